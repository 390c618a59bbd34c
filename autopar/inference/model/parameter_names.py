"""Map each decoder parameter to its tensors in a checkpoint: names, shapes, layout.

In: a decoder's configuration, and the path and shape of one of its parameters. Out: a `Source`: the names and the shape of
the tensors in the files, and the part of them that is the parameter. A slice of the parameter is read as slices of tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.inference.model.config import DecoderConfig
from autopar.inference.model.families import FAMILIES
from autopar.inference.model.safetensors import DTYPES, StoredTensor
from autopar.inference.model.tensor_names import Names, Rows

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """The stored tensors of one parameter.

    Args:
        names: the name of the tensor; of a parameter of several experts, the name of each expert's.
        stored_shape: the shape of each tensor.
        shape: the parameter's shape.
        num_outs: the number of dims of the output, which lead the shape, apart from that of the experts.
        rows: the rows of the tensors that are the parameter; None if all are.
        transposed: whether the tensors are [in, out].
        is_stacked: whether the first dim is that of the experts.
    """

    names: tuple[str, ...]
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    num_outs: int
    rows: Rows | None = None
    transposed: bool = False
    is_stacked: bool = False

    @property
    def stored(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return dict.fromkeys(self.names, self.stored_shape)

    def put(self, tensor: NDArray[Any], value: NDArray[Any]) -> None:
        """Write the parameter, or that of one expert, to its rows of a tensor."""
        outs_first = tensor.T if self.transposed else tensor
        flat = value.reshape(-1, *outs_first.shape[1:])
        rows = slice(None) if self.rows is None else self.rows.numbers.reshape(-1)
        outs_first[rows] = flat

    def of(self, tensors: Mapping[str, StoredTensor], dtype: Any = None) -> StoredParameter:
        """The parameter as an array that is read where it is sliced, of the tensors of a checkpoint."""
        return self.view([tensors[name].mapped() for name in self.names])

    def dtype(self, tensors: Mapping[str, StoredTensor], dtype: Any) -> Any:
        """The dtype of the parameter on the devices: the given one, or the stored one."""
        return dtype or DTYPES.get(tensors[self.names[0]].dtype, np.float32)

    def view(self, tensors: Sequence[NDArray[Any]]) -> StoredParameter:
        """The parameter as an array that is read where it is sliced."""
        return StoredParameter(self, tensors)


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """A parameter in memory-mapped tensors."""

    source: Source
    tensors: Sequence[NDArray[Any]]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def __getitem__(self, bounds: tuple[slice, ...]) -> NDArray[Any]:
        """A slice of the parameter. It is a view of the tensor if it is one range of the tensor's rows."""
        if not self.source.is_stacked:
            return self._of_one(self.tensors[0], self.shape, bounds)
        parts = [self._of_one(tensor, self.shape[1:], bounds[1:]) for tensor in self.tensors[bounds[0]]]
        return np.stack(parts)

    def _of_one(self, tensor: NDArray[Any], shape: tuple[int, ...], bounds: tuple[slice, ...]) -> NDArray[Any]:
        num, rows = self.source.num_outs, self.source.rows
        outs, ins = shape[:num], shape[num:]
        outs_first = tensor.T if self.source.transposed else tensor
        if rows is None:
            return outs_first.reshape(*outs, *ins)[bounds]
        wanted = rows.numbers.reshape(outs)[bounds[:num]]
        columns = outs_first.reshape(rows.num_stored, *ins)[(slice(None), *bounds[num:])]
        flat = wanted.reshape(-1)
        is_range = flat.size and flat[-1] - flat[0] == flat.size - 1
        found = columns[flat[0] : flat[-1] + 1] if is_range else columns[flat]
        return found.reshape(*wanted.shape, *found.shape[1:])


def prefix(config: DecoderConfig) -> str:
    """The prefix of tensor names, as `transformers` writes them."""
    return _names(config).prefix


def head(config: DecoderConfig) -> str:
    """The name of the head's tensor."""
    return _names(config).head


def source(config: DecoderConfig, path: Path, shape: tuple[int, ...]) -> Source:
    """Map a parameter to its stored tensors.

    Args:
        path: the path in the decoder's parameters, such as `("layers_3", "query", "weight")`.
        shape: the parameter's shape.
    """
    names, leaf = _names(config), path[-1]
    if path[0] == "head":
        return Source((names.head,), shape, shape, 1)
    layer = path[0].removeprefix("layers_") if path[0].startswith("layers_") else ""
    module = "/".join(path[1 if layer else 0 : -1])
    name = f"{names.prefix}{names.modules[module].format(layer, e='{e}')}.{leaf}"
    num_experts = shape[0] if "{e}" in name else 0
    own = shape[1:] if num_experts else shape
    num_outs = _num_outs(module, leaf, own)
    flat = (math.prod(own[:num_outs]), math.prod(own[num_outs:])) if num_outs < len(own) else (math.prod(own),)
    rows = names.fused[module](config) if module in names.fused else None
    flat = flat if rows is None else (rows.num_stored, *flat[1:])
    transposed = names.transposed and leaf == "weight" and len(flat) == 2 and not module.startswith("embed")
    every = tuple(name.replace("{e}", str(expert)) for expert in range(num_experts or 1))
    stored = flat[::-1] if transposed else flat
    return Source(every, stored, shape, num_outs, rows, transposed, is_stacked=num_experts > 0)


def is_ignored(config: DecoderConfig, name: str) -> bool:
    """Whether a checkpoint may hold this tensor without a parameter for it: a mask, or the head of a tied model."""
    names = _names(config)
    return (config.tied and name == names.head) or bool(re.fullmatch(names.not_weights, name))


def _names(config: DecoderConfig) -> Names:
    return FAMILIES[config.family].names(config)


def _num_outs(module: str, leaf: str, shape: tuple[int, ...]) -> int:
    """The number of output dims: those of a weight that are not inputs, and all of a bias or of a norm's weight."""
    if leaf == "bias" or module.endswith("norm"):
        return len(shape)
    return 1 if module == "out" else len(shape) - 1
