"""The resources of the kernels for Hopper: every configuration, with every feature, compiled by Triton alone.

What the tests measure of the best configurations is in `gluon_resources.json`, with a hash of what decides it. They
compile what is not in it with the same hash, and those of the long sweep compile everything.
`python -m plugins.triton.tests.test_gluon_resources` writes the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import jax
import pytest

import ejkernel_core
from ejkernel_core import Invocation, Unsupported
from ejkernel_triton import flash_attention_sm90 as flash_attention
from ejkernel_triton.flash_attention_sm90 import backward as flash_attention_bwd
from ejkernel_triton.launch import _jax_triton
from plugins.triton.tests.hopper_launches import SHARED_MEMORY, Figures, Launch, Lock, record_launches

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

LOCK = Lock.read(Path(__file__).with_name("gluon_resources.json"))
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "sliding_window": (300, 0)},
    "soft cap": {"causal": True, "logits_soft_cap": 20.0},
    "window and soft cap": {"causal": True, "sliding_window": (300, 0), "logits_soft_cap": 20.0},
    "sinks": {"causal": True, "softmax_aux": jax.ShapeDtypeStruct((4, 3), "float32")},
    "segments": {name: jax.ShapeDtypeStruct((2, 512), "int32") for name in ("q_segment_ids", "kv_segment_ids")},
    "packed": {name: jax.ShapeDtypeStruct((4,), "int32") for name in ("cum_seqlens_q", "cum_seqlens_k")},
    "lengths": {"causal": True, "kv_lengths": jax.ShapeDtypeStruct((2,), "int32")},
    "ring": {
        "causal": True,
        "sliding_window": (300, 0),
        "q_start": jax.ShapeDtypeStruct((2,), "int32"),
        "kv_positions": jax.ShapeDtypeStruct((2, 512), "int32"),
    },
}
#: What they load besides what other calls load: where queries start, and how many keys there are.
CACHE = ("lengths", "ring")


def invocation(dim: int, features: dict[str, Any], is_backward: bool = True) -> Invocation:
    """A call of the forward or the backward pass."""
    batch = () if "cum_seqlens_q" in features else (2,)
    query, key = (jax.ShapeDtypeStruct((*batch, 512, heads, dim), "bfloat16") for heads in (4, 2))
    results = {"out": query, "lse": jax.ShapeDtypeStruct((*batch, 4, 512), "float32"), "d_out": query}
    own = {"query": query, "key": key, "value": key}
    if is_backward:
        features = {"wrt": ("query", "key", "value"), **results, **features}
    inv = ejkernel_core.invocation(f"flash_attention{'_bwd' if is_backward else ''}", **own, **features)
    return attrs.evolve(inv, platform="gpu", device_kind="NVIDIA H200", compute_capability=(9, 0))


def launched(launches: list[Launch], dim: int, cfg: Any, features: dict[str, Any]) -> Launch:
    """The first launch of a call. The configuration is checked as the core checks it."""
    launches.clear()
    is_backward = isinstance(cfg, flash_attention_bwd.Config)
    inv = invocation(dim, features, is_backward)
    backend = flash_attention_bwd if is_backward else flash_attention
    backend.check_cfg(inv, cfg)
    arrays = {name: x for name, x in inv.arguments.items() if hasattr(x, "shape")}
    jax.eval_shape(lambda arrays: backend.run_backend(inv.with_arrays(arrays), cfg), arrays)
    products = products_of_a_step(cfg, dim)
    if is_backward and not launches[0].constants["D_QUERY"]:
        products -= 64 // 16 * 2
    return attrs.evolve(launches[0], products=products)


CONFIGURATIONS: list[tuple[int, Any]] = [
    *((dim, flash_attention.Config(*shape)) for dim, shapes in flash_attention.SHAPES.items() for shape in shapes),
    *((dim, flash_attention_bwd.Config(q)) for dim, blocks in flash_attention_bwd.Q_BLOCKS.items() for q in blocks),
]
#: The configurations that are checked before the long sweep.
BEST = [
    *((dim, flash_attention.Config(*shapes[0])) for dim, shapes in flash_attention.SHAPES.items()),
    *((dim, flash_attention_bwd.Config(blocks[0])) for dim, blocks in flash_attention_bwd.Q_BLOCKS.items()),
]


def check(figures: Figures, cfg: Any, dim: int, features: str) -> None:
    is_forward = isinstance(cfg, flash_attention.Config)
    assert figures.num_warps == 12  # two groups of four, and one that fetches, with room for three more
    assert figures.shared_memory <= SHARED_MEMORY
    # XLA makes graphs of several launches, which must not allocate.
    assert not figures.scratch
    # Each of two groups of warps loads the number of tiles, and for each tile five numbers, in the forward pass also for
    # the next tile; the warp that fetches loads four in all. Triton removes loads that it takes for dead.
    least = 26 if is_forward else 16
    assert figures.tile_numbers == least or (features in CACHE and figures.tile_numbers > least)
    assert figures.words["wgmma.mma_async"]
    assert figures.words["cp.async.bulk.tensor"]
    assert len(figures.loops) == 2
    most_loads, most_stores = spilled_in_a_step(cfg, dim, features)
    for loop in figures.loops:
        assert loop.loads <= most_loads
        assert loop.stores <= most_stores
        # More waits would mean that products wait for each other.
        assert len(loop.waits) <= (2 if is_forward else 4)


def products_of_a_step(cfg: Any, dim: int) -> int:
    """The number of products, each of which sums 16 numbers."""
    if isinstance(cfg, flash_attention.Config):
        return (dim + cfg.k_block) // 16
    if dim == 256:
        # Logits and the gradients of weights over all dims, for half of the queries in each group; then half of the dims
        # of each gradient, over 64 queries or keys.
        return 2 * dim // 16 + 2 * cfg.q_block // 16 + 2 * 64 // 16
    return 2 * (dim + cfg.q_block) // 16 + 8


def spilled_in_a_step(cfg: Any, dim: int, features: str) -> tuple[int, int]:
    """How many numbers a thread may read from and write to its stack in a step, with the branch for masks. A step of the
    backward has 32 products and 32 exponentials for each thread.
    """
    if isinstance(cfg, flash_attention.Config):
        if features in CACHE:  # of 256 dims the second group of warps spills, and the first hardly
            return (30, 4) if dim == 256 else (2, 0)
        return (4, 0) if (dim, features) == (256, "segments") else (1, 0)
    if dim == 64:
        return (28, 5) if cfg.q_block == 128 else (0, 0)
    if dim == 256:
        # Of the second group of warps; the first one has up to five loads and a store.
        return (42, 23) if _jax_triton.triton_version() < (3, 9) else (25, 7)
    spilled = {"full": (6, 0), "causal": (11, 0), "window": (10, 0), "soft cap": (29, 9), "segments": (20, 3)}
    alike = {"sinks": "causal", "packed": "window", "window and soft cap": "soft cap"}
    alike |= {"lengths": "causal", "ring": "causal"}
    return spilled[alike.get(features, features)]


@pytest.mark.parametrize(
    ("dim", "cfg"),
    [pytest.param(*one, marks=() if one in BEST else pytest.mark.long) for one in CONFIGURATIONS],
    ids=str,
)
def test_every_configuration_compiles_for_hopper(launches: list[Launch], dim: int, cfg: Any) -> None:
    check(LOCK.get(launched(launches, dim, cfg, FEATURES["causal"])), cfg, dim, "causal")


@pytest.mark.parametrize("features", CACHE)
@pytest.mark.parametrize("cfg", [flash_attention.Config(), flash_attention_bwd.Config()], ids=str)
def test_positions_in_a_cache_compile_for_hopper(launches: list[Launch], cfg: Any, features: str) -> None:
    check(LOCK.get(launched(launches, 128, cfg, FEATURES[features])), cfg, 128, features)


@pytest.mark.long
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(("dim", "cfg"), CONFIGURATIONS, ids=str)
def test_every_feature_compiles_for_hopper(launches: list[Launch], dim: int, cfg: Any, features: str) -> None:
    if getattr(cfg, "q_block", 64) == 128 and features not in ("full", "causal", "sinks"):
        with pytest.raises(Unsupported, match="does not fit"):
            launched(launches, dim, cfg, FEATURES[features])
        return
    launch = launched(launches, dim, cfg, FEATURES[features])
    figures = launch.compile()
    check(figures, cfg, dim, features)
    assert LOCK.figures.get(launch.digest) in (None, figures), f"{LOCK.file.name} differs"


EARLY_LOGITS = [(False, 3, (29, 9)), (True, 4, (50, 16))]


def launched_with_a_soft_cap(launches: list[Launch], is_early: bool) -> Launch:
    launch = launched(launches, 128, flash_attention_bwd.Config(64), FEATURES["soft cap"])
    return attrs.evolve(launch, constants={**launch.constants, "EARLY_LOGITS": is_early})


@pytest.mark.parametrize(("is_early", "most_waits", "spilled"), EARLY_LOGITS)
def test_a_soft_cap_with_and_without_early_logits(
    launches: list[Launch], is_early: bool, most_waits: int, spilled: tuple[int, int]
) -> None:
    """With each Triton, though 3.9 does not use early logits: their product is one more to wait for in a step."""
    launch = launched(launches, 128, flash_attention_bwd.Config(64), FEATURES["soft cap"])
    assert launch.constants["EARLY_LOGITS"] == (_jax_triton.triton_version() < (3, 9))
    for loop in LOCK.get(launched_with_a_soft_cap(launches, is_early)).loops:
        assert len(loop.waits) == most_waits
        assert loop.loads <= spilled[0]
        assert loop.stores <= spilled[1]


@pytest.mark.long
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_backward_pass_without_queries_compiles_for_hopper(launches: list[Launch], dim: int) -> None:
    cfg = flash_attention_bwd.Config(64)
    figures = launched(launches, dim, cfg, {**FEATURES["causal"], "wrt": ("key", "value")}).compile()
    check(figures, cfg, dim, "causal")
    assert not figures.words["cp.reduce.async.bulk"]


def adds(launch: Launch) -> bool:
    """Whether a launch adds the gradient of queries to memory."""
    return bool(launch.constants.get("D_QUERY"))


@pytest.mark.parametrize("flag", ["--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops=true"])
def test_the_gradient_of_queries_is_refused_where_xla_is_deterministic(
    monkeypatch: pytest.MonkeyPatch, launches: list[Launch], flag: str
) -> None:
    cfg = flash_attention_bwd.Config()
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/nowhere {flag}")
    for refuses in (
        lambda: flash_attention_bwd.heuristic_cfg(invocation(64, {})),
        lambda: flash_attention_bwd.config_space(invocation(64, {})),
        lambda: flash_attention_bwd.check_cfg(invocation(64, {}), cfg),
    ):
        with pytest.raises(Unsupported, match=r"differs from run to run.*: flash_attention_bwd\.triton has them"):
            refuses()
    # The gradients of keys and values are the same bits every time.
    launch = launched(launches, 64, cfg, {"wrt": ("key", "value")})
    assert (launch.kernel.partition(":")[2], adds(launch), len(launches)) == ("sum_over_queries", False, 1)
    # The last flag counts.
    monkeypatch.setenv("XLA_FLAGS", f"{flag} {flag.partition('=')[0]}=false")
    assert adds(launched(launches, 64, cfg, {}))


@pytest.mark.parametrize("wrt", [("key", "value"), ("value",), ("query",), ("key", "query")])
def test_the_gradient_of_queries_is_computed_if_it_is_requested(launches: list[Launch], wrt: tuple[str, ...]) -> None:
    assert adds(launched(launches, 64, flash_attention_bwd.Config(), {"wrt": wrt})) == ("query" in wrt)
    assert len(launches) == 1


def test_programs_are_as_many_as_the_card_holds(monkeypatch: pytest.MonkeyPatch, launches: list[Launch]) -> None:
    configs = flash_attention.Config(), flash_attention_bwd.Config()
    # 2 batches of 4 heads of 4 blocks of queries, or 2 heads of keys.
    assert [launched(launches, 128, cfg, {}).grid for cfg in configs] == [(32,), (16,)]
    for module in (flash_attention, flash_attention_bwd):
        monkeypatch.setattr(module, "multiprocessors", lambda inv: 2)
    assert [launched(launches, 128, cfg, {}).grid for cfg in configs] == [(2,), (2,)]


def recorded_launches(launches: list[Launch]) -> Iterator[tuple[str, Launch]]:
    """The launches of the tests before the long sweep."""
    for dim, cfg in BEST:
        yield f"head dim {dim}, {cfg}", launched(launches, dim, cfg, FEATURES["causal"])
    for cfg in (flash_attention.Config(), flash_attention_bwd.Config()):
        for features in CACHE:
            yield f"{features}, {cfg}", launched(launches, 128, cfg, FEATURES[features])
    for is_early, *_ in EARLY_LOGITS:
        yield f"soft cap, early logits {is_early}", launched_with_a_soft_cap(launches, is_early)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        LOCK.write(recorded_launches(record_launches(monkeypatch)))
