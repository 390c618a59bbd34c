"""Read and write the safetensors format: named tensors in one file, with a header of offsets.

    length of the header    8 bytes, little-endian
    header                  JSON: for each tensor its dtype, its shape, and its begin and end within the data
    data                    the tensors one after another, in row-major order, little-endian

Only the header is read at once. A tensor is a memory map of its bytes, which are read on access.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from autopar.errors import ModelError

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The supported dtypes of weights."""
_INTEGERS: dict[str, np.dtype[Any]] = {
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
_BYTES = {
    **{name: dtype.itemsize for name, dtype in DTYPES.items()},
    "I64": 8,
    "U64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}
_MAX_INT = 2**48  # no valid dim or offset is above it
_WAY_OUT = "Copy it again from where it came from"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    Args:
        dtype: the dtype's name in the format.
        begin: the offset of the tensor's first byte in the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def mapped(self, *, integers: bool = False) -> NDArray[Any]:
        """Map the tensor into memory. Its bytes are read on access.

        Args:
            integers: whether it is a tensor of integers, as those of quantized weights are.

        Raises:
            ModelError: the tensor's dtype is not supported for weights.
        """
        allowed = _INTEGERS if integers else DTYPES
        if self.dtype not in allowed:
            raise ModelError(
                f"{self.file}: the dtype of `{self.name}` is {self.dtype}, but it must be one of {', '.join(allowed)}. Convert"
                " the checkpoint to one of these"
            )
        dtype = allowed[self.dtype]
        if math.prod(self.shape) == 0:
            return np.zeros(self.shape, dtype)
        return np.memmap(self.file, dtype, "r", self.begin, self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a file, by name, without their data.

    Raises:
        ModelError: the file cannot be read, is not a safetensors file, is truncated, or has bytes that belong to no tensor.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = opened.read(length) if length <= size - 8 else b""
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}. {_WAY_OUT}") from None
    if len(header) < max(length, 2):
        raise ModelError(
            f"{file} is not a safetensors file, or is truncated within its header, at {size:,} bytes. {_WAY_OUT}"
        )
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = sorted((tuple(entry["data_offsets"]), name, entry) for name, entry in entries.items())
        found = {}
        expected = 0
        for (begin, end), name, entry in tensors:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            if not all(type(number) is int and abs(number) <= _MAX_INT for number in (begin, end, *shape)):
                raise ModelError(
                    f"{file} is damaged: its header gives `{name}` the shape {list(shape)} and the bytes {begin} to {end}"
                    f" of the data, and these must be integers below 2^48. {_WAY_OUT}"
                )
            if begin != expected or end - begin != _BYTES[dtype] * math.prod(shape) or min(shape, default=0) < 0:
                raise ModelError(
                    f"{file} is damaged: its header gives `{name}`, {dtype} of the shape {list(shape)}, the bytes"
                    f" {begin:,} to {end:,} of the data, but the next free byte is {expected:,}. {_WAY_OUT}"
                )
            found[name] = StoredTensor(file, name, dtype, shape, 8 + length + begin)
            expected = end
            if 8 + length + end > size:
                raise ModelError(
                    f"{file} is truncated within `{name}`, which ends at byte {8 + length + end:,} of a file of"
                    f" {size:,}. {_WAY_OUT}"
                )
    except ModelError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{file} is not a safetensors file: its header cannot be read ({error!r}). {_WAY_OUT}"
        ) from None
    if 8 + length + expected != size:
        raise ModelError(
            f"{file} is damaged: it has {size:,} bytes, but its header and tensors take {8 + length + expected:,}. {_WAY_OUT}"
        )
    return found


def write_file(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, make: Callable[[str], NDArray[Any]]
) -> None:
    """Write a file with one tensor in memory at a time.

    Args:
        shapes: the shape of each tensor, by name.
        dtype: the dtype of all tensors, by its name in the format.
        make: the function from a tensor's name to its array, which is converted to `dtype`.

    Raises:
        OSError: the file cannot be written.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # `transformers` refuses files without it
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + _BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # aligns the tensors
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        for name, shape in shapes.items():
            array = make(name).astype(DTYPES[dtype], order="C")
            assert array.shape == shape, name
            opened.write(memoryview(array.reshape(-1).view(np.uint8)))
        opened.flush()
        os.fsync(opened.fileno())
