"""Triton's interpreter, which looks for the builtins of its language anew at every call of a function."""

from functools import cache
from inspect import getmembers
from typing import Any


def remember_builtins() -> None:
    """Look for them once: a quarter of the time that the kernels take."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def builtins(package: Any) -> list[str]:
        return [name for name, _ in getmembers(package, is_builtin)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    assert hasattr(interpreter, "_patch_builtin"), "another version of Triton"
    interpreter._patch_builtin = patch_builtin
