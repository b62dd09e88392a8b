"""Several cards against one: sharded arrays under plain jit, and attention over a sharded sequence.

Each part is a run of its own, of a few minutes at most:

  --part sharded       attention with batch or heads sharded
  --part rows          attention with the rows of queries sharded (full, not causal), and rms_norm by rows
  --part context-8k    context attention of 8,192 tokens by each kernel, forward and with backward
  --part context-32k   the same for 32,768 tokens
  --part context-128k  the same for 131,072 tokens
  --part heads-32k     the same for 32,768 tokens and as many key heads as query heads
  --part experts       a layer with a mixture of experts: with all tokens on every card, and with tokens exchanged
  --part overlap       the ring of heads-32k, with and without XLA's latency hiding scheduler: times, and how much of
                       the transfers is inside the span of an attention kernel, by the profile

"sharded" and "rows" measure automatic axes, explicit axes, and shard_map. The speed-up is relative to one card, and has
the number of cards as its ideal. The efficiency of context attention is the time of one card for the whole sequence,
over the number of cards and their time. Every result is compared with that of one card, and the collectives in the
compiled text are counted; weights of experts must not be gathered. --small has tiny sizes, which eight devices on a CPU
can run.

Several processes, one for each card: start the same command in each, with CUDA_VISIBLE_DEVICES, and with
JAX_COORDINATOR_ADDRESS (such as localhost:7000), JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0). Each prints its times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import click
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ejkernel_core
from ejkernel_context import context_attention, zigzag
from ejkernel_ops import flash_attention, rms_norm

from ._calls import describe_fault
from ._devices import AXIS, FUNCTIONS, Program, compiled, draw, faults, placed, timed
from ._experts import Layer
from ._overlap import hidden_share
from ._report import Bar, Cell, Report, joined
from ._rows import Rows, announce
from ._timing import Times

ROUNDS = 5
ONE = "one card"
KERNELS = ("gather", "ulysses", "ring")
#: The least speed-up of batch and heads, of the ideal; the least efficiency, by the number of tokens.
SHARDED_SHARE = 0.95
EFFICIENCY = {32768: 0.90, 131072: 0.95}
#: The least share of transfers that is hidden.
HIDDEN = 0.7


@attrs.frozen
class Size:
    """A call of attention; ``calls`` of them are a round."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    calls: int = 5

    def shapes(self) -> list[tuple[int, ...]]:
        """Those of query, key, value, and the cotangent."""
        query = (self.batch, self.length, self.heads, self.head_dim)
        key = (self.batch, self.length, self.kv_heads, self.head_dim)
        return [query, key, key, query]


#: By part.
SIZES = {
    "sharded": Size(4, 8192, 32, 8, 128),
    "rows": Size(1, 16384, 32, 8, 128),
    "context-8k": Size(1, 8192, 32, 8, 128, calls=20),
    "context-32k": Size(1, 32768, 32, 8, 128),
    "context-128k": Size(1, 131072, 32, 8, 128, calls=2),
    "heads-32k": Size(1, 32768, 32, 32, 128),
    "overlap": Size(1, 32768, 32, 32, 128),
}
SMALL_SIZE = Size(8, 64, 16, 8, 16, "float32", calls=2)
#: (rows, dim) of the norm.
NORM, SMALL_NORM = (65536, 4096), (64, 32)
#: In the small one, some cards may have many times the average of rows.
SMALL_LAYER = Layer(tokens=64, dim=32, inner=16, experts=16, chosen=2, room=8, dtype="float32", calls=2)


def run(part: str | None = None, rounds: int = ROUNDS, small: bool = False) -> Report:
    """One part, or all. On several devices."""
    if part not in (None, *PARTS):
        raise click.UsageError(f"no part of devices is called {part}; there are {', '.join(PARTS)}")
    if jax.device_count() < 2:
        return Report("devices", (), text="devices: there is one device here, and nothing was measured")
    if jax.default_backend() == "cpu" and not small:
        return Report("devices", (), text="devices: there is no accelerator here; --small measures on the CPU")
    parts = PARTS if part is None else {part: PARTS[part]}
    return joined("devices", [measure(name, small, rounds) for name, measure in parts.items()])


