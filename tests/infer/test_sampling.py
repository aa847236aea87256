"""Sampling: hand-computed cases for each parameter, cases without an effect, and frequencies of draws."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.tiny import one_line
from tokendepth.errors import UserError
from tokendepth.infer.sampling import Sampler, Sampling, choose, draw, probabilities

HALVES = torch.tensor([0.125, 0.5, 0.125, 0.25])
"""Exact in binary, and so are their sums."""


def left(probability: torch.Tensor = HALVES, **asked) -> list[float]:
    return probabilities(probability.log()[None], [Sampling(**asked)])[0].tolist()


def sampler(sampling: Sampling, prompt: list[int] | None = None, size: int = 4) -> Sampler:
    return Sampler(sampling, prompt or [], size, torch.device("cpu"))


def close(expected: list[float]) -> object:
    return pytest.approx(expected, abs=1e-6)


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, [0.125, 0.5, 0.125, 0.25]),
        ({"temperature": 0.5}, [1 / 22, 16 / 22, 1 / 22, 4 / 22]),  # squares: 1, 16, 1, 4 of 64ths
        ({"temperature": 1 / 3}, [1 / 74, 64 / 74, 1 / 74, 8 / 74]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_k": 3}, [1 / 7, 4 / 7, 0, 2 / 7]),  # ties: the first one
        ({"top_k": 9}, [0.125, 0.5, 0.125, 0.25]),
        ({"top_p": 0.4}, [0, 1, 0, 0]),
        ({"top_p": 1e-320}, [0, 1, 0, 0]),  # zero in float32
        ({"top_p": 0.5}, [0, 1, 0, 0]),  # the first alone has that much
        ({"top_p": 0.51}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.75}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.8}, [1 / 7, 4 / 7, 0, 2 / 7]),
        ({"min_p": 0.5}, [0, 2 / 3, 0, 1 / 3]),
        ({"min_p": 0.6}, [0, 1, 0, 0]),
        ({"min_p": 0.25}, [0.125, 0.5, 0.125, 0.25]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0]),  # of the two left, the first has 2/3
        ({"temperature": 0.5, "top_p": 0.8}, [0, 0.8, 0, 0.2]),  # temperature comes first
    ],
)
def test_what_is_drawn_from(asked, expected):
    assert left(**asked) == close(expected)


def test_every_row_by_its_own_parameters():
    asks = [Sampling(), Sampling(top_k=1), Sampling(temperature=0.5), Sampling(min_p=0.5), Sampling(top_p=0.8)]
    together = probabilities(HALVES.log().expand(5, -1), asks)
    for row, ask in zip(together, asks, strict=True):
        alone = probabilities(HALVES.log()[None], [ask])[0]
        torch.testing.assert_close(row, alone)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([0.0, 0.124, 0.125, 0.624, 0.625, 0.749, 0.75, 0.9999999], [0, 0, 1, 1, 2, 2, 3, 3]),
        ([1 - 2**-53], [3]),
    ],
)
def test_a_token_is_drawn_where_the_sum_passes_the_number(numbers, expected):
    found = draw(HALVES.expand(len(numbers), -1), torch.tensor(numbers, dtype=torch.float64))
    assert found.tolist() == expected


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_a_token_without_probability_is_never_drawn(number):
    probability = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0, 0.0]])
    assert int(draw(probability, torch.tensor([number], dtype=torch.float64))) in (1, 3)


def test_repetition_penalty_divides_what_is_above_zero_and_multiplies_what_is_below():
    """Tokens of the prompt and generated ones, each penalised once however often it occurred."""
    ask = sampler(Sampling(repetition_penalty=2.0), [0, 0, 1])
    ask.note(3)
    assert ask.adjusted(torch.tensor([3.0, -1.0, 5.0, -4.0])).tolist() == [1.5, -2.0, 5.0, -8.0]


def test_presence_and_frequency_penalties_count_generated_tokens_alone():
    """As the OpenAI API defines them: logit - count * frequency - (count > 0) * presence."""
    ask = sampler(Sampling(presence_penalty=0.5, frequency_penalty=0.25), [2, 2, 2])
    for token in (0, 0, 0, 1):
        ask.note(token)
    assert ask.adjusted(torch.tensor([1.0, 1.0, 1.0, 1.0])).tolist() == [-0.25, 0.25, 1.0, 1.0]


def test_a_bias_is_added():
    ask = sampler(Sampling(logit_bias={1: -100, 3: 2.5}))
    assert ask.adjusted(torch.tensor([1.0, 1.0, 1.0, 1.0])).tolist() == [1.0, -99.0, 1.0, 3.5]


def test_penalties_come_before_the_bias():
    ask = sampler(Sampling(repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 10.0}))
    ask.note(0)
    assert ask.adjusted(torch.tensor([4.0, 0, 0, 0])).tolist() == [4 / 2 - 1 + 10, 0, 0, 0]


def test_greedy_takes_the_highest_after_penalties_and_takes_note_of_it():
    ask = sampler(Sampling(temperature=0, frequency_penalty=0.5))
    logits = torch.tensor([[1.0, 2.0, 1.9, 0.0]])
    assert [choose(logits, [ask])[0].token for _ in range(4)] == [1, 2, 1, 2]


def test_logprobs_are_the_models_own():
    """Temperature, penalties, bias and filters do not affect them."""
    ask = Sampling(temperature=0, repetition_penalty=2.0, logit_bias={2: 50}, top_k=1, logprobs=2)
    (choice,) = choose((HALVES.log() + 7)[None], [sampler(ask)])
    assert choice.token == 2
    assert choice.logprob == pytest.approx(math.log(0.125), abs=1e-6)
    assert [token for token, _ in choice.top] == [1, 3]
    assert [logprob for _, logprob in choice.top] == close([math.log(0.5), math.log(0.25)])


def test_each_request_gets_as_many_logprobs_as_it_asked_for():
    asks = [Sampling(0, logprobs=n) for n in (None, 0, 1, 20)]
    found = choose(HALVES.log().expand(4, -1), [sampler(ask) for ask in asks])
    assert [len(choice.top) for choice in found] == [0, 0, 1, 4], "20 of a vocabulary of four"
    assert [choice.logprob is None for choice in found] == [True, False, False, False]


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_a_requests_draws_are_its_own():
    """Independent of other requests in the batch, greedy or not, and of its row."""
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    ask = Sampling(temperature=1.3, seed=5)
    alone = sampler(ask)
    expected = [choose(row[None], [alone])[0].token for row in logits]
    others = [sampler(Sampling(0)), sampler(Sampling(seed=6)), sampler(Sampling(temperature=2.0, top_k=2, seed=5))]
    again, found = sampler(ask), []
    for n, row in enumerate(logits):
        company = others[: n % 4]
        company.insert(n % (len(company) + 1), again)
        choices = choose(row.expand(len(company), -1), company)
        found.append(choices[company.index(again)].token)
    assert found == expected
    other = sampler(replace(ask, seed=6))
    assert [choose(row[None], [other])[0].token for row in logits.repeat(4, 1)] != expected * 4


# --- how often --------------------------------------------------------------------------------------------------------

CHI_SQUARE_ONE_IN_A_MILLION = {3: 30.66, 7: 40.52}
"""Degrees of freedom -> the chi-square value exceeded with a probability of 1e-6."""


@pytest.mark.parametrize(
    "asked", [{}, {"temperature": 1.7}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2, "temperature": 1.2}]
)
def test_tokens_are_drawn_as_often_as_they_are_probable(asked):
    logits = torch.tensor([1.0, 0.2, -0.5, 2.0, 0.7, -1.5, 0.0, 1.4])
    expected = probabilities(logits[None], [Sampling(**asked)])[0].double()
    count = 20_000
    samplers = [sampler(Sampling(**asked, seed=seed), size=8) for seed in range(200)]
    tokens = [c.token for _ in range(count // 200) for c in choose(logits.expand(200, -1), samplers)]
    found = torch.bincount(torch.tensor(tokens), minlength=8)
    there = expected > 0
    assert not found[~there].any()
    chi_square = float(((found - count * expected)[there] ** 2 / (count * expected[there])).sum())
    degrees = int(there.sum()) - 1
    limit = CHI_SQUARE_ONE_IN_A_MILLION[min(n for n in CHI_SQUARE_ONE_IN_A_MILLION if n >= degrees)]
    assert chi_square < limit
    assert chi_square > 0.01, "no two samples are that even"


# --- what changes nothing ---------------------------------------------------------------------------------------------

LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=12)
TEMPERATURE = st.floats(0.05, 5)


@given(logits=LOGITS, temperature=TEMPERATURE)
def test_filters_that_let_everything_through_change_nothing(logits, temperature):
    row = torch.tensor(logits)[None]
    plain = (row / temperature).softmax(-1)
    for asked in ({}, {"top_k": len(logits)}, {"top_k": 1000}, {"top_p": 1.0}, {"min_p": 0.0}):
        found = probabilities(row, [Sampling(temperature, **asked)])
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-7)
    neutral = sampler(Sampling(repetition_penalty=1.0, presence_penalty=0.0), [0], len(logits))
    neutral.note(1)
    assert torch.equal(neutral.adjusted(row[0]), row[0])


@given(
    logits=LOGITS, temperature=TEMPERATURE, top_k=st.integers(0, 14), top_p=st.floats(0.01, 1), min_p=st.floats(0, 1)
)
def test_filters_keep_the_likeliest_tokens_and_their_proportions(logits, temperature, top_k, top_p, min_p):
    row = torch.tensor(logits)[None]
    plain = (row / temperature).softmax(-1)[0]
    found = probabilities(row, [Sampling(temperature, top_k, top_p, min_p)])[0]
    assert float(found.sum()) == pytest.approx(1, abs=1e-5)
    kept = found > 0
    assert kept[plain.argmax()]
    assert int(kept.sum()) <= (top_k or len(logits))
    if not kept.all():
        assert plain[kept].min() >= plain[~kept].max() * (1 - 1e-6), "nobody left out is likelier than one kept"
    ratio = (found / plain)[kept & (plain > 1e-20)]
    assert float(ratio.max() / ratio.min()) == pytest.approx(1, abs=1e-3)


@given(logits=LOGITS, seed=st.integers(0, 100))
@example(logits=[0.01, 0.010000000707805157], seed=0)
def test_top_k_of_one_and_a_tiny_temperature_are_greedy(logits, seed):
    row = torch.tensor(logits)[None]
    size = len(logits)
    best = choose(row, [sampler(Sampling(0), size=size)])[0].token
    assert choose(row, [sampler(Sampling(1, top_k=1, seed=seed), size=size)])[0].token == best
    if float(row.sort().values[0, -2:].diff()) > 0.1:
        assert choose(row, [sampler(Sampling(0.001, seed=seed), size=size)])[0].token == best


@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=6),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.001, 1, 100]),
        top_k=st.sampled_from([0, 1, 3]),
        top_p=st.sampled_from([1e-320, 0.5, 1]),
        min_p=st.sampled_from([0, 1e-320, 1]),
        repetition_penalty=st.sampled_from([0.01, 1, 100]),
        presence_penalty=st.sampled_from([-2, 0, 2]),
        frequency_penalty=st.sampled_from([-2, 0, 2]),
        logit_bias=st.sampled_from([{}, {0: 100, 1: -100}]),
    ),
)
def test_at_the_ends_of_every_range_a_token_is_chosen(logits, sampling):
    """Nothing overflows."""
    ask = sampler(sampling, [0], len(logits))
    row = torch.tensor(logits)[None]
    for _ in range(3):
        assert 0 <= choose(row, [ask])[0].token < len(logits)
    assert probabilities(ask.adjusted(row[0])[None], [sampling]).isfinite().all()


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"temperature": -1}, "--temperature is -1; expected 0, or a number from 0.001 to 100"),
        ({"temperature": math.nan}, "--temperature is nan"),
        ({"top_k": -1}, "top_k is -1; expected a number from 0 up; set it with --top-k"),
        ({"top_p": 0}, "top_p is 0; expected a number above 0, at most 1; set it with --top-p"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1; expected a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; expected a number from 0.01 to 100"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty is 1e-320; expected a number from 0.01 to 100"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1; expected a number from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3; expected a number from -2 to 2"),
        ({"logit_bias": {1: 101}}, "logit_bias is 101; expected a number from -100 to 100"),
        ({"seed": -1}, "seed is -1; expected a number from 0 to 2147483647"),
        ({"logprobs": 21}, "logprobs is 21; expected a number from 0 to 20"),
    ],
)
def test_a_parameter_out_of_range_is_refused_in_one_line(asked, said):
    with pytest.raises(UserError) as error:
        Sampling(**asked)
    assert said in one_line(error.value)
