"""Wrong arguments are refused while tracing, with the array, the axis and what to do."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_context
import ejkernel_core
from ejkernel_context import context_attention
from ejkernel_core import NoKernel

X = jnp.ones((2, 32, 4, 8))


def mesh_of(*sizes: int, names: tuple[str, ...] = ("data", "seq"), kind: AxisType = AxisType.Auto) -> Any:
    count = 1
    for size in sizes:
        count *= size
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes), devices=jax.devices()[:count])


def on_shards(query: Any = X, key: Any = X, manual: set[str] | None = None, **options: Any) -> Any:
    options = {"axis": "seq", "causal": True, **options}
    call = jax.shard_map(
        lambda query, key: context_attention(query, key, key, **options),
        mesh=mesh_of(2, 4),
        in_specs=P(None, "seq") if manual is None else P(),
        out_specs=P(None, "seq") if manual is None else P(),
        axis_names=manual or {"data", "seq"},
    )
    return jax.eval_shape(call, query, key)


ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "an unknown axis": (ValueError, "axis: takes axes of the mesh, 'data', 'seq'; got 'sq'", {"axis": "sq"}),
    "an axis that is not a name": (
        TypeError,
        "axis: takes the name of a mesh axis, or a tuple of names; got int 1",
        {"axis": 1},
    ),
    "an axis twice": (ValueError, "axis: takes each name once", {"axis": ("seq", "seq")}),
    "a layout": (ValueError, "layout: takes 'zigzag' or 'contiguous'; got str 'striped'", {"layout": "striped"}),
    "an odd shard": (
        ValueError,
        "query: with layout='zigzag' each device has two chunks of one length, so the length of a shard is even; got 3 "
        "tokens on each of the 4 devices of 'seq'. Pad the sequence to a multiple of 8 tokens, or use layout='contiguous'",
        {"query": X[:, :12], "key": X[:, :12]},
    ),
    "an odd shard of keys": (ValueError, "key: with layout='zigzag'", {"key": X[:, :12], "causal": False}),
    "two lengths": (ValueError, "key: with causal or sliding_window.*got 4 keys and 8 queries", {"key": X[:, :16]}),
    "two lengths and a window": (
        ValueError,
        "key: with causal or sliding_window",
        {"key": X[:, :16], "causal": False, "sliding_window": 3},
    ),
    "a wrong rank": (ValueError, "query", {"query": X[..., 0], "causal": False}),
    "an integer": (TypeError, "query: takes float16, bfloat16, float32 or float64", {"query": jnp.ones(X.shape, int)}),
    "a scale": (ValueError, "softmax_scale: takes a finite number", {"softmax_scale": float("nan")}),
    "a window below zero": (ValueError, "sliding_window: takes sizes of at least 0", {"sliding_window": -1}),
    "a bias": (
        TypeError,
        "bias: flash_attention takes it, and context_attention does not: it has a column",
        {"bias": X},
    ),
    "a mask": (TypeError, "attention_mask: flash_attention takes it", {"attention_mask": X}),
    "dropout": (TypeError, "dropout_prob: .*depends on places in the whole sequence", {"dropout_prob": 0.1}),
    "boundaries": (TypeError, "cum_seqlens_q: .*use segment ids", {"cum_seqlens_q": X}),
    "a typo": (TypeError, "unexpected keyword argument 'causl'; did you mean 'causal'", {"causl": True}),
    "another name": (TypeError, "'scale'; 'scale' is called 'softmax_scale' here", {"scale": 1.0}),
    "ids alone": (
        ValueError,
        "q_segment_ids and kv_segment_ids must be passed together",
        {"q_segment_ids": jnp.ones((2, 8), int)},
    ),
    "a mesh inside": (TypeError, "mesh, spec: take None inside shard_map", {"mesh": mesh_of(2, 4)}),
    "an axis that is not manual, with arrays of one device": (
        ValueError,
        "query: its length of 12 cannot be divided among the 4 devices of 'seq' in two chunks each",
        {"manual": {"data"}, "query": X[:, :12]},
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    kind, words, arguments = ERRORS[case]
    with pytest.raises(kind, match=words):
        on_shards(**arguments)


@pytest.mark.parametrize(
    ("backend", "words", "arguments"),
    [
        (
            "ulysses",
            "query: its 6 heads cannot be divided among the 4 devices of 'seq'; gather and ring need not",
            {"query": X[:, :, :1].repeat(6, 2), "key": X[:, :, :3]},
        ),
        ("ulysses", "key: its 2 heads cannot be divided among the 4 devices of 'seq'", {"key": X[:, :, :2]}),
        ("ring", "sliding_window: most steps of a ring", {"sliding_window": 5}),
        ("ring", "layout: under a causal mask", {"layout": "contiguous"}),
        (
            "gather",
            "sliding_window: without causal it ends after the keys of a chunk",
            {"sliding_window": 5, "causal": False},
        ),
    ],
)
def test_a_kernel_refuses_by_name(backend: str, words: str, arguments: dict[str, Any]) -> None:
    arguments = {"query": X, "key": X, "causal": True, **arguments}
    query, key = (arguments.pop(name) for name in ("query", "key"))
    with pytest.raises(NoKernel, match=words):
        ejkernel_core.plan("context_attention", query, key, key, axis="seq", axis_size=4, backend=backend, **arguments)


def test_a_kernel_refuses_when_the_program_is_lowered() -> None:
    call = jax.shard_map(
        lambda x: context_attention(x, x[:, :, :2], x[:, :, :2], axis="seq", backend="ulysses"),
        mesh=mesh_of(2, 4),
        in_specs=P(None, "seq"),
        out_specs=P(None, "seq"),
    )
    with pytest.raises(NoKernel, match="key: its 2 heads cannot be divided among the 4 devices of 'seq'"):
        jax.jit(call).lower(X)


# -- the line of the user ----------------------------------------------------------------------------------------------


def wrong_call(x: jax.Array, **options: Any) -> jax.Array:
    return context_attention(x, x[..., :4], x, axis="seq", **options)


def refused_call(x: jax.Array, **options: Any) -> jax.Array:
    return context_attention(x, x[:, :, :2], x[:, :, :2], axis="seq", backend="ulysses", **options)


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("call", [wrong_call, refused_call])
def test_an_error_leads_to_the_line_of_the_call(call: Any, is_inside: bool) -> None:
    mesh, spec = mesh_of(2, 4), P(None, "seq")
    inside = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec))
    with pytest.raises((NoKernel, ValueError)) as caught:
        _ = inside(X) if is_inside else call(X, mesh=mesh)
    *_, frame = traceback.extract_tb(caught.value.__traceback__)
    line = f"{call.__code__.co_filename}:{call.__code__.co_firstlineno + 1}, in {call.__name__}"
    if call is refused_call:
        assert str(caught.value).endswith(f"called at {line}")
    elif is_inside:
        assert f"{frame.filename}:{frame.lineno}, in {frame.name}" == line
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not [file for file in files if file.startswith(str(Path(ejkernel_context.__file__).parent))]


# -- outside of shard_map ----------------------------------------------------------------------------------------------


def test_no_mesh() -> None:
    with pytest.raises(
        ValueError, match=r"axis: 'seq' is not an axis of a shard_map around.*pass mesh= with this axis"
    ):
        context_attention(X, X, X, axis="seq")
    with pytest.raises(ValueError, match="axis: 'seq' is not an axis of a shard_map around this call"):
        ejkernel_core.call("context_attention", X, X, X, axis="seq")


def test_an_axis_of_vmap_is_no_mesh_axis() -> None:
    with pytest.raises(ValueError, match="axis: 'seq' is not an axis of a shard_map around this call"):
        jax.vmap(lambda x: ejkernel_core.call("context_attention", x, x, x, axis="seq"), axis_name="seq")(X[None])


def test_an_axis_that_the_mesh_does_not_have() -> None:
    with pytest.raises(ValueError, match="axis: takes axes of the mesh, 'data', 'seq'; got 'sequence'"):
        context_attention(X, X, X, axis="sequence", mesh=mesh_of(2, 4))


def test_arrays_on_different_meshes() -> None:
    query = jax.device_put(X, NamedSharding(mesh_of(2, 4), P(None, "seq")))
    key = jax.device_put(X, NamedSharding(mesh_of(1, 2), P(None, "seq")))
    words = r"key: takes an array on the mesh of the call, \(data: 2, seq: 4\); got one on \(data: 1, seq: 2\): move it"
    with pytest.raises(ValueError, match=words):
        context_attention(query, key, key, axis="seq")


@pytest.mark.parametrize(
    ("words", "arrays", "options"),
    [
        (
            "query: its length of 12 cannot be divided among the 4 devices of 'seq' in two chunks each, by layout='zigzag'; it takes a multiple of 8",
            {"query": X[:, :12]},
            {},
        ),
        (
            "key: its length of 10 cannot be divided among the 4 devices of 'seq'; it takes a multiple of 4",
            {"key": X[:, :10]},
            {"layout": "contiguous"},
        ),
        (
            "key: its heads of 3 cannot be divided among the 2 devices of 'data'",
            {"key": X[:, :, :3]},
            {"spec": P(None, "seq", "data")},
        ),
        (
            "query: its batch of 1 cannot be divided among the 2 devices of 'data'",
            {"query": X[:1]},
            {"spec": P("data")},
        ),
        ("spec: its second entry is the sequence, which axis='seq' divides", {}, {"spec": P(None, "data")}),
        (r"query: takes \(batch, length, heads, head_dim\); got shape \(32, 4, 8\)", {"query": X[0]}, {}),
    ],
)
def test_what_the_devices_cannot_divide(words: str, arrays: dict[str, Any], options: dict[str, Any]) -> None:
    arrays = {"query": X, "key": X, **arrays}
    with pytest.raises(ValueError, match=words):
        context_attention(arrays["query"], arrays["key"], arrays["key"], axis="seq", mesh=mesh_of(2, 4), **options)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_call_outside_of_shard_map_does_not_run(kind: Any) -> None:
    """``axis_size`` is for plans. On explicit axes, the core would divide the call, with a mesh axis of this name."""
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(kind,), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "seq"))
    array = jax.device_put(jnp.ones((1, 8, 2, 4)), sharding)
    with pytest.raises(ValueError, match="'seq' is not an axis of a shard_map around this call"):
        ejkernel_core.call("context_attention", array, array, array, axis="seq", axis_size=2, causal=True)
