"""The generated part of docs/API.md: every public name in the order of its use, from signatures and docstrings."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import tokendepth
from tokendepth.infer.generate import Spending
from tokendepth.infer.requests import Token
from tokendepth.infer.sampling import Choice
from tokendepth.model import Output
from tokendepth.trace import DepthTotals, Site

ORDER = (
    "recipe", "train", "load", "generate", "evaluate", "compile", "build", "import_model", "retrofit", "export",
    "score", "analysis", "TextModel", "Generation", "DepthTrace", "Run", "RunConfig", "UserError",
)  # fmt: skip
PARTS: dict[str, tuple[type, ...]] = {
    "TextModel": (Output,),
    "Generation": (Token, Choice, Spending),
    "DepthTrace": (Site, DepthTotals),
}
"""Further types that users get from a class, described below it."""
CHOSEN = {"Run": ("path", "open", "name", "finished", "verify", "config", "env", "metrics", "weights", "evaluation")}
"""The members for users of classes that also have internal ones; of other classes all public members are shown."""


def api() -> str:
    """Every public name with its signature, docstring and example; classes also with a line for each member."""
    assert sorted(ORDER) == sorted(tokendepth.__all__)
    return "\n".join(_entry(name, getattr(tokendepth, name)) for name in ORDER)


def _entry(name: str, thing: Any) -> str:
    words, _, example = (inspect.getdoc(thing) or "").partition(">>> ")
    functions = {name: thing}
    if inspect.ismodule(thing):  # the docstrings of its functions follow that of the module
        functions = {f"{name}.{each}": getattr(thing, each) for each in thing.__all__}
        words = "\n\n".join([words.strip(), *(f"`{n}`: {inspect.getdoc(each)}" for n, each in functions.items())])
    lines = "".join(f"{_call(n, each)}\n" for n, each in functions.items() if not isinstance(each, type))
    parts = [f"### `{name}`", f"```python\n{lines}```" if lines else "", words.strip()]
    if isinstance(thing, type):
        parts.append(_members(thing, CHOSEN.get(name)))
        parts += [f"`{part.__name__}`: {inspect.getdoc(part)}\n\n{_members(part)}" for part in PARTS.get(name, ())]
    parts.append(f"```pycon\n{textwrap.dedent(f'>>> {example}').strip()}\n```")
    return "\n\n".join(filter(None, parts)) + "\n"


# --- classes ----------------------------------------------------------------------------------------------------------


def _members(cls: type, chosen: tuple[str, ...] | None = None) -> str:
    """A line for each public attribute and method, which therefore needs a docstring."""
    words = dict(_documented(cls))
    lines = []
    for name in [name for name in words if not name.startswith("_")] if chosen is None else chosen:
        shown, doc = words[name]
        assert doc, f"{cls.__name__}.{name} has no docstring"
        first, _, _ = doc.partition("\n\n")
        lines.append(f"- `{shown}`: {' '.join(first.split())}")
    return "\n".join(lines)


def _documented(cls: type) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """Names in the order of the source, each as a user writes it, with its docstring."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, (statement.target.id, _string(after))
        elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            for line, behind in zip(statement.body, [*statement.body[1:], None], strict=True):
                if (text := _string(behind)) and isinstance(line, ast.Assign | ast.AnnAssign):
                    target = line.targets[0] if isinstance(line, ast.Assign) else line.target
                    assert isinstance(target, ast.Attribute)
                    yield target.attr, (target.attr, text)
        elif isinstance(statement, ast.FunctionDef):
            plain = any(isinstance(one, ast.Name) and one.id == "property" for one in statement.decorator_list)
            shown = statement.name if plain else f"{statement.name}({_arguments(statement.args)})"
            yield statement.name, (shown, ast.get_docstring(statement))


def _string(node: ast.stmt | None) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return None


def _arguments(arguments: ast.arguments) -> str:
    """Names and defaults, without types."""
    for one in (*arguments.args, *arguments.kwonlyargs):
        one.annotation = None
    return re.sub(r"^(self|cls)(, )?", "", ast.unparse(arguments))


# --- functions --------------------------------------------------------------------------------------------------------


def _call(name: str, function: Callable) -> str:
    """On one line, or with a line for each argument."""
    text = f"td.{name}{_signature(function)}"
    if len(text) <= 100:
        return text
    start, rest = text.split("(", 1)
    arguments, end = rest.rsplit(")", 1)
    return "\n".join([f"{start}(", *(f"    {one}," for one in re.split(r", (?=\*, |\w+: )", arguments)), f"){end}"])


class _AsWritten(str):
    __repr__ = str.__str__


def _signature(function: Callable) -> str:
    """Without the modules of types; private types are shown by the alias that the source uses."""
    signature = inspect.signature(function)
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    given = {one.arg: one.annotation for one in ast.walk(node.args) if isinstance(one, ast.arg) and one.annotation}
    types = {
        one.name: _AsWritten(ast.unparse(given[one.name]))
        for one in signature.parameters.values()
        if "._" in str(one.annotation)
    }
    named = [one.replace(annotation=types.get(one.name, one.annotation)) for one in signature.parameters.values()]
    text = re.sub(r"\b(?:[a-z_]+\.)+([A-Z])|~", r"\1", str(signature.replace(parameters=named)))
    return re.sub(r"Optional\[(Literal\[[^\]]*\])\]", r"\1 | None", text)  # as `int | None` is written
