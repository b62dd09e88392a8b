"""A key is content: the same however a call is made and wherever, another for whatever could change the choice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_core
from ejkernel_core import Key, Operation, Registry, hookimpl
from tests.conftest import MakeDistribution


def scale(x, y=None, *, by=1, dtype=None, mode="a"): ...


def fold(arguments: Any, names: frozenset[str], size: int) -> Any:
    (length,) = arguments["x"].shape[1:]
    return {**arguments, "x": arguments["x"].reshape(size * length)}, lambda r: tuple(
        v.reshape(size, length) for v in r
    )


class Listening(Registry):
    """A registry with the operation ``scale``, whose kernel hears every key that a choice is made for."""

    def __init__(self, **operation: Any) -> None:
        super().__init__(plugins="")
        self.keys: list[Key] = []
        keys = self.keys

        @hookimpl
        def heuristic_cfg(inv):
            keys.append(inv.key)

        @hookimpl
        def run_backend(inv, cfg):
            return inv["x"] * 2

        self.register(Operation(name="scale", signature=scale, outputs=lambda a: (a["x"],), **operation))
        self.register(SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend), "scale.two")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call("scale", *args, **kwargs)

    def key(self, *args: Any, **kwargs: Any) -> Key:
        return self.invocation("scale", *args, **kwargs).key


LISTENING = Listening()

dtypes = st.sampled_from(["float32", "float16", "bfloat16", "int32", "bool"])
shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)
arrays = st.builds(jax.ShapeDtypeStruct, shapes, dtypes)
values = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False), st.text(max_size=3))
options = st.fixed_dictionaries(
    {},
    optional={
        "by": st.one_of(values, st.tuples(values, values)),
        "dtype": st.sampled_from([jnp.float32, jnp.bfloat16, "float32", np.dtype("int8"), None]),
        "mode": st.text(max_size=3),
    },
)


def content(x: Any, given_options: dict[str, Any]) -> str:
    """What tells two calls apart, written down in another way: by type and representation."""
    whole = {"by": 1, "dtype": None, "mode": "a", **given_options}
    if whole["dtype"] is not None and not isinstance(whole["dtype"], str):
        whole["dtype"] = np.dtype(whole["dtype"])
    return repr((x.shape, str(x.dtype), [(name, type(whole[name]), whole[name]) for name in sorted(whole)]))


@given(arrays, arrays, options, options)
def test_keys_are_equal_where_the_contents_are(x: Any, other: Any, one: dict[str, Any], two: dict[str, Any]) -> None:
    same = content(x, one) == content(other, two)
    assert (LISTENING.key(x, **one) == LISTENING.key(other, **two)) is same
    assert LISTENING.key(x, **one) == LISTENING.key(x, **dict(reversed(one.items())))


# -- the same --------------------------------------------------------------------------------------------------------


def test_eagerly_and_under_every_transform_it_is_the_same_key() -> None:
    listening = Listening()
    x = jax.random.normal(jax.random.key(0), (12,))
    expected = listening.key(x, by=3)
    abstract = listening.key(jax.ShapeDtypeStruct(x.shape, x.dtype), by=3)
    listening.keys.clear()
    listening(x, by=3)
    jax.jit(lambda v: listening(v, by=3))(x)
    jax.jit(jax.jit(lambda v: listening(jnp.sin(v), by=3)))(x)
    jax.lax.scan(lambda carry, _: (listening(carry, by=3), None), x, length=2)
    jax.eval_shape(lambda v: listening(v, by=3), x)
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(lambda v: listening(v, by=3), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    jax.jit(sharded)(jnp.concatenate([x, x]))
    assert abstract == expected
    assert len(listening.keys) >= 5
    assert set(listening.keys) == {expected}


def test_vmap_folds_into_the_key_of_the_larger_call() -> None:
    listening = Listening(fold=fold)
    expected = listening.key(jnp.ones(12))
    listening.keys.clear()
    jax.vmap(listening)(jnp.ones((3, 4)))
    jax.jit(jax.vmap(listening, in_axes=1))(jnp.ones((4, 3)))
    assert listening.keys == [expected, expected]


def test_attention_under_vmap_has_the_key_of_the_larger_batch() -> None:
    q, k, v = (jax.random.normal(key, (6, 24, 2, 8)) for key in jax.random.split(jax.random.key(0), 3))
    expected, heard = ejkernel_core.invocation("flash_attention", q, k, v, causal=True).key, []

    @hookimpl(tryfirst=True)
    def select_config(inv):
        heard.append(inv.key)

    registry = Registry()
    registry.register(SimpleNamespace(select_config=select_config), "listener")
    three = [a.reshape(3, 2, 24, 2, 8) for a in (q, k, v)]
    jax.vmap(lambda *a: registry.call("flash_attention", *a, causal=True))(*three)
    assert heard == [expected]


SCRIPT = """
import os, sys
os.environ.pop("XLA_FLAGS", None)
import jax, jax.numpy as jnp
import ejkernel_core
registry = ejkernel_core.registry
print(registry.invocation("double", jnp.ones((3, 5))).key.digest)
query = jnp.ones((1, 8, 2, 4), jnp.bfloat16)
print(ejkernel_core.invocation("flash_attention", query, query, query, sliding_window=(3, 0)).key.digest)
"""


def test_another_process_with_another_hash_seed_at_another_place(
    distribution: MakeDistribution, double: None, tmp_path: Path
) -> None:
    here, there = tmp_path / "site1", tmp_path / "elsewhere" / "deeper"
    there.parent.mkdir()
    here.rename(there)
    digests = set()
    for seed, place, folder in (("0", there, tmp_path), ("1", there, Path("/")), ("4242", there, tmp_path)):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            capture_output=True,
            text=True,
            check=True,
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(place)},
        )
        digests.add(done.stdout)
    there.rename(here)
    query = jnp.ones((1, 8, 2, 4), jnp.bfloat16)
    mine = [
        Registry().invocation("double", jnp.ones((3, 5))).key.digest,
        ejkernel_core.invocation("flash_attention", query, query, query, sliding_window=(3, 0)).key.digest,
    ]
    assert digests == {"\n".join(mine) + "\n"}


# -- another ---------------------------------------------------------------------------------------------------------

X = jax.ShapeDtypeStruct((4, 6), "float32")

OTHERS = {
    "dtype": lambda: LISTENING.key(jax.ShapeDtypeStruct((4, 6), "bfloat16")),
    "shape": lambda: LISTENING.key(jax.ShapeDtypeStruct((6, 4), "float32")),
    "rank": lambda: LISTENING.key(jax.ShapeDtypeStruct((24,), "float32")),
    "an optional array": lambda: LISTENING.key(X, X),
    "a static option": lambda: LISTENING.key(X, by=2),
    "its type": lambda: LISTENING.key(X, by=1.0),
    "float32 as an option": lambda: LISTENING.key(X, dtype=jnp.float32),
    "bfloat16 as an option": lambda: LISTENING.key(X, dtype=jnp.bfloat16),
    "the operation's version": lambda: Listening(version=2).key(X),
    "the device's kind": lambda: attrs.evolve(LISTENING.invocation("scale", X), device_kind="another").key,
    "the platform": lambda: attrs.evolve(LISTENING.invocation("scale", X), platform="gpu").key,
    "a sharding": lambda: attrs.evolve(LISTENING.invocation("scale", X), sharding=(("x", "2x1 on 2"),)).key,
    "the sharding of another": lambda: (
        attrs.evolve(LISTENING.invocation("scale", X), sharding=(("y", "2x1 on 2"),)).key
    ),
}


def test_each_of_these_is_another_key() -> None:
    keys = [LISTENING.key(X), *(other() for other in OTHERS.values())]
    assert len(set(keys)) == len({key.digest for key in keys}) == len(OTHERS) + 1


def test_an_argument_that_is_not_given_is_not_in_the_key() -> None:
    """So that an operation may get another one, and its records stay."""
    given = {"x": {"!array": ["float32", 4, 6]}, "by": 1, "mode": "a"}
    assert json.loads(LISTENING.key(X).problem)["arguments"] == given


def test_axes_that_only_count_things_have_their_names_in_shapes() -> None:
    query, key = jax.ShapeDtypeStruct((2, 9, 6, 16), "float32"), jax.ShapeDtypeStruct((2, 21, 3, 16), "float32")
    bias = jax.ShapeDtypeStruct((1, 6, 9, 21), "float32")
    inv = ejkernel_core.invocation("flash_attention", query, key, key, bias=bias)
    problem = json.loads(inv.key.problem)
    assert problem["arguments"]["query"] == {"!array": ["float32", "batch", "q_len", "heads", 16]}
    assert problem["arguments"]["key"] == {"!array": ["float32", "batch", "kv_len", "kv_heads", 16]}
    assert problem["arguments"]["bias"] == {"!array": ["float32", 1, "heads", "q_len", "kv_len"]}
    assert inv.key.sizes == {"batch": 2, "q_len": 9, "kv_len": 21, "heads": 6, "kv_heads": 3}
    assert inv.tuning_keys[1].sizes == {"batch": 2, "q_len": 16, "kv_len": 32, "heads": 6, "kv_heads": 3}


@pytest.mark.parametrize("name", ["jax", "jaxlib", "good-dist", "compiler-dist"])
def test_a_kernel_knows_the_versions_that_it_depends_on(
    distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from tests.conftest import KERNEL, OPERATION

    versions = {"jax": "0.1", "jaxlib": "0.2", "good-dist": "1.0", "compiler-dist": "3.0"}

    def installed() -> Mapping[str, str]:
        kernel = KERNEL + '\n    COMPILERS = ("compiler-dist",)\n'
        points = {"operations": {"double": "key_operation:operation"}, "kernels": {"double.good": "key_kernel"}}
        modules = {"key_operation": OPERATION, "key_kernel": kernel}
        distribution("good-dist", modules, version=versions["good-dist"], **points)
        distribution("compiler-dist", {}, version=versions["compiler-dist"])
        real = ejkernel_core._loading.version_of
        monkeypatch.setattr(ejkernel_core._loading, "version_of", lambda dist: versions.get(dist) or real(dist))
        software = Registry().kernel("double", "good").software
        monkeypatch.undo()
        return software

    assert installed() == {
        "jax": "0.1",
        "jaxlib": "0.2",
        "compiler-dist": "3.0",
        "double.good": "good-dist 1.0",
    }
    versions[name] = "9.9"
    changed = {"good-dist": "double.good"}.get(name, name)
    assert installed()[changed].endswith("9.9")


def test_a_kernel_registered_at_run_time_is_known_by_its_code() -> None:
    def with_code(factor: int) -> Mapping[str, str]:
        registry = Listening()

        @hookimpl
        def heuristic_cfg(inv):
            return None

        @hookimpl
        def run_backend(inv, cfg):
            return inv["x"] * 2

        @hookimpl
        def another(inv, cfg):
            return inv["x"] * 3

        run = run_backend if factor == 2 else another
        registry.register(SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run), "scale.code")
        return registry.kernel("scale", "code").software

    assert with_code(2) == with_code(2) != with_code(3)


# -- shardings -------------------------------------------------------------------------------------------------------


def cut(array: Any, spec: P, kind: AxisType, names: tuple[str, str] = ("a", "b")) -> jax.Array:
    mesh = jax.make_mesh((2, 2), names, axis_types=(kind, kind))
    return jax.device_put(array, NamedSharding(mesh, spec))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_how_an_array_is_cut_is_a_part_of_the_key(kind: AxisType) -> None:
    x = jnp.ones((4, 8))
    specs = [P("a", None), P(None, "a"), P("a", "b"), P(("a", "b"), None)]
    keys = [LISTENING.key(x), *(LISTENING.key(cut(x, spec, kind)) for spec in specs)]
    assert len(set(keys)) == 5
    assert LISTENING.key(cut(x, P("z", None), kind, ("z", "y"))) == keys[1]
    assert LISTENING.key(jax.device_put(x, jax.devices()[3])) == keys[0]


def test_a_choice_for_a_sharded_array_is_made_for_its_key() -> None:
    listening = Listening()
    whole, half = jnp.ones((4, 8)), cut(jnp.ones((4, 8)), P("a", None), AxisType.Auto)
    expected = [listening.key(whole), listening.key(half)]
    listening.keys.clear()
    for array in (whole, half, whole, half):
        np.testing.assert_allclose(listening(array), 2)
    assert listening.keys == expected


def test_explicit_axes_are_known_under_jit_too() -> None:
    listening = Listening()
    x = cut(jnp.ones((4, 8)), P("a", "b"), AxisType.Explicit)
    expected = listening.key(x)
    listening.keys.clear()
    listening(x)
    with jax.set_mesh(x.sharding.mesh):
        jax.jit(lambda v: listening(v))(x)
    assert listening.keys == [expected, expected]
