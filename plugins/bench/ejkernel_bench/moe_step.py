"""A training step of layers like Qwen3-30B-A3B's: on our operations, on jax.nn and ragged_dot, and on tokamax.

Each part is a run of its own, of a few minutes, and a quarter of an hour where tokamax tunes:

  --part full        4 x 4096 tokens, as many layers as fit with Adam's moments, ours and tokamax; tokamax's own tuning
                     gets five minutes, and where it takes longer, tokamax runs without it
  --part ragged_dot  two layers, all arms, at the largest batch at which the step on jax.nn and ragged_dot fits

A layer has attention of 32 query and 4 key heads of 128, and 128 experts of 768 of which a token has 8. The model is
written once in plain JAX, and each arm gives it the functions of a library. Each layer is computed again in the
backward, but for attention. The head has 151,936 words; its loss is fused_linear_cross_entropy in our arm, and in the
others chunks of rows, whose logits are computed again. Parameters are bfloat16, moments float32.

The loss and all gradients of two layers are compared with ours. Routing is discrete, so that the rounding of one arm
sends some tokens to other experts than that of another: in bfloat16, gradients may differ by a fifth, where a wrong
kernel makes them differ by their size. The steps of a round do not wait for each other, as in training. The time
of the layers is that of the step less that of the same arm's step without layers. Only useful operations count. The
product rate is measured in the run. Memory is what the compiler plans.

On a GPU, set XLA_PYTHON_CLIENT_MEM_FRACTION=0.93. --quick has at most four layers, and tries no batch of more than
1 x 4096 tokens for ragged_dot. --small has tiny sizes, which a CPU can run.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import attrs
import click
import jax
import jax.numpy as jnp

from ejkernel_ops import (
    flash_attention,
    fused_linear_cross_entropy,
    grouped_matmul,
    moe_combine,
    moe_permute,
    moe_permute_matmul,
    moe_route,
    rms_norm,
)
from ejkernel_ops.moe_permute import definition as permutation

from ._calls import describe_fault
from ._errors import error
from ._grouped_products import NotTuned, tuning_of_tokamax
from ._memory import GIB, MEMORY_SHARE, memory_limit, peak_bytes, planned_bytes
from ._moe_model import (
    EPSILON,
    Arm,
    DenseArm,
    Size,
    State,
    loss,
    parameters_of,
    state_of,
    tokens_of,
    training_step,
)
from ._peers import is_installed
from ._profile import FORWARD, part, profile_of, seconds_by_part
from ._report import ABSENT, Bar, Cell, Report, Table, joined
from ._rows import Rows, announce
from ._timing import Times, in_bursts, on_the_device
from .moe_route import by_definition
from .suite import OURS

Attention = Callable[[Any, Any, Any], Any]

JAX, TOKAMAX = "jax.nn and ragged_dot", "tokamax"
ROUNDS = 5
#: Of the comparison, and of the part "ragged_dot".
FEW_LAYERS = 2
#: The most layers of a quick run.
QUICK_LAYERS = 4
#: The batches that are tried, the largest first: (batch, length).
BATCHES = ((4, 4096), (2, 4096), (1, 4096), (1, 2048), (1, 1024), (1, 512))
#: The least speed relative to the others, and the least share of the product rate.
MINIMA = {JAX: 3.0, TOKAMAX: 1.2}
SHARE_MINIMUM = 0.35
#: How far gradients of the same parameters may be apart, relative to their norm; and how far losses, relative to it.
GRADIENT_LIMITS, LOSS_LIMITS = {"bfloat16": 0.2, "float32": 1e-3}, {"bfloat16": 2e-3, "float32": 1e-5}
#: The least time of the steps of a round, which do not wait for each other, as in training.
BURST_S = 0.5
#: How long tokamax may tune.
TUNING_S = 300.0
#: The profiler does not know to which instruction a kernel in a CUDA graph belongs. A layer took 25 ms on an H100 with
#: graphs and without them.
NO_GRAPHS: dict[str, str | bool] = {"xla_gpu_graph_min_graph_size": str(1 << 30)}
SMALL = Size(
    layers=2,
    batch=2,
    length=24,
    dim=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    experts=8,
    chosen=2,
    inner=24,
    vocabulary=97,
    chunk=16,
    dtype="float32",
)
#: Rows, contracted and columns of the product whose rate is that of the card.
DENSE, SMALL_DENSE = 8192, 64


# -- the arms ----------------------------------------------------------------------------------------------------------


def by_ejkernel(backend: str | None = None) -> Arm:
    """Our operations. A backend is that of the grouped products, whose rows are in order then."""
    product = partial(grouped_matmul, backend=backend)

    def in_place(x: Any, order: Any, k: int, matrices: Any, sizes: Any) -> Any:
        return moe_permute_matmul(x, order, matrices, sizes, k)

    return Arm(
        norm=partial(rms_norm, epsilon=EPSILON),
        attention=partial(flash_attention, causal=True),
        route=moe_route,
        token_product=in_place if backend is None else of_rows(moe_permute, product),
        product=product,
        combine=moe_combine,
        loss=loss_of_head,
    )


def loss_of_head(x: Any, matrix: Any, labels: Any, chunk: int) -> Any:
    """Our loss, which chooses its own chunks by the memory of their logits."""
    return fused_linear_cross_entropy(x, matrix, labels)


def of_rows(permute: Callable[[Any, Any, int], Any], product: Callable[[Any, Any, Any], Any]) -> Any:
    """The product of tokens by two functions: one orders the rows, and one multiplies them."""

    def token_product(x: Any, order: Any, k: int, matrices: Any, sizes: Any) -> Any:
        with part("permute"):
            rows = permute(x, order, k)
        return product(rows, matrices, sizes)

    return token_product


def by_jax() -> Arm:
    """``jax.nn`` and ``jax.lax``, with plain JAX for what they do not have."""
    ragged_dot = jax.lax.ragged_dot
    rows = of_rows(_permute, ragged_dot)
    return Arm(plain_norm, attention_of_jax, _route, rows, ragged_dot, permutation.combined)


def attention_of_jax(query: Any, key: Any, value: Any) -> Any:
    """Causal, by cuDNN on a GPU."""
    implementation: Literal["cudnn", "xla"] = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)


def by_tokamax(size: Size, notes: list[str]) -> Arm:
    """Attention and the grouped product by tokamax, and the rest in plain JAX.

    Where it has no attention of this size with a gradient, the arm has that of ``jax.nn``, which the notes say.
    """
    tokamax = importlib.import_module("tokamax")
    attention: Attention = partial(tokamax.dot_product_attention, is_causal=True)
    shapes = [(size.batch, size.length, heads, size.head_dim) for heads in (size.heads, size.kv_heads, size.kv_heads)]
    arrays = [jax.ShapeDtypeStruct(shape, size.dtype) for shape in shapes]
    try:
        jax.jit(jax.grad(lambda *arrays: attention(*arrays).astype(jnp.float32).sum(), (0, 1, 2))).lower(
            *arrays
        ).compile()
    except Exception as fault:
        notes.append(f"{TOKAMAX} has the attention of jax.nn: {' '.join(describe_fault(fault).split())}")
        attention = attention_of_jax
    rows = of_rows(_permute, tokamax.ragged_dot)
    return Arm(plain_norm, attention, _route, rows, tokamax.ragged_dot, permutation.combined)


def plain_norm(x: Any, weight: Any) -> Any:
    """In float32, as models in plain JAX have it."""
    wide = x.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + EPSILON)
    return (unit * weight).astype(x.dtype)


def _route(logits: Any, k: int) -> tuple[Any, Any, Any, Any]:
    weights, experts, sizes, order = by_definition({"k": k})(router_logits=logits)
    return weights, experts, sizes, order


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _permute(x: Any, order: Any, k: int) -> Any:
    """Its gradient adds up the rows of each token, where that of a gather in JAX has atomic additions.

    With the barrier, XLA does not compute the gather in what reads the rows. Without it, on an H100 and with tokamax's
    products, the rows took 3.4 ms of a layer's backward, and 0.4 of its forward.
    """
    return jax.lax.optimization_barrier(permutation.permuted(x, order, k))


def _permute_fwd(x: Any, order: Any, k: int) -> tuple[Any, Any]:
    return _permute(x, order, k), order


def _permute_bwd(k: int, order: Any, d_rows: Any) -> tuple[Any, None]:
    ones = jnp.ones((order.shape[0] // k, k), d_rows.dtype)
    return permutation.combined(d_rows, order, ones), None


_permute.defvjp(_permute_fwd, _permute_bwd)


@attrs.frozen(eq=False)
class Contender:
    """An arm, and the context in which it is traced: that of tokamax's tuned configurations."""

    arm: DenseArm
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


