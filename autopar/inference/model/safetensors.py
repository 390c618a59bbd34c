"""The safetensors format: named tensors in one file, each found by its offset.

    length of the header    8 bytes, little-endian
    header                  JSON: of each tensor its dtype, shape, and begin and end within the data
    data                    tensors one after the other, row by row, little-endian

Reading looks at the header alone. A tensor is a memory map of its bytes, which are read as they are looked at.
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
"""Those that weights are read as."""
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
_MOST = 2**48  # no dim and no offset is above it
_WAY_OUT = "Copy it again from where it came from"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    Args:
        dtype: by the format's name. begin: its first byte in the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def mapped(self) -> NDArray[Any]:
        """The tensor, none of which has been read yet.

        Raises:
            ModelError: it has no dtype that weights are read as.
        """
        if self.dtype not in DTYPES:
            raise ModelError(
                f"{self.file}: `{self.name}` is of {self.dtype}, and weights are read as {', '.join(DTYPES)}. Convert"
                " the checkpoint to one of these"
            )
        dtype = DTYPES[self.dtype]
        if math.prod(self.shape) == 0:
            return np.zeros(self.shape, dtype)
        return np.memmap(self.file, dtype, "r", self.begin, self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """What a file holds, by name.

    Raises:
        ModelError: it cannot be read, is no safetensors file, is cut short, or has bytes that are no tensor's.
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
            f"{file} is no safetensors file, or is cut short within its header, at {size:,} bytes. {_WAY_OUT}"
        )
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = sorted((tuple(entry["data_offsets"]), name, entry) for name, entry in entries.items())
        found = {}
        expected = 0
        for (begin, end), name, entry in tensors:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            if not all(type(number) is int and abs(number) <= _MOST for number in (begin, end, *shape)):
                raise ModelError(
                    f"{file} is damaged: its header says that `{name}` is of the shape {list(shape)} and lies in bytes"
                    f" {begin} to {end} of the data, which are no whole numbers below 2^48. {_WAY_OUT}"
                )
            if begin != expected or end - begin != _BYTES[dtype] * math.prod(shape) or min(shape, default=0) < 0:
                raise ModelError(
                    f"{file} is damaged: its header says that `{name}`, {dtype} of the shape {list(shape)}, lies in bytes"
                    f" {begin:,} to {end:,} of the data, where {expected:,} is the next free one. {_WAY_OUT}"
                )
            found[name] = StoredTensor(file, name, dtype, shape, 8 + length + begin)
            expected = end
            if 8 + length + end > size:
                raise ModelError(
                    f"{file} is cut short within `{name}`, which ends at byte {8 + length + end:,} of a file of"
                    f" {size:,}. {_WAY_OUT}"
                )
    except ModelError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is no safetensors file: its header cannot be read ({error!r}). {_WAY_OUT}") from None
    if 8 + length + expected != size:
        raise ModelError(f"{file} is damaged: of its {size:,} bytes {8 + length + expected:,} are tensors. {_WAY_OUT}")
    return found


def write_file(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, make: Callable[[str], NDArray[Any]]
) -> None:
    """Write a file, tensor by tensor: no more than one is in memory.

    Args:
        shapes: of the tensors, by name. dtype: of all, by the format's name. make: one of them; it is converted.

    Raises:
        OSError: it cannot be written.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it `transformers` refuses the file
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + _BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # so that tensors are aligned
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        for name, shape in shapes.items():
            array = make(name).astype(DTYPES[dtype], order="C")
            assert array.shape == shape, name
            opened.write(memoryview(array.reshape(-1).view(np.uint8)))
        opened.flush()
        os.fsync(opened.fileno())
