"""grouped_matmul on a GPU: each direction against torch, quack, tokamax and jax.lax.

Each part is a run of its own:

  --part forward    the product of eight published shapes, and of each with half of all rows in one group
  --part d_lhs      the gradient of the rows
  --part d_rhs      the gradient of the matrices
  --part decode     few rows, against a copy of the matrices that are used
  --part tuned-forward, tuned-d_lhs, tuned-d_rhs
                    beside tokamax with its own tuning, which takes most of the time; what it does not reach within
                    seven minutes is told

Without a part, it measures the first four. Every result is compared with ours in float32. Skewed calls are a table of
their own, in which only our choice, Gluon, torch and quack are measured. --small has tiny sizes, which a CPU can run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any

import attrs
import click
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Cost, Example
from ejkernel_ops.grouped_matmul.examples import layer_call, layer_d_rhs_call
from ejkernel_ops.grouped_matmul.samples import group_sizes
from ejkernel_ops.grouped_matmul.sizes import PEERS, Layer

from . import suite
from ._calls import Inputs, Run, describe, draw, jitted
from ._grouped_products import by_quack, by_ragged_dot, by_tokamax, by_torch, tuning_of_tokamax
from ._peers import Prepared
from ._report import Cell, joined
from .suite import COPY, OURS, Bar, Measurement, Peer, Report

RAGGED_DOT, TOKAMAX, TUNED, TORCH, QUACK = "ragged_dot", "tokamax", "tokamax tuned", "torch", "quack"
GLUON, TRITON = "gluon_sm90", "triton"
BACKENDS = (GLUON, TRITON, "xla")
#: The peers that are measured with skewed calls.
OF_SKEWED = (TORCH, QUACK)
#: Least geometric means of speeds, relative to a contender; and the least speed of a single case, relative to torch.
MEANS = {TORCH: 1.0, TOKAMAX: 1.6, RAGGED_DOT: 5.0}
WORST = 0.92
#: The most time of a skewed call, relative to the same one of a router; of a choice, relative to the best kernel.
SKEW_LIMIT, CHOICE_LIMIT = 1.05, 1.03
#: The least speed of the portable kernel, relative to Gluon's; the least share of the copy rate in decoding.
TRITON_MEAN, DECODE_MINIMUM = 0.75, 0.9
#: How long tokamax may tune.
TUNING_S = 420.0

#: A call with fewer rows is one of decoding.
DECODE_ROWS = 1024
SMALL = (Layer("96 x 40 x 48, 5 groups", 96, 40, 48, 5), Layer("130 x 32 x 24, 3 groups", 130, 32, 24, 3))
SMALL_DECODE = (Layer("8 x 40 x 48, 12 groups", 8, 40, 48, 12),)


# -- the calls ---------------------------------------------------------------------------------------------------------


def forward_call(layer: Layer) -> Example:
    """The product alone."""
    return attrs.evolve(layer_call(layer), wrt=())


#: By direction.
DIRECTIONS: dict[str, Callable[[Layer], Example]] = {
    "forward": forward_call,
    "d_lhs": partial(layer_call, transpose=True),
    "d_rhs": layer_d_rhs_call,
}


#: Of the name of a skewed call, the end.
SKEWED = ", half in one"


def skewed(example: Example) -> Example:
    """The same call, where the group in the middle has half of all rows."""

    def arguments(draw: int) -> dict[str, Any]:
        values = dict(example.arguments(draw))
        sizes = skewed_sizes(jax.random.key(draw), values["lhs"].shape[0], _groups(values))
        if "boundaries" in values:
            return values | {"boundaries": jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes)])}
        return values | {"group_sizes": sizes}

    return attrs.evolve(example, name=example.name + SKEWED, arguments=arguments)


def skewed_sizes(key: Any, rows: int, groups: int) -> jax.Array:
    """Sizes of groups of which the one in the middle has half of all rows.

    >>> skewed_sizes(jax.random.key(0), 100, 4)
    Array([17, 19, 50, 14], dtype=int32)
    """
    others = group_sizes(key, rows - rows // 2, groups - 1)
    middle = groups // 2
    return jnp.concatenate([others[:middle], jnp.full(1, rows // 2, jnp.int32), others[middle:]])


def _groups(values: Mapping[str, Any]) -> int:
    sizes = values.get("group_sizes")
    return int(values["boundaries"].shape[0] - 1 if sizes is None else sizes.shape[0])


def used_bytes(inputs: Inputs) -> float:
    """The bytes of the matrices that have rows."""
    rhs, used = inputs.arrays["rhs"], int((inputs.arrays["group_sizes"] > 0).sum())
    return float(used * np.prod(rhs.shape[1:]) * rhs.dtype.itemsize)


# -- the suite ---------------------------------------------------------------------------------------------------------

#: By contender, by the name of a call.
Seconds = Mapping[str, Mapping[str, float]]


@attrs.frozen
class Part:
    """What one run measures."""

    direction: str
    is_decode: bool = False
    has_tuning: bool = False


PARTS = {
    **{name: Part(name) for name in DIRECTIONS},
    "decode": Part("forward", is_decode=True),
    **{f"tuned-{name}": Part(name, has_tuning=True) for name in DIRECTIONS},
}


def peers() -> dict[str, Peer | str | None]:
    """The peers of a call at any shape."""
    has_gpu = jax.default_backend() == "gpu"
    return {
        RAGGED_DOT: by_ragged_dot,
        TOKAMAX: suite.optional(by_tokamax, "tokamax"),
        TORCH: suite.optional(by_torch, "torch") if has_gpu else None,
        QUACK: suite.optional(by_quack, "quack") if has_gpu else None,
    }


def run(backend: str | None = None, rounds: int = suite.ROUNDS, small: bool = False, part: str | None = None) -> Report:
    """One part, or those without tokamax's tuning."""
    if part not in (None, *PARTS):
        raise click.UsageError(f"no part of grouped_matmul is called {part}; there are {', '.join(PARTS)}")
    if jax.default_backend() == "cpu" and not small:
        return suite.run("grouped_matmul")
    names = [name for name in PARTS if not PARTS[name].has_tuning] if part is None else [part]
    return joined("grouped_matmul", [measure(name, _layers(name, small), backend, rounds) for name in names])


