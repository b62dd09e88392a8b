"""The memory of attention, forward and backward, beyond inputs and outputs: by length, and its peak at S 16384."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from ejkernel_core import Example
from ejkernel_ops.flash_attention.sizes import self_attention

from ._attention import by_jax_nn
from ._calls import Function, abstract_inputs, by_core, describe, draw, kernels_of, with_gradients
from ._fresh import in_new_process
from ._report import Bar, Report, Table
from ._rows import Rows, announced_table

#: A length at which the dense scores alone have 8 GiB.
SIZE = (1, 16384, 8, 64)
ROUNDS = 1
LIMIT_GIB = 1.0
GIB, MIB = 2**30, 2**20
#: Of the comparison with ``jax.nn``, which is compiled and not run.
LENGTHS = (1024, 2048, 4096, 8192, 16384)

#: Each in a new process, because the peak of a process never falls.
_PEAK = """
import json, sys
from ejkernel_bench.memory import peak
size, backend = json.loads(sys.argv[1])
print(json.dumps(peak(size, backend)))
"""


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """The greatest peak of so many rounds."""
    lengths = by_length(LENGTHS, backend)
    table, bars = measure(SIZE, backend, rounds)
    return Report("memory", [lengths, table], bars)


def by_length(lengths: Sequence[int], backend: str | None) -> Table:
    """What the compiled functions need for intermediate results, ours and that of ``jax.nn``. Nothing is run."""
    batch, _, heads, head_dim = SIZE
    title = f"MiB of temporaries, by the compiler: forward+backward, B{batch} H{heads} D{head_dim} float32 causal"
    rows = Rows(title, ("tokens", "ejkernel", "jax.nn"), series=("ejkernel", "jax.nn"))
    for length in lengths:
        example = self_attention(batch, length, heads, head_dim)
        peer = by_jax_nn(describe(example))
        assert peer is not None  # it takes every plain call
        rows.add(str(length), *(temporaries(example, call) / MIB for call in (by_core(example, backend), peer)))
    return rows.table()


def temporaries(example: Example, function: Function) -> int:
    """The bytes that the compiled function takes besides its inputs and outputs."""
    inputs = abstract_inputs(example)
    program = jax.jit(with_gradients(function, inputs.wrt)).lower(*inputs.parts).compile()
    analysis = program.memory_analysis()
    assert analysis is not None  # every backend of jaxlib has it
    return int(analysis.temp_size_in_bytes)


def measure(size: tuple[int, int, int, int], backend: str | None, rounds: int) -> tuple[Table, list[Bar]]:
    """As the compiler counts, and on a CPU as the operating system does."""
    example = self_attention(*size)
    peaks = [in_new_process(_PEAK, json.dumps([size, backend])) for _ in range(rounds)]
    figures = {"temporaries, by the compiler": max(temporary for temporary, _ in peaks) / GIB}
    if jax.default_backend() == "cpu":  # elsewhere the arrays are not in the process's memory
        figures["growth of the process, by the system"] = max(growth for _, growth in peaks) / GIB
    bars = [Bar(f"{name}, {example.name}", gib, LIMIT_GIB, "GiB") for name, gib in figures.items()]
    kernels = kernels_of(example, backend)
    title = f"{example.name}, {kernels}: memory of forward+backward beyond inputs and outputs"
    return announced_table(title, ("", "GiB"), figures.items(), series=("GiB",)), bars


def peak(size: tuple[int, int, int, int], backend: str | None) -> tuple[int, int]:
    """Bytes of the compiled function's temporaries, and the greatest growth of this process while it runs.

    The growth counts from what is resident after compiling. It can only be too large, by what compiling took more.
    """
    example = self_attention(*size)
    inputs = draw(example)
    arguments = jax.block_until_ready(inputs.parts)
    function = jax.jit(with_gradients(by_core(example, backend), inputs.wrt)).lower(*arguments).compile()
    before = _resident()
    outputs = sum(result.nbytes for result in jax.block_until_ready(function(*arguments)))
    analysis = function.memory_analysis()
    assert analysis is not None  # every backend of jaxlib has it
    return int(analysis.temp_size_in_bytes), max(_peak_resident() - before - outputs, 0)


def _resident() -> int:
    """The memory of the process; the peak so far where the system does not say."""
    import resource

    table = Path("/proc/self/statm")
    return int(table.read_text().split()[1]) * resource.getpagesize() if table.exists() else _peak_resident()


def _peak_resident() -> int:
    import resource  # no such module on Windows, where nothing else here needs it either

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
