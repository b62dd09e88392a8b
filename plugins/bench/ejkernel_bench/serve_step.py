"""A whole step of decoding of Llama-3.1-8B and of Qwen3-30B-A3B, beside what the card's rates allow.

Points are sequences x cached tokens each:

  --part llama-8b, qwen3-30b   all points of one model; both by default
  --part llama-8b-64x4096      a point; several are named with commas

The model is that of ejkernel_bench.serving, with random weights in bfloat16, greedy, and pages of 64 tokens. Where a
point does not fit into the memory, it has fewer layers, which its row says. Steps follow each other without a pause.

The limit adds up, for each product, the longer of two times: that of its bytes at the copy rate, and that of its
operations at the product rate; and that of the cache's bytes at the copy rate. Both rates are measured in the run. An
expert's weights count if one of its tokens is expected in the step. The first logits of a model of two layers are
compared with those of the reference of attention. --small has tiny sizes, which a CPU can run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import click
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops import ragged_paged_attention

from ._memory import MEMORY_SHARE, memory_limit
from ._profile import FORWARD, profile_of, seconds_by_part
from ._report import ABSENT, Bar, Report, Table
from ._rows import Rows, announce
from ._timing import Times, in_bursts, on_the_device
from .moe_step import NO_GRAPHS, dense_rate
from .serving.engine import Batch, decode
from .serving.models import Decoder, count_weights, decoder, init_params, layer_shapes

ROUNDS = 5
#: The time of the steps of a round.
BURST_S = 0.3
PAGE_SIZE, SMALL_PAGE_SIZE = 64, 4
MODELS = {
    "llama-8b": Decoder(
        layers=32, width=4096, heads=32, kv_heads=8, head_dim=128, inner=14336, vocabulary=128256, rope_theta=5e5
    ),
    "qwen3-30b": Decoder(
        layers=48, width=2048, heads=32, kv_heads=4, head_dim=128, inner=768, vocabulary=151936, experts=128,
        experts_per_token=8, has_head_norms=True, rope_theta=1e6,
    ),
}  # fmt: skip
BATCHES, LENGTHS = (1, 16, 64, 256), (1024, 4096, 16384)
#: The most cached tokens of a point, by the memory of the card in bytes.
MOST_CACHED = ((100e9, 768 << 10), (0, 256 << 10))
SMALL = {
    "dense": Decoder(2, 32, 4, 2, 16, 48, 97, dtype="float32"),
    "experts": Decoder(2, 32, 4, 2, 16, 24, 97, experts=8, experts_per_token=2, has_head_norms=True, dtype="float32"),
}
#: Rows of the product, and bytes of the copy, whose rates are those of the card.
DENSE, COPIED, SMALL_DENSE, SMALL_COPIED = 8192, 1 << 30, 64, 1 << 16
#: The least share of the limit, from so many sequences on.
FEWEST, MINIMA = 16, {False: 0.85, True: 0.75}
#: Of the compared model: its layers, and how far the logits may be apart, relative to the largest.
COMPARED_LAYERS, LIMITS = 2, {"bfloat16": 3e-2, "float32": 1e-4}


@attrs.frozen
class Point:
    """A model at a batch and a length."""

    model: str
    sizes: Decoder
    batch: int
    length: int
    page_size: int = PAGE_SIZE

    @property
    def name(self) -> str:
        return f"{self.model}-{self.batch}x{self.length}"

    @property
    def pages(self) -> int:
        return self.batch * -(-self.length // self.page_size)

    def that_fits(self, limit: float | None) -> Point:
        """With as many layers as fit into so many bytes, at least one."""
        one, none = (self.bytes(attrs.evolve(self.sizes, layers=count)) for count in (1, 0))
        layers = self.sizes.layers if limit is None else int((limit - none) / (one - none))
        return attrs.evolve(self, sizes=attrs.evolve(self.sizes, layers=min(self.sizes.layers, max(1, layers))))

    def bytes(self, sizes: Decoder) -> float:
        """Of the weights and the cache."""
        cache = sizes.layers * self.pages * self.page_size * 2.0 * sizes.kv_heads * sizes.head_dim
        return (count_weights(sizes) + cache) * jnp.dtype(sizes.dtype).itemsize

    def limit(self, copy_rate: float, product_rate: float) -> float:
        """The least seconds of a step, by these rates."""
        sizes, item = self.sizes, jnp.dtype(self.sizes.dtype).itemsize
        cached = 2.0 * self.batch * self.length * sizes.kv_heads * sizes.head_dim * item
        of_layer = sum(self._product(shape, copy_rate, product_rate) for shape in self._matrices())
        head = self._product((sizes.width, sizes.vocabulary), copy_rate, product_rate)
        return sizes.layers * (of_layer + cached / copy_rate) + head

    def _matrices(self) -> Iterator[tuple[int, ...]]:
        """Of a layer."""
        for name, shape in layer_shapes(self.sizes).items():
            if not name.endswith("norm"):
                yield shape

    def _product(self, shape: tuple[int, ...], copy_rate: float, product_rate: float) -> float:
        item, matrices, rows = jnp.dtype(self.sizes.dtype).itemsize, 1.0, self.batch
        if len(shape) == 3:
            share = self.sizes.experts_per_token / self.sizes.experts
            matrices, rows = shape[0] * (1 - (1 - share) ** self.batch), self.batch * self.sizes.experts_per_token
        dim, columns = shape[-2:]
        moved = item * (matrices * dim * columns + rows * (dim + columns))
        return max(moved / copy_rate, 2.0 * rows * dim * columns / product_rate)


class Step:
    """A step that can be repeated: each writes the last token of all sequences again."""

    def __init__(self, point: Point, attention: Any) -> None:
        sizes = point.sizes
        self.params = jax.jit(partial(init_params, sizes))(jax.random.key(0))
        key = jax.random.key(1)
        shape, dtype = jax.eval_shape(lambda: sizes.cache(point.pages, point.page_size)).shape, sizes.dtype
        self.cache = jax.jit(lambda key: jax.random.normal(key, shape, dtype))(key)
        self.arrays = arrays_of(point)
        step = partial(decode, decoder(sizes, attention), max_query_len=1)
        self.lowered = jax.jit(step, donate_argnums=1).lower(self.params, self.cache, *self.arrays)
        self.compiled = self.lowered.compile()

    def run(self) -> Any:
        tokens, self.cache = self.compiled(self.params, self.cache, *self.arrays)
        return tokens


def arrays_of(point: Point) -> tuple[Any, ...]:
    """The arguments of a step behind the parameters and the cache, on the device."""
    batch, length, size = point.batch, point.length, point.page_size
    rng = np.random.default_rng(batch)
    tables = rng.permutation(point.pages).reshape(batch, -1).astype(np.int32)
    positions = np.full(batch, length - 1, np.int32)
    slots = tables[:, (length - 1) // size] * size + (length - 1) % size
    starts, lengths = np.arange(batch + 1, dtype=np.int32), np.full(batch, length, np.int32)
    of_step = Batch(slots, lengths, tables, starts, np.array([batch], np.int32), starts[:-1])
    tokens = rng.integers(0, point.sizes.vocabulary, batch).astype(np.int32)
    numbers = np.tile(np.array([[0.0], [0.0], [1.0], [0.0]], np.float32), batch)
    arrays: tuple[Any, ...] = jax.device_put((tokens, positions, of_step, np.zeros(batch, np.uint32), numbers))
    return arrays


# -- the suite ---------------------------------------------------------------------------------------------------------


def run(backend: str | None = None, rounds: int = ROUNDS, small: bool = False, part: str | None = None) -> Report:
    """All points of both models, or those that are named."""
    if jax.default_backend() == "cpu" and not small:
        return Report("serve-step", (), text="serve-step: there is no accelerator here; --small measures on the CPU")
    limit = memory_limit()
    points = named_points(small, limit, part)
    attention = partial(ragged_paged_attention, backend=backend)
    rates = copy_rate(SMALL_COPIED if small else COPIED), dense_rate(SMALL_DENSE if small else DENSE, "bfloat16")
    title = f"a step of decoding; a copy has {rates[0] / 1e12:.3g} TB/s, a product {rates[1] / 1e12:.3g} TFLOP/s"
    columns = ("", "layers", "ms", "range", "limit, ms", "limit / time", "tokens / s")
    rows = Rows(title, columns, ("ms", "limit, ms"))
    tables: list[Table] = []
    bars: list[Bar] = []
    faults: list[str] = []
    for name in dict.fromkeys(point.model for point in points):
        faults += compared(next(point for point in points if point.model == name), attention)
    for point in points:
        announce(f"compiling {point.name}")
        point = point.that_fits(None if limit is None else MEMORY_SHARE * limit)
        step = Step(point, attention)
        times = in_bursts({point.name: step.run}, rounds, BURST_S)[point.name]
        least = point.limit(*rates)
        rows.add(*_row(point, times, least))
        bars += _bars(point, least / times.median)
        tables += _profiled(point, step)
        del step
    return Report("serve-step", [rows.table(), *tables], [] if small else bars, faults)


def named_points(small: bool, limit: float | None, part: str | None) -> list[Point]:
    if small:
        every = [Point(name, sizes, 3, 21, SMALL_PAGE_SIZE) for name, sizes in SMALL.items()]
    else:
        most = next(count for least, count in MOST_CACHED if limit is None or limit >= least)
        every = [
            Point(name, sizes, batch, length)
            for name, sizes in MODELS.items()
            for batch in BATCHES
            for length in LENGTHS
            if batch * length <= most
        ]
    if part is None:
        return every
    words = part.split(",")
    for word in words:
        if word not in {name for point in every for name in (point.name, point.model)}:
            names = ", ".join(dict.fromkeys(point.model for point in every))
            raise click.UsageError(f"no model or point of serve-step is named {word}; there are {names}")
    return [point for point in every if point.name in words or point.model in words]


def copy_rate(size: int) -> float:
    """Bytes that are read and written in a second, by a copy of so many."""
    array = jnp.zeros(size // 2, jnp.bfloat16)
    copy = jax.jit(lambda x: x + 1)
    return 2.0 * size / on_the_device({"copy": lambda: copy(array)}, 3)["copy"].median


def compared(point: Point, attention: Any) -> list[str]:
    """What is wrong with the logits of few layers, by the reference of attention."""
    announce(f"comparing {point.model}")
    small = attrs.evolve(
        point,
        sizes=attrs.evolve(point.sizes, layers=COMPARED_LAYERS),
        batch=min(point.batch, 4),
        length=min(point.length, 1024),
    )
    params = jax.jit(partial(init_params, small.sizes))(jax.random.key(0))
    shape = small.sizes.cache(small.pages, small.page_size).shape
    cache = jax.random.normal(jax.random.key(1), shape, small.sizes.dtype)
    tokens, positions, batch, *_ = arrays_of(small)

    def logits(attention: Any) -> np.ndarray:
        model = jax.jit(lambda *arrays: decoder(small.sizes, attention)(*arrays)[0])
        return np.asarray(model(params, tokens, positions, cache, batch), np.float64)

    right = logits(partial(ragged_paged_attention, backend="reference"))
    distance = np.abs(logits(attention) - right).max() / np.abs(right).max()
    if distance <= LIMITS[small.sizes.dtype]:
        return []
    return [f"{point.model}: its logits are {distance:.1e} from those of the reference, relative to the largest"]


def _row(point: Point, times: Times, least: float) -> tuple[Any, ...]:
    speed = point.batch / times.median
    return point.name, point.sizes.layers, *times.scaled(1e-3)[:2], 1e3 * least, least / times.median, speed


def _bars(point: Point, share: float) -> Iterator[Bar]:
    if point.batch >= FEWEST:
        yield Bar(f"{point.name}: of the limit", share, MINIMA[bool(point.sizes.experts)], "times", at_least=True)


def _profiled(point: Point, step: Step) -> Iterator[Table]:
    """The milliseconds of each part, of a step without CUDA graphs, whose kernels have no names; none without a GPU."""
    if jax.default_backend() != "gpu":
        return
    announce(f"profiling {point.name}")
    step.compiled = step.lowered.compile(compiler_options=NO_GRAPHS)
    jax.block_until_ready(step.run())
    profile = profile_of(step.run, 1)
    seconds, unknown = ({}, []) if profile is None else seconds_by_part(profile, step.compiled.as_text() or "", 1)
    rows = Rows(f"{point.name}: milliseconds by the profile of a step", ("", "ms"))
    for (name, when), value in sorted(seconds.items(), key=lambda item: -item[1]):
        rows.add(name if when == FORWARD else f"{name}, {when}", 1e3 * value)
    if unknown:
        rows.add(f"of no part are {', '.join(unknown)}", ABSENT)
    if seconds:
        yield rows.table()
