"""The configurations that the kernels choose and offer, and the calls that they refuse, by device."""

from __future__ import annotations

import attrs
import jax
import jax.numpy as jnp
import pytest

import ejkernel_core as core
from ejkernel_pallas_tpu import flash_attention
from ejkernel_pallas_tpu.flash_attention import Config, _tuning
from ejkernel_pallas_tpu.flash_attention import backward as flash_attention_bwd
from ejkernel_pallas_tpu.launch._generations import KINDS
from ejkernel_pallas_tpu.testing import interpreted_registry

FORWARD, BACKWARD = "flash_attention", "flash_attention_bwd"


def shape(*sizes, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def invocation(device_kind="TPU v5e", length=4096, dim=128, dtype="bfloat16", op=FORWARD, k_length=None, **options):
    """The invocation of the call on that device."""
    query, key = (shape(1, n, 4, dim, dtype=dtype) for n in (length, k_length or length))
    arrays = {"query": query, "key": key, "value": key}
    if op == BACKWARD:
        lse = shape(1, 4, length, dtype="float32")
        arrays |= {"out": query, "lse": lse, "d_out": query, "d_lse": None, "wrt": ("query", "key", "value")}
    plan = core.plan(op, **arrays, **options, backend="reference")
    return attrs.evolve(plan.invocation, platform="tpu", device_kind=device_kind)


@pytest.mark.parametrize(
    ("device", "q_block", "k_block"),
    [
        ("TPU v4", 512, 512),
        ("TPU v5 lite", 512, 512),
        ("TPU v5e", 512, 512),
        ("TPU v5", 512, 512),
        ("TPU v5p", 512, 512),
        ("TPU v6 lite", 1024, 1024),
        ("TPU v6e", 1024, 1024),
        ("TPU7x", 1024, 1024),
    ],
)
def test_every_generation_has_its_blocks(device, q_block, k_block):
    assert flash_attention.heuristic_cfg(invocation(device)) == Config(q_block, k_block)


@pytest.mark.parametrize(("length", "block"), [(1, 128), (128, 128), (129, 256), (400, 512), (10**5, 512)])
def test_short_lengths_have_short_blocks(length, block):
    assert flash_attention.heuristic_cfg(invocation(length=min(length, 8191))).q_block == block
    assert flash_attention.heuristic_cfg(invocation(k_length=length)).k_block == block
    assert flash_attention_bwd.heuristic_cfg(invocation(length=length, op=BACKWARD)).keys.q_block == block


def test_a_long_forward_has_blocks_of_more_queries():
    assert [
        flash_attention.heuristic_cfg(invocation(length=length, **options))
        for length, options in ((8191, {}), (8192, {}), (8192, {"sliding_window": (512, 0)}))
    ] == [Config(512, 512), Config(1024, 512), Config(512, 512)]


@pytest.mark.parametrize("device", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("bias", [False, True])
def test_every_configuration_fits(device, dtype, dim, bias):
    options = {"bias": shape(1, 4, 4096, 4096, dtype="float32")} if bias else {}
    budget = KINDS[device].budget
    inv = invocation(device, dim=dim, dtype=dtype, **options)
    space = [(cfg.q_block, cfg.k_block) for cfg in flash_attention.config_space(inv)]
    assert len({*space}) == len(space) > 0
    assert all(_tuning.vmem_bytes(inv, "forward", blocks) <= budget for blocks in space)
    inv = invocation(device, dim=dim, dtype=dtype, op=BACKWARD, **options)
    for cfg in flash_attention_bwd.config_space(inv):
        for pass_name in ("queries", "keys", "bias"):
            blocks = attrs.astuple(getattr(cfg, pass_name))
            assert _tuning.vmem_bytes(inv, pass_name, blocks) <= budget


@pytest.mark.parametrize(
    ("blocks", "reported"), [((256, 1024), 11513856), ((1024, 256), 9715712), ((512, 256), 5517312)]
)
def test_memory_of_float32_keys_is_estimated_from_above(blocks, reported):
    """What libtpu 0.0.42.1 reports for v5e and v5p, lengths of 2048."""
    inv = invocation(length=2048, dtype="float32", op=BACKWARD)
    assert reported <= _tuning.vmem_bytes(inv, "keys", blocks) <= 1.05 * reported


def test_memory_of_segment_ids_is_estimated_from_above():
    """What libtpu 0.0.42.1 reports for v4, for a call with all arguments."""
    ids, square = shape(1, 2048, dtype="int32"), (2048, 2048)
    options = {"bias": shape(1, 4, *square, dtype="float32"), "attention_mask": shape(1, 1, *square, dtype="bool")}
    options |= {"q_segment_ids": ids, "kv_segment_ids": ids, "dropout_prob": 0.1, "dropout_seed": shape(dtype="int32")}
    inv = invocation("TPU v4", length=2048, op=BACKWARD, **options)
    assert 5811200 <= _tuning.vmem_bytes(inv, "queries", (128, 1024)) <= 1.05 * 5811200


def test_the_heuristic_is_the_first_of_the_space():
    inv = invocation()
    assert next(iter(flash_attention.config_space(inv))) == flash_attention.heuristic_cfg(inv)
    inv = invocation(op=BACKWARD)
    assert next(iter(flash_attention_bwd.config_space(inv))) == flash_attention_bwd.heuristic_cfg(inv)


@pytest.mark.parametrize("module", [flash_attention, flash_attention_bwd])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "cpu"}, "run on TPUs; this is cpu"),
        ({"device_kind": None}, "use_abstract_mesh with an AbstractDevice('TPU v5e', 1, 'tpu')"),
        ({"device_kind": "TPU v3"}, "know TPU v4, TPU v5e"),
    ],
)
def test_devices_are_refused_with_a_reason(module, change, reason):
    op = BACKWARD if module is flash_attention_bwd else FORWARD
    with pytest.raises(core.Unsupported, match="Pallas TPU|blocks are chosen") as refusal:
        module.heuristic_cfg(attrs.evolve(invocation(op=op), **change))
    assert reason in str(refusal.value)


