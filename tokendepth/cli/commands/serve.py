"""Commands that serve HTTP: a server for the OpenAI API, and a page that shows the depth of a text."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from tokendepth.checks import check_range
from tokendepth.cli.arguments import draft_share
from tokendepth.cli.commands.one import LOADING
from tokendepth.errors import UserError
from tokendepth.progress import Progress


@dataclass(frozen=True)
class Serve:
    """Serve a finished run over HTTP with the OpenAI API: completions, chat, streaming, depth per token.

    If TOKENDEPTH_API_KEY is set in the environment, clients must send that key.
    """

    run: tyro.conf.Positional[Path]
    """Run folder."""
    host: str = "127.0.0.1"
    """Address to listen on; by default only this machine can reach it."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    name: str | None = None
    """Model name for clients; by default the name of the folder."""
    slots: int = 8
    """Requests that are generated at the same time."""
    queue: int = 16
    """Requests that may wait for a slot; further ones get status 429."""
    max_tokens: int = 4096
    """Maximum number of tokens that one request may ask for."""
    seconds: float = 120.0
    """Time limit per request; its text ends there."""
    execution: Literal["hard", "sparse"] = "sparse"
    """sparse really skips; hard computes everything for the same text, to compare speeds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    speculate: str | None = None
    """Self-speculation for all requests, as in generate: auto, or a draft's share of tokens."""

    def __call__(self) -> None:
        check_range("slots", self.slots, 1, 4096)
        check_range("queue", self.queue, 0, 10**6)
        check_range("max_tokens", self.max_tokens, 1, 10**9)
        check_range("seconds", self.seconds, 0.1, 10**6)
        with Progress(LOADING), serve_extra("serve"):
            from tokendepth.serve.server import serve
            from tokendepth.serve.service import Limits
        limits = Limits(self.slots, self.queue, self.max_tokens, self.seconds)
        options = {"device": self.device, "name": self.name, "execution": self.execution}
        options["speculate"] = draft_share(self.speculate)
        key = os.environ.get("TOKENDEPTH_API_KEY") or None
        serve(self.run, host=self.host, port=self.port, limits=limits, api_key=key, **options)


@dataclass(frozen=True)
class Explore:
    """Open a page that shows the depth of every token in a text that you type (docs/EXPLORE.md)."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders; two of them can be shown side by side."""
    port: int = 8001
    """Port on this machine only; 0 takes a free one."""
    open: bool = True
    """Also open the page in a browser, if there is a screen."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""

    def __call__(self) -> None:
        if not self.runs:
            raise UserError("explore needs a run folder; tokendepth train and demo make them")
        with Progress(LOADING), serve_extra("explore"):
            from tokendepth.explore.server import explore
        explore(self.runs, port=self.port, device=self.device, browser=self.open)


@contextlib.contextmanager
def serve_extra(command: str) -> Iterator[None]:
    """Around imports of the extra `serve`: a one-line error if it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn", "starlette"):
            raise
        missing = f"{command} needs the package {error.name}, not installed"
        raise UserError(f"{missing}; pip install 'tokendepth[serve]'") from None
