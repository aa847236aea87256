"""The OpenAI API: the official client gets the output of td.generate, streamed or not, alone or with others."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx2
import openai
import pytest

import tokendepth as td
from tests.serve.conftest import Served, serving
from tokendepth.infer.drafting import Speculation
from tokendepth.infer.engine import Engine
from tokendepth.infer.generate import tokenizer_of
from tokendepth.measure.evaluate import load_model
from tokendepth.runs.machine import choose_device
from tokendepth.runs.run import Run
from tokendepth.serve.service import Limits, Service

pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.slow]
PROMPTS = ["green", "40 green bottles hanging", "th"]
SETTINGS = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 7, "top_p": 0.9},
    {"temperature": 1.3, "seed": 8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
]


def offline(run: Run, prompt: str, tokens: int = 20, **settings) -> td.Generation:
    found = td.generate(run, prompt, tokens=tokens, device="cpu", **settings)
    assert found.text
    return found


@pytest.mark.parametrize("settings", SETTINGS)
def test_completions_are_the_offline_output(served: Served, run, settings):
    client = served.client()
    whole = client.completions.create(model="bottles", prompt=PROMPTS, max_tokens=20, **settings)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.text for choice in whole.choices] == [offline(run, prompt, **settings).text for prompt in PROMPTS]
    assert {choice.finish_reason for choice in whole.choices} == {"length"}
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (sum(map(len, PROMPTS)), 60)
    stream = client.completions.create(model="bottles", prompt=PROMPTS, max_tokens=20, stream=True, **settings)
    pieces: dict[int, list] = {0: [], 1: [], 2: []}
    for chunk in stream:
        pieces[chunk.choices[0].index].append(chunk.choices[0])
    for index, choice in enumerate(whole.choices):
        assert "".join(piece.text for piece in pieces[index]) == choice.text
        assert [piece.finish_reason for piece in pieces[index]] == [None] * (len(pieces[index]) - 1) + ["length"]
        assert len(pieces[index]) == 20, "a chunk for every token"


@pytest.mark.parametrize("settings", SETTINGS[:2])
def test_with_drafts_completions_are_the_offline_output(run, settings, monkeypatch):
    """One chunk per token, although a step generates several; FLOPs of drafts count as executed."""
    monkeypatch.setattr(Speculation, "next_length", lambda _, room: max(0, min(3, room)))
    expected = [offline(run, prompt, speculate=0, **settings).text for prompt in PROMPTS]
    with serving(Service.of(run, "cpu", Limits(slots=2), speculate=0)) as found:
        client = found.client()
        whole = client.completions.create(model="bottles", prompt=PROMPTS, max_tokens=20, **settings)
        assert [choice.text for choice in whole.choices] == expected
        chunks = list(
            client.completions.create(model="bottles", prompt=PROMPTS[0], max_tokens=20, stream=True, **settings)
        )
        totals = found.service.metrics._totals
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected[0]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 19 + ["length"]
    assert totals["generated"] == 80
    assert totals["flops"] > totals["flops_dense"], "most drafts of an untrained model are rejected"


def test_ids_are_taken_for_text(served: Served, tokenizer):
    asked = {"model": "bottles", "max_tokens": 5, "temperature": 0}
    ids = tokenizer.encode("green")
    texts = [
        served.client().completions.create(prompt=prompt, **asked).choices[0].text
        for prompt in ("green", ["green"], ids, [ids])
    ]
    assert len(set(texts)) == 1


def test_a_stop_string_ends_it_and_is_shown_in_no_chunk(served: Served, run):
    whole = offline(run, "green", 30, seed=3).text
    stop = whole[5:8]
    asked = {
        "model": "bottles",
        "prompt": "green",
        "max_tokens": 30,
        "seed": 3,
        "temperature": 0.8,
        "stop": [stop, "\0"],
    }
    (choice,) = served.client().completions.create(**asked).choices
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
    chunks = [chunk.choices[0] for chunk in served.client().completions.create(**asked, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == choice.text
    assert chunks[-1].finish_reason == "stop"


def test_several_choices_draw_with_seeds_of_their_own(served: Served, run):
    asked = {"model": "bottles", "prompt": "green", "max_tokens": 12, "temperature": 0.8}
    found = served.client().completions.create(**asked, n=3, seed=20)
    assert [c.text for c in found.choices] == [offline(run, "green", 12, seed=20 + n).text for n in range(3)]
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (5, 36)
    one, other = (served.client().completions.create(**asked).choices[0].text for _ in range(2))
    assert one != other, "without a seed every request draws anew"


def test_logprobs_and_depth_are_those_of_the_engine(served: Served, run):
    asked = {"model": "bottles", "prompt": "green", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    (choice,) = served.client().completions.create(**asked, extra_body={"depth": True}).choices
    tokens = list(offline(run, "green", 6, temperature=0, logprobs=2).tokens())
    found = choice.logprobs
    assert found is not None
    assert found.token_logprobs == pytest.approx([token.choice.logprob for token in tokens], abs=1e-4)
    assert found.tokens == [token.text for token in tokens]
    assert found.text_offset == list(range(6))
    assert [len(top) for top in found.top_logprobs or []] == [2] * 6, "the likeliest is the chosen one"
    depth = choice.model_extra["depth"]
    assert depth["sites"] == ["block 0", "block 1", "block 2"]
    assert [each["work"] for each in depth["tokens"]] == [token.depth for token in tokens]
    chunks = list(served.client().completions.create(**asked, stream=True, extra_body={"depth": True}))
    assert [c.choices[0].logprobs.text_offset for c in chunks] == [[n] for n in range(6)]
    assert [c.choices[0].model_extra["depth"]["tokens"] for c in chunks] == [[each] for each in depth["tokens"]]


def test_a_stream_says_what_it_used_where_that_was_asked_for(served: Served):
    asked = {"model": "bottles", "prompt": "green", "max_tokens": 3, "stream": True}
    *chunks, last = served.client().completions.create(**asked, stream_options={"include_usage": True})
    assert (last.choices, last.usage.completion_tokens) == ([], 3)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_a_request_may_name_a_budget(served: Served, run):
    """A budget with stored thresholds, next to a request at the model's own."""
    asked = {"model": "bottles", "prompt": "green", "max_tokens": 20, "temperature": 0}

    def at(budget: float | None) -> list[list[float]]:
        extra = {"depth": True, "budget": budget}
        (choice,) = served.client().completions.create(**asked, extra_body=extra).choices
        return [each["work"] for each in choice.model_extra["depth"]["tokens"]]

    def expected(budget: float | None) -> list[list[float]]:
        return [token.depth for token in offline(run, "green", 20, temperature=0, budget=budget).tokens()]

    with ThreadPoolExecutor(3) as pool:
        own, higher, named = pool.map(at, (None, 0.8, 0.4))
    assert own == named == expected(None)
    assert higher == expected(0.8)
    assert sum(map(sum, higher)) > sum(map(sum, own))


