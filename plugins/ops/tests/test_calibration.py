"""Shared memory, warps and stages, against the arithmetic of the documentation."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ejkernel_ops import calibration
from ejkernel_ops.calibration import (
    estimate_shared_memory_bytes,
    get_shared_memory_limit,
    select_num_stages,
    select_num_warps,
)

KIB = 1024
SIZES = st.integers(1, 2048)
DTYPES = st.sampled_from(["float16", jnp.bfloat16, jnp.float32, np.float64, jnp.float8_e4m3fn, np.dtype("int8")])


@pytest.fixture(autouse=True)
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(calibration.VARIABLE, raising=False)


def bytes_of(dtype: Any) -> int:
    return np.zeros(1, dtype).nbytes


# -- the memory of a kernel ----------------------------------------------------------------------------------------


@given(SIZES, SIZES, SIZES, DTYPES, st.booleans())
def test_estimates(q: int, kv: int, dim: int, dtype: Any, softmax: bool) -> None:
    tiles = [np.zeros(shape, dtype) for shape in ((q, 1), (kv, 1), (kv, 1))]
    expected = sum(tile.nbytes for tile in tiles) * dim + 2 * np.zeros(q, np.float32).nbytes * softmax
    estimate = estimate_shared_memory_bytes(q, kv, dim, dtype, include_softmax=softmax)
    assert type(estimate) is int
    assert expected <= estimate < expected + 128
    assert estimate % 128 == 0


def test_the_estimate_of_the_documentation() -> None:
    assert estimate_shared_memory_bytes(128, 256, 64) == 82944 > 49152
    assert estimate_shared_memory_bytes(np.int32(1), 1, 1, include_softmax=False) == 128


# -- the memory of a device ----------------------------------------------------------------------------------------

#: From the data sheets: V100, T4, A100, RTX 30, Orin, RTX 40, H100 and H200, B200, B300, RTX 50, and unknown devices.
LIMITS = {
    (7, 0): 96, (7, 5): 64, (8, 0): 164, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227,
    (12, 0): 99, (12, 1): 99, (6, 1): 48, (8, 1): 48, (99, 0): 48, (0, 0): 48,
}  # fmt: skip


class Gpu:
    platform, device_kind = "gpu", "a card"
    compute_capability: Any = None


@pytest.mark.parametrize(("capability", "kib"), LIMITS.items(), ids=str)
def test_the_limit_by_compute_capability(capability: Any, kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_shared_memory_limit(compute_capability=capability) == kib * KIB
    monkeypatch.setattr(jax, "Device", Gpu)
    monkeypatch.setattr(Gpu, "compute_capability", ".".join(map(str, capability)))
    assert get_shared_memory_limit(Gpu()) == kib * KIB
    monkeypatch.setattr(jax, "devices", lambda: [Gpu()])
    assert get_shared_memory_limit() == kib * KIB


@pytest.mark.parametrize("capability", [None, "gfx942", "9", "9.x"])
def test_the_limit_without_a_compute_capability(capability: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_shared_memory_limit() == get_shared_memory_limit(jax.devices("cpu")[0]) == 48 * KIB
    monkeypatch.setattr(jax, "Device", Gpu)
    monkeypatch.setattr(Gpu, "compute_capability", capability)
    assert get_shared_memory_limit(Gpu()) == 48 * KIB


def test_the_environment_overrides_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(calibration.VARIABLE, "101376")
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("the device was read"))
    assert get_shared_memory_limit() == get_shared_memory_limit(compute_capability=(9, 0)) == 99 * KIB
    assert select_num_stages(50 * KIB) == 1
    assert select_num_stages(50 * KIB, limit=100 * KIB) == 2
    monkeypatch.setenv(calibration.VARIABLE, "")
    assert get_shared_memory_limit(compute_capability=(9, 0)) == 227 * KIB


@pytest.mark.parametrize("text", ["0", "-1", "48K", "1e5", "1.5", " ", "1_000", "٣", "none", "+5"])
def test_a_wrong_environment_variable_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(calibration.VARIABLE, text)
    for function in (get_shared_memory_limit, lambda: select_num_stages(1)):
        with pytest.raises(ValueError, match=f"{calibration.VARIABLE}: takes a whole number of bytes above 0"):
            function()


# -- warps and stages ----------------------------------------------------------------------------------------------


@given(SIZES, SIZES, SIZES, DTYPES)
@example(256, 128, 128, "float16")  # the tiles fill the registers of 16 warps
@example(1, 1, 1, "float16")
@example(2048, 2048, 2048, np.float64)
def test_the_warps_are_the_fewest_that_hold_the_tiles(q: int, kv: int, dim: int, dtype: Any) -> None:
    warps = select_num_warps(q, kv, dim, dtype)
    assert warps in (4, 8, 16)
    sum_bytes = max(4, bytes_of(dtype))
    tile_bytes = q * kv * sum_bytes + q * dim * sum_bytes + q * kv * bytes_of(dtype)
    assert tile_bytes <= warps * 20 * KIB or warps == 16
    assert tile_bytes > (warps // 2) * 20 * KIB or warps == 4
    assert select_num_warps(2 * q, kv, dim, dtype) >= warps


@given(st.integers(1, 2**20), st.integers(1, 2**20))
@example(100, 300)
@example(100, 299)
@example(100, 99)
def test_the_stages_are_the_most_that_fit(smem: int, limit: int) -> None:
    stages = select_num_stages(smem, limit)
    assert stages in (1, 2, 3)
    assert stages * smem <= limit or (stages == 1 and smem > limit)
    assert stages == 3 or (stages + 1) * smem > limit


# -- wrong arguments -----------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Any] = {
    "q_block": lambda value: (estimate_shared_memory_bytes(value, 64, 64), select_num_warps(value, 64, 64)),
    "kv_block": lambda value: select_num_warps(64, value, 64),
    "head_dim": lambda value: estimate_shared_memory_bytes(64, 64, value),
    "smem_bytes": lambda value: select_num_stages(value, 10),
    "limit": lambda value: select_num_stages(10, value),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-64, ValueError), (64.0, TypeError), ("64", TypeError), (True, TypeError)]
)
def test_sizes_are_whole_numbers_from_1(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name}: (must be at least 1; got|takes a whole number; got)"):
        FUNCTIONS[name](value)


@pytest.mark.parametrize("value", [None, "banana", object, str, "f4,i4", jnp.bool_])
def test_dtypes_without_numbers_are_refused(value: Any) -> None:
    for function in (estimate_shared_memory_bytes, select_num_warps):
        with pytest.raises(TypeError, match="dtype: takes a numeric dtype"):
            function(64, 64, 64, dtype=value)


@pytest.mark.parametrize("value", ["gpu", 0, Gpu(), types.SimpleNamespace(platform="gpu")])
def test_other_values_than_devices_are_refused(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(calibration.VARIABLE, "1024")
    with pytest.raises(TypeError, match="device: takes one of jax.devices"):
        get_shared_memory_limit(value)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("9.0", TypeError),
        ((9.0, 0), TypeError),
        ([9, 0], TypeError),
        ((9,), ValueError),
        ((9, -1), ValueError),
        ((), ValueError),
    ],
)
def test_other_values_than_compute_capabilities_are_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="compute_capability: takes two whole numbers"):
        get_shared_memory_limit(compute_capability=value)


def test_a_device_and_a_compute_capability_are_refused_together() -> None:
    with pytest.raises(TypeError, match="not both"):
        get_shared_memory_limit(jax.devices()[0], compute_capability=(9, 0))
