"""Launches of the kernels for Hopper, recorded and compiled by Triton alone, and what is measured of them.

jax-triton compiles Gluon kernels only from version 0.4.1 on, which needs Python 3.12. What is here works with every
Python and every Triton.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest

from ejkernel_triton.launch import _jax_triton

SHARED_MEMORY = 227 * 1024
TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int32": "i32",
    "float8_e4m3fn": "fp8e4nv",
    "int8": "i8",
}
WORDS = ("wgmma.mma_async", "cp.async.bulk.tensor", "cp.reduce.async.bulk", "st.global.b16")


@attrs.frozen
class Loop:
    """What the loop over steps of a group of warps has."""

    #: Reads from and writes to the stack.
    loads: int
    stores: int
    #: The waits for products: how many may still run after each.
    waits: tuple[int, ...]


@attrs.frozen
class Figures:
    """What is measured of a compiled kernel."""

    num_warps: int
    #: Of a thread, at the launch.
    registers: int
    shared_memory: int
    #: The bytes that a launch allocates.
    scratch: int
    #: Reads from and writes to the stack, in loops and outside.
    spilled: tuple[int, int]
    #: How many numbers about tiles the kernel loads.
    tile_numbers: int
    #: How often the PTX has a word.
    words: dict[str, int]
    #: Of each group of warps.
    loops: tuple[Loop, ...]


@attrs.frozen
class Launch:
    """The arguments of a kernel's launch."""

    #: "module:function".
    kernel: str
    arrays: list[Any]
    outputs: list[Any]
    scalars: tuple[int, ...]
    constants: dict[str, Any]
    num_warps: int
    grid: tuple[int, ...]
    #: Of a step, each of which sums 16 numbers.
    products: int
    max_registers: int | None = None

    @property
    def types(self) -> list[str]:
        """Triton's types of the parameters that are not constants."""
        return [*map(_type, [*self.arrays, *self.scalars, *self.outputs])]

    @property
    def digest(self) -> str:
        """A hash of all that decides the figures."""
        from ejkernel_triton.interpreter._resources import sources  # it needs Triton, without which tests are skipped

        module, _, name = self.kernel.partition(":")
        parts = (
            _jax_triton.triton_version(),
            sources(module),
            name,
            self.types,
            self.constants,
            self.num_warps,
            self.products,
            *([] if self.max_registers is None else [self.max_registers]),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def compile(self) -> Figures:
        """By Triton, for an H200."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

        kernel = _jax_triton.import_kernel(self.kernel)
        names = kernel.arg_names
        types = [*self.types, *["constexpr"] * (len(names) - len(self.types))]
        even = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")}
        constants = {(names.index(name),): constant for name, constant in self.constants.items()}
        source_type = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
        source = source_type(kernel, dict(zip(names, types, strict=True)), constants, even)
        options = {"num_warps": self.num_warps, "enable_fp_fusion": True, "ptx_version": 87}
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        code = Code.of(compiled.asm["cubin"])
        return Figures(
            num_warps=compiled.metadata.num_warps,
            registers=code.registers,
            shared_memory=compiled.metadata.shared,
            scratch=compiled.metadata.global_scratch_size or 0,
            spilled=(count(code.instructions, "LDL"), count(code.instructions, "STL")),
            tile_numbers=len(re.findall(r"= tt\.load %\S+ : !tt\.ptr<i32>", compiled.asm["ttgir"])),
            words={word: compiled.asm["ptx"].count(word) for word in WORDS},
            loops=tuple(map(_loop, code.loops(self.products))) if self.products else (),
        )


def _type(argument: Any) -> str:
    if isinstance(argument, int):
        return "i32"
    if isinstance(argument, _jax_triton.DescribedArray):
        dtype, descriptor = argument.array.dtype, argument.descriptor
        block = ",".join(map(str, descriptor.block))
        return f"tensordesc<{TYPES[str(dtype)]}[{block}],{descriptor.layout(dtype)!r}>"
    return f"*{TYPES[str(argument.dtype)]}"


@attrs.frozen
class Code:
    """The machine code of a kernel."""

    instructions: list[str]
    #: The places of labels.
    labels: dict[str, int]
    registers: int

    @classmethod
    def of(cls, cubin: bytes) -> Code:
        """What a cubin has."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(cubin)
            text = _run("nvdisasm", "-c", file.name)
            usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        labels: dict[str, int] = {}
        instructions: list[str] = []
        for line in text.splitlines():
            if label := re.match(r"\s*(\.L\S+):", line):
                labels[label[1]] = len(instructions)
            elif instruction := re.search(r"/\*[0-9a-f]+\*/\s+(.*?);", line):
                instructions.append(instruction[1])
        return cls(instructions, labels, max(map(int, re.findall(r"REG:(\d+)", usage))))

    def loops(self, products: int) -> list[list[str]]:
        """The instructions of the loops over steps, one for each group of warps, which have this number of products."""
        # Behind the end is what waits again for a barrier, and jumps back into a loop.
        end = max(i for i, instruction in enumerate(self.instructions) if "EXIT" in instruction)
        jumps = ((i, re.search(r"BRA.*`\((\.L\S+)\)", one)) for i, one in enumerate(self.instructions[:end]))
        backward = [(self.labels[jump[1]], i) for i, jump in jumps if jump and self.labels.get(jump[1], i) < i]
        # A jump back into the middle of a loop does not have all products after it.
        loops = [(first, last) for first, last in backward if count(self.instructions[first:last], "HGMMA") == products]
        # Around them are loops over tiles.
        inner = [one for one in loops if not any(_is_inside(other, one) for other in loops)]
        return [self.instructions[first : last + 1] for first, last in inner]


def _is_inside(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one != other and other[0] <= one[0] and one[1] <= other[1]


def _run(tool: str, *words: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    return subprocess.run([path, *words], capture_output=True, text=True, check=True, timeout=120).stdout


def count(code: list[str], word: str) -> int:
    return sum(word in instruction for instruction in code)


def _loop(code: list[str]) -> Loop:
    waits = (re.search(r"WARPGROUP\.DEPBAR.*?, 0x([0-9a-f]+)", instruction) for instruction in code)
    return Loop(count(code, "LDL"), count(code, "STL"), tuple(int(wait[1], 16) for wait in waits if wait))


@attrs.frozen
class Lock:
    """Recorded figures, by the hashes of launches."""

    file: Path
    figures: dict[str, Figures]

    @classmethod
    def read(cls, file: Path) -> Lock:
        """The figures in a file; none where there is no file."""
        rows = json.loads(file.read_text()) if file.exists() else []
        return cls(file, {digest: _figures(row) for _, digest, row in rows})

    def get(self, launch: Launch) -> Figures:
        """The recorded figures of a launch; measured if anything that decides them has changed."""
        return self.figures.get(launch.digest) or launch.compile()

    def write(self, launches: Iterable[tuple[str, Launch]]) -> None:
        """Write the figures of named launches: compile what has changed."""
        rows = [(name, launch.digest, attrs.asdict(self.get(launch))) for name, launch in launches]
        self.file.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def _figures(row: dict[str, Any]) -> Figures:
    loops = tuple(Loop(**{**loop, "waits": tuple(loop["waits"])}) for loop in row["loops"])
    return Figures(**{**row, "spilled": tuple(row["spilled"]), "loops": loops})


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches from now on, which are not run."""
    _jax_triton.load()  # before the version changes
    launches: list[Launch] = []

    def call(
        kernel: str, arrays: Any, outputs: Any, *, scalars: Any = (), constants: Any, num_warps: int, **rest: Any
    ) -> tuple[jax.Array, ...]:
        aliases = (rest.get("aliases") or {}).values()
        own = [x for i, x in enumerate(outputs) if i not in aliases]
        one = Launch(kernel, list(arrays), own, scalars, dict(constants), num_warps, rest["grid"], 0)
        launches.append(attrs.evolve(one, max_registers=rest.get("max_registers")))
        return tuple(jnp.zeros(x.shape, x.dtype) for x in outputs)

    monkeypatch.setattr(_jax_triton, "call", call)
    monkeypatch.setattr(_jax_triton, "version", lambda: (0, 4, 1))
    monkeypatch.setattr(_jax_triton, "no_descriptors_reason", lambda: None)
    return launches