# -- sharded arrays ----------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Subject:
    """A call of which an axis is sharded."""

    name: str
    call: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    #: Of the arrays and the cotangent, which has the sharding of the result.
    specs: Sequence[P]
    dtype: str
    calls: int
    has_bar: bool = False

    def programs(self, pass_name: str) -> Iterator[tuple[str, Callable[[], Program]]]:
        """One card, and each way to shard; not compiled yet."""
        function, arrays = FUNCTIONS[pass_name], draw(self.shapes, self.dtype)
        yield ONE, partial(compiled, partial(function, self.call), arrays)
        for name, kind in (("auto", AxisType.Auto), ("explicit", AxisType.Explicit)):
            mesh = _mesh(kind)
            shards = [placed(array, mesh, spec) for array, spec in zip(arrays, self.specs, strict=True)]
            context = mesh if kind is AxisType.Explicit else None
            yield name, partial(compiled, partial(function, self.call), shards, context)
        mesh = _mesh(AxisType.Auto)
        shards = [placed(array, mesh, spec) for array, spec in zip(arrays, self.specs, strict=True)]
        *arguments, result = self.specs
        call = jax.shard_map(self.call, mesh=mesh, in_specs=tuple(arguments), out_specs=result)
        yield "shard_map", partial(compiled, partial(function, call), shards)


def _mesh(kind: AxisType) -> Any:
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(kind,))


def _sharded(part: str, small: bool, rounds: int) -> Report:
    size = SMALL_SIZE if small else SIZES[part]
    causal = partial(flash_attention, causal=True)
    batch, heads = P(AXIS), P(None, None, AXIS)
    subjects = [
        Subject("batch", causal, size.shapes(), [batch] * 4, size.dtype, size.calls, has_bar=not small),
        Subject("heads", causal, size.shapes(), [heads] * 4, size.dtype, size.calls, has_bar=not small),
    ]
    return _compare(part, subjects, rounds)


def _rows(part: str, small: bool, rounds: int) -> Report:
    size, norm = (SMALL_SIZE, SMALL_NORM) if small else (SIZES[part], NORM)
    rows, whole = P(None, AXIS), P()
    subjects = [
        Subject("queries", flash_attention, size.shapes(), [rows, whole, whole, rows], size.dtype, size.calls),
        Subject("rms_norm", rms_norm, [norm, norm[1:], norm], [P(AXIS), whole, P(AXIS)], size.dtype, 4 * size.calls),
    ]
    return _compare(part, subjects, rounds)


def _compare(part: str, subjects: Sequence[Subject], rounds: int) -> Report:
    columns = ("", "median", "range", f"speed-up of {jax.device_count()}", "collectives", "kernels")
    rows = Rows(_title(rounds), columns, series=("median",))
    bars: list[Bar] = []
    messages: list[str] = []
    for subject in subjects:
        for pass_name in FUNCTIONS:
            label = f"{subject.name}, {pass_name}"
            programs, new_messages = _right_programs(label, subject.programs(pass_name), subject.dtype)
            messages += new_messages
            times = timed(programs, rounds, subject.calls)
            for name, program in programs.items():
                speed_up = times[ONE].median / times[name].median
                rows.add(*_row(f"{label}, {name}", times[name], speed_up, program))
                if subject.has_bar and name != ONE:
                    least = SHARDED_SHARE * jax.device_count()
                    bars.append(Bar(f"{label}, {name}: speed-up", speed_up, least, "times", at_least=True))
                    gathers = program.collectives().get("all-gather", 0)
                    bars.append(Bar(f"{label}, {name}", gathers, 0, "all-gathers in the text"))
    return Report(part, [rows.table()], bars, messages)


