"""Responses in the format of the OpenAI API: complete ones and the chunks of a stream."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from tokendepth.data import Tokenizer
from tokendepth.infer.engine import Token
from tokendepth.infer.sampling import Choice
from tokendepth.serve.asked import Asked

Tree = dict[str, Any]


class Reply:
    """Builds the responses to one request; `Completion` and `Chat` are the two formats."""

    prefix, whole_object, chunk_object = "", "", ""

    def __init__(self, model: str, asked: Asked, tokenizer: Tokenizer, sites: Sequence[str]) -> None:
        self.asked, self.tokenizer, self.sites = asked, tokenizer, list(sites)
        self._shared = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, written: Sequence[Sequence[Token]], reasons: Sequence[str], prompt_tokens: int) -> Tree:
        choices = [
            self._choice(index, tokens, reason)
            for index, (tokens, reason) in enumerate(zip(written, reasons, strict=True))
        ]
        usage = _usage(prompt_tokens, sum(map(len, written)))
        return {**self._shared, "object": self.whole_object, "choices": choices, "usage": usage}

    def first_chunks(self, count: int) -> list[Tree]:
        """The chunks at the beginning of a stream of `count` choices."""
        return []

    def chunk(self, index: int, before: Sequence[Token], token: Token | None, reason: str | None) -> Tree | None:
        """The chunk for a token that follows those in `before`; None if there is nothing to send yet."""
        wanted = token is not None and (token.text or self.asked.depth or self.asked.sampling.logprobs is not None)
        if not wanted and reason is None:
            return None
        return self._chunk(self._delta(index, before, [] if token is None else [token], reason))

    def last_chunk(self, prompt_tokens: int, completion_tokens: int) -> Tree:
        return {**self._chunk(None), "usage": _usage(prompt_tokens, completion_tokens)}

    def _chunk(self, choice: Tree | None) -> Tree:
        found = {**self._shared, "object": self.chunk_object, "choices": [] if choice is None else [choice]}
        return {**found, "usage": None} if self.asked.usage else found

    def _choice(self, index: int, tokens: Sequence[Token], reason: str) -> Tree:
        raise NotImplementedError

    def _delta(self, index: int, before: Sequence[Token], tokens: Sequence[Token], reason: str | None) -> Tree:
        raise NotImplementedError

    def _common(self, index: int, tokens: Sequence[Token], reason: str | None, logprobs: Tree | None) -> Tree:
        found: Tree = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        if self.asked.depth:
            depth = [
                {"work": token.depth, "active_fraction": token.active_fraction, "flops_share": token.flops_share}
                for token in tokens
            ]
            found["depth"] = {"sites": self.sites, "tokens": depth}
        return found

    def _spelled(self, token: int) -> str:
        """An incomplete character is written as in the OpenAI API: bytes:\\xe2."""
        spelling = self.tokenizer.token_bytes(token)
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


class Completion(Reply):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _choice(self, index: int, tokens: Sequence[Token], reason: str) -> Tree:
        return self._delta(index, [], tokens, reason)

    def _delta(self, index: int, before: Sequence[Token], tokens: Sequence[Token], reason: str | None) -> Tree:
        logprobs = None if self.asked.sampling.logprobs is None else self._logprobs(before, tokens)
        text = "".join(token.text for token in tokens)
        return {"text": text, **self._common(index, tokens, reason, logprobs)}

    def _logprobs(self, before: Sequence[Token], tokens: Sequence[Token]) -> Tree:
        tops = [self._likeliest(token.choice) for token in tokens] if self.asked.sampling.logprobs else None
        offset, offsets = sum(len(token.text) for token in before), []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [self._spelled(token.choice.token) for token in tokens],
            "token_logprobs": [token.choice.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _likeliest(self, choice: Choice) -> dict[str, float | None]:
        """The most likely tokens and always the chosen one."""
        return {self._spelled(token): logprob for token, logprob in (*choice.top, (choice.token, choice.logprob))}


class Chat(Reply):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_chunks(self, count: int) -> list[Tree]:
        start = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": index, "delta": start, "finish_reason": None, "logprobs": None})
            for index in range(count)
        ]

    def _choice(self, index: int, tokens: Sequence[Token], reason: str) -> Tree:
        message = {"role": "assistant", "content": "".join(token.text for token in tokens), "refusal": None}
        return {"message": message, **self._common(index, tokens, reason, self._logprobs(tokens))}

    def _delta(self, index: int, before: Sequence[Token], tokens: Sequence[Token], reason: str | None) -> Tree:
        text = "".join(token.text for token in tokens)
        delta = {"content": text} if text else {}
        return {"delta": delta, **self._common(index, tokens, reason, self._logprobs(tokens))}

    def _logprobs(self, tokens: Sequence[Token]) -> Tree | None:
        if self.asked.sampling.logprobs is None:
            return None
        content = []
        for choice in (token.choice for token in tokens):
            likeliest = [self._entry(*each) for each in choice.top]
            content.append({**self._entry(choice.token, choice.logprob), "top_logprobs": likeliest})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> Tree:
        return {"token": self._spelled(token), "logprob": logprob, "bytes": [*self.tokenizer.token_bytes(token)]}


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
