"""FwdParams, BwdParams, hashes by content, and functions of devices."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import attrs
import cattrs
import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel_classes import (
    BwdParams,
    FwdParams,
    device_fingerprint,
    device_kind,
    get_device_platform,
    get_safe_hash_int,
    hash_fn,
    preferred_backend,
)

FIELDS = [field.name for field in attrs.fields(FwdParams)]
params = st.dictionaries(st.sampled_from(FIELDS), st.integers(1, 512)).map(lambda given: FwdParams(**given))


def test_all_fields_exist_and_are_optional() -> None:
    assert FIELDS == [
        "blocksize_m", "blocksize_k", "blocksize_n", "q_blocksize", "kv_blocksize", "blocksize_heads",
        "blocksize_keys", "num_key_splits", "num_warps", "num_stages",
    ]  # fmt: skip
    assert FwdParams() == FwdParams(**dict.fromkeys(FIELDS))
    assert FwdParams().to_dict() == BwdParams().to_dict() == {}


@given(params, params)
def test_merge_prefers_the_second(base: FwdParams, override: FwdParams) -> None:
    assert FwdParams.merge(base, override).to_dict() == {**base.to_dict(), **override.to_dict()}
    assert FwdParams.merge(None, override) == override
    assert FwdParams.merge(base, None) == base


@given(params, params)
def test_hashes_are_equal_if_and_only_if_values_are(first: FwdParams, second: FwdParams) -> None:
    assert (hash_fn(first) == hash_fn(second)) is (first == second)
    assert (hash(first) == hash(second)) or first != second


@given(params)
def test_params_go_through_cattrs(value: FwdParams) -> None:
    assert cattrs.structure(cattrs.unstructure(value), FwdParams) == value


@given(params, st.floats(0.01, 4))
def test_backward_blocks_are_powers_of_two_from_16(fwd: FwdParams, scale: float) -> None:
    bwd = BwdParams.from_fwd_params(fwd, scale)
    for block, forward_block in ((bwd.q_blocksize, fwd.q_blocksize), (bwd.kv_blocksize, fwd.kv_blocksize)):
        scaled_block = (forward_block or 128) * scale
        assert block is not None
        assert block >= 16
        assert block & (block - 1) == 0
        assert block == 16 or block <= scaled_block < 2 * block + 1
    assert (bwd.num_warps, bwd.num_stages) == (fwd.num_warps, fwd.num_stages)


@pytest.mark.parametrize("value", [0, -8, True, 1.5, "128"])
def test_an_invalid_block_or_scale_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="q_blocksize"):
        FwdParams(q_blocksize=value)
    with pytest.raises(ValueError, match="scale: takes a number above 0"):
        BwdParams.from_fwd_params(FwdParams(), 0)


@dataclasses.dataclass
class Fields:
    a: Any = 0
    b: Any = 0


class PlainObject:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def test_hash_fn_distinguishes_fields() -> None:
    assert hash_fn(Fields(12, 3)) != hash_fn(Fields(1, 23))
    assert hash_fn(Fields(64, 0)) != hash_fn(Fields(0, 64))
    assert hash_fn(Fields("64", 0)) != hash_fn(Fields(64, 0))
    assert hash_fn(Fields(1, True)) == hash_fn(Fields(1.0, 1))
    assert hash_fn(Fields([1, {"x": 2}])) == hash_fn(Fields([True, {"x": 2.0}]))
    assert hash_fn(PlainObject(a=1)) == hash_fn(PlainObject(a=1)) != hash_fn(PlainObject(b=1))


@pytest.mark.parametrize("algorithm", ["md5", "sha256", "blake2b"])
def test_the_hash_is_that_of_hashlib(algorithm: str) -> None:
    expected = int(hashlib.new(algorithm, b"12").hexdigest(), 16)
    assert get_safe_hash_int("12", algorithm) == get_safe_hash_int(12, algorithm=algorithm) == expected


@pytest.mark.parametrize("algorithm", ["md17", "", "shake_128"])
def test_an_unknown_algorithm_is_refused(algorithm: str) -> None:
    with pytest.raises(ValueError, match="algorithm: takes one of hashlib's"):
        get_safe_hash_int("text", algorithm)


class Gpu:
    platform, device_kind = "cuda", "a card"


def test_kind_platform_and_backend_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = jax.devices("cpu")[0]
    assert (device_kind(cpu), get_device_platform(), preferred_backend(cpu)) == ("cpu", "cpu", "xla")
    assert device_fingerprint(cpu) == device_fingerprint()
    monkeypatch.setattr(jax, "Device", object)
    for platform, device_platform, backend in (
        ("cuda", "gpu", "triton"), ("rocm", "gpu", "triton"), ("tpu", "tpu", "pallas_tpu"), ("abacus", "unknown", "xla"),
    ):  # fmt: skip
        monkeypatch.setattr(Gpu, "platform", platform)
        assert (get_device_platform(Gpu()), preferred_backend(Gpu())) == (device_platform, backend)


@pytest.mark.parametrize("function", [device_kind, get_device_platform, preferred_backend, device_fingerprint])
def test_a_device_of_another_type_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="dev: takes one of jax.devices"):
        function("gpu")
