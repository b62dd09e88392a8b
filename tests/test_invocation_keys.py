"""Keys of invocations: equal for equal calls, however and wherever they are made, and different otherwise."""

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
from ejkernel_core import Axes, Key, Operation, Registry, hookimpl
from tests.distributions import MakeDistribution


def scale(x, y=None, *, by=1, dtype=None, mode="a"): ...


def fold(arguments: Any, names: frozenset[str], size: int, sums: frozenset[str]) -> Any:
    (length,) = arguments["x"].shape[1:]
    return {**arguments, "x": arguments["x"].reshape(size * length)}, lambda r: tuple(
        v.reshape(size, length) for v in r
    )


class KeyRecorder(Registry):
    """A registry with the operation ``scale``, which records the key of each invocation that a choice is made for."""

    def __init__(self, opaque: tuple[str, ...] = (), **operation: Any) -> None:
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
        kernel = SimpleNamespace(OPAQUE=opaque, heuristic_cfg=heuristic_cfg, run_backend=run_backend)
        self.register(kernel, "scale.two")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call("scale", *args, **kwargs)

    def key(self, *args: Any, **kwargs: Any) -> Key:
        return self.invocation("scale", *args, **kwargs).key


RECORDER = KeyRecorder()

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
    """The content of a call, computed in another way: by the types and ``repr`` of its options."""
    all_options = {"by": 1, "dtype": None, "mode": "a", **given_options}
    if all_options["dtype"] is not None and not isinstance(all_options["dtype"], str):
        all_options["dtype"] = np.dtype(all_options["dtype"])
    return repr(
        (x.shape, str(x.dtype), [(name, type(all_options[name]), all_options[name]) for name in sorted(all_options)])
    )


@given(arrays, arrays, options, options)
def test_keys_are_equal_if_and_only_if_the_contents_are(
    x: Any, other_x: Any, options: dict[str, Any], other_options: dict[str, Any]
) -> None:
    same = content(x, options) == content(other_x, other_options)
    assert (RECORDER.key(x, **options) == RECORDER.key(other_x, **other_options)) is same
    assert RECORDER.key(x, **options) == RECORDER.key(x, **dict(reversed(options.items())))


# -- equal keys ------------------------------------------------------------------------------------------------------


def test_the_key_is_the_same_eagerly_and_under_every_transform() -> None:
    recorder = KeyRecorder()
    x = jax.random.normal(jax.random.key(0), (12,))
    expected = recorder.key(x, by=3)
    abstract = recorder.key(jax.ShapeDtypeStruct(x.shape, x.dtype), by=3)
    recorder.keys.clear()
    recorder(x, by=3)
    jax.jit(lambda v: recorder(v, by=3))(x)
    jax.jit(jax.jit(lambda v: recorder(jnp.sin(v), by=3)))(x)
    jax.lax.scan(lambda carry, _: (recorder(carry, by=3), None), x, length=2)
    jax.eval_shape(lambda v: recorder(v, by=3), x)
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(lambda v: recorder(v, by=3), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    jax.jit(sharded)(jnp.concatenate([x, x]))
    assert abstract == expected
    assert len(recorder.keys) >= 5
    assert set(recorder.keys) == {expected}


def test_vmap_folds_into_the_key_of_the_larger_call() -> None:
    recorder = KeyRecorder(fold=fold)
    expected = recorder.key(jnp.ones(12))
    recorder.keys.clear()
    jax.vmap(recorder)(jnp.ones((3, 4)))
    jax.jit(jax.vmap(recorder, in_axes=1))(jnp.ones((4, 3)))
    assert recorder.keys == [expected, expected]


def test_attention_under_vmap_has_the_key_of_the_larger_batch() -> None:
    q, k, v = (jax.random.normal(key, (6, 24, 2, 8)) for key in jax.random.split(jax.random.key(0), 3))
    expected, keys = ejkernel_core.invocation("flash_attention", q, k, v, causal=True).key, []

    @hookimpl(tryfirst=True)
    def select_config(inv):
        keys.append(inv.key)

    registry = Registry()
    registry.register(SimpleNamespace(select_config=select_config), "listener")
    batches = [a.reshape(3, 2, 24, 2, 8) for a in (q, k, v)]
    jax.vmap(lambda *a: registry.call("flash_attention", *a, causal=True))(*batches)
    assert keys == [expected]


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


def test_keys_are_the_same_in_processes_with_other_hash_seeds_and_folders(
    distribution: MakeDistribution, double: None, tmp_path: Path
) -> None:
    site, moved_site = tmp_path / "site1", tmp_path / "elsewhere" / "deeper"
    moved_site.parent.mkdir()
    site.rename(moved_site)
    digests = set()
    for seed, site_path, folder in (
        ("0", moved_site, tmp_path),
        ("1", moved_site, Path("/")),
        ("4242", moved_site, tmp_path),
    ):
        process = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            capture_output=True,
            text=True,
            check=True,
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(site_path)},
        )
        digests.add(process.stdout)
    moved_site.rename(site)
    query = jnp.ones((1, 8, 2, 4), jnp.bfloat16)
    digests_here = [
        Registry().invocation("double", jnp.ones((3, 5))).key.digest,
        ejkernel_core.invocation("flash_attention", query, query, query, sliding_window=(3, 0)).key.digest,
    ]
    assert digests == {"\n".join(digests_here) + "\n"}


