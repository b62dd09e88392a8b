"""Measurements of one processor do not apply to another, although JAX calls all of them "cpu"."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
import ejkernel_tuning
from ejkernel_classes import Kernel
from ejkernel_core import Registry, _devices
from ejkernel_core._devices import target
from ejkernel_core.extend import device_name, processor

GENOA = {"model name": "AMD EPYC", "cpu family": "25", "model": "17"}
GRACE = {"CPU implementer": "0x41", "CPU part": "0xd4f"}

X = jnp.arange(1.0, 4.0)

SetProcessor = Callable[..., None]


@attrs.frozen
class Factor:
    by: int = 2


class Scale(Kernel[Factor, jax.Array]):
    """Multiplies by the configuration's factor, so that the result shows which configuration was used."""

    def run(self, x, *, cfg):
        return x * cfg.by


@pytest.fixture
def set_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetProcessor]:
    """``set_processor(cpuinfo, cores)`` makes this process see another processor."""

    def change(cpuinfo: dict[str, str], cores: int = 16) -> None:
        monkeypatch.setattr(_devices, "_cpuinfo", lambda: cpuinfo)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        processor.cache_clear()

    yield change
    processor.cache_clear()


@pytest.mark.parametrize(
    ("cpuinfo", "cores", "name"),
    [
        (GENOA, 16, "AMD EPYC 25-17, 16 cores"),
        (GENOA, 1, "AMD EPYC 25-17, 1 core"),
        ({"model name": "Intel(R)  Xeon(R) CPU @ 2.20GHz"}, 2, "Intel(R) Xeon(R) CPU @ 2.20GHz, 2 cores"),
        ({"cpu": "POWER9, altivec supported"}, 4, "POWER9, altivec supported, 4 cores"),
        (GRACE, 72, "aarch64 0x41-0xd4f, 72 cores"),
        ({}, 8, "aarch64, 8 cores"),
    ],
)
def test_the_name_of_a_processor_has_its_model_and_usable_cores(
    set_processor: SetProcessor, monkeypatch: pytest.MonkeyPatch, cpuinfo: dict[str, str], cores: int, name: str
) -> None:
    monkeypatch.setattr(_devices, "machine", lambda: "aarch64")
    monkeypatch.delenv("PROCESSOR_IDENTIFIER", raising=False)
    set_processor(cpuinfo, cores)
    assert processor() == name


def test_an_unidentified_processor_has_a_name(set_processor: SetProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_devices, "machine", lambda: "")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    monkeypatch.delenv("PROCESSOR_IDENTIFIER", raising=False)
    set_processor({})
    monkeypatch.delattr(os, "sched_getaffinity")
    assert processor() == "cpu, 1 core"
    monkeypatch.setenv("PROCESSOR_IDENTIFIER", "Intel64 Family 6 Model 106")
    processor.cache_clear()
    assert processor() == "Intel64 Family 6 Model 106, 1 core"


def test_a_malformed_cpuinfo_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "cpuinfo").write_bytes(b"processor\t: 0\nmodel name\t: a: \xff b\nnothing\n\nmodel name\t: another\n")
    builtin_open = open
    monkeypatch.setattr(
        "builtins.open", lambda path, *arguments, **keywords: builtin_open(tmp_path / "cpuinfo", *arguments, **keywords)
    )
    assert _devices._cpuinfo() == {"processor": "0", "model name": "a: \ufffd b", "nothing": ""}
    (tmp_path / "cpuinfo").unlink()
    assert _devices._cpuinfo() == {}


def test_invocations_keys_and_fingerprints_name_the_processor(set_processor: SetProcessor) -> None:
    set_processor(GENOA)
    inv = ejkernel_core.invocation("flash_attention", *np.ones((3, 1, 8, 2, 4), np.float32))
    assert target("cpu").device_kind == device_name(jax.devices("cpu")[0]) == "AMD EPYC 25-17, 16 cores"
    assert (inv.platform, inv.device_kind, inv.key.device) == ("cpu", *["AMD EPYC 25-17, 16 cores"] * 2)
    assert str(inv).endswith(" on cpu (AMD EPYC 25-17, 16 cores)")
    assert _devices.device_fingerprint(jax.devices("cpu")[0]).startswith("AMD EPYC 25-17, 16 cores (")
    assert jax.devices("cpu")[0].device_kind == "cpu"


def test_a_record_of_one_processor_is_not_used_on_another(set_processor: SetProcessor) -> None:
    registry, kernel = Registry(plugins=""), Scale()
    registry.register(kernel)
    for cpuinfo, cores in ((GENOA, 16), (GRACE, 16), (GENOA, 4)):
        set_processor(cpuinfo, cores)
        assert registry.plan("Scale", X).origin == "heuristic"
        registry.remember(registry.invocation("Scale", X).key, Factor(cores))
        assert (registry.plan("Scale", X).origin, registry.plan("Scale", X).cfg) == ("memory", Factor(cores))
    set_processor(GENOA, 16)
    assert registry.plan("Scale", X).cfg == Factor(16)
    assert len(registry.memory) == 3


def test_a_result_of_another_processor_is_refused(set_processor: SetProcessor) -> None:
    set_processor(GENOA)
    query = np.random.default_rng(0).normal(size=(1, 8, 2, 4)).astype(np.float32)
    cfg = ejkernel_core.plan("flash_attention", query, query, query, backend="xla").cfg
    options = {"configs": [cfg], "backend": "xla", "num_iters": 1, "remember": False}
    result = ejkernel_tuning.autotune("flash_attention", query, query, query, **options)
    (provenance,) = {record.provenance.device for _, records in result.items() for record in records}
    assert provenance.startswith("AMD EPYC 25-17, 16 cores (")
    with result:
        assert ejkernel_core.plan("flash_attention", query, query, query, backend="xla").origin == "overlay"
    set_processor(GRACE)
    with pytest.raises(ValueError, match="measured on AMD EPYC 25-17, 16 cores, and here there are .*0x41"), result:
        pass
