"""``FwdParams`` and ``BwdParams`` as ``cfg`` of attention: in the kernel's own words, or refused with what fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_pallas_tpu.flash_attention.backward
import ejkernel_xla.flash_attention
import ejkernel_xla.flash_attention.backward
from ejkernel_classes import (
    BwdParams,
    Executor,
    FwdParams,
    Kernel,
    find_labels_in_lowered,
    flash_attention,
    labels_to_configs,
    vmap_with_config,
)
from ejkernel_classes._blocks import configuration
from ejkernel_core import NoKernel, Registry, UnknownBackend, Unsupported

pytest.importorskip("triton")

from ejkernel_triton import flash_attention as triton_fwd
from ejkernel_triton import flash_attention_sm90 as gluon_fwd
from ejkernel_triton.flash_attention import backward as triton_bwd
from ejkernel_triton.flash_attention_sm90 import backward as gluon_bwd
from ejkernel_triton.interpreter import interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton

Q, K, V = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 16))
FWD = FwdParams(q_blocksize=16, kv_blocksize=32)
BWD = BwdParams(q_blocksize=32, kv_blocksize=16)


def used(function: Any, *args: Any) -> dict[str, Any]:
    """The configurations of a program by operation."""
    configs = labels_to_configs(find_labels_in_lowered(jax.jit(function).lower(*args)))
    return {label.name: config for label, config in configs.items()}


# -- one configuration -----------------------------------------------------------------------------------------------

TILES = triton_fwd.Config(128, 64, 8, 3)
PASS = triton_bwd.Pass(64, 64, 4, 2)
WHOLE = triton_bwd.Config(keys=PASS, queries=attrs.evolve(PASS, q_block=128), bias=triton_bwd.Pass(32, 32, 4, 1))
TPU = ejkernel_pallas_tpu.flash_attention.backward.Config()


@pytest.mark.parametrize(
    ("params", "known", "wanted"),
    [
        (FwdParams(), TILES, TILES),
        (FwdParams(q_blocksize=64), TILES, triton_fwd.Config(64, 64, 8, 3)),
        (FwdParams(kv_blocksize=32), TILES, triton_fwd.Config(128, 32, 8, 3)),
        (FwdParams(num_warps=4), TILES, triton_fwd.Config(128, 64, 4, 3)),
        (FwdParams(num_stages=1), TILES, triton_fwd.Config(128, 64, 8, 1)),
        (
            FwdParams(q_blocksize=16, kv_blocksize=256, num_warps=2, num_stages=5),
            TILES,
            triton_fwd.Config(16, 256, 2, 5),
        ),
        (
            BwdParams(q_blocksize=32, num_warps=8),
            WHOLE,
            attrs.evolve(WHOLE, keys=triton_bwd.Pass(32, 64, 8, 2), queries=triton_bwd.Pass(32, 64, 8, 2)),
        ),
        (
            BwdParams(kv_blocksize=16, num_stages=1),
            WHOLE,
            attrs.evolve(WHOLE, keys=triton_bwd.Pass(64, 16, 4, 1), queries=triton_bwd.Pass(128, 16, 4, 1)),
        ),
        (BwdParams(), WHOLE, WHOLE),
        (FwdParams(kv_blocksize=64, num_stages=3), gluon_fwd.Config(), gluon_fwd.Config(k_block=64, stages=3)),
        (BwdParams(q_blocksize=128), gluon_bwd.Config(), gluon_bwd.Config(q_block=128)),
        (
            FwdParams(q_blocksize=5),
            ejkernel_xla.flash_attention.Config(7, 8),
            ejkernel_xla.flash_attention.Config(5, 8),
        ),
        (FwdParams(), None, None),
    ],
)
def test_a_field_is_the_kernels_own(params: Any, known: Any, wanted: Any) -> None:
    assert configuration(params, known) == wanted


def test_of_a_tpus_backward_every_pass_that_is_there() -> None:
    found = configuration(BwdParams(q_blocksize=256), TPU)
    assert (found.queries.q_block, found.keys.q_block, found.fused, found.bias) == (256, 256, TPU.fused, TPU.bias)
    assert found.queries.k_block == TPU.queries.k_block


@pytest.mark.parametrize(
    ("params", "known", "told"),
    [
        (
            FwdParams(blocksize_m=64),
            TILES,
            "takes q_blocksize, kv_blocksize, num_warps, num_stages, and not blocksize_m",
        ),
        (FwdParams(num_key_splits=2, blocksize_heads=1), TILES, "and not blocksize_heads, num_key_splits"),
        (FwdParams(q_blocksize=48), TILES, r"refuses it: 'q_block' must be in \(16, 32, 64, 128, 256\) \(got 48\)"),
        (BwdParams(num_warps=3), WHOLE, r"refuses it: 'num_warps' must be in \(1, 2, 4, 8, 16\) \(got 3\)"),
        (BwdParams(blocksize_k=16), WHOLE, "and not blocksize_k"),
        (FwdParams(q_blocksize=64), gluon_fwd.Config(), "takes kv_blocksize, num_stages, and not q_blocksize"),
        (FwdParams(q_blocksize=64), None, "takes none of these parameters"),
        (BwdParams(num_warps=4), TPU, "takes q_blocksize, kv_blocksize, and not num_warps"),
    ],
)
def test_what_does_not_fit_is_told(params: Any, known: Any, told: str) -> None:
    with pytest.raises(Unsupported, match=told):
        configuration(params, known)


# -- calls on the CPU ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda q: flash_attention(q, K, V, causal=True, cfg=FWD),
        lambda q: flash_attention(q, K, V, None, causal=True, softmax_scale=None, cfg=FWD, backend="xla"),
        lambda q: Executor()("flash_attention", q, K, V, causal=True, cfg=FWD),
    ],
)
def test_the_forward_runs_with_them(call: Any) -> None:
    assert used(call, Q) == {"flash_attention": ejkernel_xla.flash_attention.Config(16, 32)}
    np.testing.assert_allclose(call(Q), flash_attention(Q, K, V, causal=True), atol=1e-5)


def test_under_vmap_and_grad() -> None:
    mapped = vmap_with_config("flash_attention", in_axes=(0, None, None), cfg=FWD)
    rows = jnp.stack([Q, 2 * Q])
    assert used(lambda rows: mapped(rows, K, V), rows)["flash_attention"].kv_block == 32
    np.testing.assert_allclose(mapped(rows, K, V)[1], flash_attention(2 * Q, K, V), atol=1e-5)
    gradient = jax.grad(lambda q: flash_attention(q, K, V, cfg=FWD).sum())
    np.testing.assert_allclose(gradient(Q), jax.grad(lambda q: flash_attention(q, K, V).sum())(Q), atol=1e-5)


@pytest.mark.parametrize("mapped", [False, True])
def test_of_the_backward_they_are_for_the_backward(mapped: bool) -> None:
    def gradient(q: Any) -> Any:
        return jax.grad(lambda q: (flash_attention(q, K, V, cfg=BWD) ** 2).sum())(q)

    plain = jax.grad(lambda q: (flash_attention(q, K, V) ** 2).sum())
    over, q = (jax.vmap, jnp.stack([Q, 2 * Q])) if mapped else (lambda function: function, Q)
    found, usual = used(over(gradient), q), used(over(plain), q)
    assert found["flash_attention_bwd"] == ejkernel_xla.flash_attention.backward.Config(32, 16)
    assert found["flash_attention"] == usual["flash_attention"]
    assert found["flash_attention_bwd"] != usual["flash_attention_bwd"]
    np.testing.assert_allclose(over(gradient)(q), over(plain)(q), atol=1e-4)
    # It holds for that call alone.
    assert used(over(plain), q) == usual


def test_the_backward_operation_itself() -> None:
    out, lse = flash_attention(Q, K, V, return_lse=True)
    given = {"query": Q, "key": K, "value": V, "out": out, "lse": lse, "d_out": out, "wrt": ("query",)}
    found = used(lambda q: Executor()("flash_attention_bwd", **{**given, "query": q}, cfg=BWD), Q)
    assert found == {"flash_attention_bwd": ejkernel_xla.flash_attention.backward.Config(32, 16)}
    with pytest.raises(TypeError, match="flash_attention_bwd is a backward pass, which takes BwdParams; got FwdParams"):
        Executor()("flash_attention_bwd", **given, cfg=FWD)


@pytest.mark.parametrize(
    ("cfg", "backend", "error", "told"),
    [
        (
            FwdParams(num_warps=4),
            None,
            TypeError,
            "cfg: FwdParams fits no kernel that can do this call: flash_attention.xla takes q_blocksize, kv_blocksize, "
            "and not num_warps; flash_attention.reference takes none of these parameters",
        ),
        (FWD, "reference", TypeError, "flash_attention.reference takes none of these parameters"),
        (FWD, "triton", NoKernel, "flash_attention.triton .*: refused, it runs on gpu; this is cpu"),
        (FWD, "tritn", UnknownBackend, "did you mean 'triton'"),
        (
            BwdParams(num_stages=2),
            None,
            TypeError,
            "flash_attention_bwd.xla takes q_blocksize, kv_blocksize, and not num_stages",
        ),
        (BWD, "reference", TypeError, "flash_attention_bwd.reference takes none of these parameters"),
    ],
)
def test_a_call_that_they_do_not_fit_is_refused(cfg: Any, backend: Any, error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        flash_attention(Q, K, V, cfg=cfg, backend=backend)


def test_a_kernels_own_configuration_goes_through() -> None:
    own = ejkernel_xla.flash_attention.Config(16, 16)
    assert used(lambda q: flash_attention(q, K, V, cfg=own), Q) == {"flash_attention": own}


def test_a_kernel_whose_configurations_they_are(use_registry: Any) -> None:
    class Times(Kernel[FwdParams, jax.Array]):
        def run(self, x: Any, *, cfg: FwdParams) -> Any:
            return x * (cfg.blocksize_m or 1)

    registry = Registry(plugins="")
    registry.register(Times())
    use_registry(registry)
    assert Executor()("Times", jnp.ones(2), cfg=FwdParams(blocksize_m=7)).tolist() == [7, 7]
    assert Times()(jnp.ones(2), cfg=FwdParams(blocksize_m=7)).tolist() == [7, 7]


# -- the Triton kernels, interpreted -----------------------------------------------------------------------------------


@pytest.fixture
def triton(use_registry: Any) -> Iterator[None]:
    """Triton's kernels are the best ones here."""
    if _jax_triton.missing():
        pytest.skip(_jax_triton.missing())
    modules: Any = {"flash_attention.triton": triton_fwd, "flash_attention_bwd.triton": triton_bwd}
    use_registry(interpreted_registry(modules))
    with interpreted():
        yield


