"""The kernels under transformations of JAX: sharded, lowered and exported for an absent card, with checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import ejkernel_core
from ejkernel_triton import flash_attention
from ejkernel_triton.flash_attention import backward as flash_attention_bwd
from ejkernel_triton.interpreter import compiled_for, interpreted, interpreted_registry, kernels_in
from ejkernel_triton.launch import _jax_triton

TARGET = "triton_kernel_call_ffi" if _jax_triton.version() >= (0, 4) else "triton_kernel_call"
FORWARD, KEYS, QUERIES, BIAS = "attend", "sum_over_queries", "sum_over_keys", "sum_into_bias"
EXACT_LSE = "exact_lse"
RNG = np.random.default_rng(11)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


# -- several devices ----------------------------------------------------------------------------------------------

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 4, 20, 4, 2, 16
ARRAYS = (normal(BATCH, LENGTH, HEADS, DIM), *(normal(BATCH, LENGTH, KV_HEADS, DIM) for _ in range(2)))
SINKS = normal(HEADS)
WEIGHTS = normal(BATCH, LENGTH, HEADS, DIM)


@pytest.fixture(scope="module")
def attention() -> Iterator[Any]:
    registry = interpreted_registry(
        {"flash_attention.triton": flash_attention, "flash_attention_bwd.triton": flash_attention_bwd}
    )

    def call(query: Any, key: Any, value: Any, sinks: Any) -> Any:
        return registry.call("flash_attention", query, key, value, softmax_aux=sinks, causal=True, backend="triton")

    with interpreted():
        yield call


def sharded(attention: Any, check: bool = True) -> Any:
    mesh = jax.make_mesh((4, 2), ("batch", "heads"), axis_types=(AxisType.Auto,) * 2)
    rows = P("batch", None, "heads")
    return jax.shard_map(attention, mesh=mesh, in_specs=(rows, rows, rows, P("heads")), out_specs=rows, check_vma=check)


def close(found: Any, expected: Any) -> None:
    for result, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(result, right, rtol=0, atol=1e-5 * float(jnp.abs(right).max()))


@pytest.mark.parametrize("check", [True, False])
def test_batch_and_heads_may_be_sharded(attention: Any, check: bool) -> None:
    assert len(jax.devices()) == 8
    cut = sharded(attention, check)
    loss = lambda function: lambda *given: (function(*given) * WEIGHTS).sum()
    found = jax.jit(cut)(*ARRAYS, SINKS)
    assert len(found.sharding.device_set) == 8
    close([found], [attention(*ARRAYS, SINKS)])
    gradients = jax.jit(jax.grad(loss(cut), argnums=(0, 1, 2, 3)))(*ARRAYS, SINKS)
    expected = jax.jit(jax.grad(loss(attention), argnums=(0, 1, 2, 3)))(*ARRAYS, SINKS)
    close(gradients, expected)
    # The gradient of a sink is a sum over the whole batch, on all devices.
    reference = lambda *given: ejkernel_core.call(
        "flash_attention", *given[:3], softmax_aux=given[3], causal=True, backend="reference"
    )
    close(gradients, jax.jit(jax.grad(loss(reference), argnums=(0, 1, 2, 3)))(*ARRAYS, SINKS))


def test_a_call_on_a_shard_is_chosen_for_its_shape(attention: Any) -> None:
    shapes = []

    def message(*given: Any) -> Any:
        shapes.append(tuple(array.shape for array in given))
        return attention(*given)

    jax.eval_shape(sharded(message), *ARRAYS, SINKS)
    assert set(shapes) == {((1, 20, 2, 16), (1, 20, 1, 16), (1, 20, 1, 16), (2,))}


def test_a_second_device_changes_nothing(attention: Any) -> None:
    """Several devices and no mesh: the call runs on the device of its arrays."""
    expected = attention(*ARRAYS, SINKS)
    place = jax.devices()[5]
    found = jax.jit(attention)(*(jax.device_put(array, place) for array in (*ARRAYS, SINKS)))
    assert found.devices() == {place}
    np.testing.assert_array_equal(found, expected)


def test_replicated_arrays_may_be_used_inside_jit(attention: Any) -> None:
    mesh = jax.make_mesh((8,), ("all",), axis_types=(AxisType.Auto,))
    given = [jax.device_put(array, NamedSharding(mesh, P())) for array in (*ARRAYS, SINKS)]
    np.testing.assert_array_equal(jax.jit(attention)(*given), attention(*ARRAYS, SINKS))


# -- a card that is not here --------------------------------------------------------------------------------------


def on(card: str) -> Any:
    return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(card, None, "gpu")))


def shape(*axes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(axes, dtype)


QKV = (shape(2, 256, 4, 64), shape(2, 256, 2, 64), shape(2, 256, 2, 64))


def chosen(module: Any, card: str) -> Any:
    """The heuristic configuration for a card."""
    inv = ejkernel_core.invocation("flash_attention", *QKV, causal=True)
    capability = {"NVIDIA H200": (9, 0), "NVIDIA A100-SXM4-80GB": (8, 0)}[card]
    return module.heuristic_cfg(attrs.evolve(inv, platform="gpu", device_kind=card, compute_capability=capability))


def called(*qkv: Any, **more: Any) -> Any:
    return ejkernel_core.call("flash_attention", *qkv, backend="triton", **more)


def trained(*qkv: Any, argnums: Any = (0, 1, 2), **more: Any) -> Any:
    """The gradients of a training step."""
    return jax.grad(lambda *qkv: called(*qkv, **more).astype(jnp.float32).sum(), argnums=argnums)(*qkv)


@pytest.mark.parametrize("card", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_a_function_with_the_kernels_is_lowered_for_an_absent_card(card: str) -> None:
    with on(card):
        lowered = jax.jit(lambda *qkv: trained(*qkv, causal=True)).trace(*QKV).lower(lowering_platforms=("cuda",))
    found = kernels_in(lowered)
    assert sorted(kernel.name for kernel in found) == sorted([FORWARD, KEYS, QUERIES])
    # There is a row of programs for each head; the kernel sums over grouped queries, for each head of keys.
    rows = {FORWARD: 2 * 4, QUERIES: 2 * 4, KEYS: 2 * 2}
    cfg, cfg_bwd = (chosen(module, card) for module in (flash_attention, flash_attention_bwd))
    blocks = {FORWARD: cfg.q_block, QUERIES: cfg_bwd.queries.q_block, KEYS: cfg_bwd.keys.k_block}
    assert {k.name: k.grid for k in found} == {name: (256 // blocks[name] * rows[name], 1, 1) for name in rows}
    target = "sm_90a" if card == "NVIDIA H200" else "sm_80"
    assert {target in kernel.ptx for kernel in found} == {True}


def exported() -> Any:
    allowed = [jax.export.DisabledSafetyCheck.custom_call(TARGET)]
    with on("NVIDIA H200"):
        step = jax.jit(partial(trained, causal=True))
        return jax.export.export(step, platforms=["cuda"], disabled_checks=allowed)(*QKV)


def test_a_function_with_the_kernels_is_exported() -> None:
    made = exported()
    assert made.platforms == ("cuda",)
    assert [aval.shape for aval in made.out_avals] == [aval.shape for aval in QKV]
    assert made.mlir_module().count(f"@{TARGET}(") == 3
    with pytest.raises(ValueError, match="platforms"):
        made.call(*(jnp.zeros(aval.shape, aval.dtype) for aval in QKV))


def test_an_exported_function_can_be_serialized() -> None:
    made = exported()
    again = jax.export.deserialize(made.serialize())
    assert again.mlir_module() == made.mlir_module()


def test_only_the_gradients_that_are_used_are_computed() -> None:
    for argnum, expected in ((0, QUERIES), (1, KEYS), (2, KEYS)):
        names = [
            kernel.name
            for kernel in compiled_for(
                "NVIDIA H200",
                partial(trained, argnums=argnum),
                *QKV,
            )
        ]
        assert sorted(names) == sorted([FORWARD, expected])


def test_the_gradient_of_a_bias_is_a_kernel_of_its_own() -> None:
    def of_bias(bias: Any, *qkv: Any) -> Any:
        return jax.grad(lambda bias: called(*qkv, bias=bias).astype(jnp.float32).sum())(bias)

    found = compiled_for("NVIDIA H200", of_bias, shape(1, 4, 256, 256), *QKV)
    assert sorted(kernel.name for kernel in found) == sorted([FORWARD, EXACT_LSE, BIAS])


def test_a_bias_does_not_make_the_host_wait() -> None:
    def total(bias: Any, *qkv: Any) -> Any:
        return called(*qkv, bias=bias).astype(jnp.float32).sum()

    step = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))
    with on("NVIDIA H200"):
        lowered = step.trace(shape(1, 4, 256, 256), *QKV).lower(lowering_platforms=("cuda",))
    assert sorted(kernel.name for kernel in kernels_in(lowered)) == sorted([FORWARD, EXACT_LSE, KEYS, QUERIES, BIAS])
    assert not re.search(r"stablehlo\.(case|if|while)", lowered.as_text())


# -- what is not used costs nothing -------------------------------------------------------------------------------

EVERYTHING = {
    "causal": True,
    "sliding_window": (40, 0),
    "logits_soft_cap": 20.0,
    "dropout_prob": 0.1,
    "dropout_seed": 3,
    "attention_mask": np.ones((2, 1, 256, 256), bool),
}


def instructions(ptx: str, word: str = "") -> int:
    """How many instructions begin with a word, predicated or not."""
    return len(re.findall(rf"^\s*(?:@!?%p\d+\s+)?{re.escape(word)}[\w.:]*\s[^\n]*;$", ptx, re.MULTILINE))


@pytest.fixture(scope="module")
def kernels() -> dict[str, dict[str, Any]]:
    """The kernels of the same call without features, with a causal mask, and with all features."""
    options: dict[str, dict[str, Any]] = {"plain": {}, "causal": {"causal": True}, "everything": EVERYTHING}
    return {
        name: {kernel.name: kernel for kernel in compiled_for("NVIDIA H200", partial(trained, **given), *QKV)}
        for name, given in options.items()
    }


@pytest.mark.parametrize("name", [FORWARD, KEYS, QUERIES])
def test_unused_features_are_not_in_the_code(kernels: dict[str, dict[str, Any]], name: str) -> None:
    plain, causal, everything = (kernels[which][name] for which in ("plain", "causal", "everything"))
    counts = [instructions(kernel.ptx) for kernel in (plain, causal, everything)]
    assert counts == sorted(counts)
    assert counts[0] < 0.75 * counts[1]  # one loop, not two
    # A mask, a cap or dropout takes an instruction or more for each logit of a thread.
    logits = 64 * 64 // (32 * plain.num_warps)
    assert instructions(plain.ptx, "wgmma.mma_async") > 0
    for word, user in (("selp", causal), ("setp", causal), ("div", everything)):
        assert instructions(plain.ptx, word) < logits <= instructions(user.ptx, word)


# -- rematerialised layers -----------------------------------------------------------------------------------------


OUT, LSE = "flash_attention.out", "flash_attention.lse"
save_only, offload = (
    jax.checkpoint_policies.save_only_these_names,
    partial(
        jax.checkpoint_policies.save_and_offload_only_these_names,
        names_which_can_be_saved=[],
        offload_src="device",
        offload_dst="pinned_host",
    ),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "forwards"),
    [
        (None, (7, 8)),  # XLA may not compute the last layer twice
        (save_only(OUT), (7, 8)),
        (save_only(OUT, LSE), (4,)),
        (offload(names_which_can_be_offloaded=[OUT, LSE]), (4,)),
    ],
    ids=["nothing", "out", "out and lse", "offloaded"],
)
def test_saved_results_are_not_computed_again(attention: Any, policy: Any, forwards: tuple[int, ...]) -> None:
    """The launches in a program of four layers, which are computed again except for the saved names."""

    def loss(layer: Any, x: Any) -> Any:
        for _ in range(4):
            x = layer(x)
        return x.sum()

    def layer(x: Any) -> Any:
        return x + jnp.tanh(attention(x, *ARRAYS[1:], SINKS))

    remat = jax.checkpoint(layer, policy=policy)
    compiled = jax.jit(jax.grad(partial(loss, remat))).lower(ARRAYS[0]).compile()
    launches = re.findall(r'custom_call_target="\w*callback\w*"', compiled.as_text())
    assert len(launches) - 4 in forwards  # the backward of queries is one launch a layer
    close([compiled(ARRAYS[0])], [jax.grad(partial(loss, layer))(ARRAYS[0])])
