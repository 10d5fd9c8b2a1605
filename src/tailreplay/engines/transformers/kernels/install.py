"""Put the kernels into the mixers of one model, and take them out again."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import CellType, FunctionType, MethodType
from typing import Any

import torch

from tailreplay.engines.transformers.kernels.library import chunk_rule, convolution, step_rule

VARIABLE = "TAILREPLAY_KERNELS"
_STAND_INS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "torch_chunk_gated_delta_rule": chunk_rule,
    "torch_recurrent_gated_delta_rule": step_rule,
    "causal_conv1d_fn": convolution,
}
_OURS = "_tailreplay_kernels"


def wanted() -> bool:
    """Whether the kernels are to be used: yes, unless the environment says ``TAILREPLAY_KERNELS=0``."""
    return os.environ.get(VARIABLE, "1") != "0"


def install(mixers: Iterable[torch.nn.Module]) -> bool:
    """Let these modules' forwards use the kernels. Mutates the modules, not their classes; doing it twice is no harm.

    The library's mixers call module-level functions. An instance gets a forward of the same code whose globals name the
    stand-ins; other models of the process, the library's among them, are not touched.

    Returns
    -------
    bool
        Whether all of them use the kernels now. One whose forward is somebody else's, or does not call these functions,
        is left as it is.
    """
    done = [_install(mixer) for mixer in mixers]
    return bool(done) and all(done)


def uninstall(mixers: Iterable[torch.nn.Module]) -> None:
    """Give these modules their class's forward back. Mutates the modules."""
    for mixer in mixers:
        if installed(mixer):
            del mixer.__dict__["forward"]


def installed(mixer: torch.nn.Module) -> bool:
    """Whether a module uses the kernels."""
    return hasattr(mixer.__dict__.get("forward"), _OURS)


def _install(mixer: torch.nn.Module) -> bool:
    if "forward" in mixer.__dict__:
        return installed(mixer)
    forward = _with_kernels(type(mixer).forward)
    if forward is None:
        return False
    mixer.forward = MethodType(forward, mixer)
    return True


@lru_cache(maxsize=64)
def _with_kernels(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a copy of `forward` that calls the stand-ins, or None if it cannot be made."""
    inner = inspect.unwrap(forward)
    if not isinstance(inner, FunctionType) or not all(name in inner.__code__.co_names for name in _STAND_INS):
        return None
    stand_ins = {name: make(inner.__globals__[name]) for name, make in _STAND_INS.items()}
    copy = _rewrapped(forward, inner, _copy(inner, {**inner.__globals__, **stand_ins}, inner.__closure__))
    if copy is not None:
        setattr(copy, _OURS, True)
    return copy


def _rewrapped(outer: Callable[..., Any], inner: FunctionType, new: FunctionType) -> FunctionType | None:
    """Return a copy of decorated `outer` in which `new` takes the place of `inner`."""
    if outer is inner:
        return new
    below = getattr(outer, "__wrapped__", None)
    if below is None or not isinstance(outer, FunctionType):
        return None
    wrapped = _rewrapped(below, inner, new)
    cells = outer.__closure__ or ()
    if wrapped is None or not any(cell.cell_contents is below for cell in cells):
        return None
    closure = tuple(CellType(wrapped) if cell.cell_contents is below else cell for cell in cells)
    copy = _copy(outer, outer.__globals__, closure)
    copy.__wrapped__ = wrapped  # type: ignore[attr-defined]
    return copy


def _copy(function: FunctionType, names: dict[str, Any], closure: tuple[CellType, ...] | None) -> FunctionType:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copy.__doc__, copy.__qualname__, copy.__module__ = function.__doc__, function.__qualname__, function.__module__
    copy.__annotations__ = function.__annotations__
    return copy