# -- the suite ---------------------------------------------------------------------------------------------------------

PARTS = ("full", "ragged_dot")


def run(
    backend: str | None = None,
    rounds: int = ROUNDS,
    small: bool = False,
    quick: bool = False,
    part: str | None = None,
) -> Report:
    """One part, or both. A quick run has at most a few layers, and tries no batch that is unlikely to fit."""
    if part not in (None, *PARTS):
        raise click.UsageError(f"no part of moe-step is called {part}; there are {', '.join(PARTS)}")
    if jax.default_backend() == "cpu" and not small:
        return Report("moe-step", (), text="moe-step: there is no accelerator here; --small measures on the CPU")
    names = PARTS if part is None else (part,)
    return joined("moe-step", [_part(name, backend, rounds, small, quick) for name in names])


def _part(name: str, backend: str | None, rounds: int, small: bool, quick: bool) -> Report:
    is_full = name == "full"
    run = Run(name, rounds, SMALL_DENSE if small else DENSE)
    run.add(OURS, partial(by_ejkernel, backend))
    if not is_full:
        run.add(JAX, by_jax)
    size = SMALL if small else _full_size(quick) if is_full else run.largest(JAX, BATCHES[2:] if quick else BATCHES)
    if size is None:
        return run.report([])
    if is_installed("tokamax"):
        run.add(TOKAMAX, partial(by_tokamax, size, run.notes))
    else:
        run.notes.append(f"{name}: not installed, and not measured: {TOKAMAX}")
    if is_full and TOKAMAX in run.contenders:
        run.tune(size)
    return run.measure(size)


