"""Trace and lower cuDNN attention on a machine without cuDNN, to plan and compile for GPUs that are not there.

In: nothing.
Out: `without_cudnn`, a context in which `jax.nn.dot_product_attention(implementation="cudnn")` can be traced. JAX reads
the version of the installed cuDNN and the compute capability of the local GPU already when it traces.
`attention_without_devices`, a context in which it can be lowered for a mesh without devices.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jax._src import dispatch as _dispatch

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"

#: What the checks answer where there is no cuDNN: a version and a GPU that support every kind of attention.
_ANSWERS = {
    "check_cudnn_version": lambda: 99_999,
    "check_compute_capability": lambda capability: True,
    "is_cuda_compute_capability_equal": lambda capability: False,
}

_PATCHING = threading.RLock()  # one thread at a time replaces JAX's functions and restores them


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Let JAX trace cuDNN attention where no cuDNN is installed. Where it is, JAX's own checks apply."""
    module = _attention_module()
    if module is None or _is_installed(module):
        yield
        return
    with _replaced(module, {name: answer for name, answer in _ANSWERS.items() if hasattr(module, name)}):
        yield


@contextmanager
def attention_without_devices() -> Iterator[None]:
    """Let JAX lower cuDNN attention for an abstract mesh. JAX's own partitioning of it needs devices, but autopar runs it in
    manual regions, where JAX does not partition."""
    module = _attention_module()
    if module is None:
        yield
        return
    primitives = {one for name, one in vars(module).items() if name.endswith(("_p", "_p_wrapper"))}
    needing = _dispatch.prim_requires_devices_during_lowering
    with _replaced(_dispatch, {"prim_requires_devices_during_lowering": needing - primitives}):
        yield


@contextmanager
def _replaced(module: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of one of JAX's modules."""
    with _PATCHING:
        before = {name: getattr(module, name) for name in values}
        try:
            for name, value in values.items():
                setattr(module, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(module, name, value)


def _attention_module() -> Any | None:
    try:
        return importlib.import_module(_MODULE)
    except ImportError:  # JAX has moved it
        return None


def _is_installed(module: Any) -> bool:
    check = module.check_cudnn_version
    if check is _ANSWERS["check_cudnn_version"]:  # another thread traces, and has replaced it
        return False
    try:
        check()
    except Exception:  # JAX raises RuntimeError, and the CUDA libraries what they like
        return False
    return True
