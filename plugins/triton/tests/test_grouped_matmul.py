"""The tables of tiles of the Hopper kernels, on the CPU, and what the kernels refuse."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.moe_permute_matmul import by_parts
from ejkernel_triton import grouped_matmul as portable
from ejkernel_triton import grouped_matmul_sm90 as hopper
from ejkernel_triton import moe_permute_matmul
from ejkernel_triton.grouped_matmul_sm90 import _launch, d_rhs
from ejkernel_triton.interpreter import interpreted
from ejkernel_triton.launch import _jax_triton

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

#: The sizes of groups, and how many rows are behind them.
SIZES = {
    "uneven": ([1, 300, 0, 128, 129, 127], 0),
    "rest": ([5, 0, 64], 200),
    "one-has-all": ([0, 0, 1000, 0], 0),
    "empty": ([0, 0], 70),
    "many": ([*range(40), *range(40)], 1),
}


def invocation(sizes: list[int], rest: int, part: slice = slice(None), **changes: Any) -> Invocation:
    """A call on an H200 with these sizes."""
    rows, groups = sum(sizes) + rest, len(range(*part.indices(len(sizes))))
    arrays = {
        "lhs": jax.ShapeDtypeStruct((rows, 64), "bfloat16"),
        "rhs": jax.ShapeDtypeStruct((groups, 64, 256), "bfloat16"),
        "group_sizes": jnp.asarray(sizes, jnp.int32),
    }
    if part != slice(None):
        arrays["group_offset"] = jnp.array([part.start], jnp.int32)
    arguments = {**arrays, **changes}
    inv = ejkernel_core.invocation("grouped_matmul", **arguments)
    concrete = {name: array for name, array in arrays.items() if isinstance(array, jax.Array)}
    on_card = {"platform": "gpu", "device_kind": "NVIDIA H200", "compute_capability": (9, 0)}
    return attrs.evolve(inv.with_arrays(concrete), **on_card)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("is_part", [False, True])
def test_the_tiles_of_rows_have_each_row_once(name: str, is_part: bool) -> None:
    sizes, rest = SIZES[name]
    part = slice(1, max(2, len(sizes) - 1)) if is_part else slice(None)
    inv = invocation(sizes, rest, part)
    with interpreted():
        table = np.asarray(jax.jit(lambda: _launch.row_table(inv))()).reshape(-1, 4)
    count, tiles = table[0, 0], table[1 : 1 + table[0, 0], :3]
    ends = np.cumsum(sizes)
    groups = [*range(len(sizes))][part]
    owner = np.full(sum(sizes) + rest, -1)
    for local, group in enumerate(groups):
        owner[ends[group] - sizes[group] : ends[group]] = local
    seen = np.full_like(owner, -9)
    for group, first, end in tiles:
        rows = slice(first, min(first + 128, end))
        assert (seen[rows] == -9).all()
        seen[rows] = group
    np.testing.assert_array_equal(seen, owner)
    assert count <= -(-len(owner) // 128) + len(groups) + 1
    assert [*tiles[:, 1]] == sorted(tiles[:, 1])  # neighbours in memory are neighbours in time


@pytest.mark.parametrize("sizes", [[3, 9, 9, 0, 100, 1], [7], [0, 0, 0], [*range(100)]])
@pytest.mark.parametrize(("k", "n"), [(2048, 768), (4096, 1536)])
def test_the_largest_groups_come_first(sizes: list[int], k: int, n: int) -> None:
    inv = ejkernel_core.invocation(
        "grouped_matmul_d_rhs",
        jax.ShapeDtypeStruct((sum(sizes), k), "bfloat16"),
        jax.ShapeDtypeStruct((sum(sizes), n), "bfloat16"),
        jax.ShapeDtypeStruct((len(sizes) + 1,), "int32"),
    )
    inv = attrs.evolve(inv, platform="gpu", device_kind="NVIDIA H200", compute_capability=(9, 0))
    boundaries = np.cumsum([0, *sizes])
    inv = inv.with_arrays({"boundaries": jnp.asarray(boundaries, jnp.int32)})
    with interpreted():
        narrow, *table = np.asarray(jax.jit(lambda: _launch.group_table(inv, hopper.Config()))())
    order = np.argsort(-np.asarray(sizes), kind="stable")
    expected = np.stack([order, boundaries[order], boundaries[order + 1]], axis=1)
    np.testing.assert_array_equal(np.reshape(table, (-1, 3)), expected)
    # 132 programs share the work of 48 tiles of each group: half of it is too much for one tile.
    limit = 48 * sum(sizes) // 264 if k == 2048 else sum(sizes)
    assert narrow == sum(size > limit for size in sizes)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_group_with_most_rows_is_shared_by_more_programs(transposed: bool) -> None:
    sizes, rest, (k, n) = [150, 1, 1, 0], 9, (200, 392)
    ends = np.cumsum([0, *sizes])
    keys = jax.random.split(jax.random.key(7), 2)
    arrays = {
        name: jax.random.normal(key, (sum(sizes) + rest, size), "bfloat16").at[ends[-1] :].set(jnp.nan)
        for name, key, size in zip(("lhs", "d_out"), keys, (k, n), strict=True)
    }
    arrays["boundaries"] = jnp.asarray(ends, jnp.int32)
    inv = ejkernel_core.invocation("grouped_matmul_d_rhs", **arrays, transpose_rhs=transposed)
    inv = attrs.evolve(inv, platform="gpu", device_kind="NVIDIA H200", compute_capability=(9, 0)).with_arrays(arrays)
    with interpreted():
        table = np.asarray(jax.jit(lambda: _launch.group_table(inv, hopper.Config()))())
        # Two in one program, which count their tiles apart.
        results = jax.jit(lambda: [d_rhs.run_backend(inv, hopper.Config()) for _ in range(2)])()
    assert [*table[:3]] == [1, 0, 0]  # the first group alone has narrow tiles
    rows, d_out = np.asarray(arrays["lhs"], np.float32), np.asarray(arrays["d_out"], np.float32)
    for group, (start, end) in enumerate(pairwise(ends)):
        expected = rows[start:end].T @ d_out[start:end]
        expected = expected.T if transposed else expected
        for result in results:
            np.testing.assert_allclose(np.asarray(result[group], np.float32), expected, rtol=1e-2, atol=1e-2)


def test_boundaries_that_are_no_rows_end_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as if there were rows of zeros, also if a boundary is the number that means that nothing is left."""
    monkeypatch.setattr(_launch, "multiprocessors", lambda inv: 3)
    keys = jax.random.split(jax.random.key(8), 2)
    arrays = {
        name: jax.random.normal(key, (1, size), "bfloat16")
        for name, key, size in zip(("lhs", "d_out"), keys, (8, 16), strict=True)
    }
    arrays["boundaries"] = jnp.array([-2, 1], jnp.int32)
    inv = ejkernel_core.invocation("grouped_matmul_d_rhs", **arrays)
    inv = attrs.evolve(inv, platform="gpu", device_kind="NVIDIA H200", compute_capability=(9, 0)).with_arrays(arrays)
    with interpreted():
        result = jax.jit(lambda: d_rhs.run_backend(inv, hopper.Config()))()
    rows, d_out = np.asarray(arrays["lhs"], np.float32), np.asarray(arrays["d_out"], np.float32)
    np.testing.assert_allclose(np.asarray(result[0], np.float32), rows.T @ d_out, rtol=1e-2)


