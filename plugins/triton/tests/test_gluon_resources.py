"""The resources of the kernels for Hopper: every configuration, with every feature, compiled by Triton alone.

jax-triton compiles Gluon kernels only from version 0.4.1 on, which needs Python 3.12. So these tests record the launches
and compile them without it, with every Python and every Triton. What they measure of the best configurations is in
`gluon_resources.json`, with a hash of what decides it; the tests compile what is not in it with the same hash, and those
of the long sweep compile everything. `python plugins/triton/tests/test_gluon_resources.py` writes the file.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
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
from ejkernel_triton.interpreter._resources import sources
from ejkernel_triton.launch import _jax_triton

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

LOCK_FILE = Path(__file__).with_name("gluon_resources.json")
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
class Figures:
    """What is measured of a compiled kernel."""

    num_warps: int
    shared_memory: int
    #: The bytes that a launch allocates.
    scratch: int
    #: How many of the host's numbers about tiles the kernel loads.
    tile_numbers: int
    #: How often the PTX has a word.
    words: dict[str, int]
    #: Of the loop over blocks of each group of warps: reads from and writes to the stack, and waits for products.
    loops: tuple[tuple[int, int, int], ...]


WORDS = ("wgmma.mma_async", "cp.async.bulk.tensor", "cp.reduce.async.bulk")


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

    @property
    def types(self) -> list[str]:
        """Triton's types of the parameters that are no constants."""
        return [*map(_type, [*self.arrays, *self.scalars, *self.outputs])]

    @property
    def digest(self) -> str:
        """A hash of all that decides the figures."""
        code = sources(self.kernel.partition(":")[0])
        parts = (
            _jax_triton.triton_version(),
            code,
            self.kernel,
            self.types,
            self.constants,
            self.num_warps,
            self.products,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def compile(self) -> Figures:
        """By Triton, for an H200."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.experimental.gluon._runtime import GluonASTSource

        kernel = _jax_triton.import_kernel(self.kernel)
        names = kernel.arg_names
        types = [*self.types, *["constexpr"] * (len(names) - len(self.types))]
        even = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")}
        constants = {(names.index(name),): constant for name, constant in self.constants.items()}
        source = GluonASTSource(kernel, dict(zip(names, types, strict=True)), constants, even)
        options = {"num_warps": self.num_warps, "enable_fp_fusion": True, "ptx_version": 87}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        return Figures(
            num_warps=compiled.metadata.num_warps,
            shared_memory=compiled.metadata.shared,
            scratch=compiled.metadata.global_scratch_size or 0,
            tile_numbers=len(re.findall(r"= tt\.load %\S+ : !tt\.ptr<i32>", compiled.asm["ttgir"])),
            words={word: compiled.asm["ptx"].count(word) for word in WORDS},
            loops=tuple(
                (count(body, "LDL"), count(body, "STL"), count(body, "WARPGROUP.DEPBAR"))
                for body in loops(compiled.asm["cubin"], self.products)
            ),
        )


def _type(argument: Any) -> str:
    if isinstance(argument, int):
        return "i32"
    if isinstance(argument, _jax_triton.DescribedArray):
        dtype, descriptor = argument.array.dtype, argument.descriptor
        block = ",".join(map(str, descriptor.block))
        return f"tensordesc<{TYPES[str(dtype)]}[{block}],{descriptor.layout(dtype)!r}>"
    return f"*{TYPES[str(argument.dtype)]}"


def read_lock() -> dict[str, Figures]:
    """The recorded figures, by the hashes of the launches."""
    rows = json.loads(LOCK_FILE.read_text()) if LOCK_FILE.exists() else []
    return {digest: Figures(**{**row, "loops": tuple(map(tuple, row["loops"]))}) for _, digest, row in rows}


LOCK = read_lock()


def figures_of(launch: Launch) -> Figures:
    """The recorded figures of a launch; measured if anything that decides them has changed."""
    return LOCK.get(launch.digest) or launch.compile()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches of a test, which are not run."""
    return record_launches(monkeypatch)


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    _jax_triton.load()  # before the version changes
    launches: list[Launch] = []

    def call(
        kernel: str, arrays: Any, outputs: Any, *, scalars: Any = (), constants: Any, num_warps: int, **rest: Any
    ) -> tuple[jax.Array, ...]:
        aliases = (rest.get("aliases") or {}).values()
        own = [x for i, x in enumerate(outputs) if i not in aliases]
        launches.append(Launch(kernel, list(arrays), own, scalars, dict(constants), num_warps, rest["grid"], 0))
        return tuple(jnp.zeros(x.shape, x.dtype) for x in outputs)

    monkeypatch.setattr(_jax_triton, "call", call)
    monkeypatch.setattr(_jax_triton, "version", lambda: (0, 4, 1))
    monkeypatch.setattr(_jax_triton, "no_descriptors_reason", lambda: None)
    return launches


def invocation(dim: int, features: dict[str, Any]) -> Invocation:
    """A call of the backward pass, which has all arguments of the forward pass, too."""
    batch = () if "cum_seqlens_q" in features else (2,)
    query, key = (jax.ShapeDtypeStruct((*batch, 512, heads, dim), "bfloat16") for heads in (4, 2))
    results = {"out": query, "lse": jax.ShapeDtypeStruct((*batch, 4, 512), "float32"), "d_out": query}
    features = {"wrt": ("query", "key", "value"), **features}
    own = {"query": query, "key": key, "value": key}
    inv = ejkernel_core.invocation("flash_attention_bwd", **own, **results, **features)
    return attrs.evolve(inv, platform="gpu", device_kind="NVIDIA H200", compute_capability=(9, 0))


def launched(launches: list[Launch], dim: int, cfg: Any, features: dict[str, Any]) -> Launch:
    """The first launch of a call. The configuration is checked as the core checks it."""
    launches.clear()
    inv = invocation(dim, features)
    backend = flash_attention_bwd if isinstance(cfg, flash_attention_bwd.Config) else flash_attention
    backend.check_cfg(inv, cfg)
    arrays = {name: x for name, x in inv.arguments.items() if hasattr(x, "shape")}
    jax.eval_shape(lambda arrays: backend.run_backend(inv.with_arrays(arrays), cfg), arrays)
    products = products_of_a_step(cfg, dim)
    if isinstance(cfg, flash_attention_bwd.Config) and not launches[0].constants["D_QUERY"]:
        products -= 64 // 16 * 2
    return attrs.evolve(launches[0], products=products)


def loops(cubin: bytes, products: int) -> list[list[str]]:
    """The instructions of the loops over blocks, one for each group of warps, which have this number of products."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L\S+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction[1])
    jumps = ((i, re.search(r"BRA.*`\((\.L\S+)\)", instruction)) for i, instruction in enumerate(code))
    backward_jumps = [(labels[jump[1]], i) for i, jump in jumps if jump and labels.get(jump[1], i) < i]
    bodies = [code[first : last + 1] for first, last in backward_jumps]
    # A jump back into the middle of a loop does not have all products after it.
    return sorted((body for body in bodies if count(body, "HGMMA") == products), key=len)[:2]


def count(code: list[str], word: str) -> int:
    return sum(word in instruction for instruction in code)


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
    assert figures.tile_numbers == (26 if is_forward else 16)
    assert figures.words["wgmma.mma_async"]
    assert figures.words["cp.async.bulk.tensor"]
    assert len(figures.loops) == 2
    most_loads, most_stores = spilled_in_a_step(cfg, dim, features)
    for loads, stores, waits in figures.loops:
        assert loads <= most_loads
        assert stores <= most_stores
        # More waits would mean that products wait for each other.
        assert waits <= (2 if is_forward else 4)


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
    check(figures_of(launched(launches, dim, cfg, FEATURES["causal"])), cfg, dim, "causal")


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
    assert LOCK.get(launch.digest) in (None, figures), f"{LOCK_FILE.name} differs"


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
    for loads, stores, waits in figures_of(launched_with_a_soft_cap(launches, is_early)).loops:
        assert waits == most_waits
        assert loads <= spilled[0]
        assert stores <= spilled[1]


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
    monkeypatch.setattr(_schedule, "programs", lambda device_kind: 2)
    assert [launched(launches, 128, cfg, {}).grid for cfg in configs] == [(2,), (2,)]


def recorded_launches(launches: list[Launch]) -> Iterator[tuple[str, Launch]]:
    """The launches of the tests before the long sweep."""
    for dim, cfg in BEST:
        yield f"head dim {dim}, {cfg}", launched(launches, dim, cfg, FEATURES["causal"])
    for is_early, *_ in EARLY_LOGITS:
        yield f"soft cap, early logits {is_early}", launched_with_a_soft_cap(launches, is_early)


def write_lock() -> None:
    """Write the lock file: compile what has changed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        launches = list(recorded_launches(record_launches(monkeypatch)))
        rows = [(name, launch.digest, attrs.asdict(figures_of(launch))) for name, launch in launches]
    LOCK_FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    write_lock()
