"""Products of groups on TPUs: their visits, their tiles, what they refuse, and several tiles along each axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import ejkernel_core as core
from ejkernel_core import Example
from ejkernel_ops.grouped_matmul.examples import grid
from ejkernel_pallas_tpu import grouped_matmul
from ejkernel_pallas_tpu.grouped_matmul import Config, _visits, backward, d_rhs
from ejkernel_pallas_tpu.launch._generations import KINDS
from ejkernel_pallas_tpu.testing import interpreted_registry
from ejkernel_testing import KernelProofs

MODULES = {"grouped_matmul": grouped_matmul, "grouped_matmul_d_rhs": d_rhs}
KERNELS = {
    "grouped_matmul.pallas_tpu": grouped_matmul,
    "grouped_matmul_bwd.pallas_tpu": backward,
    "grouped_matmul_d_rhs.pallas_tpu": d_rhs,
}


# -- visits ----------------------------------------------------------------------------------------------------------

BOUNDARIES: dict[str, Sequence[int]] = {
    "aligned": (0, 8, 24, 32),
    "two in a tile": (0, 3, 5, 20, 37),
    "empty": (0, 0, 11, 11, 11, 30, 30),
    "a part of the rows": (9, 12, 29),
    "a part of one tile": (9, 10, 12),
    "without rows, at a tile": (16, 16, 16),
    "without rows, inside a tile": (13, 13),
    "without rows, at the end": (37, 37, 37),
    "all": (0, 37),
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_every_row_of_a_group_is_visited_once_and_no_tile_is_left_out(name):
    rows, tile, bounds = 37, 8, np.array(BOUNDARIES[name], np.int32)
    groups = len(bounds) - 1
    by_tiles = _table(_visits.by_tiles(jnp.asarray(bounds), rows, tile))
    by_groups = _table(_visits.by_groups(jnp.asarray(bounds), rows, tile))
    for visits in (by_tiles, by_groups):
        owners = np.full(rows + tile, -1)
        for visit in visits:
            visited = slice(visit["tile"] * tile + visit["start"], visit["tile"] * tile + visit["end"])
            assert (owners[visited] == -1).all()
            owners[visited] = visit["group"]
        expected = np.searchsorted(bounds, np.arange(rows), side="right") - 1
        assert (owners[:rows] == np.where(expected < groups, expected, -1)).all()
        assert (owners[rows:] == -1).all()
    for visits, place, places in ((by_tiles, "tile", -(-rows // tile)), (by_groups, "group", groups)):
        order = [visit[place] for visit in visits]
        assert sorted({*order}) == list(range(places))
        assert order == sorted(order)
        firsts = [i for i, visit in enumerate(visits) if visit["first"]]
        lasts = [i for i, visit in enumerate(visits) if visit["last"]]
        assert firsts == [order.index(value) for value in range(places)]
        assert lasts == [len(order) - 1 - order[::-1].index(value) for value in range(places)]


def test_a_visit_without_rows_fetches_what_its_neighbour_fetches():
    visits = _table(_visits.by_tiles(jnp.array([0, 0, 12, 12, 20, 20], jnp.int32) + 9, 64, 8))
    fetched = [(visit["source"], visit["group"]) for visit in visits]
    assert fetched == [(1, 1), (1, 1), (2, 1), (2, 3), (3, 3), (3, 3), (3, 3), (3, 3), (3, 3)]


def _table(visits: _visits.Visits) -> list[dict[str, int]]:
    table, count = np.asarray(visits.table), int(visits.count)
    assert 1 <= count <= visits.capacity
    return [{name: int(visits.read(table, name, i)) for name in _visits.NUMBERS} for i in range(count)]


# -- several tiles along each axis -----------------------------------------------------------------------------------

SIZES = (3, 300, 0, 128, 70, 0, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("activation", [None, "silu_gated", "gelu_gated", "swiglu_oai"])
@pytest.mark.parametrize("k", [256, 300])
def test_a_product_of_many_tiles(activation, transpose, k, dtype):
    """With entries of k behind the end of the array, where 300 are divided by 128."""
    keys = jax.random.split(jax.random.key(0), 3)
    lhs = jax.random.normal(keys[0], (520, k), dtype).at[502:].set(jnp.nan)
    rhs = jax.random.normal(keys[1], (len(SIZES), 512, k) if transpose else (len(SIZES), k, 512), dtype) * k**-0.5
    bias = jax.random.normal(keys[2], (len(SIZES), 512))
    call = (lhs, rhs, jnp.array(SIZES))
    options = {"transpose_rhs": transpose, "activation": activation, "rhs_bias": bias}
    expected = core.call("grouped_matmul", *call, **options, backend="reference")
    for rows, columns, chunk in ((128, 128, 32), (256, 256, 128)):
        cfg = Config(rows, columns, 128, chunk, interpret=True)
        out = core.call("grouped_matmul", *call, **options, backend="pallas_tpu", cfg=cfg)
        assert jnp.abs((out - expected).astype(jnp.float32)).max() < (2e-5 if dtype == "float32" else 4e-2)
        assert (out[502:] == 0).all()


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_of_many_tiles(transpose, dtype):
    """Rows of no group, which are not numbers, have no part in it, and that of an empty group is exactly 0."""
    keys = jax.random.split(jax.random.key(0), 2)
    lhs, d_out = (jax.random.normal(key, (520, n), dtype) for key, n in zip(keys, (300, 200), strict=True))
    lhs, d_out = (x.at[502:].set(jnp.nan) for x in (lhs, d_out))
    ends = jnp.cumsum(jnp.array((0, *SIZES)))
    options = {"transpose_rhs": transpose, "preferred_element_type": "float32"}
    expected = core.call("grouped_matmul_d_rhs", lhs, d_out, ends, **options, backend="reference")
    for rows, chunk in ((128, 64), (256, 256)):
        cfg = Config(rows, 128, 128, chunk, interpret=True)
        out = core.call("grouped_matmul_d_rhs", lhs, d_out, ends, **options, backend="pallas_tpu", cfg=cfg)
        assert jnp.abs(out - expected).max() < 2e-4
        assert (out[jnp.array([2, 5])] == 0).all()


# -- with races detected ---------------------------------------------------------------------------------------------


class DetectingRaces(KernelProofs):
    refuses = frozenset({"float64", "float16"})
    roundings = 1.5
    names: Sequence[str] = ()

    def examples(self) -> Sequence[Example]:
        examples = [example for example in super().examples() if example.name.startswith(self.names)]
        return [attrs.evolve(example, checks=frozenset({"values"}), variations=(), long=False) for example in examples]

    @pytest.fixture(autouse=True)
    def _fresh_memory(self):
        pltpu.reset_tpu_interpret_mode_state()
        yield
        pltpu.reset_tpu_interpret_mode_state()


class TestProductDetectingRaces(DetectingRaces):
    kernel = "grouped_matmul.pallas_tpu"
    backward = "grouped_matmul_bwd.pallas_tpu"
    registry = interpreted_registry(KERNELS, device_kind="TPU v5p", races=True)
    names = ("infinite-without-group", "part-without-rows")


# -- tiles -----------------------------------------------------------------------------------------------------------


def invocation(op: str, rows: int, k: int, n: int, groups: int, device_kind: str, **options: Any) -> Any:
    def array(*shape: int, dtype: str = options.pop("dtype", "bfloat16")) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    arguments: dict[str, Any] = {"lhs": array(rows, k)}
    if op == "grouped_matmul":
        matrix = (n, k) if options.get("transpose_rhs") else (k, n)
        arguments |= {"rhs": array(groups, *matrix), "group_sizes": array(groups, dtype="int32")}
    else:
        arguments |= {"d_out": array(rows, n), "boundaries": array(groups + 1, dtype="int32")}
    inv = core.registry.invocation(op, **arguments, **options)
    return attrs.evolve(inv, platform="tpu", device_kind=device_kind)


@pytest.mark.parametrize("op", MODULES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_configurations_fit_and_the_first_is_the_heuristics(op, dtype):
    for kind, chip in KINDS.items():
        for sizes in ((1, 1, 1, 1), (0, 8, 8, 2), (300, 40, 72, 3), (65536, 7168, 2048, 256), (512, 16384, 65536, 8)):
            inv = invocation(op, *sizes, kind, dtype=dtype)
            space = list(MODULES[op].config_space(inv))
            assert space[0] == MODULES[op].heuristic_cfg(inv)
            assert len(space) == len({*space})
            assert all(MODULES[op].vmem(inv, cfg) <= chip.budget for cfg in space)


#: What the compiler reports, in MiB: libtpu 0.0.42.1.
REPORTED: Any = (
    ("grouped_matmul_d_rhs", 20.3, Config(512, 256, 2176, 64), (4001, 2049, 1401, 8), {"dtype": "float32"}),
    (
        "grouped_matmul",
        12.9,
        Config(256, 128, 2048, 64),
        (32768, 2048, 2816, 64),
        {"dtype": "float32", "activation": "silu_gated"},
    ),
    (
        "grouped_matmul",
        30.6,
        Config(512, 128, 2176, 512),
        (4001, 2049, 2816, 64),
        {"dtype": "float32", "activation": "silu_gated", "transpose_rhs": True},
    ),
    ("grouped_matmul", 13.9, Config(512, 512, 2944, 64), (16384, 2880, 5760, 32), {"activation": "swiglu_oai"}),
    ("grouped_matmul", 62.0, Config(512, 512, 14336, 128), (16384, 14336, 4096, 8), {"transpose_rhs": True}),
)


@pytest.mark.parametrize(("op", "reported", "cfg", "sizes", "options"), REPORTED)
def test_an_estimate_of_memory_is_at_least_what_the_compiler_reports(op, reported, cfg, sizes, options):
    inv = invocation(op, *sizes, "TPU v6e", **options)
    assert reported < MODULES[op].vmem(inv, cfg) / 2**20 < 1.2 * reported


@pytest.mark.parametrize("device_kind", ["TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x"])
@pytest.mark.parametrize("sizes", [(1000, 300, 512, 3), (5, 1, 2, 2), (300, 2048, 300, 40)])
@pytest.mark.parametrize("options", [{}, {"transpose_rhs": True}])
@pytest.mark.parametrize("op", MODULES)
def test_every_configuration_lowers(op, device_kind, sizes, options):
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind, 1, "tpu"))
    inv = invocation(op, *sizes, device_kind, **options)
    shapes = {name: value for name, value in inv.items() if isinstance(value, jax.ShapeDtypeStruct)}
    for cfg in MODULES[op].config_space(inv):

        def function(shapes: Any, cfg: Any = cfg) -> Any:
            return core.call(op, **shapes, **options, backend="pallas_tpu", cfg=cfg)

        with use_abstract_mesh(mesh):
            lowered = jax.jit(function).trace(shapes).lower(lowering_platforms=("tpu",))
        assert lowered.as_text().count("tpu_custom_call") == 1


def test_a_layer_and_its_gradients_are_preferred_on_a_tpu():
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("TPU v5e", 1, "tpu"))
    call = grid({"sizes": "uneven", "k": 64, "n": 256, "transpose": False, "bias": "own", "activation": "silu_gated",
                 "part": False, "preferred": None}, 0)  # fmt: skip
    arrays = {name: jnp.asarray(call[name], jnp.bfloat16) for name in ("lhs", "rhs", "rhs_bias")}

    def layer(arrays: Any) -> Any:
        return core.call("grouped_matmul", **arrays, group_sizes=call["group_sizes"], activation="silu_gated")

    def with_gradients(arrays: Any) -> Any:
        out, pull = jax.vjp(layer, arrays)
        return pull(out)

    with use_abstract_mesh(mesh):
        lowered = jax.jit(with_gradients).trace(arrays).lower(lowering_platforms=("tpu",))
    # The layer; for the gradients the products once more, and those of rows, matrices and biases.
    assert lowered.as_text().count("@tpu_custom_call") == 5


# -- refusals --------------------------------------------------------------------------------------------------------


def test_tiles_that_do_not_fit_are_refused():
    inv = invocation("grouped_matmul", 4096, 8192, 8192, 4, "TPU v4")
    with pytest.raises(core.Unsupported, match="take more than the 15 MiB of vector memory: take smaller ones"):
        grouped_matmul.check_cfg(inv, Config(512, 2048))


def test_more_rows_than_a_table_has_are_refused():
    inv = invocation("grouped_matmul", 2**24, 64, 64, 4, "TPU v5e")
    with pytest.raises(core.Unsupported, match="the visits of 16777216 rows in 4 groups do not fit"):
        grouped_matmul.heuristic_cfg(inv)
    inv = invocation("grouped_matmul", 2**22, 64, 64, 4, "TPU v5e")
    with pytest.raises(core.Unsupported, match="4194304 rows in tiles of 128 are too many: take larger tiles"):
        grouped_matmul.check_cfg(inv, Config(128))


@pytest.mark.parametrize("cfg", [Config(), Config(interpret=True)])
def test_dtypes_that_a_tpu_does_not_have_are_refused(cfg):
    for op, module in MODULES.items():
        with pytest.raises(core.Unsupported, match="take bfloat16 and float32; lhs is float16"):
            module.check_cfg(invocation(op, 8, 8, 8, 2, "TPU v5e", dtype="float16"), cfg)
        inv = invocation(op, 8, 8, 8, 2, "TPU v5e", preferred_element_type="float16")
        with pytest.raises(core.Unsupported, match="preferred_element_type is float16"):
            module.check_cfg(inv, cfg)


def test_sizes_of_tiles_are_checked():
    with pytest.raises(ValueError, match="columns: takes a multiple of 128; got 200"):
        Config(columns=200)
    with pytest.raises(ValueError, match="rows"):
        Config(rows=100)
