"""``FwdParams`` and ``BwdParams`` as ``cfg`` of attention: translated to the kernel's Config, or refused."""

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


def configs_of(function: Any, *args: Any) -> dict[str, Any]:
    """The configurations of a program by operation."""
    configs = labels_to_configs(find_labels_in_lowered(jax.jit(function).lower(*args)))
    return {label.name: config for label, config in configs.items()}


# -- one configuration -----------------------------------------------------------------------------------------------

TILES = triton_fwd.Config(128, 64, 8, 3)
PASS = triton_bwd.Pass(64, 64, 4, 2)
THREE_PASSES = triton_bwd.Config(keys=PASS, queries=attrs.evolve(PASS, q_block=128), bias=triton_bwd.Pass(32, 32, 4, 1))
TPU = ejkernel_pallas_tpu.flash_attention.backward.Config()


@pytest.mark.parametrize(
    ("params", "cfg", "expected"),
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
            THREE_PASSES,
            attrs.evolve(THREE_PASSES, keys=triton_bwd.Pass(32, 64, 8, 2), queries=triton_bwd.Pass(32, 64, 8, 2)),
        ),
        (
            BwdParams(kv_blocksize=16, num_stages=1),
            THREE_PASSES,
            attrs.evolve(THREE_PASSES, keys=triton_bwd.Pass(64, 16, 4, 1), queries=triton_bwd.Pass(128, 16, 4, 1)),
        ),
        (BwdParams(), THREE_PASSES, THREE_PASSES),
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
def test_params_replace_the_fields_of_the_kernels_config(params: Any, cfg: Any, expected: Any) -> None:
    assert configuration(params, cfg) == expected


def test_params_apply_to_every_pass_of_the_tpu_backward() -> None:
    cfg = configuration(BwdParams(q_blocksize=256), TPU)
    assert (cfg.queries.q_block, cfg.keys.q_block, cfg.fused, cfg.bias) == (256, 256, TPU.fused, TPU.bias)
    assert cfg.queries.k_block == TPU.queries.k_block


@pytest.mark.parametrize(
    ("params", "cfg", "message"),
    [
        (
            FwdParams(blocksize_m=64),
            TILES,
            "takes q_blocksize, kv_blocksize, num_warps, num_stages, and not blocksize_m",
        ),
        (FwdParams(num_key_splits=2, blocksize_heads=1), TILES, "and not blocksize_heads, num_key_splits"),
        (FwdParams(q_blocksize=48), TILES, r"refuses it: 'q_block' must be in \(16, 32, 64, 128, 256\) \(got 48\)"),
        (BwdParams(num_warps=3), THREE_PASSES, r"refuses it: 'num_warps' must be in \(1, 2, 4, 8, 16\) \(got 3\)"),
        (BwdParams(blocksize_k=16), THREE_PASSES, "and not blocksize_k"),
        (FwdParams(q_blocksize=64), gluon_fwd.Config(), "takes kv_blocksize, num_stages, and not q_blocksize"),
        (FwdParams(q_blocksize=64), None, "takes none of these parameters"),
        (BwdParams(num_warps=4), TPU, "takes q_blocksize, kv_blocksize, and not num_warps"),
    ],
)
def test_params_that_do_not_fit_a_kernel_are_refused(params: Any, cfg: Any, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        configuration(params, cfg)


# -- calls on the CPU ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda q: flash_attention(q, K, V, causal=True, cfg=FWD),
        lambda q: flash_attention(q, K, V, None, causal=True, softmax_scale=None, cfg=FWD, backend="xla"),
        lambda q: Executor()("flash_attention", q, K, V, causal=True, cfg=FWD),
    ],
)
def test_the_forward_runs_with_params(call: Any) -> None:
    assert configs_of(call, Q) == {"flash_attention": ejkernel_xla.flash_attention.Config(16, 32)}
    np.testing.assert_allclose(call(Q), flash_attention(Q, K, V, causal=True), atol=1e-5)


def test_params_under_vmap_and_grad() -> None:
    mapped = vmap_with_config("flash_attention", in_axes=(0, None, None), cfg=FWD)
    rows = jnp.stack([Q, 2 * Q])
    assert configs_of(lambda rows: mapped(rows, K, V), rows)["flash_attention"].kv_block == 32
    np.testing.assert_allclose(mapped(rows, K, V)[1], flash_attention(2 * Q, K, V), atol=1e-5)
    gradient = jax.grad(lambda q: flash_attention(q, K, V, cfg=FWD).sum())
    np.testing.assert_allclose(gradient(Q), jax.grad(lambda q: flash_attention(q, K, V).sum())(Q), atol=1e-5)


