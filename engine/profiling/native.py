"""Annotate compiled kernels for torch's profiler, which does not record calls through ctypes.

    with native_calls():
        ...                 # each call of a kernel is an annotation `rankwise::<name>`

Every public function of `engine.kernels`, wherever the engine imported it, and every call of a callable object of its
classes (a packed layer) is annotated. Used only in a profiled region: a kernel of the decode loop takes microseconds,
an annotation about one.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from torch.profiler import record_function

from engine.profiling.events import NATIVE

_KERNELS = "engine.kernels."
_NOT_KERNELS = "engine.kernels.build"


@contextmanager
def native_calls() -> Iterator[None]:
    """Annotate every call of a loaded kernel within the context."""
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("engine.") and module is not None]
    with ExitStack() as stack:
        for holder, attribute, plain, annotated in list(_replacements(ours)):
            setattr(holder, attribute, annotated)
            stack.callback(setattr, holder, attribute, plain)
        yield


def _replacements(modules: list[ModuleType]) -> Iterator[tuple[Any, str, Any, Any]]:
    """Yield holder, attribute, original and replacement."""
    functions: dict[int, Callable[..., Any]] = {}
    for module in modules:
        if not module.__name__.startswith(_KERNELS) or module.__name__ == _NOT_KERNELS:
            continue
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(value) and not name.startswith("_"):
                functions[id(value)] = _annotated(value, name)
            elif inspect.isclass(value) and "__call__" in vars(value):
                plain = vars(value)["__call__"]
                yield value, "__call__", plain, _annotated(plain, name.strip("_"))
    for module in modules:
        for name, value in vars(module).items():
            if id(value) in functions:
                yield module, name, value, functions[id(value)]


def _annotated(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def inner(*arguments: Any, **named: Any) -> Any:
        with record_function(NATIVE + name):
            return call(*arguments, **named)

    return inner
