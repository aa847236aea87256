"""Training as in transformers: the gradient equals the native step's, however a batch is split."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.hf.samples import each_case, run_config, tokens
from tests.tiny import one_line
from tokendepth.config import RunConfig
from tokendepth.data.dataset import NO_LOSS
from tokendepth.errors import UserError
from tokendepth.hf import TokenDepthConfig, TokenDepthForCausalLM
from tokendepth.methods import build
from tokendepth.training.ranks import Ranks
from tokendepth.training.step import OptimiserStep

BATCH = 4


def without_dropout(case: str) -> RunConfig:
    config = run_config(case)
    return replace(config, model=replace(config.model, dropout=0.0))


def trained(case: str) -> TokenDepthForCausalLM:
    """In training mode, with the native model's initial weights."""
    return TokenDepthForCausalLM(TokenDepthConfig.of(without_dropout(case))).train()


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {name.removeprefix("model."): grad.clone() for name, grad in found.items()}


def assert_alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Equal up to the rounding of sums in another order (float32: 6e-8), relative to each gradient's largest number.

    A loss that is counted twice or omitted changes some gradient by far more.
    """
    assert set(found) <= set(wanted)
    scale = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        difference = (found.get(name, torch.zeros_like(gradient)) - gradient).abs().max()
        assert float(difference) <= 1e-5 * scale, name


def cut(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    pieces = {name: value.chunk(parts) for name, value in batch.items()}
    return [{name: value[n] for name, value in pieces.items()} for n in range(parts)]


def step_gradients(case: str, batch: dict[str, Tensor], parts: int, world: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """As in the Trainer: every process scales its losses by the number of processes, then gradients are averaged."""
    model = trained(case)
    torch.manual_seed(seed)
    targets = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
    items = (targets != NO_LOSS).sum()
    for micro_batch in cut(batch, parts * world):
        loss = model(**micro_batch, num_items_in_batch=items).loss
        (loss * world / world).backward()
    return gradients(model)


@each_case
@pytest.mark.parametrize(("parts", "world"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_the_gradient_is_the_native_steps(case, parts, world):
    """Compared with the same layout; for several processes, with as many micro-batches in one."""
    config = without_dropout(case)
    native = build(config)
    ids = tokens(BATCH, native.config.context + 1, seed=1)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    train = replace(config.train, batch_size=BATCH, accumulate=parts * world)
    step = OptimiserStep(native.train(), train, torch.device("cpu"), Ranks())
    step.begin(inputs.numpy(), targets.numpy(), step=0)
    wanted = dict(zip(step.parameters, step.gradients, strict=True))
    found = step_gradients(case, {"input_ids": inputs, "shift_labels": targets}, parts, world, step.dropout_seed)
    assert_alike(found, wanted)


def ragged() -> dict[str, Tensor]:
    """Left and right padding, prompts without a loss, and one sequence without labels."""
    ids = tokens(BATCH, 12, seed=2)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, 9:] = mask[2, :1] = 0
    labels = ids.masked_fill(mask == 0, NO_LOSS)
    labels[1, :4] = labels[3] = NO_LOSS
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@each_case
def test_with_padding_the_gradient_does_not_depend_on_the_layout(case):
    if statistic := build(without_dropout(case)).method.batch_statistic:
        pytest.skip(f"takes {statistic} over each micro-batch")
    whole = step_gradients(case, ragged(), 1)
    assert all(gradient.isfinite().all() for gradient in whole.values())
    for parts, world in ((2, 1), (4, 1), (2, 2)):
        assert_alike(step_gradients(case, ragged(), parts, world), whole)
    half = {name: value[:2] for name, value in ragged().items()}
    assert not torch.equal(step_gradients(case, half, 1)["norm.weight"], whole["norm.weight"]), "every part counts"


@each_case
def test_a_batch_without_a_label_changes_nothing(case):
    batch = {name: value[3:] for name, value in ragged().items()}
    model = trained(case)
    model(**batch, num_items_in_batch=7).loss.backward()
    assert all((gradient == 0).all() for name, gradient in gradients(model).items())


@each_case
def test_padding_changes_no_loss(case):
    model, ids = trained(case), tokens(2, 9, seed=3)
    torch.manual_seed(0)
    alone = model(ids, labels=ids)
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids, torch.zeros(2, 2, dtype=torch.long)], 1)
    mask = torch.cat([torch.zeros(2, 4), torch.ones(2, 9), torch.zeros(2, 2)], 1)
    labels = padded.masked_fill(mask == 0, NO_LOSS)
    torch.manual_seed(0)
    again = model(padded, attention_mask=mask, labels=labels)
    torch.testing.assert_close(again.loss, alone.loss)
    torch.testing.assert_close(again.aux_loss, alone.aux_loss)


def test_in_evaluation_the_loss_is_the_tasks_alone():
    model, ids = trained("tsa").eval(), tokens(2, 9)
    with torch.no_grad():
        out = model(ids, labels=ids)
    wanted = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, wanted)
    assert out.aux_loss is None


@each_case
def test_gradient_checkpointing_computes_the_same(case):
    ids = tokens(2, 12, seed=4)
    config = run_config(case)  # with dropout, whose mask must be drawn again
    plain, checkpointed = (TokenDepthForCausalLM(TokenDepthConfig.of(config)).train() for _ in range(2))
    checkpointed.gradient_checkpointing_enable()
    assert checkpointed.is_gradient_checkpointing
    found, passes = [], []
    for model in (plain, checkpointed):
        counted = []
        for block in model.model.modules():
            if hasattr(block, "norm_ffn"):
                block.norm_ffn.register_forward_hook(lambda *_, counted=counted: counted.append(1))
        torch.manual_seed(0)
        model(ids, labels=ids).loss.backward()
        found.append(gradients(model))
        passes.append(len(counted))
    assert passes[1] > passes[0]
    for name, gradient in found[0].items():
        assert torch.equal(found[1][name], gradient), name
    checkpointed.gradient_checkpointing_disable()
    assert not checkpointed.is_gradient_checkpointing


def test_thresholds_are_calibrated_for_a_budget_after_training():
    model = trained("budget modern").eval()
    ids = tokens(32, 16)
    for budget in (0.25, None):
        model.calibrate(ids, budget)
        with torch.no_grad():
            share = model(ids, output_depth=True).depth.totals().active_fraction
        assert abs(share - (budget or 0.4)) < 0.02
    with pytest.raises(UserError) as error:
        trained("tsa").calibrate(ids)
    assert "tsa has no budget" in one_line(error.value)
