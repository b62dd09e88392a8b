"""What the kernels choose and refuse, by device."""

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


def invocation(device_kind="TPU v5e", length=4096, dim=128, dtype="bfloat16", op=FORWARD, k_length=None, **given):
    """The call as a kernel sees it on that device."""
    query, key = (shape(1, n, 4, dim, dtype=dtype) for n in (length, k_length or length))
    arrays = {"query": query, "key": key, "value": key}
    if op == BACKWARD:
        wide = shape(1, 4, length, dtype="float32")
        arrays |= {"out": query, "lse": wide, "d_out": query, "d_lse": None, "wrt": ("query", "key", "value")}
    plan = core.plan(op, **arrays, **given, backend="reference")
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
    assert flash_attention.heuristic_cfg(invocation(length=length)).q_block == block
    assert flash_attention.heuristic_cfg(invocation(k_length=length)).k_block == block
    assert flash_attention_bwd.heuristic_cfg(invocation(length=length, op=BACKWARD)).keys.q_block == block


@pytest.mark.parametrize("device", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_offered_fits(device, dtype, dim, bias):
    given = {"bias": shape(1, 4, 4096, 4096, dtype="float32")} if bias else {}
    budget = KINDS[device].budget
    inv = invocation(device, dim=dim, dtype=dtype, **given)
    space = [(cfg.q_block, cfg.k_block) for cfg in flash_attention.config_space(inv)]
    assert len({*space}) == len(space) > 0
    assert all(_tuning.needed(inv, "forward", blocks) <= budget for blocks in space)
    inv = invocation(device, dim=dim, dtype=dtype, op=BACKWARD, **given)
    for cfg in flash_attention_bwd.config_space(inv):
        for which in ("queries", "keys", "bias"):
            blocks = attrs.astuple(getattr(cfg, which))
            assert _tuning.needed(inv, which, blocks) <= budget


def test_the_heuristic_is_the_first_of_the_space():
    inv = invocation()
    assert next(iter(flash_attention.config_space(inv))) == flash_attention.heuristic_cfg(inv)
    inv = invocation(op=BACKWARD)
    assert next(iter(flash_attention_bwd.config_space(inv))) == flash_attention_bwd.heuristic_cfg(inv)


@pytest.mark.parametrize("module", [flash_attention, flash_attention_bwd])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"platform": "cpu"}, "run on TPUs; this is cpu"),
        ({"device_kind": None}, "use_abstract_mesh with an AbstractDevice('TPU v5e', 1, 'tpu')"),
        ({"device_kind": "TPU v3"}, "know TPU v4, TPU v5e"),
    ],
)
def test_devices_are_refused_with_a_reason(module, change, told):
    op = BACKWARD if module is flash_attention_bwd else FORWARD
    with pytest.raises(core.Unsupported, match="Pallas TPU|blocks are chosen") as refusal:
        module.heuristic_cfg(attrs.evolve(invocation(op=op), **change))
    assert told in str(refusal.value)


@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
@pytest.mark.parametrize(
    ("given", "told"), [({"dtype": "float16"}, "not float16"), ({"dim": 520}, "up to 512, not 520")]
)
def test_arguments_are_refused_with_a_reason(op, given, told):
    module = {FORWARD: flash_attention, BACKWARD: flash_attention_bwd}[op]
    with pytest.raises(core.Unsupported) as refusal:
        module.heuristic_cfg(invocation(op=op, **given))
    assert told in str(refusal.value)


def test_off_tpu_the_core_says_where_it_runs():
    registry = core.Registry()
    registry.register(flash_attention, "flash_attention.pallas_tpu")
    query = shape(1, 8, 2, 16)
    with pytest.raises(core.NoKernel, match="it runs on tpu; this is cpu"):
        registry.plan(FORWARD, query, query, query, backend="pallas_tpu")


@pytest.mark.parametrize("q_block", [0, 64, 192, 4096, 128.5])
def test_blocks_are_checked(q_block):
    with pytest.raises(ValueError, match="q_block"):
        Config(q_block=q_block)


def test_a_configuration_that_asks_for_the_interpreter_gets_it():
    inv = invocation(length=9, dtype="float32")
    arrays = {name: jax.random.normal(jax.random.key(0), (1, 9, 4, 128)) for name in ("query", "key", "value")}
    out, lse = flash_attention.run_backend(inv.with_arrays(arrays), Config(interpret=True))
    right, right_lse = core.call(FORWARD, **arrays, return_lse=True, backend="reference")
    assert jnp.allclose(out, right, atol=1e-5)
    assert jnp.allclose(lse, right_lse, atol=1e-5)


def test_a_call_may_be_interpreted_where_no_tpu_is():
    query, key, value = jax.random.normal(jax.random.key(1), (3, 1, 200, 2, 16))
    interpreted = Config(128, 128, interpret=True)
    out, lse = core.call(FORWARD, query, key, value, causal=True, return_lse=True, cfg=interpreted)
    right = core.call(FORWARD, query, key, value, causal=True, return_lse=True, backend="reference")
    assert jnp.allclose(out, right[0], atol=1e-5)
    d_out = jax.random.normal(jax.random.key(2), out.shape)
    arrays = {"query": query, "key": key, "value": value, "out": out, "lse": lse, "d_out": d_out}
    options = {"causal": True, "wrt": ("query", "key", "value")}
    wanted = core.call(BACKWARD, **arrays, **options, backend="reference")
    for fused in (None, flash_attention_bwd.Pass(128, 128)):
        small = flash_attention_bwd.Pass(128, 128)
        cfg = flash_attention_bwd.Config(fused, queries=small, keys=small, interpret=True)
        found = core.call(BACKWARD, **arrays, **options, cfg=cfg)
        assert all(jnp.allclose(x, y, atol=1e-5) for x, y in zip(found, wanted, strict=True))


def test_an_interpreted_call_is_refused_what_the_kernels_do_not_do():
    half = invocation(dtype="float16")
    wide = invocation(dim=640)
    for inv, reason in ((half, "not float16"), (wide, "head dims up to 512, not 640")):
        with pytest.raises(core.Unsupported, match=reason):
            flash_attention.check_cfg(inv, Config(interpret=True))


def test_every_block_that_is_offered_is_right():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 300, 1, 16))
    registry = interpreted_registry({"flash_attention.pallas_tpu": flash_attention})
    right = core.call(FORWARD, query, key, key, causal=True, backend="reference")
    for cfg in flash_attention.config_space(invocation(length=300)):
        out = registry.call(FORWARD, query, key, key, causal=True, backend="pallas_tpu", cfg=cfg)
        assert jnp.allclose(out, right, atol=1e-5), cfg
