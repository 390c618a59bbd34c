"""Map each parameter of a quantized matmul to its tensors in a checkpoint, and read it in the decoder's layout.

In: the `Source` of the float weight, and how it is quantized. Out: `QuantizedSource`. One stored tensor at a time is unpacked on
the host; each device still gets its own slice only.

| format | weight | scale | zero |
|---|---|---|---|
| compressed-tensors, int-quantized | `weight` int8 [out, in] | `weight_scale` [out, groups] | `weight_zero_point` |
| compressed-tensors, pack-quantized | `weight_packed` int32 [out, in / n] | `weight_scale` | `weight_zero_point` [out / n, groups] |
| GPTQ | `qweight` int32 [in / n, out] | `scales` [groups, out] | `qzeros` [groups, out / n], less one modulo the range |
| AWQ | `qweight` int32 [in, out / n], columns in another order | `scales` [groups, out] | `qzeros` [groups, out / n] |

n weights share an int32: 8 of 4 bits, or 4 of 8 bits, the first one in the lowest bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ModelError
from autopar.inference.model.parameter_names import Source
from autopar.inference.model.quantization import Quantization
from autopar.inference.model.quantized_weights import packed, quantized
from autopar.inference.model.safetensors import DTYPES, StoredTensor

#: The column of each 4 bits of an int32 in AWQ.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_WAY_OUT = "Copy the checkpoint again from where it came from"


@dataclass(frozen=True, slots=True)
class QuantizedSource:
    """The stored tensors of one parameter of a quantized matmul.

    Args:
        base: the source of the float weight.
        leaf: "weight", "scale" or "zero". shape: its shape.
        how: the quantization.
    """

    base: Source
    leaf: str
    shape: tuple[int, ...]
    how: Quantization

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(self.stored)

    @property
    def stored(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return {name: shape for module in self._modules for name, shape in self._stored_of(module).items()}

    @property
    def _modules(self) -> tuple[str, ...]:
        return tuple(name.removesuffix(".weight") for name in self.base.names)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """The stored outputs, the inputs and the groups."""
        own = self.base.shape[1:] if self.base.is_stacked else self.base.shape
        outs = math.prod(own[: self.base.num_outs]) if self.base.rows is None else self.base.rows.num_stored
        ins = math.prod(own[self.base.num_outs :])
        return outs, ins, self.how.num_groups(ins)

    def _stored_of(self, module: str) -> dict[str, tuple[int, ...]]:
        (outs, ins, groups), num = self._sizes, 32 // self.how.bits
        if self.how.format == "made":
            return {f"{module}.weight": self.base.stored_shape}
        shapes = {
            "int-quantized": {
                "weight": {"weight": (outs, ins)},
                "scale": {"weight_scale": (outs, groups)},
                "zero": {"weight_zero_point": (outs, groups)},
            },
            "pack-quantized": {
                "weight": {"weight_packed": (outs, ins // num), "weight_shape": (2,)},
                "scale": {"weight_scale": (outs, groups)},
                "zero": {"weight_zero_point": (outs // num, groups)},
            },
            "awq": {
                "weight": {"qweight": (ins, outs // num)},
                "scale": {"scales": (groups, outs)},
                "zero": {"qzeros": (groups, outs // num)},
            },
        }
        shapes["gptq"] = shapes["gptq_v2"] = {
            **shapes["awq"],
            "weight": {"qweight": (ins // num, outs), "g_idx": (ins,)},
        }
        return {f"{module}.{name}": shape for name, shape in shapes[self.how.format][self.leaf].items()}

    def dtype(self, tensors: Mapping[str, StoredTensor], dtype: Any) -> np.dtype[Any]:
        """The dtype of the parameter on the devices.

        Args:
            dtype: the dtype of float weights; by default the stored one. Scales that a checkpoint stores keep their own.
        """
        if self.leaf == "weight":
            return np.dtype(np.uint8 if self.how.bits == 4 else np.int8)
        if self.leaf == "zero":
            return np.dtype(np.int16)
        return self._scale_dtype(tensors[self.names[0]], dtype)

    def _scale_dtype(self, tensor: StoredTensor, dtype: Any) -> np.dtype[Any]:
        if dtype is not None and self.how.format == "made":
            return np.dtype(dtype)
        stored = DTYPES.get(tensor.dtype, np.dtype(np.float32))
        return np.dtype(np.float32) if stored == np.float64 else stored

    def of(self, tensors: Mapping[str, StoredTensor], dtype: Any = None) -> WholeParameter:
        """The parameter as an array that is read when it is first sliced.

        Args:
            dtype: as for `dtype`.
        """
        return WholeParameter(self, tensors, dtype)

    def read(self, tensors: Mapping[str, StoredTensor], dtype: Any) -> NDArray[Any]:
        """Read the whole parameter.

        Raises:
            ModelError: a scale is not a finite number, or the tensors contradict each other.
        """
        parts = [self._of_one(tensors, module, dtype) for module in self._modules]
        return (np.stack(parts) if self.base.is_stacked else parts[0]).reshape(self.shape)

    def _of_one(self, tensors: Mapping[str, StoredTensor], module: str, dtype: Any) -> NDArray[Any]:
        """The parameter of one module, `[out, …]`."""
        stored = [tensors[name] for name in self._stored_of(module)]
        base = self.base
        if self.how.format == "made":
            own = base.shape[1:] if base.is_stacked else base.shape
            one = Source((stored[0].name,), base.stored_shape, own, base.num_outs, base.rows, base.transposed)
            floats = one.view([stored[0].mapped()])[tuple(map(slice, own))]
            _refuse_infinite(stored[0], floats)
            flat = floats.reshape(math.prod(own[: base.num_outs]), -1)
            return quantized(flat, self.how, self._scale_dtype(stored[0], dtype))[self.leaf]
        arrays = [np.asarray(tensor.mapped(integers=self.leaf != "scale")) for tensor in stored]
        found = {"weight": self._weight, "scale": self._scale, "zero": self._zero}[self.leaf](stored, *arrays)
        if base.rows is not None:
            rows = base.rows
            found = found.reshape(rows.groups, rows.parts, rows.size, -1)[:, rows.first : rows.last]
            found = found.reshape(-1, found.shape[-1])
        return packed(found, self.how) if self.leaf == "weight" else found

    def _signed(self, values: NDArray[Any]) -> NDArray[np.int16]:
        """Unsigned values as the decoder has them: those of 8 bits are signed."""
        return values.astype(np.int16) - (128 if self.how.bits == 8 else 0)

    def _weight(self, stored: list[StoredTensor], array: NDArray[Any], *rest: NDArray[Any]) -> NDArray[Any]:
        (_, ins, _), bits = self._sizes, self.how.bits
        if self.how.format == "int-quantized":
            return array
        if self.how.format == "pack-quantized":
            if rest[0].tolist() != list(self._sizes[:2]):
                raise ModelError(
                    f"{stored[1].file}: `{stored[1].name}` is {rest[0].tolist()}, but config.json requires"
                    f" {list(self._sizes[:2])}. {_WAY_OUT}"
                )
            return self._signed(_unpacked(array, bits))
        if self.how.format == "awq":
            return self._signed(_in_awq_order(array).T)
        group = self.how.group or ins
        if (rest[0] != np.arange(ins) // group).any():
            raise ModelError(
                f"{stored[1].file}: `{stored[1].name}` gives inputs to groups out of order (act-order), which is not supported."
                " Use a checkpoint made with desc_act=false"
            )
        return self._signed(_unpacked(array.T, bits))

    def _scale(self, stored: list[StoredTensor], array: NDArray[Any]) -> NDArray[Any]:
        _refuse_infinite(stored[0], array)
        return array if "quantized" in self.how.format else array.T

    def _zero(self, stored: list[StoredTensor], array: NDArray[Any]) -> NDArray[Any]:
        if self.how.format == "int-quantized":
            return array.astype(np.int16)
        if self.how.format == "pack-quantized":
            return self._signed(_unpacked(array.T, self.how.bits).T)
        if self.how.format == "awq":
            return self._signed(_in_awq_order(array).T)
        # GPTQ's first version stores one less, modulo the range: a zero of 0 is the largest value.
        less = 1 if self.how.format == "gptq" else 0
        return self._signed((_unpacked(array, self.how.bits).T + less) % 2**self.how.bits)


@dataclass(eq=False, slots=True)
class WholeParameter:
    """A parameter that is read as a whole when it is first sliced."""

    source: QuantizedSource
    tensors: Mapping[str, StoredTensor]
    dtype: Any
    _array: NDArray[Any] | None = field(default=None, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def __getitem__(self, bounds: tuple[slice, ...]) -> NDArray[Any]:
        if self._array is None:
            self._array = self.source.read(self.tensors, self.dtype)
        return self._array[bounds]


def _unpacked(array: NDArray[np.int32], bits: int) -> NDArray[np.int32]:
    """The values of int32 words along the last dim, the lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.int32)
    values = (array[..., None] >> shifts) & (2**bits - 1)
    return values.reshape(*array.shape[:-1], -1)


def _in_awq_order(array: NDArray[np.int32]) -> NDArray[np.int32]:
    """The values of AWQ's words along the last dim, in the order of columns."""
    values = _unpacked(array, 4).reshape(*array.shape, 8)
    ordered = np.empty_like(values)
    ordered[..., list(_AWQ_ORDER)] = values
    return ordered.reshape(*array.shape[:-1], -1)


def _refuse_infinite(tensor: StoredTensor, array: NDArray[Any]) -> None:
    if not np.isfinite(array.astype(np.float32)).all():
        raise ModelError(
            f"{tensor.file}: `{tensor.name}` has values that are NaN or infinite, so the weights are not numbers. {_WAY_OUT}"
        )
