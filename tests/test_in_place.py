"""Operations that update an argument in place: values, the caller's array, and copies."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_core import Axes, NotDifferentiable, Operation, PluginError, Registry, hookimpl

RNG = np.random.default_rng(5)
PAGES = RNG.normal(size=(64, 4, 3)).astype(np.float32)
ROWS = RNG.normal(size=(5, 4, 3)).astype(np.float32)
SLOTS = np.array([7, 0, 63, 12, -1], np.int32)
AXES = Axes(
    {"pages": "slots heads dim", "rows": "tokens heads dim", "slots": "tokens"},
    {"new_pages": "slots heads dim"},
    independent="heads",
    whole="slots tokens dim",
)


@hookimpl
def run_backend(inv: Any, cfg: Any) -> Any:
    """Rows at their slots; a slot below 0 is none."""
    pages, slots = inv["pages"], inv["slots"]
    return pages.at[jnp.where(slots < 0, pages.shape[0], slots)].set(inv["rows"].astype(pages.dtype), mode="drop")


def expected(pages: np.ndarray, rows: np.ndarray, slots: np.ndarray) -> np.ndarray:
    new_pages = pages.copy()
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            new_pages[slot] = row
    return new_pages


def make_registry(is_opaque: bool) -> Registry:
    registry = Registry(plugins="")
    registry.register(
        Operation(name="store", signature=lambda pages, rows, slots: None, axes=AXES, aliases={"new_pages": "pages"})
    )
    for backend, rank in (("reference", 0), ("plain", 1)):
        opaque = ("cpu",) if is_opaque and rank else ()
        kernel = SimpleNamespace(run_backend=run_backend, PLATFORMS={"cpu": rank}, OPAQUE=opaque)
        registry.register(kernel, f"store.{backend}")
    return registry


@pytest.fixture(params=[False, True], ids=["plain", "opaque"])
def registry(request: pytest.FixtureRequest) -> Registry:
    return make_registry(request.param)


def arrays() -> list[jax.Array]:
    """New ones, so that each may be given away."""
    return [jnp.array(PAGES), jnp.array(ROWS), jnp.array(SLOTS)]


def copies_in(compiled: Any, shape: tuple[int, ...]) -> int:
    dims = ",".join(map(str, shape))
    return len(re.findall(rf"= f32\[{dims}\]\S* copy\(", compiled.as_text()))


# -- who owns the array ------------------------------------------------------------------------------------------------


def test_without_donation_the_array_of_the_caller_stays(registry: Registry) -> None:
    pages, rows, slots = arrays()
    for _ in range(2):
        np.testing.assert_array_equal(registry.call("store", pages, rows, slots), expected(PAGES, ROWS, SLOTS))
    np.testing.assert_array_equal(pages, PAGES)


def test_an_eager_call_updates_what_it_was_given(registry: Registry) -> None:
    pages, rows, slots = arrays()
    place = pages.unsafe_buffer_pointer()
    new_pages = registry.call("store", pages, rows, slots, donate=True)
    assert pages.is_deleted()
    assert new_pages.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(new_pages, expected(PAGES, ROWS, SLOTS))
    assert [array.is_deleted() for array in (rows, slots)] == [False, False]
    second = registry.call("store", new_pages, 2 * rows, slots // 2, donate=True)
    assert second.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(second, expected(expected(PAGES, ROWS, SLOTS), 2 * ROWS, SLOTS // 2))


def test_an_array_that_was_given_away_is_named(registry: Registry) -> None:
    pages, rows, slots = arrays()
    registry.call("store", pages, rows, slots, donate=True)
    for options in ({}, {"donate": True}, {"backend": "reference"}):
        with pytest.raises(ValueError, match="^store: pages was given away, by donate=True of an earlier call"):
            registry.call("store", pages, rows, slots, **options)
    with pytest.raises(ValueError, match="^store: rows was given away"):
        registry.call("store", jnp.array(PAGES), deleted(rows), slots)


def deleted(array: jax.Array) -> jax.Array:
    array = array + 0
    array.delete()
    return array


def test_inside_a_trace_donation_is_that_of_the_caller(registry: Registry) -> None:
    step = lambda pages, rows, slots: registry.call("store", pages, rows, slots, donate=True)
    pages, rows, slots = arrays()
    np.testing.assert_array_equal(jax.jit(step)(pages, rows, slots), expected(PAGES, ROWS, SLOTS))
    np.testing.assert_array_equal(pages, PAGES)
    mapped = jax.jit(jax.vmap(step, (None, 0, None)))(pages, jnp.stack([rows, 2 * rows]), slots)
    np.testing.assert_array_equal(mapped, [expected(PAGES, ROWS, SLOTS), expected(PAGES, 2 * ROWS, SLOTS)])
    np.testing.assert_array_equal(pages, PAGES)


# -- without a copy ----------------------------------------------------------------------------------------------------

Step = Callable[[Any, Any, Any], Any]


def scanned(step: Step) -> Step:
    """The pages are the carry of a scan."""

    def run(pages: Any, rows: Any, slots: Any) -> Any:
        body = lambda carry, offset: (step(carry, rows * (1.0 + offset), slots + offset), None)
        return jax.lax.scan(body, pages, jnp.arange(3))[0]

    return run


def of_scan() -> np.ndarray:
    pages = PAGES
    for offset in range(3):
        slots = SLOTS + offset
        pages = expected(pages, ROWS * (1 + offset), np.where(slots >= len(PAGES), -1, slots))
    return pages


PROGRAMS: dict[str, tuple[Callable[[Step], Step], Callable[[], np.ndarray]]] = {
    "jit": (lambda step: step, lambda: expected(PAGES, ROWS, SLOTS)),
    "nested jit": (lambda step: lambda *a: jax.jit(jax.jit(step))(*a), lambda: expected(PAGES, ROWS, SLOTS)),
    "scan": (scanned, of_scan),
    "scan in a scan": (lambda step: scanned(lambda *a: jax.jit(step)(*a)), of_scan),
    "checkpoint": (lambda step: jax.checkpoint(step), lambda: expected(PAGES, ROWS, SLOTS)),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_copied_where_the_caller_donates(registry: Registry, program: str) -> None:
    wrap, result = PROGRAMS[program]
    step = wrap(lambda *a: registry.call("store", *a))
    compiled = jax.jit(step, donate_argnums=0).lower(*arrays()).compile()
    assert copies_in(compiled, PAGES.shape) == 0
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == PAGES.nbytes
    assert memory.temp_size_in_bytes < PAGES.nbytes
    pages, rows, slots = arrays()
    place = pages.unsafe_buffer_pointer()
    new_pages = compiled(pages, rows, slots)
    assert new_pages.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(new_pages, result())


@pytest.mark.parametrize("kind", ["automatic", "explicit", "shard_map"])
def test_shards_are_updated_in_place(registry: Registry, kind: str) -> None:
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(axis_type,), devices=jax.devices()[:4])
    by_heads = NamedSharding(mesh, P(None, "heads"))
    pages, rows = jax.device_put((PAGES, ROWS), by_heads)
    slots = jax.device_put(SLOTS, NamedSharding(mesh, P()))
    step = lambda *a: registry.call("store", *a)
    if kind == "shard_map":
        spec = P(None, "heads")
        step = jax.shard_map(step, mesh=mesh, in_specs=(spec, spec, P()), out_specs=spec)
    with jax.set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=0, out_shardings=by_heads).lower(pages, rows, slots).compile()
        places = [shard.data.unsafe_buffer_pointer() for shard in pages.addressable_shards]
        new_pages = compiled(pages, rows, slots)
    assert copies_in(compiled, (64, 1, 3)) == 0
    assert "all-gather" not in compiled.as_text()
    assert compiled.memory_analysis().alias_size_in_bytes == PAGES.nbytes // 4
    assert [shard.data.unsafe_buffer_pointer() for shard in new_pages.addressable_shards] == places
    np.testing.assert_array_equal(new_pages, expected(PAGES, ROWS, SLOTS))


# -- refused -----------------------------------------------------------------------------------------------------------


def test_donations_that_are_refused(registry: Registry) -> None:
    registry.register(Operation(name="plain", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    registry.register(SimpleNamespace(run_backend=hookimpl(lambda inv, cfg: inv["x"])), "plain.reference")
    with pytest.raises(ValueError, match="^plain: donate=True has nothing to give away: it updates no argument"):
        registry.call("plain", jnp.ones(3), donate=True)
    pages, rows, slots = arrays()
    with pytest.raises(TypeError, match="^store: donate takes True or False; got 'pages'"):
        registry.call("store", pages, rows, slots, donate="pages")
    with pytest.raises(ValueError, match="^store: donate=True gives pages away, and rows is the same array"):
        registry.call("store", pages, pages, jnp.arange(64), donate=True)
    for method in (registry.plan, registry.explain, registry.invocation):
        with pytest.raises(TypeError, match="^store: donate is for a call that runs"):
            method("store", pages, rows, slots, donate=True)
    assert not pages.is_deleted()
    np.testing.assert_array_equal(registry.call("store", pages, pages, jnp.arange(64)), PAGES)


def test_an_eager_map_gives_away_what_it_maps_over(registry: Registry) -> None:
    step = lambda pages, rows, slots: registry.call("store", pages, rows, slots, donate=True)
    pages, rows, slots = arrays()
    with pytest.raises(ValueError, match="donate=True cannot give pages away, because jax.vmap does not map over it"):
        jax.vmap(step, (None, 0, None))(pages, jnp.stack([rows, rows]), slots)
    inner = jax.vmap(step, (0, 0, None))
    two, rows_of_two = jnp.stack([pages, 2 * pages]), jnp.stack([rows, 3 * rows])
    with pytest.raises(ValueError, match="jax.vmap does not map over it"):
        jax.vmap(inner, (None, 0, None))(two, jnp.stack([rows_of_two] * 2), slots)
    results = inner(two, rows_of_two, slots)
    assert two.is_deleted()
    np.testing.assert_array_equal(results, [expected(PAGES, ROWS, SLOTS), expected(2 * PAGES, 3 * ROWS, SLOTS)])


def test_what_is_updated_has_no_gradient(registry: Registry) -> None:
    pages, rows, slots = arrays()
    with pytest.raises(NotDifferentiable, match="'store' has no gradient for rows"):
        jax.grad(lambda rows: registry.call("store", pages, rows, slots).sum())(rows)
    pages, rows, slots = arrays()

    def loss(weight: Any) -> Any:
        return (weight * registry.call("store", pages, rows, slots, donate=True)).sum()

    np.testing.assert_allclose(jax.grad(loss)(2.0), expected(PAGES, ROWS, SLOTS).sum(), rtol=1e-5)
    assert pages.is_deleted()


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "other axes": ({"aliases": {"new_pages": "rows"}}, "new_pages has the axes 'slots heads dim', and rows 'tokens"),
    "no result": ({"aliases": {"pages": "pages"}}, "'pages' is not a result"),
    "no array": ({"aliases": {"new_pages": "page"}}, "'page' is not an array; did you mean 'pages'?"),
    "gradients": ({"differentiable": ("rows",)}, "what is updated in place has no gradient"),
    "a backward": ({"backward": "store_bwd"}, "what is updated in place has no gradient"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_refused_when_they_are_declared(case: str) -> None:
    fields, message = MISTAKES[case]
    valid = {"name": "store", "signature": lambda pages, rows, slots: None, "axes": AXES}
    with pytest.raises(ValueError, match=f"^aliases of store: {re.escape(message)}"):
        Operation(**{**valid, "aliases": {"new_pages": "pages"}, **fields})


def test_two_results_cannot_be_one_argument() -> None:
    axes = Axes({"x": "n"}, {"a": "n", "b": "n"}, whole="n")
    with pytest.raises(ValueError, match="^aliases of twice: x cannot be two results"):
        Operation(name="twice", signature=lambda x: None, axes=axes, aliases={"a": "x", "b": "x"})


def test_a_result_by_hand_has_to_be_like_its_argument() -> None:
    registry = Registry(plugins="")
    operation = Operation(
        name="odd",
        signature=lambda x: None,
        results=("out",),
        aliases={"out": "x"},
        outputs=lambda a: (jax.ShapeDtypeStruct(a["x"].shape, "bfloat16"),),
    )
    registry.register(operation)
    registry.register(SimpleNamespace(run_backend=hookimpl(lambda inv, cfg: inv["x"])), "odd.reference")
    with pytest.raises(PluginError, match="^odd: out is x, updated, and has to be like it"):
        registry.call("odd", jnp.ones(3))
    assert registry.call("odd", jnp.ones(3, "bfloat16")).dtype == jnp.bfloat16


def test_a_derived_result_has_the_dtype_of_its_argument() -> None:
    axes = Axes({"x": "n", "cache": "m"}, {"cache_out": "m", "sums": "n"}, whole="n m", statistics="sums")
    operation = Operation(name="f", signature=lambda x, cache: None, axes=axes, aliases={"cache_out": "cache"})
    x, cache = jax.ShapeDtypeStruct((3,), "bfloat16"), jax.ShapeDtypeStruct((4,), "int8")
    assert operation.outputs is not None
    assert [out.dtype for out in operation.outputs({"x": x, "cache": cache})] == ["int8", "float32"]
