"""The peak memory of losses with their gradients, by the device.

A device only says the most that was in use since the process began. So those run first whose plan takes least, and one
that does not raise the peak is shown as "<" what it would have had to exceed. PyTorch's can be reset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax

from ejkernel_core import Example

from ._calls import PASSES, Inputs, abstract_inputs, by_core, describe, describe_fault, draw, jitted
from ._memory import GIB, bytes_in_use, peak_bytes, planned_bytes, temporary_bytes
from ._peers import Prepared, TorchFunction
from ._report import ABSENT, Cell, Table
from ._rows import Rows, announce
from .suite import OURS, Peer, excess_of

BOTH = PASSES[1]


@attrs.frozen(eq=False)
class Contender:
    """A program for a call."""

    name: str
    example: Example
    #: Of JAX, or that of PyTorch.
    program: Any
    #: Bytes by the compiler: at once, and besides arrays and results. PyTorch has no plan.
    planned: int = 0
    temporaries: int | None = None


def peaks(
    examples: Sequence[Example], peers: Mapping[str, Peer | str | None], backend: str | None
) -> tuple[Table, list[str]]:
    """A table of GiB besides arrays and results, and what was not measured."""
    notes: list[str] = []
    contenders = [one for example in examples for one in contenders_of(example, peers, backend, notes)]
    measured: dict[tuple[str, str], Cell] = {}
    for one in sorted(contenders, key=lambda one: one.planned):
        announce(f"peak of {one.name}, {one.example.name}")
        try:
            measured[one.name, one.example.name] = _measured(one)
        except Exception as fault:  # the others are measured all the same
            notes.append(f"{one.name}, {one.example.name}: {describe_fault(fault)}")
    names = list(dict.fromkeys(one.name for one in contenders))
    columns = ["", *(column for name in names for column in (name, "measured"))]
    rows = Rows(f"GiB besides arrays and results, by the compiler and by the device: {BOTH}", columns, series=names)
    for example in examples:
        planned = {one.name: one.temporaries for one in contenders if one.example is example}
        cells = ((_gib(planned.get(name)), measured.get((name, example.name), ABSENT)) for name in names)
        rows.add(example.name, *(cell for pair in cells for cell in pair))
    return rows.table(), notes


def _gib(size: int | None) -> Cell:
    return ABSENT if size is None else size / GIB


def contenders_of(
    example: Example, peers: Mapping[str, Peer | str | None], backend: str | None, notes: list[str]
) -> list[Contender]:
    """Ours and the peers that take the call, compiled where they are of JAX, and that fit."""
    functions: dict[str, Any] = {OURS: by_core(example, backend)}
    functions |= {name: peer(describe(example)) for name, peer in peers.items() if callable(peer)}
    inputs, found = abstract_inputs(example), []
    for name, function in functions.items():
        if isinstance(function, TorchFunction):
            found.append(Contender(name, example, function))
        elif function is not None:
            announce(f"compiling {name}, {example.name}")
            function = function.function if isinstance(function, Prepared) else function
            compiled = jitted(function, BOTH, inputs).compile()
            if excess := excess_of(compiled):
                notes.append(f"{name}, {example.name}: {excess}")
            sizes = planned_bytes(compiled), temporary_bytes(compiled)
            found.append(Contender(name, example, None if excess else compiled, *sizes))
    return found


def _measured(one: Contender) -> Cell:
    """GiB; "<" and a limit where the peak was that of another one before; absent where the device does not say."""
    if one.program is None:
        return ABSENT
    inputs = draw(one.example)
    if isinstance(one.program, TorchFunction):
        return _measured_by_torch(one.program, inputs)
    arguments = jax.block_until_ready(inputs.of_pass(BOTH))
    before, peak = bytes_in_use(), peak_bytes()
    results = jax.block_until_ready(one.program(*arguments))
    after, size = peak_bytes(), sum(result.nbytes for result in results)
    if before is None or peak is None or after is None:
        return ABSENT
    gib = (after - before - size) / GIB
    return gib if after > peak else f"< {gib:.3g}"


def _measured_by_torch(function: TorchFunction, inputs: Inputs) -> Cell:
    """The second run, after what is made once."""
    import torch

    if not torch.cuda.is_available():
        return ABSENT
    run = function.prepared(inputs, BOTH)
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    torch.cuda.synchronize()
    size = sum(result.tensor.nbytes for result in results)
    return float(torch.cuda.max_memory_allocated() - before - size) / GIB