def _right_programs(
    label: str,
    programs: Iterator[tuple[str, Callable[[], Program]]],
    dtype: str,
    in_order: Callable[[Any], Any] = lambda array: array,
) -> tuple[dict[str, Program], list[str]]:
    """The programs with right results, compiled, and what is wrong with the others. The first one is one card's; its
    results are those that are expected, ``in_order`` of the others.
    """
    right: dict[str, Program] = {}
    messages: list[str] = []
    expected: list[Any] = []
    for name, compile_program in programs:
        try:
            program = compile_program()
            results = jax.block_until_ready(program())
            if name == ONE:
                expected = [in_order(result) for result in results]
                wrong = []
            else:
                wrong = faults(f"{label}, {name}", results, expected, dtype)
            del results  # it can be large, and the next program has results of its own
        except Exception as fault:  # the others are measured all the same
            if name == ONE:
                raise
            wrong = [f"{label}, {name}: {describe_fault(fault)}"]
        messages += wrong
        if not wrong:
            right[name] = program
            announce(f"{label}, {name}: right")
    return right, messages


def _row(label: str, times: Times, ratio: float, program: Program) -> tuple[Cell, ...]:
    collectives = ", ".join(f"{count} {kind}" for kind, count in program.collectives().items())
    return label, *times.scaled(1e-3)[:2], ratio, collectives or "none", program.kernels


def _title(rounds: int) -> str:
    process = f", process {jax.process_index()} of {jax.process_count()}" if jax.process_count() > 1 else ""
    return f"milliseconds, medians of {rounds} rounds in turn, {jax.device_count()} cards{process}"


# -- attention over a sharded sequence ---------------------------------------------------------------------------------


def _context_programs(
    size: Size, pass_name: str, kernels: Mapping[str, tuple[str | None, bool]]
) -> Iterator[tuple[str, Callable[[], Program]]]:
    """One card with the whole sequence, and each of the kernels: by name, the backend and whether XLA is to overlap."""
    function, arrays = FUNCTIONS[pass_name], draw(size.shapes(), size.dtype)
    yield ONE, partial(compiled, partial(function, partial(flash_attention, causal=True)), arrays)
    mesh, spec = _mesh(AxisType.Auto), P(None, AXIS)
    shards = [placed(zigzag(array, shards=jax.device_count()), mesh, spec) for array in arrays]
    for name, (backend, has_overlap) in kernels.items():
        call = partial(context_attention, axis=AXIS, causal=True, backend=backend)
        sharded = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
        yield name, partial(compiled, partial(function, sharded), shards, None, has_overlap)


def _context(part: str, small: bool, rounds: int) -> Report:
    size = SMALL_SIZE if small else SIZES[part]
    kernels: dict[str, tuple[str | None, bool]] = {name: (name, True) for name in KERNELS}
    columns = ("", "median", "range", "efficiency", "collectives", "kernels")
    title = f"{size.length} tokens, {size.heads} heads, {size.kv_heads} key heads: {_title(rounds)}"
    rows = Rows(title, columns, series=("median",))
    bars: list[Bar] = []
    messages: list[str] = []
    for pass_name in FUNCTIONS:
        contenders = _context_programs(size, pass_name, kernels)
        programs, new_messages = _right_programs(pass_name, contenders, size.dtype, _by_device)
        messages += new_messages
        times = timed(programs, rounds, size.calls)
        efficiency = {name: _efficiency(times, name) for name in programs}
        for name in programs:
            rows.add(*_row(f"{pass_name}, {name}", times[name], efficiency[name], programs[name]))
        chosen = _chosen(size)
        if size.length in EFFICIENCY and size.kv_heads < size.heads and chosen in efficiency:
            title = f"{pass_name}: efficiency of {chosen}, which the rule chooses"
            bars.append(Bar(title, efficiency[chosen], EFFICIENCY[size.length], "", at_least=True))
    return Report(part, [rows.table()], bars, messages)


def _by_device(array: Any) -> Any:
    return zigzag(array, shards=jax.device_count())


def _efficiency(times: Mapping[str, Times], name: str) -> float:
    devices = 1 if name == ONE else jax.device_count()
    return times[ONE].median / (devices * times[name].median)