def _layers(name: str, small: bool) -> Sequence[Layer]:
    if small:
        return SMALL_DECODE if PARTS[name].is_decode else SMALL
    return [layer for layer in PEERS if (layer.rows < DECODE_ROWS) == PARTS[name].is_decode]


def measure(name: str, layers: Sequence[Layer], backend: str | None, rounds: int) -> Report:
    """All layers of one part: as a router has them, and skewed unless they are of decoding or tuned."""
    part, others = PARTS[name], peers()
    if part.has_tuning:
        others = {TUNED: partial(by_tuned, time.monotonic() + TUNING_S) if others[TOKAMAX] else None}
    calls = [DIRECTIONS[part.direction](layer) for layer in layers]
    routed: dict[str, Mapping[str, float]] = {}
    skewed_ones: dict[str, Mapping[str, float]] = {}
    measured = partial(_measured, backend=backend, rounds=rounds, work=partial(work, part))
    report = measured(calls, others, () if part.has_tuning else BACKENDS, routed)
    tables, faults, text = report.tables, report.faults, report.text
    if not part.is_decode and not part.has_tuning:
        others = {peer: function for peer, function in others.items() if peer in OF_SKEWED}
        report = measured([skewed(call) for call in calls], others, (GLUON,), skewed_ones)
        tables, faults = (*tables, *report.tables), (*faults, *report.faults)
    return Report(name, tables, list(bars(part, routed, skewed_ones)), faults, text)