# -- different keys --------------------------------------------------------------------------------------------------

X = jax.ShapeDtypeStruct((4, 6), "float32")

DIFFERENT = {
    "dtype": lambda: RECORDER.key(jax.ShapeDtypeStruct((4, 6), "bfloat16")),
    "shape": lambda: RECORDER.key(jax.ShapeDtypeStruct((6, 4), "float32")),
    "rank": lambda: RECORDER.key(jax.ShapeDtypeStruct((24,), "float32")),
    "an optional array": lambda: RECORDER.key(X, X),
    "a static option": lambda: RECORDER.key(X, by=2),
    "its type": lambda: RECORDER.key(X, by=1.0),
    "float32 as an option": lambda: RECORDER.key(X, dtype=jnp.float32),
    "bfloat16 as an option": lambda: RECORDER.key(X, dtype=jnp.bfloat16),
    "the operation's version": lambda: KeyRecorder(version=2).key(X),
    "the device's kind": lambda: attrs.evolve(RECORDER.invocation("scale", X), device_kind="another").key,
    "the platform": lambda: attrs.evolve(RECORDER.invocation("scale", X), platform="gpu").key,
}


def test_calls_that_differ_have_different_keys() -> None:
    keys = [RECORDER.key(X), *(key_of() for key_of in DIFFERENT.values())]
    assert len(set(keys)) == len({key.digest for key in keys}) == len(DIFFERENT) + 1


def test_an_omitted_argument_is_not_in_the_key() -> None:
    """So records stay valid when an operation gets a new parameter."""
    arguments = {"x": {"!array": ["float32", 4, 6]}, "by": 1, "mode": "a"}
    assert json.loads(RECORDER.key(X).problem)["arguments"] == arguments


def test_axes_that_count_are_written_by_name() -> None:
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
def test_a_kernel_has_the_versions_of_its_dependencies(
    distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from tests.distributions import KERNEL, OPERATION

    versions = {"jax": "0.1", "jaxlib": "0.2", "good-dist": "1.0", "compiler-dist": "3.0"}

    def software_of_kernel() -> Mapping[str, str]:
        kernel = KERNEL + '\n    COMPILERS = ("compiler-dist",)\n'
        entry_points = {"operations": {"double": "key_operation:operation"}, "kernels": {"double.good": "key_kernel"}}
        modules = {"key_operation": OPERATION, "key_kernel": kernel}
        distribution("good-dist", modules, version=versions["good-dist"], **entry_points)
        distribution("compiler-dist", {}, version=versions["compiler-dist"])
        version_of = ejkernel_core._loading.version_of
        monkeypatch.setattr(ejkernel_core._loading, "version_of", lambda dist: versions.get(dist) or version_of(dist))
        software = Registry().kernel("double", "good").software
        monkeypatch.undo()
        return software

    assert software_of_kernel() == {
        "jax": "0.1",
        "jaxlib": "0.2",
        "compiler-dist": "3.0",
        "double.good": "good-dist 1.0",
    }
    versions[name] = "9.9"
    entry = {"good-dist": "double.good"}.get(name, name)
    assert software_of_kernel()[entry].endswith("9.9")


def test_a_kernel_registered_at_run_time_is_identified_by_its_code() -> None:
    def software_for(factor: int) -> Mapping[str, str]:
        registry = KeyRecorder()

        @hookimpl
        def heuristic_cfg(inv):
            return None

        @hookimpl
        def run_backend(inv, cfg):
            return inv["x"] * 2

        @hookimpl
        def run_tripled(inv, cfg):
            return inv["x"] * 3

        run = run_backend if factor == 2 else run_tripled
        registry.register(SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run), "scale.code")
        return registry.kernel("scale", "code").software

    assert software_for(2) == software_for(2) != software_for(3)


# -- shardings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_key_of_a_sharded_call_has_no_sharding(axis_type: AxisType) -> None:
    """An operation without axes is not divided, so its call has the key of the whole arrays."""
    recorder, x = KeyRecorder(), jnp.ones((4, 8))
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    sharded = jax.device_put(x, NamedSharding(mesh, P("a", "b")))
    expected = recorder.key(x)
    assert recorder.key(sharded) == recorder.key(jax.device_put(x, jax.devices()[3])) == expected
    recorder.keys.clear()
    np.testing.assert_allclose(recorder(sharded), 2)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(recorder)(sharded), 2)
    assert recorder.keys == [expected, expected]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_where_a_call_is_divided_its_key_is_that_of_a_shard(axis_type: AxisType) -> None:
    """Under automatic axes it is divided by the core only if XLA cannot partition a kernel."""
    axes = Axes({"x": "rows dim"}, {"out": "rows dim"}, independent="rows", whole="dim")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    sharded = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("a", "b")))
    for opaque in (("cpu",), ()):
        recorder = KeyRecorder(opaque, axes=axes)
        shard, whole = recorder.key(jnp.ones((2, 8))), recorder.key(jnp.ones((4, 8)))
        expected = shard if opaque or axis_type is AxisType.Explicit else whole
        assert recorder.key(sharded) == expected
        for call in (recorder, jax.jit(recorder)):
            with jax.set_mesh(mesh):
                np.testing.assert_allclose(call(sharded), 2)
            assert recorder.keys[-1] == expected