@pytest.mark.parametrize("activation", [None, "silu_gated", "swiglu_oai"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_smallest_call(monkeypatch: pytest.MonkeyPatch, activation: str | None, transposed: bool) -> None:
    """One row, one group, and one tile for three programs."""
    monkeypatch.setattr(_launch, "multiprocessors", lambda inv: 3)
    keys = jax.random.split(jax.random.key(9), 3)
    shapes = {"lhs": (1, 8), "rhs": (1, 16, 8) if transposed else (1, 8, 16), "rhs_bias": (1, 16)}
    arrays = {
        name: jax.random.normal(key, shape, "bfloat16") for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    options = {"activation": activation, "transpose_rhs": transposed}
    inv = invocation([1], 0, **arrays, **options).with_arrays(arrays)
    with interpreted():
        result = jax.jit(lambda: hopper.run_backend(inv, hopper.Config()))()
    wide = {name: array.astype("float32") for name, array in arrays.items()}
    expected = ejkernel_core.call("grouped_matmul", **wide, group_sizes=jnp.array([1]), **options, backend="reference")
    np.testing.assert_allclose(np.asarray(result, np.float32), expected, rtol=1e-2, atol=1e-2)


HAS_GLUON = _jax_triton.version() >= (0, 4, 1)


@pytest.mark.skipif(not HAS_GLUON, reason="the Gluon kernels need newer versions")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lhs": ((128, 64), "float32"), "rhs": ((1, 64, 256), "float32")}, "float16 and bfloat16; not float32"),
        ({"lhs": ((128, 60), "bfloat16"), "rhs": ((1, 60, 256), "bfloat16")}, "multiples of 8 for k and n; not 60"),
        ({"rhs": ((1, 64, 100), "bfloat16")}, "multiples of 8 for k and n; not 100"),
        ({"rhs": ((1, 64, 8), "bfloat16"), "activation": "silu_gated"}, "multiples of 8 for k and n; not 4"),
        ({"lhs": ((0, 64), "bfloat16")}, "no arrays without rows"),
        ({"rhs": ((2000, 64, 64), "bfloat16"), "sizes": [0] * 2000}, "up to 1022 groups; there are 2000"),
    ],
)
def test_what_hopper_refuses(changes: dict[str, Any], text: str) -> None:
    options = {
        name: jax.ShapeDtypeStruct(*value) if isinstance(value, tuple) else value
        for name, value in changes.items()
        if name != "sizes"
    }
    with pytest.raises(Unsupported, match=re.escape(text)):
        hopper.heuristic_cfg(invocation(changes.get("sizes", [128]), 0, **options))


def test_groups_of_few_rows_are_left_to_the_portable_kernel() -> None:
    def is_preferred(rows: int, groups: int, part: slice = slice(None)) -> bool:
        inv = invocation([rows // groups] * groups, rows % groups, part)
        return hopper.rank(inv) > portable.PLATFORMS["gpu"]

    assert [is_preferred(rows, 128) for rows in (0, 512, 2048, 2049, 131072)] == [False, False, False, True, True]
    # A device with a part of the groups has tiles that are as full as those of all.
    assert not is_preferred(2048, 128, slice(32, 64))


@pytest.mark.skipif(not HAS_GLUON, reason="the Gluon kernels need newer versions")
@pytest.mark.parametrize("transposed", [False, True])
def test_a_matrix_has_no_more_rows_of_tiles_than_16_bits_count(transposed: bool) -> None:
    def kernel_takes(rows: int) -> None:
        sizes = (8, rows) if transposed else (rows, 8)
        arrays = (jax.ShapeDtypeStruct((4, size), "bfloat16") for size in sizes)
        boundaries = jax.ShapeDtypeStruct((2,), "int32")
        inv = ejkernel_core.invocation("grouped_matmul_d_rhs", *arrays, boundaries, transpose_rhs=transposed)
        d_rhs.heuristic_cfg(attrs.evolve(inv, platform="gpu", device_kind="NVIDIA H200", compute_capability=(9, 0)))

    kernel_takes(1 << 23)
    with pytest.raises(Unsupported, match="up to 8388608 rows of a matrix; there are 8388616"):
        kernel_takes((1 << 23) + 8)


def test_stages_have_to_fit() -> None:
    inv = invocation([128], 0)
    portable.check_cfg(inv, portable.Config(rows=128, columns=128))
    with pytest.raises(Unsupported, match=r"need \d+ bytes of shared memory, and there are \d+"):
        portable.check_cfg(inv, portable.Config(rows=256, columns=256, depth=128, num_stages=6))
    if HAS_GLUON:
        with pytest.raises(Unsupported, match="6 stages of 256 columns do not fit"):
            hopper.check_cfg(inv, hopper.Config(256, 6))
        with pytest.raises(Unsupported, match="tiles of 128 columns are not for silu_gated: take 256"):
            hopper.check_cfg(invocation([128], 0, activation="silu_gated"), hopper.Config(128, 4))


def test_the_kernels_of_a_direction_have_configurations_of_their_own() -> None:
    assert hopper.Config is d_rhs.Config  # the same fields, chosen for each operation
    few, many = invocation([1] * 128, 0), invocation([1000] * 8, 0)
    assert portable.heuristic_cfg(few).rows < portable.heuristic_cfg(many).rows


def test_tokens_are_read_in_place_unless_the_product_has_many_columns() -> None:
    def is_before_the_parts(
        n: int, capability: tuple[int, int], transposed: bool = False, dtype: str = "bfloat16", tokens: int = 64
    ) -> bool:
        arrays = {
            "x": ((tokens, 128), dtype),
            "token_order": ((2 * tokens,), "int32"),
            "rhs": ((4, n, 128) if transposed else (4, 128, n), dtype),
            "group_sizes": ((4,), "int32"),
        }
        shapes = {name: jax.ShapeDtypeStruct(*array) for name, array in arrays.items()}
        inv = ejkernel_core.invocation("moe_permute_matmul", **shapes, k=2, transpose_rhs=transposed)
        on_card = attrs.evolve(inv, platform="gpu", device_kind="a card", compute_capability=capability)
        return moe_permute_matmul.rank(on_card) > by_parts.forward.PLATFORMS["gpu"]

    assert [is_before_the_parts(n, (9, 0)) for n in (1536, 8192, 8200)] == [True, True, not HAS_GLUON]
    assert is_before_the_parts(8200, (9, 0), transposed=True) is not HAS_GLUON
    # Where the product has no faster kernel:
    assert is_before_the_parts(8200, (8, 0))
    assert is_before_the_parts(8200, (9, 0), dtype="float32")
    assert is_before_the_parts(8200, (9, 0), tokens=32)
