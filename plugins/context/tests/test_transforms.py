"""The transformations of JAX, meshes with other axes, and arrays on a mesh outside of ``shard_map``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_context import context_attention, unzigzag, zigzag
from ejkernel_ops import flash_attention

BACKENDS = ("gather", "ulysses", "ring")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
Call = Callable[..., Any]


def draw(*shapes: tuple[int, ...]) -> list[Any]:
    numbers = np.random.default_rng(9)
    return [jnp.asarray(numbers.standard_normal(shape), jnp.float32) for shape in shapes]


def qkv(batch: int = 2, length: int = 32, heads: int = 8, kv_heads: int = 4, dim: int = 8) -> list[Any]:
    return draw((batch, length, heads, dim), (batch, length, kv_heads, dim), (batch, length, kv_heads, dim))


whole = partial(flash_attention, causal=True, backend="reference")


def loss(call: Call) -> Call:
    return lambda *arrays: (call(*arrays) * jnp.cos(jnp.arange(8.0))).sum()


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(np.asarray(e)).max() > 0.01
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance)


def mesh_of(kind: AxisType = AUTO, **sizes: int) -> Any:
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)


def sharded(backend: str | None, check_vma: bool = True, around: Callable[[Call], Call] = lambda call: call) -> Call:
    """The call on whole arrays in the order of the sequence, by four devices."""
    mesh = mesh_of(seq=4)
    call = around(lambda q, k, v: context_attention(q, k, v, axis="seq", causal=True, backend=backend))
    run = jax.shard_map(call, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"), check_vma=check_vma)
    return lambda *arrays: unzigzag(run(*zigzag(arrays, shards=4)), shards=4)


# -- transformations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, *(pytest.param(name, marks=pytest.mark.long) for name in BACKENDS)])
def test_eager(backend: str | None) -> None:
    close(sharded(backend)(*qkv()), whole(*qkv()))


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("argnums", [(0,), (1,), (2,), (0, 2)])
def test_some_gradients(backend: str, argnums: tuple[int, ...]) -> None:
    gradient = jax.jit(jax.grad(loss(sharded(backend)), argnums))
    close(gradient(*qkv()), jax.grad(loss(whole), argnums)(*qkv()))


@pytest.mark.parametrize("backend", [pytest.param("gather", marks=pytest.mark.long), "ring"])
def test_vmap_inside_shard_map(backend: str) -> None:
    """The mapped axis is folded into the batch."""
    arrays = [jnp.stack([array, array / 2], axis=2) for array in qkv()]
    call = sharded(backend, around=lambda call: jax.vmap(call, in_axes=2, out_axes=2))
    run = jax.jit(jax.grad(loss(call), argnums=(0, 1)))
    close(run(*arrays), jax.grad(loss(jax.vmap(whole, in_axes=2, out_axes=2)), argnums=(0, 1))(*arrays))


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_outside_shard_map(backend: str) -> None:
    arrays = [jnp.stack([array, array / 2]) for array in qkv()]
    run = jax.jit(jax.vmap(jax.value_and_grad(loss(sharded(backend)), argnums=(0, 1))))
    close(run(*arrays), jax.vmap(jax.value_and_grad(loss(whole), argnums=(0, 1)))(*arrays))


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_mapped_sinks_are_a_loop(backend: str) -> None:
    sinks = draw((3, 8))[0]
    mesh = mesh_of(seq=4)

    def call(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        one = partial(context_attention, q, k, v, axis="seq", causal=True, backend=backend)
        return jax.vmap(lambda sinks: one(softmax_aux=sinks))(sinks)

    specs = (*(P(None, "seq"),) * 3, P())
    run = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(None, None, "seq"))
    expected = jax.vmap(lambda sinks: whole(*qkv(), softmax_aux=sinks))(sinks)
    close(unzigzag(run(*zigzag(qkv(), shards=4), sinks), shards=4, dim=2), expected)


@pytest.mark.parametrize("backend", [*(pytest.param(name, marks=pytest.mark.long) for name in BACKENDS[:2]), "ring"])
def test_layers_in_a_scan_with_checkpoint(backend: str) -> None:
    policy = jax.checkpoint_policies.save_only_these_names("context_attention.out", "context_attention.lse")

    def layers(call: Call) -> Call:
        @partial(jax.checkpoint, policy=policy)
        def layer(x: Any, scale: Any) -> tuple[Any, None]:
            return x + call(x, scale * x, x), None

        return lambda x, *_: jax.lax.scan(layer, x, jnp.array([0.5, 1.0, 2.0]))[0]

    x = 0.3 * qkv()[0]
    call = sharded(backend, around=layers)
    close(jax.jit(jax.grad(loss(call)))(x, x, x), jax.grad(loss(layers(whole)))(x))


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_names_save_a_forward(backend: str) -> None:
    """With both results saved, the backward calls no forward."""
    policy = jax.checkpoint_policies.save_only_these_names("context_attention.out", "context_attention.lse")

    names = (partial(jax.checkpoint, policy=policy), jax.checkpoint)
    saved, again = (str(jax.make_jaxpr(jax.grad(loss(sharded(backend, around=f))))(*qkv())) for f in names)
    assert (saved.count("ejkernel_call["), again.count("ejkernel_call[")) == (2, 3)


@pytest.mark.long
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_second_derivatives(backend: str, check_vma: bool) -> None:
    """The derivative of the backward is that of its reference, as for attention."""
    arrays = qkv(length=16, heads=4)

    def second(call: Call) -> Any:
        def inner(key: Any) -> Any:
            return (jax.grad(loss(call))(arrays[0], key, arrays[2]) ** 2).sum()

        return jax.jit(jax.grad(inner))(arrays[1])

    close(second(sharded(backend, check_vma)), second(whole), 1e-4)


@pytest.mark.long
def test_forward_mode() -> None:
    arrays = qkv(length=16)
    tangents = [jnp.cos(array) for array in arrays]
    close(jax.jvp(sharded("ring"), arrays, tangents), jax.jvp(whole, arrays, tangents))


# -- meshes ------------------------------------------------------------------------------------------------------------

SPEC = P("data", "seq", "model")


@pytest.mark.parametrize("kind", [AUTO, pytest.param(EXPLICIT, marks=pytest.mark.long)])
@pytest.mark.parametrize("backend", [*(pytest.param(name, marks=pytest.mark.long) for name in BACKENDS[1:]), "gather"])
def test_batch_and_heads_are_sharded_too(backend: str, kind: AxisType) -> None:
    mesh = mesh_of(kind, data=2, seq=2, model=2)
    call = partial(context_attention, axis="seq", causal=True, backend=backend)
    run = jax.shard_map(call, mesh=mesh, in_specs=SPEC, out_specs=SPEC)
    arrays = [jax.device_put(zigzag(array, shards=2), NamedSharding(mesh, SPEC)) for array in qkv()]
    weights = jax.device_put(jnp.cos(jnp.arange(8.0)), NamedSharding(mesh, P()))
    gradients = jax.jit(jax.grad(lambda *arrays: (run(*arrays) * weights).sum(), argnums=(0, 1, 2)))(*arrays)
    expected = jax.grad(loss(whole), argnums=(0, 1, 2))(*qkv())
    close([unzigzag(np.asarray(gradient), shards=2) for gradient in gradients], expected)


@pytest.mark.long
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_other_axes_are_not_manual(backend: str, kind: AxisType) -> None:
    mesh = mesh_of(kind, data=2, seq=4)
    call = partial(context_attention, axis="seq", causal=True, backend=backend)
    run = jax.shard_map(call, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"), axis_names={"seq"})
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("data", "seq"))
        arrays = [jax.device_put(zigzag(array, shards=4), sharding) for array in qkv()]
        weights = jax.device_put(jnp.cos(jnp.arange(8.0)), NamedSharding(mesh, P()))
        gradients = jax.jit(jax.grad(lambda *arrays: (run(*arrays) * weights).sum(), argnums=(0, 1, 2)))(*arrays)
    expected = jax.grad(loss(whole), argnums=(0, 1, 2))(*qkv())
    close([unzigzag(np.asarray(gradient), shards=4) for gradient in gradients], expected)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_over_two_axes(backend: str) -> None:
    mesh = mesh_of(node=2, card=2)
    axis = ("node", "card")
    call = partial(context_attention, axis=axis, causal=True, backend=backend)
    run = jax.shard_map(call, mesh=mesh, in_specs=P(None, axis), out_specs=P(None, axis))
    gradients = jax.jit(jax.grad(loss(lambda *arrays: unzigzag(run(*zigzag(arrays, shards=4)), shards=4)), (0, 1, 2)))
    close(gradients(*qkv()), jax.grad(loss(whole), (0, 1, 2))(*qkv()))


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_are_equal_on_all_devices(backend: str) -> None:
    """Their gradient is the sum over the devices, because each of them has the same keys."""
    query, key, value = qkv()
    mesh = mesh_of(seq=4)
    call = partial(context_attention, axis="seq", layout="contiguous", backend=backend)
    specs = (P(None, "seq"), P(), P())
    run = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(None, "seq"))
    copies = partial(jnp.tile, reps=(1, 4, 1, 1))

    def expected(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(q, copies(k), copies(v), backend="reference")

    gradients = jax.grad(loss(run), argnums=(0, 1, 2))(query, key[:, :8], value[:, :8])
    close(gradients, jax.grad(loss(expected), argnums=(0, 1, 2))(query, key[:, :8], value[:, :8]))


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_arrays_that_are_equal_on_all_devices(backend: str) -> None:
    """The results differ, because the places in the sequence do."""
    arrays = [array[:, :8] for array in qkv()]
    call = partial(context_attention, axis="seq", layout="contiguous", causal=True, backend=backend)
    shards = partial(jax.shard_map, call, mesh=mesh_of(seq=4), in_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        shards(out_specs=P())(*arrays)

    def expected(*arrays: Any) -> Any:
        return whole(*(jnp.tile(array, (1, 4, 1, 1)) for array in arrays))

    run = shards(out_specs=P(None, "seq"))
    close(run(*arrays), expected(*arrays))
    close(jax.grad(loss(run), argnums=(0, 1, 2))(*arrays), jax.grad(loss(expected), argnums=(0, 1, 2))(*arrays))


# -- outside of shard_map ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("jit", [True, pytest.param(False, marks=pytest.mark.long)])
def test_arrays_on_a_mesh(kind: AxisType, jit: bool) -> None:
    mesh = mesh_of(kind, data=2, seq=2, model=2)
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(array, NamedSharding(mesh, SPEC)) for array in qkv()]
        call = partial(context_attention, axis="seq", causal=True, return_lse=True)
        run = jax.jit(call) if jit else call
        out, lse = run(*zigzag(arrays, "seq"))
        if kind is EXPLICIT:
            assert jax.typeof(out).sharding.spec == P("data", "seq", "model", None)
        ordered = unzigzag(out, "seq"), unzigzag(lse, "seq", dim=2)
    close(ordered, whole(*qkv(), return_lse=True))


def test_vmap_over_another_axis_of_an_explicit_mesh() -> None:
    mesh = mesh_of(EXPLICIT, data=2, seq=2)
    arrays = [jnp.stack([array, array / 2]) for array in qkv(length=8)]
    call = jax.vmap(partial(context_attention, axis="seq", layout="contiguous", causal=True))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(array, NamedSharding(mesh, P("data", None, "seq"))) for array in arrays]
        actual = jax.jit(jax.value_and_grad(loss(call), (0, 1, 2)))(*placed)
        with pytest.raises(ValueError, match="'seq' cannot divide the sequence, because a jax.vmap around this call"):
            call(*(jax.device_put(array, NamedSharding(mesh, P("seq"))) for array in arrays))
    close(actual, jax.value_and_grad(loss(jax.vmap(whole)), (0, 1, 2))(*arrays))


def test_arrays_on_a_mesh_of_both_kinds() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(EXPLICIT, AUTO), devices=jax.devices()[:4])
    spec = P("data", "seq")
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(array, NamedSharding(mesh, spec)) for array in zigzag(qkv(), shards=2)]
        out = jax.jit(partial(context_attention, axis="seq", causal=True, mesh=mesh, spec=spec))(*arrays)
    close([unzigzag(np.asarray(out), shards=2)], [whole(*qkv())])


@pytest.mark.long
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_gradients_of_arrays_on_a_mesh(kind: AxisType) -> None:
    mesh = mesh_of(kind, data=2, seq=2, model=2)
    arrays = [jax.device_put(array, NamedSharding(mesh, SPEC)) for array in qkv(kv_heads=1)[:1] + qkv()[1:]]
    weights = jax.device_put(jnp.cos(jnp.arange(8.0)), NamedSharding(mesh, P()))

    def on_mesh(*arrays: Any) -> Any:
        out = context_attention(*arrays, axis="seq", causal=True, mesh=mesh)
        return (out * weights).sum()

    gradients = jax.jit(jax.grad(on_mesh, argnums=(0, 1, 2)))(*zigzag(arrays, "seq", mesh=mesh))
    expected = jax.grad(loss(whole), argnums=(0, 1, 2))(*qkv())
    close([unzigzag(np.asarray(gradient), shards=2) for gradient in gradients], expected)


@pytest.mark.long
def test_the_spec_says_what_arrays_do_not() -> None:
    mesh = mesh_of(data=2, seq=2, model=2)
    arrays = [zigzag(array, shards=2) for array in draw((2, 16, 4, 8), (2, 16, 1, 8), (2, 16, 1, 8))]
    call = partial(context_attention, axis="seq", causal=True, mesh=mesh, spec=SPEC)
    assert "f32[1,8,2,8]" in jax.jit(call).lower(*arrays).compile().as_text()
    ordered = [unzigzag(array, shards=2) for array in arrays]
    close(unzigzag(jax.jit(call)(*arrays), shards=2), whole(*ordered))