def _chosen(size: Size) -> str:
    """The kernel that the rule chooses."""
    devices = jax.device_count()
    query, key, value, _ = (
        jax.ShapeDtypeStruct((shape[0], shape[1] // devices, *shape[2:]), size.dtype) for shape in size.shapes()
    )
    plan = ejkernel_core.plan("context_attention", query, key, value, axis=AXIS, axis_size=devices, causal=True)
    return plan.kernel.backend


def _overlap(part: str, small: bool, rounds: int) -> Report:
    size = SMALL_SIZE if small else SIZES[part]
    kernels: dict[str, tuple[str | None, bool]] = {"with overlap": ("ring", True), "without": ("ring", False)}
    contenders = _context_programs(size, "forward", kernels)
    programs, messages = _right_programs("ring", contenders, size.dtype, _by_device)
    times = timed(programs, rounds, size.calls)
    columns = ("", "median", "range", "efficiency", "transfers hidden", "collectives", "kernels")
    rows = Rows(_title(rounds), columns, series=("median",))
    bars: list[Bar] = []
    for name, program in programs.items():
        share = None if name == ONE else hidden_share(program)
        label, *cells = _row(f"ring, forward, {name}", times[name], _efficiency(times, name), program)
        rows.add(label, *cells[:3], "-" if share is None else share, *cells[3:])
        if name == "with overlap" and share is not None:
            bars.append(Bar("ring: share of transfers inside attention", share, HIDDEN, "", at_least=True))
    if {"with overlap", "without"} <= programs.keys() and not small:
        ratio = times["with overlap"].median / times["without"].median
        bars.append(Bar("ring: the time with overlap, over that without", ratio, 1.0, ""))
    return Report(part, [rows.table()], bars, messages)


# -- experts -----------------------------------------------------------------------------------------------------------


def _experts(part: str, small: bool, rounds: int) -> Report:
    layer = SMALL_LAYER if small else Layer()
    columns = ("", "median", "range", f"speed-up of {jax.device_count()}", "collectives")
    title = f"{layer.tokens} tokens, {layer.chosen} of {layer.experts} experts: {_title(rounds)}"
    rows = Rows(title, columns, series=("median",))
    bars: list[Bar] = []
    messages: list[str] = []
    for pass_name in FUNCTIONS:
        programs, new_messages = _right_programs(pass_name, _expert_programs(layer, pass_name), layer.dtype)
        messages += new_messages
        times = timed(programs, rounds, layer.calls)
        for name, program in programs.items():
            speed_up = times[ONE].median / times[name].median
            rows.add(*_row(f"{pass_name}, {name}", times[name], speed_up, program)[:-1])
            if name != ONE:
                gathers = program.collectives().get("all-gather", 0)
                bars.append(Bar(f"{pass_name}, {name}", gathers, 0, "all-gathers in the text"))
    return Report(part, [rows.table()], bars, messages)


def _expert_programs(layer: Layer, pass_name: str) -> Iterator[tuple[str, Callable[[], Program]]]:
    function, tokens = FUNCTIONS[pass_name], (layer.tokens, layer.dim)
    x, *weights, cotangent = draw([tokens, *layer.parameters().values(), tokens], layer.dtype)
    router, *experts = (weight * 2.0 ** -round(math.log2(weight.shape[-2]) / 2) for weight in weights)
    arrays = [_rounded_to_six_bits(x), _rounded_to_six_bits(router), *experts, cotangent]
    yield ONE, partial(compiled, partial(function, layer.on_one), arrays)
    mesh, whole, shard = _mesh(AxisType.Auto), P(), P(AXIS)
    ways = {"all tokens on all": (layer.of_all_tokens, whole), "tokens exchanged": (layer.with_exchange, shard)}
    for name, (call, spec) in ways.items():
        specs = (spec, whole, shard, shard)
        sharded = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=spec)
        shards = [placed(array, mesh, spec) for array, spec in zip(arrays, (*specs, spec), strict=True)]
        yield name, partial(compiled, partial(function, sharded), shards)


def _rounded_to_six_bits(array: Any) -> Any:
    """Logits of such numbers are exact sums, so that all programs choose the same experts."""
    step = 2.0 ** jnp.floor(jnp.log2(jnp.abs(array).max()) - 5)
    return (jnp.round(array / step) * step).astype(array.dtype)


PARTS: dict[str, Callable[[str, bool, int], Report]] = {
    "sharded": _sharded,
    "rows": _rows,
    **dict.fromkeys(("context-8k", "context-32k", "context-128k", "heads-32k"), _context),
    "experts": _experts,
    "overlap": _overlap,
}
