"""Load runs, serve the page of `tokendepth explore`, and stop on a signal."""

import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from tokendepth.explore.app import create_app
from tokendepth.explore.explored import Explored
from tokendepth.progress import Progress
from tokendepth.runs.run import Run
from tokendepth.serve.server import listening, run_until_stopped

HOST = "127.0.0.1"
"""Only this machine can reach the page; from elsewhere, use an SSH tunnel."""


def explore(runs: Sequence[Path], *, port: int, device: str, browser: bool) -> None:
    with listening(HOST, port) as listener:  # fails before the models are loaded, which takes longer
        explored = []
        for path in dict.fromkeys(runs):
            with Progress(f"loading {path}"):
                explored.append(Explored(Run.open(path), device))
        address = f"http://{HOST}:{listener.getsockname()[1]}/"
        print(f"exploring {', '.join(each.name for each in explored)} at {address}; press Ctrl-C to stop", flush=True)
        if browser and _has_screen():
            webbrowser.open(address)
        run_until_stopped(create_app(explored), listener)


def _has_screen() -> bool:
    """Without a display, a text browser could take over the terminal."""
    return sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