@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
@pytest.mark.parametrize(
    ("arguments", "reason"), [({"dtype": "float16"}, "not float16"), ({"dim": 520}, "up to 512, not 520")]
)
def test_arguments_are_refused_with_a_reason(op, arguments, reason):
    module = {FORWARD: flash_attention, BACKWARD: flash_attention_bwd}[op]
    with pytest.raises(core.Unsupported) as refusal:
        module.heuristic_cfg(invocation(op=op, **arguments))
    assert reason in str(refusal.value)


def test_without_a_tpu_the_core_says_where_the_kernel_runs():
    registry = core.Registry()
    registry.register(flash_attention, "flash_attention.pallas_tpu")
    query = shape(1, 8, 2, 16)
    with pytest.raises(core.NoKernel, match="it runs on tpu; this is cpu"):
        registry.plan(FORWARD, query, query, query, backend="pallas_tpu")


@pytest.mark.parametrize("q_block", [0, 64, 192, 4096, 128.5])
def test_blocks_are_checked(q_block):
    with pytest.raises(ValueError, match="q_block"):
        Config(q_block=q_block)


def test_a_configuration_can_choose_the_interpreter():
    inv = invocation(length=9, dtype="float32")
    arrays = {name: jax.random.normal(jax.random.key(0), (1, 9, 4, 128)) for name in ("query", "key", "value")}
    out, lse = flash_attention.run_backend(inv.with_arrays(arrays), Config(interpret=True))
    expected, expected_lse = core.call(FORWARD, **arrays, return_lse=True, backend="reference")
    assert jnp.allclose(out, expected, atol=1e-5)
    assert jnp.allclose(lse, expected_lse, atol=1e-5)


def test_a_call_can_be_interpreted_without_a_tpu():
    query, key, value = jax.random.normal(jax.random.key(1), (3, 1, 200, 2, 16))
    interpreted = Config(128, 128, interpret=True)
    out, lse = core.call(FORWARD, query, key, value, causal=True, return_lse=True, cfg=interpreted)
    expected, _ = core.call(FORWARD, query, key, value, causal=True, return_lse=True, backend="reference")
    assert jnp.allclose(out, expected, atol=1e-5)
    d_out = jax.random.normal(jax.random.key(2), out.shape)
    arrays = {"query": query, "key": key, "value": value, "out": out, "lse": lse, "d_out": d_out}
    options = {"causal": True, "wrt": ("query", "key", "value")}
    expected_gradients = core.call(BACKWARD, **arrays, **options, backend="reference")
    for fused in (None, flash_attention_bwd.Pass(128, 128)):
        small = flash_attention_bwd.Pass(128, 128)
        cfg = flash_attention_bwd.Config(fused, queries=small, keys=small, interpret=True)
        gradients = core.call(BACKWARD, **arrays, **options, cfg=cfg)
        assert all(jnp.allclose(x, y, atol=1e-5) for x, y in zip(gradients, expected_gradients, strict=True))


def test_an_interpreted_call_is_refused_if_the_kernels_do_not_support_it():
    float16_inv = invocation(dtype="float16")
    wide_inv = invocation(dim=640)
    for inv, reason in ((float16_inv, "not float16"), (wide_inv, "head dims up to 512, not 640")):
        with pytest.raises(core.Unsupported, match=reason):
            flash_attention.check_cfg(inv, Config(interpret=True))


def test_every_configuration_has_right_results():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 300, 1, 16))
    registry = interpreted_registry({"flash_attention.pallas_tpu": flash_attention})
    expected = core.call(FORWARD, query, key, key, causal=True, backend="reference")
    for cfg in flash_attention.config_space(invocation(length=300)):
        out = registry.call(FORWARD, query, key, key, causal=True, backend="pallas_tpu", cfg=cfg)
        assert jnp.allclose(out, expected, atol=1e-5), cfg
