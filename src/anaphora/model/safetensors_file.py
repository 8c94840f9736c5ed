"""safetensors files, mapped: tensors as float32 without torch.

The package's numpy front end refuses bfloat16, which most checkpoints are; the format is a length, a JSON table and raw
little-endian data.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from anaphora.model.errors import ModelError

if TYPE_CHECKING:
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
            table = json.loads(data[8:data_start])
            self._entries = {
                name: (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
                for name, entry in table.items()
                if name != "__metadata__"
            }
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise ModelError(f"{path}: not a safetensors file, or damaged: {error}") from None
        self._path = path
        self._data = memoryview(data)[data_start:]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor as float32; a view of the mapped file where it is float32 there.

        Raises:
            KeyError: there is none of that name.
            ModelError: a dtype other than F32, F16 and BF16, or data that do not fit the tensor.
        """
        dtype, shape, start, end = self._entries[name]
        if dtype not in _STORED_AS:
            raise ModelError(f"tensor {name!r}: dtype {dtype} is not supported; supported are {', '.join(_STORED_AS)}")
        try:
            stored = np.frombuffer(self._data[start:end], _STORED_AS[dtype]).reshape(shape)
        except (ValueError, TypeError) as error:
            raise ModelError(f"{self._path}: tensor {name!r}: damaged or truncated: {error}") from None
        if dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            return np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
        return stored.astype(np.float32, copy=False)
