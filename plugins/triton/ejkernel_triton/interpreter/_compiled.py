"""The Triton kernels of a program that is lowered for CUDA, and the resources of each. No GPU is needed."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from ejkernel_triton.launch import _launch
from ejkernel_triton.launch._jax_triton import Launch


@attrs.frozen
class Compiled:
    """A compiled kernel, as a program launches it."""

    name: str
    num_warps: int
    grid: tuple[int, int, int]
    #: The bytes of each program.
    shared_memory: int
    ptx: str = attrs.field(repr=False)
    #: Triton's own representation, before the passes for a card.
    ttir: str = attrs.field(repr=False)
    registers: int
    #: The bytes of each thread that are in memory because there are too few registers.
    spilled: int

    def count(self, instruction: str) -> int:
        """How often the PTX has an instruction, such as "wgmma.mma_async" or "mma.sync"."""
        return self.ptx.count(instruction)


def compiled_for(device_kind: str, function: Callable[..., Any], *arguments: Any) -> list[Compiled]:
    """The Triton kernels of a function of these arguments (arrays, or ``jax.ShapeDtypeStruct``) on a card.

    ``device_kind`` is the name of the card in JAX, such as "NVIDIA H200". Configurations are chosen for this card, and
    Triton and ptxas compile the kernels for it.
    """
    mesh = AbstractMesh((1,), ("_",), abstract_device=AbstractDevice(device_kind, None, "gpu"))
    with use_abstract_mesh(mesh):
        # A new function, because JAX would use the trace for another card again.
        lowered = jax.jit(lambda *arrays: function(*arrays)).trace(*arguments).lower(lowering_platforms=("cuda",))
    return kernels_in(lowered)


def kernels_in(lowered: Any) -> list[Compiled]:
    """The Triton kernels of a ``jax.stages.Lowered`` for CUDA, in the order of the program."""
    launches = _launch.opaques(lowered.compiler_ir("stablehlo").operation)
    return [_compiled(_fields(zlib.decompress(opaque))) for opaque in launches]


def compiled_launch(launch: Launch, arrays: Sequence[Any]) -> Compiled:
    """The kernel of a launch for arrays of these shapes and dtypes."""
    return _compiled(_fields(zlib.decompress(_launch.opaque(launch, arrays))))


def _compiled(call: dict[int, list[Any]]) -> Compiled:
    """From the protocol buffer of `ejkernel_triton.launch._protocol`."""
    launch = _fields(call[1][0])
    kernel = _fields(launch[1][0])
    ptx = kernel[4][0].decode()
    registers, spilled = _assembled(ptx)
    return Compiled(
        name=kernel[1][0].decode(),
        num_warps=kernel[2][0],
        grid=tuple(launch.get(axis, [0])[0] for axis in (2, 3, 4)),
        shared_memory=kernel.get(3, [0])[0],
        ptx=ptx,
        ttir=kernel[5][0].decode(),
        registers=registers,
        spilled=spilled,
    )


@functools.lru_cache(maxsize=16)
def _assembled(ptx: str) -> tuple[int, int]:
    """The registers of a thread and the spilled bytes that ptxas reports."""
    target = re.search(r"^\.target\s+(sm_(\d+)\w*)", ptx, re.MULTILINE)
    if target is None:
        raise ValueError("this is not PTX: it has no .target")
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        process = subprocess.run(
            [get_ptxas(int(target[2])).path, "-v", f"-arch={target[1]}", str(source), "-o", str(Path(folder, "out"))],
            capture_output=True,
            text=True,
            check=False,
        )
    if process.returncode:
        raise RuntimeError(f"ptxas refuses the kernel: {process.stderr.strip()}")
    registers = re.findall(r"Used (\d+) registers", process.stderr)
    spilled = re.findall(r"(\d+) bytes spill stores", process.stderr)
    return max(map(int, registers)), max(map(int, spilled), default=0)


def _fields(message: bytes) -> dict[int, list[Any]]:
    """The fields of a protocol buffer by their numbers; nested messages are bytes."""
    fields: dict[int, list[Any]] = {}
    position = 0
    value: int | bytes
    while position < len(message):
        tag, position = _varint(message, position)
        kind = tag & 7
        if kind == 0:
            value, position = _varint(message, position)
        else:
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                size, position = _varint(message, position)
            value, position = message[position : position + size], position + size
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """A number, and the position after it."""
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
