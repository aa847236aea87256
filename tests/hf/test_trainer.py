"""The transformers Trainer, PEFT adapters and torch.compile, on toy models."""

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from tests.hf.samples import pair, tokens
from tests.hf.test_training import assert_alike, gradients, trained
from tests.tiny import one_line
from tokendepth.errors import UserError
from tokendepth.hf import TokenDepthForCausalLM
from tokendepth.methods import METHODS

pytest.importorskip("accelerate", reason="needs the extra hf")


def train(model: nn.Module, folder, batch: int, accumulate: int, **options) -> Trainer:
    """Two steps of plain SGD on eight sequences each, the same in every layout."""
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate, max_steps=2,
        learning_rate=0.1, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no", logging_strategy="no", seed=1, **options,
    )  # fmt: skip
    examples = [{"input_ids": row, "labels": row.clone()} for row in tokens(16, 12, seed=5)]
    trainer = Trainer(model, arguments, train_dataset=examples, eval_dataset=examples[:4])
    trainer.train()
    return trainer


@pytest.mark.parametrize("case", ["tsa", "early_exit modern"])
def test_weights_do_not_depend_on_accumulation(case, tmp_path):
    """Both methods have an auxiliary loss, which must not count once per micro-batch."""
    found = []
    for batch, accumulate in ((8, 1), (4, 2), (2, 4)):
        model = trained(case)
        trainer = train(model, tmp_path, batch, accumulate)
        found.append({name: weight.detach() for name, weight in model.named_parameters()})
    for weights in found[1:]:
        assert_alike(weights, found[0])
    assert not torch.equal(found[0]["model.norm.weight"], trained(case).model.norm.weight), "it has learned"
    model.eval()
    with torch.no_grad():
        ids = torch.stack([example["input_ids"] for example in trainer.eval_dataset])
        wanted = float(model(ids, labels=ids).loss)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_with_checkpointing_and_is_saved(method, tmp_path):
    model = trained(method)
    trainer = train(model, tmp_path / "work", 4, 1, gradient_checkpointing=True)
    assert trainer.state.global_step == 2
    trainer.save_model(str(tmp_path / "saved"))
    loaded, ids = TokenDepthForCausalLM.from_pretrained(tmp_path / "saved"), tokens(2)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


# --- adapters ---------------------------------------------------------------------------------------------------------

ADAPTED = ["qkv", "out", "up", "gate_up", "down"]


def adapted(case: str, **options):
    """LoRA with non-zero matrices on every linear layer of the blocks; routers are trained in full."""
    peft = pytest.importorskip("peft", reason="needs the extra hf")
    native, model = pair(case)
    names = sorted({name.split(".")[-1] for name, _ in model.named_modules() if name.split(".")[-1] in ADAPTED})
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=names, modules_to_save=["router"], **options)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    return native, model


@pytest.mark.parametrize("execution", ["soft", "hard", "sparse"])
@pytest.mark.parametrize("case", ["tsa", "budget modern", "span modern", "tsa modern"])
@torch.no_grad()
def test_adapters_count_in_every_execution_and_merge(case, execution, tmp_path):
    """Sparse execution uses rows of a weight, and could miss an adapter there."""
    peft = pytest.importorskip("peft", reason="needs the extra hf")
    native, model = adapted(case)
    ids = tokens(3)
    model.get_base_model().config.execution = execution
    found = model.eval()(ids).logits
    plain = native(ids, execution=execution).logits
    assert float((found - plain).abs().max()) > 1e-2 * float(plain.abs().max()), "the adapter does something"
    with model.disable_adapter():
        assert torch.equal(model(ids).logits, plain)
    model.save_pretrained(str(tmp_path))
    _, base = pair(case)
    base.config.execution = execution
    reloaded = peft.PeftModel.from_pretrained(base, str(tmp_path)).eval()
    assert torch.equal(reloaded(ids).logits, found)
    merged = reloaded.merge_and_unload()
    assert type(merged) is TokenDepthForCausalLM
    assert float((merged(ids).logits - found).abs().max()) <= 1e-5 * float(found.abs().max())
    generated = [m.generate(input_ids=ids[:, :4], max_new_tokens=5, do_sample=False) for m in (model, merged)]
    assert torch.equal(*generated)


def test_adapters_and_routers_learn_and_nothing_else(tmp_path):
    _, model = adapted("tsa modern")
    model.train()
    ids = tokens(2)
    model(ids, labels=ids).loss.backward()
    learning = set(gradients(model))
    assert learning == {
        name.removeprefix("model.") for name, weight in model.named_parameters() if weight.requires_grad
    }
    assert all("lora_" in name or "modules_to_save" in name for name in learning)
    assert any("router" in name for name in learning)


def test_a_variant_of_lora_is_refused_where_rows_are_taken():
    _, model = adapted("tsa", use_dora=True)
    with pytest.raises(UserError) as error, torch.no_grad():
        model.eval()(tokens(1))
    assert "merge it into the model first" in one_line(error.value)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "early_exit", "budget"])
def test_a_training_pass_is_one_graph(method):
    """Only captures the graph, which is what can break.

    For methods without an auxiliary loss, with one, and with a second pass; test_contract.py covers all methods.
    """
    plain, compiled, ids = trained(method), trained(method), tokens(2, 13)
    torch.compiler.reset()
    fast = torch.compile(compiled, backend="eager", fullgraph=True)
    for run in (plain, fast):
        torch.manual_seed(0)
        run(ids, labels=ids).loss.backward()
    assert_alike(gradients(compiled), gradients(plain))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tsa", "budget modern", "span"])
@torch.no_grad()
def test_an_evaluation_pass_is_one_graph(case):
    _, model = pair(case)
    ids = tokens(2, 13)
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(fast(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