def _full_size(quick: bool) -> Size:
    limit = memory_limit()
    layers = QUICK_LAYERS if limit is None else layers_that_fit(Size(1), limit)
    return Size(min(layers, QUICK_LAYERS) if quick else layers)


def layers_that_fit(size: Size, limit: float) -> int:
    """A first guess, at least 1: twelve bytes for each parameter with its gradient and moments, and what layers keep.

    >>> layers_that_fit(Size(1), 0.93 * 141e9), layers_that_fit(Size(1), 0.93 * 80e9)
    (14, 7)
    """
    kept = 2 * size.tokens * (size.dim + 2 * (size.heads + size.kv_heads) * size.head_dim)
    layer = 12 * count(size.layer_shapes()) + kept
    rows = size.tokens * size.chosen * (4 * size.dim + 6 * size.inner) * 2
    others = 12 * count(size.other_shapes()) + rows + 3 * 4 * size.chunk * size.vocabulary
    return max(1, int((MEMORY_SHARE * limit - others) / layer))


def count(shapes: Mapping[str, Sequence[int]]) -> int:
    """The numbers in all arrays."""
    return sum(math.prod(shape) for shape in shapes.values())


@attrs.define(eq=False)
class Run:
    """What has been compiled and measured of a part."""

    name: str
    rounds: int
    dense: int
    contenders: dict[str, Contender] = attrs.field(factory=dict)
    absences: Rows = attrs.field(factory=lambda: Rows("not measured", ("arm", "reason")))
    faults: list[str] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)
    #: By dtype, how far gradients may be apart.
    gradient_limits: Mapping[str, float] = attrs.field(factory=lambda: GRADIENT_LIMITS)

    # -- compiling -----------------------------------------------------------------------------------------------------

    def add(self, name: str, arm: Callable[[], DenseArm]) -> None:
        """Add an arm, unless its library cannot be imported, which is told."""
        if (functions := self._try(name, arm)) is not None:
            self.contenders[name] = Contender(functions)

    def compiled(self, name: str, size: Size) -> Any:
        """The training step of an arm. The state is donated."""
        contender = self.contenders[name]
        announce(f"compiling {name}: {title_of(size)}")
        parameters = jax.eval_shape(lambda: parameters_of(size, jax.random.key(0)))
        state = jax.eval_shape(state_of, parameters)
        tokens = jax.eval_shape(lambda: tokens_of(size, jax.random.key(0)))
        step = jax.jit(partial(training_step, contender.arm, size), donate_argnums=0)
        with contender.context():
            return step.lower(state, tokens).compile(compiler_options=NO_GRAPHS)

    def _try(self, name: str, work: Callable[[], Any]) -> Any:
        """The result, or None where the arm fails, which is told."""
        try:
            return work()
        except Exception as fault:  # the others are measured all the same
            self.absences.add(name, " ".join(describe_fault(fault).split()))
            return None

    def largest(self, name: str, batches: Sequence[tuple[int, int]]) -> Size | None:
        """Few layers, at the first batch at which the step of this arm runs; None if it never does."""
        for batch, length in batches:
            size = Size(FEW_LAYERS, batch, length, chunk=min(Size(1).chunk, batch * length))
            if self._try(f"{name}, {batch} x {length} tokens", partial(self._runs, name, size)):
                return size
        return None

    def _runs(self, name: str, size: Size) -> bool:
        compiled, limit = self.compiled(name, size), memory_limit()
        if limit is not None and planned_bytes(compiled) > MEMORY_SHARE * limit:
            raise MemoryError(f"its plan takes {planned_bytes(compiled) / GIB:.0f} of {limit / GIB:.0f} GiB")
        jax.block_until_ready(compiled(*_start(size)))
        return True

    def tune(self, size: Size) -> None:
        """Measure tokamax with its own tuning, if that ends in time."""
        few = attrs.evolve(size, layers=1)
        announce(f"{TOKAMAX} is tuning for at most {TUNING_S:.0f} s")
        arm, start = self.contenders[TOKAMAX].arm, time.monotonic()
        try:
            parameters = jax.eval_shape(lambda: parameters_of(few, jax.random.key(0)))
            tokens = jax.eval_shape(lambda: tokens_of(few, jax.random.key(0)))
            lowered = jax.jit(jax.grad(partial(loss, arm, few))).lower(parameters, tokens)
            result = tuning_of_tokamax(lowered, start + TUNING_S)
        except Exception as fault:  # then it runs without
            reason = str(fault) if isinstance(fault, NotTuned) else " ".join(describe_fault(fault).split())
            self.notes.append(f"{self.name}: {TOKAMAX} is measured without its tuning: {reason}")
            return
        seconds = time.monotonic() - start
        self.notes.append(f"{self.name}: {TOKAMAX} is measured with its tuning, which took {seconds:.0f} s")
        self.contenders[TOKAMAX] = Contender(arm, lambda: result)

    # -- comparing -----------------------------------------------------------------------------------------------------

    def compare(self, size: Size) -> Table:
        """The losses and gradients of few layers, relative to ours."""
        size = attrs.evolve(size, layers=min(size.layers, FEW_LAYERS))
        columns = ("", "loss", "loss, relative to ours", "largest distance of a gradient", "of")
        rows = Rows(f"compared with {OURS}: {title_of(size)}", columns)
        parameters, tokens = parameters_of(size, jax.random.key(0)), tokens_of(size, jax.random.key(1))
        expected: tuple[Any, Any] | None = None
        for name in list(self.contenders):
            announce(f"comparing {name}")
            results = self._try(name, partial(self._gradients, name, size, parameters, tokens))
            if results is None:
                del self.contenders[name]
            elif expected is None:
                expected = results
                rows.add(name, float(results[0]), "-", "-", "-")
            else:
                rows.add(*self._compared(name, size, results, expected))
            if OURS not in self.contenders:
                break  # there is nothing to compare with
        return rows.table()

    def _gradients(self, name: str, size: Size, parameters: Any, tokens: Any) -> tuple[Any, Any]:
        contender = self.contenders[name]
        with contender.context():
            function = jax.jit(jax.value_and_grad(partial(loss, contender.arm, size)))
            results: tuple[Any, Any] = jax.block_until_ready(function(parameters, tokens))
        return results

    def _compared(self, name: str, size: Size, results: tuple[Any, Any], expected: tuple[Any, Any]) -> tuple[Cell, ...]:
        distance = abs(float(results[0]) / float(expected[0]) - 1)
        leaves, right = jax.tree_util.tree_leaves_with_path(results[1]), jax.tree.leaves(expected[1])
        pairs = zip(leaves, right, strict=True)
        distances = {jax.tree_util.keystr(path): error(leaf, other).norm for (path, leaf), other in pairs}
        # A NaN is larger than every number here, and within no limit.
        worst = max(distances, key=lambda path: float("inf") if distances[path] != distances[path] else distances[path])
        if not distance <= LOSS_LIMITS[size.dtype]:
            self.faults.append(f"{name}: its loss is {float(results[0]):.6g} and ours {float(expected[0]):.6g}")
        if not distances[worst] <= self.gradient_limits[size.dtype]:
            self.faults.append(f"{name}: its gradient of {worst} is {distances[worst]:.1e} from ours")
        return name, float(results[0]), distance, distances[worst], worst

    # -- measuring -----------------------------------------------------------------------------------------------------

    def measure(self, size: Size) -> Report:
        """Compare, time in turn and profile all arms. They share one state, which each of them trains."""
        comparison = self.compare(size)
        rate = dense_rate(self.dense, size.dtype)
        size, steps = self._steps(size)
        if OURS not in steps:
            return self.report([comparison])
        training = Training(size, steps)
        memory = {name: planned_bytes(step) for name, step in steps.items()}
        peaks = self._first_steps(training, steps, memory)
        times = in_bursts({name: partial(training.run, name) for name in steps}, self.rounds, BURST_S)
        profiles = {name: _by_part(partial(training.run, name), steps[name]) for name in steps}
        training.state = None  # so that the next one fits
        figures = self.figures(Measured(size, times, memory, peaks, rate))
        tables = [figures.times_table(), figures.table(), *_parts_table(size, profiles, self.notes), comparison]
        return self.report(tables, list(figures.bars(is_full=self.name == "full")))

    def figures(self, measured: Measured) -> Figures:
        """With the time of steps without layers."""
        return Figures(measured, self._rest(measured.size, list(measured.times)))

    def _first_steps(
        self, training: Training, steps: dict[str, Any], memory: Mapping[str, int]
    ) -> Mapping[str, int | None]:
        """The peak of a step by the device, which only tells the most until now: so that with the smallest plan is
        first, and one that does not raise it has none. A step that fails is told, and left out.
        """
        peaks: dict[str, int | None] = {}
        for name in sorted(steps, key=memory.__getitem__):
            announce(f"running {name}")
            before = peak_bytes()
            if self._try(name, partial(training.run_to_end, name)) is None:
                del steps[name]
                training.restart()
            else:
                after = peak_bytes()
                peaks[name] = after if after is not None and before is not None and after > before else None
        return peaks

    def _steps(self, size: Size) -> tuple[Size, dict[str, Any]]:
        """The compiled steps, of fewer layers if they do not fit."""
        limit = memory_limit()
        while True:
            attempts = {name: self._try(name, partial(self.compiled, name, size)) for name in self.contenders}
            steps = {name: step for name, step in attempts.items() if step is not None}
            largest = max(map(planned_bytes, steps.values()), default=0)
            if limit is None or largest <= MEMORY_SHARE * limit or size.layers == 1:
                return size, steps
            fewer = int(size.layers * MEMORY_SHARE * limit / largest)
            announce(f"{size.layers} layers take {largest / GIB:.0f} of {limit / GIB:.0f} GiB")
            size = attrs.evolve(size, layers=max(1, min(fewer, size.layers - 1)))

    def _rest(self, size: Size, names: Sequence[str]) -> Mapping[str, Times]:
        """The time of a step without layers, by arm: their losses differ."""
        nothing = attrs.evolve(size, layers=0)
        training = Training(nothing, {name: self.compiled(name, nothing) for name in names})
        return in_bursts({name: partial(training.run, name) for name in names}, self.rounds, BURST_S)

    def report(self, tables: Sequence[Table], bars: Sequence[Bar] = ()) -> Report:
        absences = [self.absences.table()] if len(self.absences) else []
        return Report(self.name, [*tables, *absences], bars, self.faults, "\n".join(self.notes))


