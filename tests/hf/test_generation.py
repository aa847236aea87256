"""generate() gives the native model's tokens without a cache, with every kind of decoding and cache."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.hf.samples import each_case, greedy, pair, tokens
from tests.tiny import one_line
from tokendepth.errors import UserError

PROMPT, NEW = 5, 7
each_cache = pytest.mark.parametrize("cache", ["dynamic", "static"])


@each_case
@each_cache
def test_greedy_with_a_cache_is_the_native_model_without(case, cache):
    native, model = pair(case)
    prompts = tokens(2, PROMPT, seed=3)
    found = model.generate(prompts, max_new_tokens=NEW, do_sample=False, cache_implementation=cache)
    for row, prompt in zip(found, prompts, strict=True):
        assert torch.equal(row, greedy(native, prompt, NEW))


@each_case
@each_cache
def test_a_left_padded_batch_is_each_prompt_alone(case, cache):
    """The padding id may be outside the vocabulary, as here."""
    native, model = pair(case)
    prompts = [tokens(1, length, seed=length)[0] for length in (2, 6, 4)]
    size = native.config.vocab_size
    ids = torch.stack([torch.cat([torch.full((6 - len(prompt),), size), prompt]) for prompt in prompts])
    mask = (ids != size).long()
    found = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, cache_implementation=cache)
    for row, prompt in zip(found, prompts, strict=True):
        assert torch.equal(row[6 - len(prompt) :], greedy(native, prompt, NEW))


@pytest.mark.parametrize("masked", [True, False])
def test_padding_behind_the_vocabulary_is_padding_before_and_after_a_text(masked):
    """Also without a mask, and after the end of a sequence while others continue."""
    native, model = pair("tsa")
    prompts, size = [tokens(1, length, seed=length)[0] for length in (3, 5)], native.config.vocab_size
    ids = torch.stack([torch.nn.functional.pad(prompt, (5 - len(prompt), 0), value=size) for prompt in prompts])
    whole = [greedy(native, prompt, NEW)[len(prompt) :] for prompt in prompts]
    last = int(whole[0][1])
    options = {"attention_mask": (ids < size).long()} if masked else {}
    found = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=last, pad_token_id=size, **options)[
        :, 5:
    ]
    for row, wanted in zip(found, whole, strict=True):
        ends = (wanted == last).nonzero()
        length = int(ends[0]) + 1 if len(ends) else NEW
        assert torch.equal(row[:length], wanted[:length])
        assert (row[length:] == size).all()
    assert (found == size).any()


@each_case
def test_beams_and_samples_are_those_of_a_model_without_a_cache(case):
    _, model = pair(case)
    ids, mask = tokens(2, PROMPT, seed=4), torch.tensor([[0, 1, 1, 1, 1], [1] * 5])
    for options in ({"num_beams": 3, "num_return_sequences": 2, "do_sample": False}, {"do_sample": True, "top_k": 5}):
        found = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            found.append(model.generate(ids, attention_mask=mask, max_new_tokens=NEW, use_cache=use_cache, **options))
        assert torch.equal(*found)


@each_case
def test_assisted_decoding_takes_the_same_tokens(case):
    """With an assistant that is often wrong, so that tokens are rejected, and with prompt lookup."""
    native, model = pair(case)
    _, helper = pair(case)
    with torch.no_grad():
        for weight in helper.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    prompt = tokens(1, PROMPT, seed=5)
    prompt[:, -2:] = prompt[:, :2]  # something to look up
    wanted = greedy(native, prompt[0], NEW)
    options = {"max_new_tokens": NEW, "do_sample": False}
    assert torch.equal(model.generate(prompt, assistant_model=helper, **options)[0], wanted)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=3, **options)[0], wanted)


@each_case
def test_a_conversation_goes_on_from_its_cache(case):
    native, model = pair(case)
    prompt = tokens(1, PROMPT, seed=6)
    first = model.generate(prompt, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    turn = torch.cat([first.sequences, tokens(1, 2, seed=7)], 1)
    kept = copy.deepcopy(first.past_key_values)
    for cache in (kept, first.past_key_values):
        second = model.generate(turn, past_key_values=cache, max_new_tokens=3, do_sample=False)
        assert torch.equal(second[0], greedy(native, turn[0], 3))


@pytest.mark.parametrize("case", ["span", "switch", "mod modern"])
@torch.no_grad()
def test_columns_are_taken_back_padding_and_all(case):
    """Removes from each sequence only the tokens that were in those columns."""
    native, model = pair(case)
    cache, ids = model.new_cache(croppable=True), tokens(2, 12, seed=8)
    first = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    second = torch.tensor([[1, 1, 1], [1, 0, 0]])
    model(ids[:, :6], attention_mask=first, past_key_values=cache)
    model(ids[:, 6:9], attention_mask=second, past_key_values=cache)
    cache.crop(-2)
    assert cache.get_seq_length() == 7
    assert cache.native.lengths.tolist() == [5, 7]
    cache.batch_select_indices(torch.tensor([1, 0]))
    cache.crop(torch.tensor(-3))  # as in some versions
    assert cache.native.lengths.tolist() == [4, 2]
    out = model(ids[:, 9:], past_key_values=cache).logits
    for row, tokens_left in ((0, ids[1, :4]), (1, ids[0, 2:4])):
        whole = native(torch.cat([tokens_left, ids[row, 9:]])[None], execution="sparse").logits[0, -3:]
        assert float((out[row] - whole).abs().max()) <= 1e-5 * float(whole.abs().max())
    cache.reset()
    assert torch.equal(model(ids, past_key_values=cache).logits, model(ids, past_key_values=model.new_cache()).logits)


def test_what_generation_spent_is_told_where_it_is_asked_for():
    native, model = pair("tsa")
    prompt = tokens(1, PROMPT, seed=3)
    out = model.generate(prompt, max_new_tokens=NEW, do_sample=False, output_depth=True, return_dict_in_generate=True)
    spent = out.past_key_values.spent()
    with torch.no_grad():
        whole = native(out.sequences[:, :-1], execution="sparse").trace.totals()
    assert spent.tokens == whole.tokens == PROMPT + NEW - 1
    assert spent.work == whole.work
    assert 0 < spent.active_fraction < 1
    with pytest.raises(UserError, match="output_depth=True"):
        model.new_cache().spent()


def refused(call) -> str:
    with pytest.raises(UserError) as error:
        call()
    return one_line(error.value)


def test_what_cannot_work_is_refused_in_one_line():
    _, model = pair("dense")
    ids = tokens(1, PROMPT)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=9)):
        said = refused(lambda cache=cache: model.generate(ids, past_key_values=cache, max_new_tokens=2))
        assert said.startswith(f"past_key_values is a {type(cache).__name__}")
        assert "new_cache" in said
    assert "dynamic or static" in refused(
        lambda: model.generate(ids, cache_implementation="offloaded", max_new_tokens=2)
    )
    assert "context is 16" in refused(lambda: model.generate(ids, max_new_tokens=13))
    assert "use generate()" in refused(lambda: model.generate_batch([[1, 2]], max_new_tokens=2))
    assert "token id 11 is out of range; expected 0 to 10" in refused(lambda: model(torch.tensor([[1, 11]])))
    assert "token id -1 is out of range" in refused(lambda: model(torch.tensor([[1, -1]])))
    assert "[batch, tokens so far]" in refused(lambda: model(ids, attention_mask=torch.ones(1, 1, 5, 5)))
    assert "position_ids" in refused(lambda: model(ids, position_ids=torch.arange(5)[None]))
    cache = model.new_cache()
    model(ids, past_key_values=cache)
    assert "holds 1 sequences, 2 were given" in refused(lambda: model(tokens(2, 1), past_key_values=cache))


def test_as_many_tokens_as_the_context_has_are_generated():
    native, model = pair("dense")
    prompt = tokens(1, PROMPT)
    assert torch.equal(model.generate(prompt, max_new_tokens=12, do_sample=False)[0], greedy(native, prompt[0], 12))
