"""What the kernels for Hopper take of a card: every configuration, with every feature, compiled by Triton alone.

jax-triton does that where it is new enough. Here what it would be called with is taken down and compiled, so that it is
proved with every Python and every Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest

import ejkernel_core
from ejkernel_core import Invocation, Unsupported
from ejkernel_triton import flash_attention_sm90 as flash_attention
from ejkernel_triton.flash_attention_sm90 import _schedule
from ejkernel_triton.flash_attention_sm90 import backward as flash_attention_bwd
from ejkernel_triton.launch import _jax_triton

if _jax_triton.missing():
    pytest.skip(_jax_triton.missing(), allow_module_level=True)

SHARED_MEMORY = 227 * 1024
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "sliding_window": (300, 0)},
    "soft cap": {"causal": True, "logits_soft_cap": 20.0},
    "window and soft cap": {"causal": True, "sliding_window": (300, 0), "logits_soft_cap": 20.0},
    "sinks": {"causal": True, "softmax_aux": jax.ShapeDtypeStruct((4, 3), "float32")},
    "segments": {name: jax.ShapeDtypeStruct((2, 512), "int32") for name in ("q_segment_ids", "kv_segment_ids")},
    "packed": {name: jax.ShapeDtypeStruct((4,), "int32") for name in ("cum_seqlens_q", "cum_seqlens_k")},
}


@attrs.frozen
class Described:
    """An array for the copy engine."""

    array: Any
    block: tuple[int, ...]
    layout: Any


@attrs.frozen
class Launch:
    """What a kernel is called with."""

    kernel: Any
    arrays: list[Any]
    outputs: list[Any]
    scalars: tuple[int, ...]
    constants: dict[str, Any]
    num_warps: int
    grid: tuple[int, ...]

    def compiled(self) -> Any:
        """By Triton, for an H200."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.experimental.gluon._runtime import GluonASTSource

        names = self.kernel.arg_names
        given = [*self.arrays, *self.scalars, *self.outputs]
        types = [*map(_type, given), *["constexpr"] * (len(names) - len(given))]
        even = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")}
        constants = {(names.index(name),): constant for name, constant in self.constants.items()}
        source = GluonASTSource(self.kernel, dict(zip(names, types, strict=True)), constants, even)
        options = {"num_warps": self.num_warps, "enable_fp_fusion": True, "ptx_version": 87}
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _type(given: Any) -> str:
    if isinstance(given, int):
        return "i32"
    if isinstance(given, Described):
        block = ",".join(map(str, given.block))
        return f"tensordesc<{TYPES[str(given.array.dtype)]}[{block}],{given.layout!r}>"
    return f"*{TYPES[str(given.dtype)]}"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What is launched, and is not run."""
    _jax_triton.load()  # as the version that it is
    found: list[Launch] = []

    def call(
        kernel: Any, arrays: Any, outputs: Any, *, scalars: Any = (), constants: Any, num_warps: int, **rest: Any
    ) -> tuple[jax.Array, ...]:
        updated = (rest.get("updated") or {}).values()
        own = [x for i, x in enumerate(outputs) if i not in updated]
        found.append(Launch(kernel, list(arrays), own, scalars, dict(constants), num_warps, rest["grid"]))
        return tuple(jnp.zeros(x.shape, x.dtype) for x in outputs)

    monkeypatch.setattr(_jax_triton, "call", call)
    monkeypatch.setattr(_jax_triton, "described", Described)
    monkeypatch.setattr(_jax_triton, "version", lambda: (0, 4, 1))
    monkeypatch.setattr(_jax_triton, "why_no_descriptors", lambda: None)
    return found


def invocation(dim: int, features: dict[str, Any]) -> Invocation:
    """Of the backward pass, whose arguments are also those of the forward pass."""
    batch = () if "cum_seqlens_q" in features else (2,)
    query, key = (jax.ShapeDtypeStruct((*batch, 512, heads, dim), "bfloat16") for heads in (4, 2))
    passed = {"out": query, "lse": jax.ShapeDtypeStruct((*batch, 4, 512), "float32"), "d_out": query}
    features = {"wrt": ("query", "key", "value"), **features}
    own = {"query": query, "key": key, "value": key}
    inv = ejkernel_core.invocation("flash_attention_bwd", **own, **passed, **features)
    return attrs.evolve(inv, platform="gpu", device_kind="NVIDIA H200", compute_capability=(9, 0))


def launched(launches: list[Launch], dim: int, cfg: Any, features: dict[str, Any]) -> Launch:
    """The first, of a configuration that is checked as the core checks it."""
    launches.clear()
    inv = invocation(dim, features)
    backend = flash_attention_bwd if isinstance(cfg, flash_attention_bwd.Config) else flash_attention
    backend.check_cfg(inv, cfg)
    arrays = {name: x for name, x in inv.arguments.items() if hasattr(x, "shape")}
    jax.eval_shape(lambda arrays: backend.run_backend(inv.with_arrays(arrays), cfg), arrays)
    return launches[0]


def loops(cubin: bytes, products: int) -> list[list[str]]:
    """The instructions of the loops over blocks, one for each group of warps, that have so many products."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    places: dict[str, int] = {}
    code: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L\S+):", line):
            places[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction[1])
    jumps = ((i, re.search(r"BRA.*`\((\.L\S+)\)", one)) for i, one in enumerate(code))
    found = [(places[jump[1]], i) for i, jump in jumps if jump and places.get(jump[1], i) < i]
    bodies = [code[first : last + 1] for first, last in found]
    # Whoever jumps back into the middle of a loop makes none of his own: that would not have all products.
    return sorted((body for body in bodies if count(body, "HGMMA") == products), key=len)[:2]