def title_of(size: Size) -> str:
    """The size, for a heading."""
    return f"{size.layers} layers, {size.batch} x {size.length} tokens, {size.dtype}"


def _start(size: Size) -> tuple[State, Any]:
    return state_of(parameters_of(size, jax.random.key(0))), tokens_of(size, jax.random.key(1))


class Training:
    """One state, which the steps of all arms continue: several would not fit."""

    def __init__(self, size: Size, steps: Mapping[str, Any]) -> None:
        self.size, self.steps = size, steps
        self.state: State | None = None
        self.restart()

    def restart(self) -> None:
        """From the beginning, such as after a step that failed and has taken the state with it."""
        self.state = None
        self.state, self.tokens = _start(self.size)

    def run(self, name: str) -> Any:
        """A step of an arm, which may still be running: its loss, and the state after it."""
        self.state, value = self.steps[name](self.state, self.tokens)
        return value, self.state

    def run_to_end(self, name: str) -> Any:
        """The same, when the step is done: a fault of the device is raised here."""
        return jax.block_until_ready(self.run(name))


def dense_rate(size: int, dtype: str) -> float:
    """The operations in a second of a square product of so many rows."""
    left, right = (jax.random.normal(key, (size, size), dtype) for key in jax.random.split(jax.random.key(0)))
    product = jax.jit(jnp.matmul)
    return 2.0 * size**3 / on_the_device({"product": lambda: product(left, right)}, 3)["product"].median


