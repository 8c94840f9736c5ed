"""safetensors files, mapped: tensors as float32 without torch.

The package's numpy front end refuses bfloat16, which most checkpoints are; the format is a length, a JSON table and raw
little-endian data.
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anaphora.model.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_STORED_AS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class SafetensorsFile:
    """One mapped file.

    Raises:
        ModelError: not a safetensors file, or a damaged one.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            data_start = 8 + int.from_bytes(data[:8], "little")
            if data_start > len(data):
                raise ValueError("the file ends before its header does")
            table = json.loads(data[8:data_start])
            self._entries = {name: _entry(entry) for name, entry in table.items() if name != "__metadata__"}
        except (OSError, ValueError, AttributeError, KeyError, RecursionError, TypeError) as error:
            raise ModelError(f"{path}: not a safetensors file, or damaged: {error}") from None
        self._path = path
        self._data = memoryview(data)[data_start:]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, by the header alone.

        Raises:
            KeyError: there is none of that name.
            ModelError: a dtype other than F32, F16 and BF16, or data that do not fit the tensor.
        """
        dtype, shape, start, end = self._entries[name]
        if dtype not in _STORED_AS:
            raise ModelError(f"tensor {name!r}: dtype {dtype} is not supported; supported are {', '.join(_STORED_AS)}")
        if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
            raise ModelError(f"{self._path}: tensor {name!r}: damaged: its sizes are no numbers from 0 up")
        size = math.prod(shape) * np.dtype(_STORED_AS[dtype]).itemsize
        if end - start != size or end > len(self._data):
            raise ModelError(f"{self._path}: tensor {name!r}: damaged or truncated: it takes {size} bytes")
        return shape

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor as float32; a view of the mapped file where it is float32 there.

        Raises:
            KeyError: there is none of that name.
            ModelError: what `shape_of` raises.
        """
        shape = self.shape_of(name)
        dtype, _, start, end = self._entries[name]
        stored = np.frombuffer(self._data[start:end], _STORED_AS[dtype]).reshape(shape)
        if dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            stored = np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
        widened: NDArray[np.float32] = stored.astype(np.float32, copy=False)
        return widened


def _entry(entry: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    start, end = entry["data_offsets"]
    return entry["dtype"], tuple(entry["shape"]), start, end
