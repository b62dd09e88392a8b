"""Safetensors files: the length of a header, the header in JSON, and the numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Those of all files of a folder, which are read when they are used."""
    arrays: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found = _read(file)
        if twice := sorted(found.keys() & arrays.keys()):
            raise ValueError(f"{file}: {twice[0]} is in another file, too")
        arrays |= found
    if not arrays:
        raise FileNotFoundError(f"{folder}: has no safetensors files with tensors")
    return arrays


def read_object(text: bytes, where: str) -> dict[str, Any]:
    """What a text in JSON has under each name."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} is not a JSON object: {found!r:.100}")
    return found


def _read(file: Path) -> dict[str, np.ndarray]:
    content = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.empty(0, np.uint8)  # none maps 0 bytes
    begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
    if begin > content.size:
        raise ValueError(f"{file}: has {content.size} bytes, and its header ends at {begin}")
    header = read_object(content[8:begin].tobytes(), f"{file}: the header")
    header.pop("__metadata__", None)
    entries = sorted((*_entry(f"{file}: {name}", entry), name) for name, entry in header.items())
    data, end, arrays = content[begin:], 0, {}
    for first, last, dtype, shape, name in entries:  # without gaps: no numbers are of two tensors, or of none
        if first != end or last > data.size:
            place = f"must begin at {end}, and the data has {data.size} bytes"
            raise ValueError(f"{file}: {name} has data_offsets [{first}, {last}]: it {place}")
        arrays[name], end = data[first:last].view(_DTYPES[dtype]).reshape(shape), last
    if end != data.size:
        raise ValueError(f"{file}: has {data.size} bytes of data, and its tensors end at {end}")
    return arrays


def _entry(where: str, entry: object) -> tuple[int, int, str, list[int]]:
    """Where the numbers of a tensor begin and end, their dtype and their shape."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(first), int(last)]}:
            pass
        case _:
            raise ValueError(f"{where} must have dtype, shape and two data_offsets: {entry!r:.100}")
    if dtype not in _DTYPES:
        raise ValueError(f"{where} has dtype {dtype}, and {', '.join(_DTYPES)} are supported")
    if len(shape) > 2 or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"{where} must have a shape of at most two positive integers: {shape!r:.100}")
    if last - first != (size := math.prod(shape) * _DTYPES[dtype].itemsize):
        raise ValueError(f"{where} has data_offsets [{first}, {last}], and {dtype} of shape {shape} takes {size} bytes")
    return first, last, dtype, shape