def test_clients_at_the_same_time_get_their_own(served: Served, run):
    """More clients than slots, in shared steps."""
    settings = [{"temperature": 0.9, "seed": seed} for seed in range(10)]
    expected = [offline(run, "green", 15, **each).text for each in settings]
    before = served.service.metrics._totals["steps"]
    gate = threading.Barrier(10)

    def ask(each: dict) -> str:
        gate.wait()
        stream = served.client().completions.create(model="bottles", prompt="green", max_tokens=15, stream=True, **each)
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(ask, settings)) == expected
    assert served.service.metrics._totals["steps"] - before < 10 * 15 * 0.8


def test_the_example_of_the_page_works(served: Served, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "SERVE.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.setattr(served.service, "name", "budget")
    exec(code.replace("http://127.0.0.1:8000", served.url).replace("def ", "green"), {})
    said = capsys.readouterr().out
    assert re.search(r" [01]\.\d+\n", said), "the first one's active fraction"
    assert len(said) >= 20 + 20


# --- chat -------------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '\n' }}{% endfor %}"
    "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('the first one must ask') }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "green"}]}]


@pytest.fixture(scope="module")
def chatting(tmp_path_factory) -> "Served":
    """A byte model whose tokenizer has a chat template."""
    from tests.tiny import tiny, write_corpus
    from tokendepth.config import DataConfig
    from tokendepth.training.loop import train

    folder = tmp_path_factory.mktemp("chat")
    config = tiny(folder, steps=1, context=64)
    config = replace(config, data=DataConfig(write_corpus(folder), tokens="byte"))
    run = train(config, folder / "talks", show=False)
    tokenizer = tokenizer_of(run)
    object.__setattr__(tokenizer, "chat_template", TEMPLATE)

    def make() -> Engine:
        return Engine(load_model(run, choose_device("cpu")), tokenizer, slots=2)

    with serving(Service(make, "talks", Limits(slots=2))) as found:
        yield found


def test_a_chat_is_the_completion_of_its_template(chatting: Served):
    client, asked = chatting.client(), {"model": "talks", "max_tokens": 9, "temperature": 0}
    prompt = "<system>be brief\n<user>green\n<assistant>"
    expected = client.completions.create(prompt=prompt, **asked).choices[0].text
    found = client.chat.completions.create(messages=HELLO, **asked, logprobs=True, top_logprobs=1)
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected, "length")
    assert found.usage.prompt_tokens == len(prompt)
    content = choice.logprobs.content
    assert bytes(b for each in content for b in each.bytes).decode("utf-8", "replace") == expected
    assert all(each.top_logprobs[0].bytes == each.bytes for each in content)
    chunks = [c.choices[0] for c in client.chat.completions.create(messages=HELLO, **asked, stream=True)]
    assert chunks[0].delta.role == "assistant"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].finish_reason == "length"


