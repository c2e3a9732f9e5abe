"""Calls of the compiled part that do not fit: one sentence of ours in place of nanobind's list of signatures."""

from __future__ import annotations

import builtins
import functools
import inspect
import numbers
import reprlib
import sys
import types
import typing
from typing import Any

from megamoe import _core


def tell_plainly(scope: Any) -> None:
    """Makes the compiled functions in a module or class say in one sentence what they expected and what came."""
    for name, value in list(vars(scope).items()):
        if isinstance(value, type):
            tell_plainly(value)
        elif hasattr(value, "__nb_signature__"):
            plain = _plain(value)
            static = isinstance(scope, type) and type(value).__name__ == "nb_func"
            setattr(scope, name, staticmethod(plain) if static else plain)


def _plain(function: Any) -> Any:
    signature = _signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if not str(error).startswith(f"{function.__name__}(): incompatible function arguments"):
                raise
        raise _misfit(function.__name__, signature, args, kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _signature(function: Any) -> inspect.Signature:
    """By Python itself: what nanobind tells is a function's first line. What it returns is not always Python."""
    text: str = function.__nb_signature__[0][0].rpartition(" -> ")[0]
    scope: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{text}: ...", scope)
    return inspect.signature(scope[function.__name__])


def _misfit(function: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception:
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as error:  # "missing a required argument: 'x'"
        return TypeError(f"{function}(): {error}")
    scope = sys.modules | vars(_core)
    for name, value in arguments.items():
        expected = signature.parameters[name].annotation
        if expected is not inspect.Parameter.empty and not _fits(value, eval(expected, scope)):
            return TypeError(f"{name} must be {expected.replace('_core.', '')}, got {_kind(value)}")
    for name, value in arguments.items():  # then it is a number that C++'s type does not hold
        if "int" not in str(signature.parameters[name].annotation):
            continue
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, numbers.Integral) and not -2**31 <= number < 2**31:
                bits = 32 if -2**63 <= number < 2**63 else 64
                return ValueError(f"{name} must fit in {bits} bits, got {number}")
    given = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in arguments.items())
    return TypeError(f"{function}() cannot take {given}")  # a path with a null byte, an object without its parts


def _fits(value: Any, expected: Any) -> bool:
    if isinstance(expected, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(expected))
    origin = typing.get_origin(expected) or expected
    if origin is list:
        return isinstance(value, (list, tuple)) and all(_fits(one, *typing.get_args(expected)) for one in value)
    return isinstance(value, {int: numbers.Integral, float: numbers.Real}.get(origin, origin))  # NumPy's are those, too


def _kind(value: Any) -> str:
    name = type(value).__name__
    if hasattr(builtins, name) and type(value).__module__ != "builtins":  # numpy.bool
        name = f"{type(value).__module__}.{name}"
    if isinstance(value, (list, tuple)) and value:
        return f"{name} of {', '.join(sorted({type(one).__name__ for one in value}))}"
    return name


tell_plainly(_core)
