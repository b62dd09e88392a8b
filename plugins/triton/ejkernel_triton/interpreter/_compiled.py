"""The Triton kernels of a program that was lowered for CUDA, and what each takes of a card. No GPU is needed."""

from __future__ import annotations

import re
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

TARGETS = ("triton_kernel_call", "triton_kernel_call_ffi")


@attrs.frozen
class Compiled:
    """One kernel of a program, as it is launched."""

    name: str
    num_warps: int
    grid: tuple[int, int, int]
    #: Bytes a program has of its own.
    shared_memory: int
    ptx: str = attrs.field(repr=False)
    #: Triton's own representation, before it is cut up for a card.
    ttir: str = attrs.field(repr=False)
    registers: int
    #: Bytes a thread that did not find a register and went to memory.
    spilled: int

    def count(self, instruction: str) -> int:
        """How often an instruction is in the code: "wgmma.mma_async", "mma.sync"."""
        return self.ptx.count(instruction)


def compiled_for(device_kind: str, function: Callable[..., Any], *arguments: Any) -> list[Compiled]:
    """The Triton kernels of a function of these arguments (arrays, or ``jax.ShapeDtypeStruct``) on such a card.

    ``device_kind`` is the card's name as JAX says it, "NVIDIA H200". Everything is done but the launch: configurations
    are chosen for the card, kernels compiled by Triton and by ptxas.
    """
    mesh = AbstractMesh((1,), ("_",), abstract_device=AbstractDevice(device_kind, None, "gpu"))
    with use_abstract_mesh(mesh):
        # A function that JAX does not know: a trace for another card would be found again.
        lowered = jax.jit(lambda *given: function(*given)).trace(*arguments).lower(lowering_platforms=("cuda",))
    return kernels_in(lowered)


def kernels_in(lowered: Any) -> list[Compiled]:
    """The Triton kernels of a ``jax.stages.Lowered`` for CUDA, in the order of the program."""
    return [
        _compiled(_fields(zlib.decompress(opaque))) for opaque in _calls(lowered.compiler_ir("stablehlo").operation)
    ]


def _calls(operation: Any) -> Iterator[bytes]:
    from jaxlib.mlir import ir

    given = operation.attributes
    if operation.name == "stablehlo.custom_call" and ir.StringAttr(given["call_target_name"]).value in TARGETS:
        # jax-triton 0.4 passes it as an attribute of a typed call, 0.3 as the text of an untyped one.
        typed = "mhlo.backend_config" in given
        yield ir.StringAttr(given["mhlo.backend_config"]["opaque"] if typed else given["backend_config"]).value_bytes
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from _calls(inner.operation)


def _compiled(call: dict[int, list[Any]]) -> Compiled:
    """From the protocol buffer that `_portable` tells of."""
    launch = _fields(call[1][0])
    kernel = _fields(launch[1][0])
    ptx = kernel[4][0].decode()
    registers, spilled = _assembled(ptx)
    return Compiled(
        name=kernel[1][0].decode(),
        num_warps=kernel[2][0],
        grid=tuple(launch.get(axis, [0])[0] for axis in (2, 3, 4)),  # type: ignore[arg-type]
        shared_memory=kernel.get(3, [0])[0],
        ptx=ptx,
        ttir=kernel[5][0].decode(),
        registers=registers,
        spilled=spilled,
    )


def _assembled(ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that are spilled, as ptxas says."""
    target = re.search(r"^\.target\s+(sm_(\d+)\w*)", ptx, re.MULTILINE)
    if target is None:
        raise ValueError("this is no PTX: it has no .target")
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        ran = subprocess.run(
            [get_ptxas(int(target[2])).path, "-v", f"-arch={target[1]}", str(source), "-o", str(Path(folder, "out"))],
            capture_output=True,
            text=True,
            check=False,
        )
    if ran.returncode:
        raise RuntimeError(f"ptxas refuses the kernel: {ran.stderr.strip()}")
    registers = re.findall(r"Used (\d+) registers", ran.stderr)
    spilled = re.findall(r"(\d+) bytes spill stores", ran.stderr)
    return max(map(int, registers)), max(map(int, spilled), default=0)


def _fields(message: bytes) -> dict[int, list[Any]]:
    """A protocol buffer, one level of it: numbers, and what is nested as bytes."""
    found: dict[int, list[Any]] = {}
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        kind = tag & 7
        if kind == 0:
            value, place = _varint(message, place)
        else:
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                size, place = _varint(message, place)
            value, place = message[place : place + size], place + size
        found.setdefault(tag >> 3, []).append(value)
    return found


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