def count(code: list[str], word: str) -> int:
    return sum(word in one for one in code)


CONFIGURATIONS: list[tuple[int, Any]] = [
    *((dim, flash_attention.Config(*shape)) for dim, shapes in flash_attention.SHAPES.items() for shape in shapes),
    *((dim, flash_attention_bwd.Config(q)) for dim, blocks in flash_attention_bwd.Q_BLOCKS.items() for q in blocks),
]
#: Those that are compiled before the long sweep.
BEST = [
    *((dim, flash_attention.Config(*shapes[0])) for dim, shapes in flash_attention.SHAPES.items()),
    *((dim, flash_attention_bwd.Config(blocks[0])) for dim, blocks in flash_attention_bwd.Q_BLOCKS.items()),
]


def check(kernel: Any, cfg: Any, dim: int, features: str, products: int) -> None:
    assert kernel.metadata.num_warps == 12  # two groups of four, and one that fetches with room for three more
    assert kernel.metadata.shared <= SHARED_MEMORY
    # XLA makes graphs of several launches, and there is no place there for one that allocates.
    assert not kernel.metadata.global_scratch_size
    assert numbers_of_tiles(kernel) == (26 if isinstance(cfg, flash_attention.Config) else 16)
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    found = loops(kernel.asm["cubin"], products)
    assert len(found) == 2
    for body in found:
        loads, stores = spilled_in_a_step(cfg, dim, features)
        assert count(body, "LDL") <= loads
        assert count(body, "STL") <= stores
        # More waits would be products that wait for each other.
        assert count(body, "WARPGROUP.DEPBAR") <= (2 if isinstance(cfg, flash_attention.Config) else 4)


def numbers_of_tiles(kernel: Any) -> int:
    """How many of the host's numbers the kernel loads: in each of two groups how many tiles there are, and which a tile
    is and what it sees, five numbers (forward also for the tile that follows); by the warp that fetches four in all.
    Triton leaves out those of which it thinks, rightly or not, that nobody needs them.
    """
    return len(re.findall(r"= tt\.load %\S+ : !tt\.ptr<i32>", kernel.asm["ttgir"]))


def products_of_a_step(cfg: Any, dim: int) -> int:
    """Each sums up 16 numbers."""
    if isinstance(cfg, flash_attention.Config):
        return (dim + cfg.k_block) // 16
    if dim == 256:
        # Logits and the gradients of weights over all dims, each group for half of the queries; then over 64 queries or
        # keys what is summed up in half of the dims.
        return 2 * dim // 16 + 2 * cfg.q_block // 16 + 2 * 64 // 16
    return 2 * (dim + cfg.q_block) // 16 + 8


def spilled_in_a_step(cfg: Any, dim: int, features: str) -> tuple[int, int]:
    """How many numbers a thread may read from and write to its stack in a step, the branch with the masks included. A
    step of the backward has 32 products and 32 exponentials for each thread.
    """
    if isinstance(cfg, flash_attention.Config):
        return (4, 0) if (dim, features) == (256, "segments") else (1, 0)
    if dim == 64:
        return (28, 5) if cfg.q_block == 128 else (0, 0)
    if dim == 256:
        return (5, 1)
    spilled = {"full": (6, 0), "causal": (11, 0), "window": (10, 0), "soft cap": (29, 9), "segments": (20, 3)}
    alike = {"sinks": "causal", "packed": "window", "window and soft cap": "soft cap"}
    return spilled[alike.get(features, features)]


@pytest.mark.parametrize(
    ("dim", "cfg"),
    [pytest.param(*one, marks=() if one in BEST else pytest.mark.long) for one in CONFIGURATIONS],
    ids=str,
)
def test_every_configuration_compiles_for_hopper(launches: list[Launch], dim: int, cfg: Any) -> None:
    kernel = launched(launches, dim, cfg, FEATURES["causal"]).compiled()
    check(kernel, cfg, dim, "causal", products_of_a_step(cfg, dim))


