"""Shared memory, warps and stages: against the documented arithmetic, and each function against its own docstring."""

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


# -- what a kernel needs -------------------------------------------------------------------------------------------


@given(SIZES, SIZES, SIZES, DTYPES, st.booleans())
def test_the_estimate(q: int, kv: int, dim: int, dtype: Any, softmax: bool) -> None:
    tiles = [np.zeros(shape, dtype) for shape in ((q, 1), (kv, 1), (kv, 1))]
    wanted = sum(tile.nbytes for tile in tiles) * dim + 2 * np.zeros(q, np.float32).nbytes * softmax
    found = estimate_shared_memory_bytes(q, kv, dim, dtype, include_softmax=softmax)
    assert type(found) is int
    assert wanted <= found < wanted + 128
    assert found % 128 == 0


def test_the_documented_estimate() -> None:
    assert estimate_shared_memory_bytes(128, 256, 64) == 82944 > 49152
    assert estimate_shared_memory_bytes(np.int32(1), 1, 1, include_softmax=False) == 128


# -- what a device gives -------------------------------------------------------------------------------------------

#: By the data sheets: V100, T4, A100, RTX 30, Orin, RTX 40, H100 and H200, B200, B300, RTX 50, and what is not known.
KNOWN = {
    (7, 0): 96, (7, 5): 64, (8, 0): 164, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227,
    (12, 0): 99, (12, 1): 99, (6, 1): 48, (8, 1): 48, (99, 0): 48, (0, 0): 48,
}  # fmt: skip


class Gpu:
    platform = "gpu"
    compute_capability: Any = None


@pytest.mark.parametrize(("capability", "kib"), KNOWN.items(), ids=str)
def test_the_limit_by_compute_capability(capability: Any, kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_shared_memory_limit(compute_capability=capability) == kib * KIB
    monkeypatch.setattr(jax, "Device", Gpu)
    monkeypatch.setattr(Gpu, "compute_capability", ".".join(map(str, capability)))
    assert get_shared_memory_limit(Gpu()) == kib * KIB
    monkeypatch.setattr(jax, "devices", lambda: [Gpu()])
    assert get_shared_memory_limit() == kib * KIB


@pytest.mark.parametrize("capability", [None, "gfx942", "9", "9.x"])
def test_the_limit_where_there_is_no_compute_capability(capability: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_shared_memory_limit() == get_shared_memory_limit(jax.devices("cpu")[0]) == 48 * KIB
    monkeypatch.setattr(jax, "Device", Gpu)
    monkeypatch.setattr(Gpu, "compute_capability", capability)
    assert get_shared_memory_limit(Gpu()) == 48 * KIB


def test_the_environment_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(calibration.VARIABLE, "101376")
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("no device has to be asked"))
    assert get_shared_memory_limit() == get_shared_memory_limit(compute_capability=(9, 0)) == 99 * KIB
    assert select_num_stages(50 * KIB) == 1
    assert select_num_stages(50 * KIB, limit=100 * KIB) == 2
    monkeypatch.setenv(calibration.VARIABLE, "")
    assert get_shared_memory_limit(compute_capability=(9, 0)) == 227 * KIB


@pytest.mark.parametrize("text", ["0", "-1", "48K", "1e5", "1.5", " ", "1_000", "٣", "none", "+5"])
def test_a_wrong_environment_is_told(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(calibration.VARIABLE, text)
    for ask in (get_shared_memory_limit, lambda: select_num_stages(1)):
        with pytest.raises(ValueError, match=f"{calibration.VARIABLE}: takes a whole number of bytes above 0"):
            ask()


# -- warps and stages ----------------------------------------------------------------------------------------------


@given(SIZES, SIZES, SIZES, DTYPES)
@example(256, 128, 128, "float16")  # exactly full
@example(1, 1, 1, "float16")
@example(2048, 2048, 2048, np.float64)
def test_the_warps_are_the_fewest_that_hold_the_tiles(q: int, kv: int, dim: int, dtype: Any) -> None:
    warps = select_num_warps(q, kv, dim, dtype)
    assert warps in (4, 8, 16)
    sums = max(4, bytes_of(dtype))
    held = q * kv * sums + q * dim * sums + q * kv * bytes_of(dtype)
    assert held <= warps * 20 * KIB or warps == 16
    assert held > (warps // 2) * 20 * KIB or warps == 4
    assert select_num_warps(2 * q, kv, dim, dtype) >= warps


@given(st.integers(1, 2**20), st.integers(1, 2**20))
@example(100, 300)
@example(100, 299)
@example(100, 99)
def test_the_stages_fit(smem: int, limit: int) -> None:
    stages = select_num_stages(smem, limit)
    assert stages in (1, 2, 3)
    assert stages * smem <= limit or (stages == 1 and smem > limit)
    assert stages == 3 or (stages + 1) * smem > limit


# -- what is wrong -------------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Any] = {
    "q_block": lambda wrong: (estimate_shared_memory_bytes(wrong, 64, 64), select_num_warps(wrong, 64, 64)),
    "kv_block": lambda wrong: select_num_warps(64, wrong, 64),
    "head_dim": lambda wrong: estimate_shared_memory_bytes(64, 64, wrong),
    "smem_bytes": lambda wrong: select_num_stages(wrong, 10),
    "limit": lambda wrong: select_num_stages(10, wrong),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("wrong", "error"), [(0, ValueError), (-64, ValueError), (64.0, TypeError), ("64", TypeError), (True, TypeError)]
)
def test_sizes_are_whole_numbers_from_1(name: str, wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name}: (is at least 1; got|takes a whole number; got)"):
        FUNCTIONS[name](wrong)


@pytest.mark.parametrize("wrong", [None, "banana", object, str, "f4,i4", jnp.bool_])
def test_a_dtype_is_of_numbers(wrong: Any) -> None:
    for function in (estimate_shared_memory_bytes, select_num_warps):
        with pytest.raises(TypeError, match="dtype: takes a dtype of numbers"):
            function(64, 64, 64, dtype=wrong)


@pytest.mark.parametrize("wrong", ["gpu", 0, Gpu(), types.SimpleNamespace(platform="gpu")])
def test_what_is_no_device_is_told(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(calibration.VARIABLE, "1024")
    with pytest.raises(TypeError, match="device: takes one of jax.devices"):
        get_shared_memory_limit(wrong)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("9.0", TypeError),
        ((9.0, 0), TypeError),
        ([9, 0], TypeError),
        ((9,), ValueError),
        ((9, -1), ValueError),
        ((), ValueError),
    ],
)
def test_what_is_no_compute_capability_is_told(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="compute_capability: takes two whole numbers"):
        get_shared_memory_limit(compute_capability=wrong)


def test_a_device_or_a_compute_capability() -> None:
    with pytest.raises(TypeError, match="not both"):
        get_shared_memory_limit(jax.devices()[0], compute_capability=(9, 0))
