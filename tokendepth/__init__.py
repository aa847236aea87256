"""Train, measure and run transformers in which some tokens skip layers.

    import tokendepth as td

    run = td.train(td.recipe("demo.budget"), "runs/demo")
    model = td.load(run)
    out = model("def depth(token):")
    print(out.trace.totals().active_fraction, td.generate(run, "def ").text)

Modules are imported on first use, so `import tokendepth` is fast and does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokendepth import analysis
    from tokendepth.api import build, compile, evaluate, export, generate, import_model, load, retrofit, score, train
    from tokendepth.config import RunConfig
    from tokendepth.errors import UserError
    from tokendepth.infer.generate import Generation
    from tokendepth.infer.text_model import TextModel
    from tokendepth.recipes import recipe
    from tokendepth.runs.run import Run
    from tokendepth.trace import DepthTrace

__version__ = "0.2.0"

__all__ = [
    "DepthTrace",
    "Generation",
    "Run",
    "RunConfig",
    "TextModel",
    "UserError",
    "analysis",
    "build",
    "compile",
    "evaluate",
    "export",
    "generate",
    "import_model",
    "load",
    "recipe",
    "retrofit",
    "score",
    "train",
]

_HOME = {
    "DepthTrace": "trace",
    "Generation": "infer.generate",
    "Run": "runs.run",
    "RunConfig": "config",
    "TextModel": "infer.text_model",
    "UserError": "errors",
    "recipe": "recipes",
}
"""Modules in which names are defined; all others are in api.py."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tokendepth' has no attribute {name!r}")
    if name == "analysis":  # a module of its own
        return import_module("tokendepth.analysis")
    return getattr(import_module(f"tokendepth.{_HOME.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
