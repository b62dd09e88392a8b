"""Refusals with their reasons, the configurations of each card, and that every configuration has the same results."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.calibration import get_shared_memory_limit
from ejkernel_triton import flash_attention
from ejkernel_triton.flash_attention import _tuning
from ejkernel_triton.flash_attention import backward as flash_attention_bwd
from ejkernel_triton.flash_attention.backward import Pass
from ejkernel_triton.interpreter import interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton

KERNELS = {"flash_attention.triton": flash_attention, "flash_attention_bwd.triton": flash_attention_bwd}
CARDS = {"NVIDIA H200": (9, 0), "NVIDIA A100-SXM4-80GB": (8, 0), "NVIDIA L40S": (8, 9), "NVIDIA GB200": (10, 0)}
H200 = "NVIDIA H200"


def invocation(
    card: str | None = H200,
    capability: tuple[int, int] | None = (9, 0),
    dim: int = 128,
    value_dim: int | None = None,
    dtype: Any = "bfloat16",
    lengths: tuple[int, int] = (4096, 4096),
    **more: Any,
) -> Invocation:
    """The invocation that kernels get on a card."""
    shape = jax.ShapeDtypeStruct
    query, key = (shape((1, length, 4, dim), dtype) for length in lengths)
    value = shape((1, lengths[1], 4, value_dim or dim), dtype)
    inv = ejkernel_core.invocation("flash_attention", query, key, value, **more)
    return attrs.evolve(inv, platform="gpu", device_kind=card, compute_capability=capability)


def on(card: str, **given: Any) -> Invocation:
    return invocation(card, CARDS[card], **given)


# -- how it is found ----------------------------------------------------------------------------------------------


def test_the_plugin_is_found_by_its_entry_points() -> None:
    found = {point.name: point.load() for point in importlib.metadata.entry_points(group="ejkernel.kernels")}
    assert {name: found.get(name) for name in KERNELS} == KERNELS
    for name, module in KERNELS.items():
        plan = ejkernel_core.plan(
            name.partition(".")[0], **_arrays(name)
        )  # it has the verdicts on our kernels, even on a CPU
        (message,) = (verdict for verdict in plan.verdicts if verdict.name == name)
        assert message.provider.startswith("ejkernel-triton")
        assert module.PLATFORMS == {"gpu": 50}
        assert module.COMPILERS == ("triton", "jax-triton")


def _arrays(name: str) -> dict[str, Any]:
    array, lse = jax.ShapeDtypeStruct((1, 8, 2, 16), "float32"), jax.ShapeDtypeStruct((1, 2, 8), "float32")
    given: dict[str, Any] = {"query": array, "key": array, "value": array}
    return given if "bwd" not in name else {**given, "out": array, "lse": lse, "d_out": array, "wrt": ("query",)}


def test_importing_it_imports_neither_triton_nor_jax_triton() -> None:
    code = (
        "import sys, ejkernel_triton.flash_attention, ejkernel_triton.flash_attention.backward\n"
        "print(sorted({'triton', 'jax_triton', 'torch'} & {name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


# -- refusals -----------------------------------------------------------------------------------------------------

REFUSED = {
    "another maker's card": ({"card": "MI300X", "capability": None}, "for NVIDIA GPUs, and MI300X is not known as one"),
    "no card": (
        {"card": None, "capability": None},
        "none is here: say which is meant, by jax.sharding.use_abstract_mesh",
    ),
    "Turing": ({"capability": (7, 5)}, "compute capability 8.0 (Ampere) or later; this GPU has 7.5"),
    "Volta": ({"capability": (7, 0)}, "compute capability 8.0 (Ampere) or later; this GPU has 7.0"),
    "wide heads": ({"dim": 264}, "take head dims up to 256, not 264"),
    "wide values": ({"value_dim": 512}, "take head dims up to 256, not 512"),
}


@pytest.mark.parametrize("module", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_calls_are_refused_with_the_reason(name: str, module: Any) -> None:
    given, message = REFUSED[name]
    for hook in (module.heuristic_cfg, module.config_space):
        with pytest.raises(Unsupported) as fault:
            _all(hook(invocation(**given)))
        assert message in str(fault.value)


def _all(found: Any) -> list[Any]:
    """A generator raises when its first configuration is read."""
    return list(found) if isinstance(found, Iterable) else [found]


@pytest.mark.parametrize("module", KERNELS.values(), ids=KERNELS)
def test_float64_is_refused(module: Any) -> None:
    with jax.enable_x64(True), pytest.raises(Unsupported) as fault:
        module.heuristic_cfg(invocation(dtype="float64"))
    assert str(fault.value) == "the Triton kernels take float16, bfloat16, float32; not float64"


@pytest.mark.parametrize("module", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(
    "message",
    [
        "triton is not installed: pip install triton",
        "jax-triton 0.3.0 is too old, 0.3.1 is the least: pip install jax-triton",
    ],
)
def test_a_missing_package_is_the_reason_of_a_refusal(
    monkeypatch: pytest.MonkeyPatch, module: Any, message: str
) -> None:
    monkeypatch.setattr(_jax_triton, "unavailable_reason", lambda: message)
    with pytest.raises(Unsupported) as fault:
        module.heuristic_cfg(invocation(capability=None))  # a missing package is the first reason
    assert str(fault.value) == message


def test_a_refusal_is_in_the_explanation_and_another_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = interpreted_registry(KERNELS)
    arrays = _arrays("flash_attention.triton")
    assert registry.plan("flash_attention", **arrays).kernel.name == "flash_attention.triton"
    monkeypatch.setattr(_jax_triton, "unavailable_reason", lambda: "triton is not installed: pip install triton")
    plan = interpreted_registry(KERNELS).plan("flash_attention", **arrays)
    assert plan.kernel.name != "flash_attention.triton"
    (message,) = (verdict for verdict in plan.verdicts if verdict.name == "flash_attention.triton")
    assert (message.status, message.reason) == ("refused", "triton is not installed: pip install triton")


def test_supported_calls_are_not_refused() -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        for dim in (8, 16, 80, 256):
            for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
                inv = invocation(dtype=dtype, dim=dim, capability=capability)
                assert isinstance(flash_attention.heuristic_cfg(inv), flash_attention.Config)
                assert isinstance(flash_attention_bwd.heuristic_cfg(inv), flash_attention_bwd.Config)


# -- configurations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [flash_attention.Config, Pass])
@pytest.mark.parametrize(
    ("name", "value"),
    [("q_block", 48), ("q_block", 8), ("k_block", 512), ("k_block", 0), ("num_warps", 3), ("num_stages", 0)],
)
def test_configurations_that_cannot_be_compiled_raise(kind: Any, name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"'{name}' must be in"):
        kind(**{"q_block": 64, "k_block": 64, name: value})


@pytest.mark.parametrize("name", ["keys", "queries", "bias"])
def test_passes_have_their_type(name: str) -> None:
    with pytest.raises(TypeError, match=f"'{name}' must be"):
        flash_attention_bwd.Config(**{name: (64, 64, 4, 2)})
    cfg = flash_attention_bwd.Config(**{name: Pass(32, 16)})
    assert getattr(cfg, name) == Pass(32, 16, 8, 2)


def test_atomics_is_a_bool_and_false_by_default() -> None:
    assert flash_attention_bwd.Config().atomics is False
    with pytest.raises(TypeError, match="'atomics' must be"):
        flash_attention_bwd.Config(atomics=1)  # type: ignore[arg-type]


# -- heuristics ---------------------------------------------------------------------------------------------------

FORWARD = {
    (H200, 64): (64, 64, 4, 3),
    (H200, 96): (128, 128, 8, 3),
    (H200, 128): (128, 128, 8, 3),
    (H200, 192): (128, 64, 8, 2),
    (H200, 256): (128, 64, 8, 2),
    ("NVIDIA GB200", 128): (128, 64, 8, 3),
    ("NVIDIA A100-SXM4-80GB", 64): (128, 64, 8, 3),
    ("NVIDIA A100-SXM4-80GB", 128): (128, 64, 8, 3),
}
BACKWARD = {
    (H200, 64): ((64, 64, 4, 2), (64, 64, 4, 2)),
    (H200, 128): ((64, 64, 4, 2), (128, 64, 8, 3)),
    (H200, 256): ((32, 64, 8, 3), (128, 32, 8, 3)),
}


@pytest.mark.parametrize(("card", "dim"), FORWARD)
def test_the_forward_heuristic(card: str, dim: int) -> None:
    expected = flash_attention.Config(*FORWARD[card, dim])
    assert flash_attention.heuristic_cfg(on(card, dim=dim)) == expected
    assert flash_attention.heuristic_cfg(on(card, dim=dim, dtype="float16")) == expected
    assert flash_attention.heuristic_cfg(on(card, dim=16, value_dim=dim)) == expected


@pytest.mark.parametrize(("card", "dim"), BACKWARD)
def test_the_backward_heuristic(card: str, dim: int) -> None:
    keys, queries = BACKWARD[card, dim]
    bias = Pass(32, 32, 8 if dim > 128 else 4, 1)
    expected = flash_attention_bwd.Config(Pass(*keys), Pass(*queries), bias, atomics=False)
    assert flash_attention_bwd.heuristic_cfg(on(card, dim=dim)) == expected


def test_a_narrow_window_has_many_small_programs() -> None:
    def cut(window: int, card: str = H200, dim: int = 128) -> tuple[flash_attention.Config, Pass]:
        inv = on(card, dim=dim, lengths=(16384, 16384), causal=True, sliding_window=(window, 0))
        return flash_attention.heuristic_cfg(inv), flash_attention_bwd.heuristic_cfg(inv).queries

    small = flash_attention.Config(64, 64, 4, 3), Pass(64, 64, 4, 2)
    large = flash_attention.Config(128, 128, 8, 3), Pass(128, 64, 8, 3)
    assert cut(1023) == cut(4096) == small
    assert cut(4097) == cut(16383) == large
    # Only Hopper was measured.
    assert cut(1023, dim=256) == cut(16383, dim=256)
    assert cut(1023, card="NVIDIA A100-SXM4-80GB") == cut(16383, card="NVIDIA A100-SXM4-80GB")


def test_the_forward_has_small_blocks_for_soft_caps_and_packed_sequences() -> None:
    def packed(tokens: int) -> Invocation:
        """A call of eight packed sequences."""
        array, bounds = jax.ShapeDtypeStruct((tokens, 4, 128), "bfloat16"), jax.ShapeDtypeStruct((9,), "int32")
        given = {"cum_seqlens_q": bounds, "cum_seqlens_k": bounds, "causal": True}
        inv = ejkernel_core.invocation("flash_attention", array, array, array, **given)
        return attrs.evolve(inv, platform="gpu", device_kind=H200, compute_capability=(9, 0))

    for inv in (packed(16384), invocation(logits_soft_cap=30.0)):
        assert flash_attention.heuristic_cfg(inv) == flash_attention.Config(64, 64, 4, 3)
        assert flash_attention_bwd.heuristic_cfg(inv).queries == Pass(128, 64, 8, 3)
    # Long sequences have the configuration of other calls.
    assert flash_attention.heuristic_cfg(packed(16392)) == flash_attention.Config(128, 128, 8, 3)


def test_float32_has_smaller_blocks() -> None:
    wide, narrow = (flash_attention.heuristic_cfg(invocation(dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert wide.q_block * wide.k_block < narrow.q_block * narrow.k_block
    assert flash_attention.heuristic_cfg(invocation(dtype="float32", dim=64)) == flash_attention.Config(64, 32, 8, 2)


def test_a_single_query_has_a_small_block() -> None:
    assert flash_attention.heuristic_cfg(invocation(lengths=(1, 4096))) == flash_attention.Config(16, 128, 4, 3)
    assert flash_attention.heuristic_cfg(invocation(lengths=(1, 40))) == flash_attention.Config(16, 64, 4, 3)
    assert flash_attention.heuristic_cfg(invocation(lengths=(0, 0))) == flash_attention.Config(16, 16, 4, 3)
    assert flash_attention.heuristic_cfg(invocation(lengths=(100, 100))) == flash_attention.Config(128, 128, 8, 3)
    backward = flash_attention_bwd.heuristic_cfg(invocation(lengths=(1, 4096)))
    assert (backward.keys.q_block, backward.queries.q_block) == (16, 16)


def test_a_card_with_little_shared_memory_gets_smaller_blocks() -> None:
    """An L40S has 99 KiB and an A100 163, and they have the same table."""
    a100, l40s = (on(card, dim=128) for card in ("NVIDIA A100-SXM4-80GB", "NVIDIA L40S"))
    assert set(_tuning.forward(l40s)) < set(_tuning.forward(a100))
    assert flash_attention.heuristic_cfg(l40s) == flash_attention.Config(128, 64, 8, 2)


def test_the_limit_of_the_environment_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EJKERNEL_TRITON_SMEM_LIMIT", str(70 * 1024))
    inv = invocation(dim=64)
    allowed = [
        shape for shape in _tuning.HOPPER["forward"][64] if _tuning.shared_memory(inv, "forward", shape) <= 71680
    ]
    assert 0 < len(allowed) < len(_tuning.HOPPER["forward"][64])
    assert _tuning.forward(inv) == allowed
    # If no shape fits, fewer stages may; if they do not, the kernel refuses.
    monkeypatch.setenv("EJKERNEL_TRITON_SMEM_LIMIT", str(30 * 1024))
    assert _tuning.forward(inv) == [(*_tuning.HOPPER["forward"][64][-1][:3], 1)]
    monkeypatch.setenv("EJKERNEL_TRITON_SMEM_LIMIT", "1000")
    with pytest.raises(Unsupported, match=r"need \d+ bytes of shared memory for such heads, and there are 1000 "):
        flash_attention.heuristic_cfg(inv)


def test_bias_and_mask_need_shared_memory() -> None:
    plain, mask = invocation(), invocation(attention_mask=jax.ShapeDtypeStruct((1, 1, 4096, 4096), jnp.bool_))
    bias = invocation(bias=jax.ShapeDtypeStruct((1, 4, 4096, 4096), jnp.bfloat16))
    taken = [_tuning.shared_memory(inv, "forward", (64, 64, 4, 3)) for inv in (plain, mask, bias)]
    assert [more - taken[0] for more in taken[1:]] == [2 * 64 * 64, 2 * 64 * 64 * 2]


# -- the configuration space --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 100, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("card", CARDS)
def test_the_space_starts_with_the_heuristic_and_has_no_duplicates_and_all_fit(
    card: str, dim: int, dtype: str, length: int
) -> None:
    inv = on(card, dim=dim, dtype=dtype, lengths=(length, length))
    limit = get_shared_memory_limit(compute_capability=CARDS[card])
    for module in KERNELS.values():
        space = list(module.config_space(inv))
        assert space[0] == module.heuristic_cfg(inv)
        assert len(set(space)) == len(space)
    for cfg in flash_attention.config_space(inv):
        assert _tuning.shared_memory(inv, "forward", attrs.astuple(cfg)) <= limit
    for cfg in flash_attention_bwd.config_space(inv):
        assert _tuning.shared_memory(inv, "keys", attrs.astuple(cfg.keys)) <= limit
        assert _tuning.shared_memory(inv, "queries", attrs.astuple(cfg.queries)) <= limit
        assert not cfg.atomics


def test_the_space_has_several_configurations() -> None:
    for card in CARDS:
        for dim in (64, 128):
            assert len(list(flash_attention.config_space(on(card, dim=dim)))) >= 3
            assert len(list(flash_attention_bwd.config_space(on(card, dim=dim)))) >= 5


# -- gradients, some of them --------------------------------------------------------------------------------------

RNG = np.random.default_rng(3)


def _problem(q_length: int = 20, k_length: int = 24, dim: int = 16, heads: int = 2) -> dict[str, Any]:
    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(RNG.normal(size=shape), jnp.float32)

    return {
        "query": normal(1, q_length, heads, dim),
        "key": normal(1, k_length, 1, dim),
        "value": normal(1, k_length, 1, dim),
        "bias": normal(1, heads, q_length, k_length),
        "softmax_aux": normal(heads),
        "causal": True,
    }


@pytest.fixture(scope="module")
def registry() -> Any:
    return interpreted_registry(KERNELS)


@pytest.fixture(scope="module")
def solved() -> dict[str, Any]:
    """A call with every array that has a gradient, and the cotangents of its results."""
    given = _problem()
    out, lse = ejkernel_core.call("flash_attention", **given, return_lse=True, backend="reference")
    d_out, d_lse = (jnp.asarray(RNG.normal(size=x.shape), jnp.float32) for x in (out, lse))
    return {**given, "out": out, "lse": lse, "d_out": d_out, "d_lse": d_lse}


ALL = ("query", "key", "value", "bias", "softmax_aux")


def close(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    assert len(found) == len(expected)
    for result, right in zip(found, expected, strict=True):
        assert (result.shape, result.dtype) == (right.shape, right.dtype)
        seen = jnp.isfinite(right)  # a row that sees no key has a log-sum-exp of -inf
        atol = tolerance * float(jnp.abs(jnp.where(seen, right, 0)).max(initial=0)) + 1e-30
        np.testing.assert_allclose(result, right, rtol=0, atol=atol)


@pytest.mark.parametrize("wrt", [*((name,) for name in ALL), ("value", "query"), ALL[::-1], ()], ids="-".join)
def test_gradients_are_those_of_wrt_in_its_order(registry: Any, solved: dict[str, Any], wrt: tuple[str, ...]) -> None:
    with interpreted():
        found = registry.call("flash_attention_bwd", **solved, wrt=wrt, backend="triton")
    close(found, ejkernel_core.call("flash_attention_bwd", **solved, wrt=wrt, backend="reference"))


@pytest.mark.parametrize("absent", [("d_out",), ("d_lse",), ("d_out", "d_lse")], ids="-".join)
def test_an_absent_cotangent_is_zero(registry: Any, solved: dict[str, Any], absent: tuple[str, ...]) -> None:
    given = {**solved, **dict.fromkeys(absent)}
    zeros = {**solved, **{name: jnp.zeros_like(solved[name]) for name in absent}}
    with interpreted():
        found = registry.call("flash_attention_bwd", **given, wrt=ALL, backend="triton")
    close(found, ejkernel_core.call("flash_attention_bwd", **zeros, wrt=ALL, backend="reference"))
    if len(absent) == 2:
        assert not any(np.any(gradient) for gradient in found)


@pytest.mark.parametrize("wrt", [("query",), ("key", "query"), ALL], ids="-".join)
def test_atomics_have_the_same_results(registry: Any, solved: dict[str, Any], wrt: tuple[str, ...]) -> None:
    blocks = {"keys": Pass(16, 16, 4, 1), "queries": Pass(16, 16, 4, 1), "bias": Pass(16, 16, 4, 1)}
    with interpreted():
        plain, atomic = (
            registry.call(
                "flash_attention_bwd", **solved, wrt=wrt, cfg=flash_attention_bwd.Config(**blocks, atomics=atomics)
            )
            for atomics in (False, True)
        )
    close(atomic, plain, 1e-6)


# -- every shape --------------------------------------------------------------------------------------------------

TABLES = {
    "hopper": _tuning.HOPPER,
    "blackwell": _tuning.BLACKWELL,
    "ampere": _tuning.AMPERE,
    "float32": _tuning.FLOAT32,
}
SHAPES = [
    pytest.param(
        which,
        dim,
        blocks,
        marks=() if number < 2 and dim == 64 else pytest.mark.long,
        id=f"{which}-{dim}-{blocks[0]}-{blocks[1]}",
    )
    for which in ("forward", "keys", "queries")
    for dim in (64, 128, 256)
    for number, blocks in enumerate(
        dict.fromkeys(shape[:2] for table in TABLES.values() for shape in table[which][dim])
    )
]


@pytest.mark.parametrize(("which", "dim", "blocks"), SHAPES)
def test_every_shape_has_the_same_results(registry: Any, which: str, dim: int, blocks: tuple[int, int]) -> None:
    """The interpreter ignores warps and stages. Both lengths are two blocks and a part of one."""
    given = _problem(*(block + block // 2 + 3 for block in blocks), dim=dim, heads=1)
    del given["bias"], given["softmax_aux"]
    out, lse = ejkernel_core.call("flash_attention", **given, return_lse=True, backend="reference")
    if which == "forward":
        with interpreted():
            cfg = flash_attention.Config(*blocks)
            found = registry.call("flash_attention", **given, return_lse=True, cfg=cfg)
        close(found, (out, lse))
        return
    wrt = ("key", "value") if which == "keys" else ("query",)
    saved = {"out": out, "lse": lse, "d_out": jnp.asarray(RNG.normal(size=out.shape), jnp.float32), "wrt": wrt}
    with interpreted():
        cfg_bwd = flash_attention_bwd.Config(Pass(*blocks), Pass(*blocks))
        found = registry.call("flash_attention_bwd", **given, **saved, cfg=cfg_bwd)
    close(found, ejkernel_core.call("flash_attention_bwd", **given, **saved, backend="reference"))