@pytest.mark.long
@pytest.mark.parametrize("features", [name for name in FEATURES if name != "causal"])
@pytest.mark.parametrize(("dim", "cfg"), CONFIGURATIONS, ids=str)
def test_every_feature_compiles_for_hopper(launches: list[Launch], dim: int, cfg: Any, features: str) -> None:
    if getattr(cfg, "q_block", 64) == 128 and features not in ("full", "sinks"):
        with pytest.raises(Unsupported, match="does not fit"):
            launched(launches, dim, cfg, FEATURES[features])
        return
    kernel = launched(launches, dim, cfg, FEATURES[features]).compiled()
    check(kernel, cfg, dim, features, products_of_a_step(cfg, dim))


@pytest.mark.parametrize(("ahead", "waits", "spilled"), [(False, 4, (29, 9)), (True, 5, (50, 16))])
def test_a_soft_cap_with_and_without_early_logits(
    launches: list[Launch], ahead: bool, waits: int, spilled: tuple[int, int]
) -> None:
    """By whichever Triton, though with 3.9 they are not taken: their product is one more to wait for in a step."""
    cfg = flash_attention_bwd.Config(64)
    launch = launched(launches, 128, cfg, FEATURES["soft cap"])
    assert launch.constants["AHEAD"] == (_jax_triton.version_of_triton() < (3, 9))
    kernel = attrs.evolve(launch, constants={**launch.constants, "AHEAD": ahead}).compiled()
    for body in loops(kernel.asm["cubin"], products_of_a_step(cfg, 128)):
        assert count(body, "DEPBAR") == waits
        assert count(body, "LDL") <= spilled[0]
        assert count(body, "STL") <= spilled[1]


@pytest.mark.long
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_backward_pass_without_queries_compiles_for_hopper(launches: list[Launch], dim: int) -> None:
    cfg = flash_attention_bwd.Config(64)
    launch = launched(launches, dim, cfg, {**FEATURES["causal"], "wrt": ("key", "value")})
    kernel = launch.compiled()
    check(kernel, cfg, dim, "causal", products_of_a_step(cfg, dim) - 64 // 16 * 2)
    assert "cp.reduce.async.bulk" not in kernel.asm["ptx"]


def adds(launch: Launch) -> bool:
    """Whether the gradient of queries is added up in memory."""
    return bool(launch.constants.get("D_QUERY"))


def test_without_atomics_another_kernel_computes_the_gradient_of_queries(launches: list[Launch]) -> None:
    assert adds(launched(launches, 128, flash_attention_bwd.Config(), {}))
    assert len(launches) == 1
    assert not adds(launched(launches, 128, flash_attention_bwd.Config(atomics=False), {}))
    assert [launch.kernel.__name__ for launch in launches] == ["sum_over_queries", "sum_over_keys"]


@pytest.mark.parametrize("flag", ["--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops=true"])
def test_nothing_is_added_in_any_order_where_xla_is_deterministic(
    monkeypatch: pytest.MonkeyPatch, launches: list[Launch], flag: str
) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/nowhere {flag}")
    assert not adds(launched(launches, 64, flash_attention_bwd.Config(), {}))
    assert [cfg.atomics for cfg in flash_attention_bwd.config_space(invocation(64, {}))] == [False, False]
    # The last one counts.
    monkeypatch.setenv("XLA_FLAGS", f"{flag} {flag.partition('=')[0]}=false")
    assert adds(launched(launches, 64, flash_attention_bwd.Config(), {}))
    assert flash_attention_bwd.heuristic_cfg(invocation(64, {})).atomics


@pytest.mark.parametrize("wrt", [("key", "value"), ("value",), ("query",), ("key", "query")])
def test_the_gradient_of_queries_is_added_up_where_it_is_asked(launches: list[Launch], wrt: tuple[str, ...]) -> None:
    assert adds(launched(launches, 64, flash_attention_bwd.Config(), {"wrt": wrt})) == ("query" in wrt)
    assert len(launches) == 1


def test_who_asks_for_the_same_bits_of_queries_alone_has_no_sums_over_queries(launches: list[Launch]) -> None:
    launch = launched(launches, 64, flash_attention_bwd.Config(atomics=False), {"wrt": ("query",)})
    assert (launch.kernel.__name__, len(launches)) == ("sum_over_keys", 1)


def test_programs_are_as_many_as_the_card_holds(monkeypatch: pytest.MonkeyPatch, launches: list[Launch]) -> None:
    configs = flash_attention.Config(), flash_attention_bwd.Config()
    # 2 batches of 4 heads of 4 blocks of queries, or 2 heads of keys.
    assert [launched(launches, 128, cfg, {}).grid for cfg in configs] == [(32,), (16,)]
    monkeypatch.setattr(_schedule, "programs", lambda device_kind: 2)
    assert [launched(launches, 128, cfg, {}).grid for cfg in configs] == [(2,), (2,)]