def _measured(
    calls: Sequence[Example],
    others: Mapping[str, Peer | str | None],
    backends: Sequence[str],
    seconds: dict[str, Mapping[str, float]],
    **options: Any,
) -> Report:
    """The calls, which are all of one operation. Their seconds are added to the others."""

    def columns(one: Measurement) -> dict[str, Cell]:
        seconds[one.example.name] = one.seconds
        best = one.over_best(BACKENDS)
        return {**one.over_ours(others), **({} if best is None else {"over the best": best})}

    names = {call.name for call in calls}
    options |= {"reference": "xla", "columns": columns}
    return suite.run(calls[0].op, others, examples=calls, names=names, backends=backends, **options)


def work(part: Part, example: Example, pass_name: str) -> Cost:
    """One product; of decoding also the bytes of the matrices that are used, with which a copy is compared."""
    arguments = describe(example)
    rows, inner = arguments["lhs"].shape
    k, n = arguments["rhs"].shape[1:] if "rhs" in arguments else (inner, arguments["d_out"].shape[1])
    return Cost(2.0 * rows * k * n, used_bytes(draw(example)) if part.is_decode else 0.0)


# -- tokamax's own tuning ----------------------------------------------------------------------------------------------


@attrs.frozen
class Tuned(Prepared):
    """What tokamax has tuned. It is compiled where the configurations are known, because a later trace is not."""

    has_gradients: bool = False
    #: By ``time.monotonic``.
    deadline: float = attrs.field(kw_only=True)

    def prepared(self, inputs: Inputs, pass_name: str) -> Run:
        program = jitted(self.function, pass_name, inputs)
        with tuning_of_tokamax(program.function.lower(*program.arguments), self.deadline):
            return partial(program.compile(), *program.arguments)


def by_tuned(deadline: float, arguments: Mapping[str, Any]) -> Tuned | None:
    """By tokamax, whose tuning may begin until the deadline."""
    function = by_tokamax(arguments)
    return None if function is None else Tuned(function, deadline=deadline)


# -- bars --------------------------------------------------------------------------------------------------------------


def bars(part: Part, routed: Seconds, skewed_ones: Seconds) -> Iterator[Bar]:
    """Speeds relative to others over the calls of routers, and times relative to others of each call."""
    if part.is_decode:
        for name, seconds in routed.items():
            share = seconds[COPY] / seconds[OURS]
            yield Bar(f"{name}: of the copy rate", share, DECODE_MINIMUM, "times", at_least=True)
    else:
        yield from _mean_bars(routed.values())
    for name, seconds in skewed_ones.items():
        if plain := routed.get(name.removesuffix(SKEWED)):
            title = f"{name.removesuffix(SKEWED)}: half of the rows in one group / as routed"
            yield Bar(title, seconds[OURS] / plain[OURS], SKEW_LIMIT, "times")
    for name, seconds in routed.items():
        own = [seconds[backend] for backend in BACKENDS if backend in seconds]
        if own:
            yield Bar(f"{name}: chosen / best", seconds[OURS] / min(own), CHOICE_LIMIT, "times")


def _mean_bars(calls: Any) -> Iterator[Bar]:
    for peer, minimum in MEANS.items():
        if ratios := [seconds[peer] / seconds[OURS] for seconds in calls if peer in seconds]:
            title = f"over {peer}, geometric mean of {len(ratios)}"
            yield Bar(title, geometric_mean(ratios), minimum, "times", at_least=True)
            if peer == TORCH:
                yield Bar(f"over {peer}, the worst of {len(ratios)}", min(ratios), WORST, "times", at_least=True)
    if ratios := [seconds[GLUON] / seconds[TRITON] for seconds in calls if {GLUON, TRITON} <= {*seconds}]:
        title = f"{TRITON} over {GLUON}, geometric mean of {len(ratios)}"
        yield Bar(title, geometric_mean(ratios), TRITON_MEAN, "times", at_least=True)
