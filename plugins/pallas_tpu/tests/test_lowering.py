"""All configurations of ``config_space`` lower for TPUs. This needs neither a TPU nor its compiler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import ejkernel_core as core
from ejkernel_pallas_tpu import flash_attention
from ejkernel_pallas_tpu.flash_attention import backward as flash_attention_bwd
from ejkernel_tuning import find_labels_in_lowered

LENGTH = 1000
FORWARD, BACKWARD = "flash_attention", "flash_attention_bwd"
REGISTRY = core.Registry()
for operation, module in ((FORWARD, flash_attention), (BACKWARD, flash_attention_bwd)):
    REGISTRY.register(module, f"{operation}.pallas_tpu")
DEVICES = ("TPU v5e", "TPU v4", "TPU v5p", "TPU v6e", "TPU7x")


def shape(*sizes: int, dtype: str = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def call(
    dtype: str = "bfloat16", dim: int = 128, v_dim: int | None = None, length: int = LENGTH, **changes: Any
) -> Any:
    """The arrays of a call, and its options."""
    arguments = {
        "query": shape(1, length, 4, dim, dtype=dtype),
        "key": shape(1, length, 2, dim, dtype=dtype),
        "value": shape(1, length, 2, v_dim or dim, dtype=dtype),
        **changes,
    }
    arrays = {name: value for name, value in arguments.items() if isinstance(value, jax.ShapeDtypeStruct)}
    options = {name: value for name, value in arguments.items() if name not in arrays}
    return SimpleNamespace(arrays=arrays, options=options)


def packed() -> Any:
    query, key, bounds = shape(LENGTH, 4, 128), shape(LENGTH, 2, 128), shape(5, dtype="int32")
    return call(query=query, key=key, value=key, cum_seqlens_q=bounds, cum_seqlens_k=bounds)


IDS = shape(1, LENGTH, dtype="int32")
CALLS = {
    "full": call(),
    "causal": call(causal=True),
    "float32": call("float32", causal=True),
    "window": call(causal=True, sliding_window=(100, 0)),
    "segments": call(q_segment_ids=IDS, kv_segment_ids=IDS, causal=True),
    "packed": packed(),
    "bias": call(bias=shape(1, 4, LENGTH, LENGTH)),
    "bias of keys": call(bias=shape(1, 1, 1, LENGTH, dtype="float32")),
    "bias of queries": call(bias=shape(1, 4, LENGTH, 1, dtype="float32")),
    "bias of one number": call(bias=shape(1, 1, 1, 1, dtype="float32")),
    "mask": call(attention_mask=shape(1, 1, LENGTH, LENGTH, dtype="bool")),
    "mask of queries": call(attention_mask=shape(1, 1, LENGTH, 1, dtype="bool")),
    "cap and sinks": call(logits_soft_cap=30.0, softmax_aux=shape(4, 2)),
    "dropout": call(dropout_prob=0.1, dropout_seed=shape(dtype="int32")),
    "narrow heads": call(dim=64),
    "odd heads": call(dim=80, v_dim=48),
    "wide heads": call(dim=256),
    "lengths": call(causal=True, kv_lengths=shape(1, dtype="int32")),
    "start and lengths": call("float32", q_start=shape(1, dtype="int32"), kv_lengths=shape(1, dtype="int32")),
    "start": call(sliding_window=(100, 20), q_start=shape(1, dtype="int32")),
    "positions of keys": call(
        causal=True, sliding_window=(100, 0), q_start=shape(1, dtype="int32"), kv_positions=IDS, dim=80, v_dim=48
    ),
    "one token and a length": call(query=shape(1, 1, 4, 128), kv_lengths=shape(1, dtype="int32")),
    "one token": call(query=shape(1, 1, 4, 128), causal=True),
}


def mesh(device_kind: str) -> AbstractMesh:
    return AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind, 1, "tpu"))


def backward(forward: Any) -> Any:
    """The gradients of the call, as a call of the backward operation."""
    wrt = tuple(name for name in ("query", "key", "value", "bias", "softmax_aux") if name in forward.arrays)
    out, lse = jax.eval_shape(
        lambda arrays: REGISTRY.call(FORWARD, **arrays, **forward.options, return_lse=True, backend="reference"),
        forward.arrays,
    )
    arrays = {**forward.arrays, "out": out, "lse": lse, "d_out": out, "d_lse": lse}
    return SimpleNamespace(arrays=arrays, options={**forward.options, "wrt": wrt})


def lower(op: str, device_kind: str, call: Any, cfg: Any = None) -> str:
    def run(arrays: Any) -> Any:
        return REGISTRY.call(op, **arrays, **call.options, backend="pallas_tpu", cfg=cfg)

    with use_abstract_mesh(mesh(device_kind)):
        return str(jax.jit(run).trace(call.arrays).lower(lowering_platforms=("tpu",)).as_text())


def config_space(op: str, device_kind: str, call: Any) -> list[Any]:
    """Every configuration that a kernel offers for the call on that device."""
    plan = REGISTRY.plan(op, **call.arrays, **call.options, backend="reference")
    inv = attrs.evolve(plan.invocation, platform="tpu", device_kind=device_kind)
    return list(REGISTRY.kernel(op, "pallas_tpu").config_space(inv))


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_call_lowers(name):
    forward = CALLS[name]
    assert lower(FORWARD, "TPU v5e", forward).count("tpu_custom_call") == 1
    gradients = backward(forward)
    fused = config_space(BACKWARD, "TPU v5e", gradients)[0]
    has_bias = "bias" in forward.arrays
    assert lower(BACKWARD, "TPU v5e", gradients, fused).count("tpu_custom_call") == 1 + has_bias
    two_passes = attrs.evolve(fused, fused=None)
    assert lower(BACKWARD, "TPU v5e", gradients, two_passes).count("tpu_custom_call") == 2 + has_bias


@pytest.mark.parametrize("device_kind", DEVICES)
@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
def test_every_configuration_of_every_generation_lowers(op, device_kind):
    causal = CALLS["causal"] if op == FORWARD else backward(CALLS["causal"])
    configurations = config_space(op, device_kind, causal)
    assert len(configurations) > 3
    for cfg in configurations:
        assert "tpu_custom_call" in lower(op, device_kind, causal, cfg), cfg


@pytest.mark.parametrize("device_kind", DEVICES)
@pytest.mark.parametrize("name", ["lengths", "positions of keys"])
def test_calls_on_a_cache_lower_for_every_generation(name, device_kind):
    for op, call in ((FORWARD, CALLS[name]), (BACKWARD, backward(CALLS[name]))):
        assert "tpu_custom_call" in lower(op, device_kind, call, config_space(op, device_kind, call)[0])


@pytest.mark.long
@pytest.mark.parametrize("device_kind", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_every_configuration_of_every_kind_of_call_lowers(name, device_kind):
    for op, call in ((FORWARD, CALLS[name]), (BACKWARD, backward(CALLS[name]))):
        for cfg in config_space(op, device_kind, call):
            assert "tpu_custom_call" in lower(op, device_kind, call, cfg), cfg


def test_a_call_can_be_exported():
    export = pytest.importorskip("jax.export")
    causal = CALLS["causal"]
    with use_abstract_mesh(mesh("TPU v6e")):
        exported = export.export(
            jax.jit(lambda arrays: REGISTRY.call(FORWARD, **arrays, **causal.options)), platforms=["tpu"]
        )(causal.arrays)
    assert exported.platforms == ("tpu",)
    assert "tpu_custom_call" in exported.mlir_module()


def test_the_kernel_is_the_first_choice_on_a_tpu():
    causal = CALLS["causal"]
    with use_abstract_mesh(mesh("TPU v5e")):
        traced = jax.jit(lambda arrays: REGISTRY.call(FORWARD, **arrays, **causal.options)).trace(causal.arrays)
        (label,) = find_labels_in_lowered(traced.lower(lowering_platforms=("tpu",)))
    assert label.backend == "pallas_tpu"