def test_triton_runs_with_them(triton: None) -> None:
    def call(q: Any) -> Any:
        return flash_attention(q, K, V, causal=True, cfg=FwdParams(q_blocksize=32, kv_blocksize=16, num_stages=1))

    usual = used(lambda q: flash_attention(q, K, V, causal=True), Q)["flash_attention"]
    assert used(call, Q) == {"flash_attention": attrs.evolve(usual, q_block=32, k_block=16, num_stages=1)}
    wanted = flash_attention(Q, K, V, causal=True, backend="reference")
    np.testing.assert_allclose(call(Q), wanted, atol=1e-5)


def test_tritons_backward_runs_with_them(triton: None) -> None:
    def gradients(q: Any, k: Any) -> Any:
        return jax.grad(lambda q, k: (flash_attention(q, k, V, causal=True, cfg=BWD) ** 2).sum(), (0, 1))(q, k)

    cfg = used(gradients, Q, K)["flash_attention_bwd"]
    assert {(one.q_block, one.k_block) for one in (cfg.keys, cfg.queries)} == {(32, 16)}
    plain = jax.grad(lambda q, k: (flash_attention(q, k, V, causal=True, backend="xla") ** 2).sum(), (0, 1))
    for found, wanted in zip(gradients(Q, K), plain(Q, K), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_what_triton_has_not_is_refused(triton: None) -> None:
    with pytest.raises(
        TypeError, match="flash_attention.triton takes q_blocksize, .*num_stages, and not num_key_splits"
    ):
        flash_attention(Q, K, V, cfg=FwdParams(num_key_splits=2))


def test_the_best_kernel_that_has_all_fields_is_taken(triton: None) -> None:
    """No block of 48 in Triton; XLA's may be of any size."""
    found = used(lambda q: flash_attention(q, K, V, cfg=FwdParams(q_blocksize=48)), Q)["flash_attention"]
    assert found == ejkernel_xla.flash_attention.Config(48, found.kv_block)