@pytest.mark.parametrize("mapped", [False, True])
def test_bwd_params_apply_to_the_backward(mapped: bool) -> None:
    def gradient(q: Any) -> Any:
        return jax.grad(lambda q: (flash_attention(q, K, V, cfg=BWD) ** 2).sum())(q)

    reference_gradient = jax.grad(lambda q: (flash_attention(q, K, V) ** 2).sum())
    transform, q = (jax.vmap, jnp.stack([Q, 2 * Q])) if mapped else (lambda function: function, Q)
    configs, default_configs = configs_of(transform(gradient), q), configs_of(transform(reference_gradient), q)
    assert configs["flash_attention_bwd"] == ejkernel_xla.flash_attention.backward.Config(32, 16)
    assert configs["flash_attention"] == default_configs["flash_attention"]
    assert configs["flash_attention_bwd"] != default_configs["flash_attention_bwd"]
    np.testing.assert_allclose(transform(gradient)(q), transform(reference_gradient)(q), atol=1e-4)
    # It applies only to that call.
    assert configs_of(transform(reference_gradient), q) == default_configs


def test_the_backward_operation_takes_bwd_params() -> None:
    out, lse = flash_attention(Q, K, V, return_lse=True)
    arguments = {"query": Q, "key": K, "value": V, "out": out, "lse": lse, "d_out": out, "wrt": ("query",)}
    configs = configs_of(lambda q: Executor()("flash_attention_bwd", **{**arguments, "query": q}, cfg=BWD), Q)
    assert configs == {"flash_attention_bwd": ejkernel_xla.flash_attention.backward.Config(32, 16)}
    with pytest.raises(TypeError, match="flash_attention_bwd is a backward pass, which takes BwdParams; got FwdParams"):
        Executor()("flash_attention_bwd", **arguments, cfg=FWD)


@pytest.mark.parametrize(
    ("cfg", "backend", "error", "message"),
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
def test_a_call_without_a_kernel_that_params_fit_is_refused(cfg: Any, backend: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attention(Q, K, V, cfg=cfg, backend=backend)


def test_a_config_of_the_kernel_is_used_unchanged() -> None:
    cfg = ejkernel_xla.flash_attention.Config(16, 16)
    assert configs_of(lambda q: flash_attention(q, K, V, cfg=cfg), Q) == {"flash_attention": cfg}


def test_a_kernel_whose_config_is_fwd_params(use_registry: Any) -> None:
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
    """A registry in which the interpreted Triton kernels are chosen first."""
    if _jax_triton.unavailable_reason():
        pytest.skip(_jax_triton.unavailable_reason())
    modules: Any = {"flash_attention.triton": triton_fwd, "flash_attention_bwd.triton": triton_bwd}
    use_registry(interpreted_registry(modules))
    with interpreted():
        yield


def test_triton_runs_with_params(triton: None) -> None:
    def call(q: Any) -> Any:
        return flash_attention(q, K, V, causal=True, cfg=FwdParams(q_blocksize=32, kv_blocksize=16, num_stages=1))

    default_cfg = configs_of(lambda q: flash_attention(q, K, V, causal=True), Q)["flash_attention"]
    assert configs_of(call, Q) == {"flash_attention": attrs.evolve(default_cfg, q_block=32, k_block=16, num_stages=1)}
    expected = flash_attention(Q, K, V, causal=True, backend="reference")
    np.testing.assert_allclose(call(Q), expected, atol=1e-5)


def test_the_triton_backward_runs_with_params(triton: None) -> None:
    def gradients(q: Any, k: Any) -> Any:
        return jax.grad(lambda q, k: (flash_attention(q, k, V, causal=True, cfg=BWD) ** 2).sum(), (0, 1))(q, k)

    cfg = configs_of(gradients, Q, K)["flash_attention_bwd"]
    assert {(pass_config.q_block, pass_config.k_block) for pass_config in (cfg.keys, cfg.queries)} == {(32, 16)}
    xla_gradients = jax.grad(lambda q, k: (flash_attention(q, k, V, causal=True, backend="xla") ** 2).sum(), (0, 1))
    for gradient, expected in zip(gradients(Q, K), xla_gradients(Q, K), strict=True):
        np.testing.assert_allclose(gradient, expected, atol=1e-4)


def test_a_field_that_triton_does_not_have_is_refused(triton: None) -> None:
    with pytest.raises(
        TypeError, match="flash_attention.triton takes q_blocksize, .*num_stages, and not num_key_splits"
    ):
        flash_attention(Q, K, V, cfg=FwdParams(num_key_splits=2))


def test_the_best_kernel_with_all_fields_is_chosen(triton: None) -> None:
    """Triton has no blocks of 48. XLA's blocks may have any size."""
    cfg = configs_of(lambda q: flash_attention(q, K, V, cfg=FwdParams(q_blocksize=48)), Q)["flash_attention"]
    assert cfg == ejkernel_xla.flash_attention.Config(48, cfg.kv_block)