# -- figures -----------------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Measured:
    """What was measured of the steps of all arms."""

    size: Size
    times: Mapping[str, Times]
    #: Bytes by arm, by the compiler; and the peak by the device, None where it does not say.
    memory: Mapping[str, int]
    peaks: Mapping[str, int | None]
    #: Of a dense product, operations in a second.
    rate: float

    def gib(self, name: str) -> tuple[Cell, Cell]:
        """By the compiler and by the device."""
        peak = self.peaks.get(name)
        return self.memory[name] / GIB, ABSENT if peak is None else peak / GIB


MEMORY_COLUMNS = ("GiB, by the compiler", "GiB, by the device")


@attrs.frozen(eq=False)
class Figures:
    """Those of steps of which the layers count."""

    measured: Measured
    #: Of a step without layers, by arm.
    rest: Mapping[str, Times]

    @property
    def size(self) -> Size:
        return self.measured.size

    @property
    def times(self) -> Mapping[str, Times]:
        return self.measured.times

    def layers_seconds(self, name: str) -> float | None:
        """The time of the layers; None where a busy machine makes the step without layers the longer one."""
        seconds = self.times[name].median - self.rest[name].median
        return seconds if seconds > 0 else None

    def share(self, name: str) -> float | None:
        """Of the product rate, by the useful operations of the layers."""
        seconds = self.layers_seconds(name)
        return None if seconds is None else self.size.layer_flops() / seconds / self.measured.rate

    def times_table(self) -> Table:
        """Steps and layers, which a picture draws."""
        columns = ["", *(column for name in self.times for column in (name, "range"))]
        rows = Rows(f"milliseconds, medians of rounds in turn: {title_of(self.size)}", columns, series=[*self.times])
        rows.add("a step", *(cell for one in self.times.values() for cell in one.scaled(1e-3)[:2]))
        layers = {name: self.layers_seconds(name) for name in self.times}
        pairs = (
            (ABSENT, ABSENT) if one is None else (1e3 * one, 1e3 * self.times[name].spread)
            for name, one in layers.items()
        )
        rows.add("its layers", *(cell for pair in pairs for cell in pair))
        return rows.table()

    def table(self) -> Table:
        """All else."""
        rate = self.measured.rate / 1e12
        title = f"{title_of(self.size)}; a dense product has {rate:.3g} TFLOP/s"
        columns = ("", f"over {OURS}", "TFLOP/s of the layers", "of the product rate", "ms without layers")
        rows = Rows(title, (*columns, *MEMORY_COLUMNS))
        for name, one in self.times.items():
            share = self.share(name)
            ratio = one.median / self.times[OURS].median
            shares: Sequence[Cell] = (ABSENT, ABSENT) if share is None else (share * rate, share)
            rows.add(name, ratio, *shares, 1e3 * self.rest[name].median, *self.measured.gib(name))
        return rows.table()

    def bars(self, is_full: bool) -> Iterator[Bar]:
        """Those of a full step: tokamax and the product rate; and of a smaller one: ragged_dot."""
        for name in (TOKAMAX,) if is_full else (JAX,):
            if name in self.times:
                ratio = self.times[name].median / self.times[OURS].median
                yield Bar(f"a step: over {name}", ratio, MINIMA[name], "times", at_least=True)
        if is_full and (share := self.share(OURS)) is not None:
            yield Bar("the layers: of the product rate", share, SHARE_MINIMUM, "times", at_least=True)