def test_a_chat_without_a_limit_goes_on_until_the_context_is_full(chatting: Served):
    found = chatting.client().chat.completions.create(model="talks", messages=HELLO, temperature=0)
    assert found.usage.total_tokens == 64


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "assistant", "content": "x"}], "the first one must ask"),
        ([{"role": "user", "content": "x" * 65}], "fewer than this model's context of 64"),
        ([{"role": "judge", "content": "x"}], "messages[0].role is 'judge'"),
        ([{"role": "user"}], "messages[0].content is null; expected text"),
        ([], "messages is []; expected a list of at least one message"),
    ],
)
def test_messages_that_cannot_be_read(chatting: Served, messages, said):
    with pytest.raises(openai.BadRequestError) as error:
        chatting.client().chat.completions.create(model="talks", messages=messages)
    assert said in error.value.body["message"]


def test_a_model_without_a_template_says_so(served: Served):
    with pytest.raises(openai.BadRequestError) as error:
        served.client().chat.completions.create(model="bottles", messages=HELLO)
    assert "this model has no chat template; use /v1/completions instead" in error.value.body["message"]


# --- the others -------------------------------------------------------------------------------------------------------


def test_models_health_and_metrics(served: Served):
    client = served.client()
    assert [model.id for model in client.models.list()] == ["bottles"]
    assert client.models.retrieve("bottles").owned_by == "tokendepth"
    with pytest.raises(openai.NotFoundError, match="this server has only 'bottles'"):
        client.models.retrieve("cans")
    assert httpx2.get(f"{served.url}/health").json() == {"status": "ok"}
    client.completions.create(model="bottles", prompt="green", max_tokens=2)
    answer = httpx2.get(f"{served.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    figures = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    assert float(figures["tokendepth_slots"]) == 4
    assert float(figures["tokendepth_generated_tokens_total"]) >= 2
    assert 0 < float(figures["tokendepth_flops_total"]) < float(figures["tokendepth_flops_dense_total"]) * 1.1
    assert float(figures['tokendepth_answers_total{endpoint="/v1/completions",status="200"}']) >= 1


def test_a_key_is_asked_for_where_there_is_one(run):
    key = "s3cret-\u00e9"
    with serving(Service.of(run, "cpu", Limits(slots=1)), key) as found:

        def answer(given: str) -> httpx2.Response:
            return httpx2.get(f"{found.url}/v1/models", headers={"Authorization": given.encode()})

        assert answer(f"Bearer {key}").json()["data"][0]["id"] == "bottles"
        for wrong in (f"Bearer {key}2", "Bearer s3cret-", "Bearer", "", key, f"Basic {key}", "Bearer \u00e9\u4e00"):
            refused = answer(wrong)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
            openai.OpenAI(base_url=f"{found.url}/v1", api_key="x", max_retries=0).models.list()
        assert httpx2.get(f"{found.url}/metrics").status_code == 401
        assert httpx2.get(f"{found.url}/health").status_code == 200, "whoever watches the server has no key"