def _by_part(run: Callable[[], Any], compiled: Any) -> tuple[dict[tuple[str, str], float], list[str]]:
    """Seconds by part and time, and the longest kernels of no part; nothing where there is no GPU."""
    if jax.default_backend() != "gpu":
        return {}, []
    announce("profiling a step")
    profile = profile_of(run, 1)
    return ({}, []) if profile is None else seconds_by_part(profile, compiled.as_text(), 1)


def _parts_table(
    size: Size, profiles: Mapping[str, tuple[Mapping[tuple[str, str], float], Sequence[str]]], notes: list[str]
) -> Iterator[Table]:
    """Milliseconds of all kernels by part, ours first; none without a profile."""
    by_arm = {name: seconds for name, (seconds, _) in profiles.items() if seconds}
    if OURS not in by_arm:
        return
    rows = Rows(f"milliseconds by the profile of a step: {title_of(size)}", ("", *by_arm), series=[*by_arm])
    rows.add("all kernels", *(1e3 * sum(seconds.values()) for seconds in by_arm.values()))
    labels = dict.fromkeys(label for seconds in by_arm.values() for label in seconds)
    passes = {name for name, when in labels if when != FORWARD}
    for label in sorted(labels, key=lambda label: -max(seconds.get(label, 0.0) for seconds in by_arm.values())):
        title = ", ".join(label) if label[0] in passes else label[0]
        rows.add(title, *(1e3 * seconds.get(label, 0.0) for seconds in by_arm.values()))
    for name, (_, unknown) in profiles.items():
        if unknown:
            notes.append(f"{name}: the longest kernels of no part: {', '.join(unknown)}")
    yield rows.table()
