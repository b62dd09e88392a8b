"""The policy ``cache``: only measured choices are written to disk, and the next process uses them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import attrs
import jax.numpy as jnp
import pytest

from ejkernel_cache import PersistentCache, default_cache, policy
from ejkernel_core import Choice, Record, RecordError, Registry


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.json"))


# -- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.always
def test_a_heuristic_is_never_on_disk(scale_op, folder):
    assert (scale_op.used_factor(), scale_op.origin()) == (2, "heuristic")
    assert not folder.exists()


def test_an_explicit_configuration_is_never_on_disk(scale_op, folder):
    scale_op.tuner(5)
    assert scale_op.used_factor(cfg=scale_op.Config(4)) == 4
    assert not folder.exists()


def test_a_measured_choice_is_written_for_the_call_and_its_bucket(scale_op, folder):
    scale_op.tuner(5, milliseconds=0.25)
    assert scale_op.used_factor() == 5
    cache, (exact, bucket_key) = PersistentCache(folder), scale_op.keys()
    assert set(cache) == {exact, bucket_key}
    (record,) = cache.records(exact)
    assert cache.records(bucket_key) == (record,)
    # The core adds the versions to the provenance of a tuner.
    software = record.provenance.software
    assert software.keys() == {"jax", "jaxlib", "scale.two"}
    without = attrs.evolve(record, provenance=attrs.evolve(record.provenance, software={}))
    assert without == scale_op.record(5, 0.25)
    scale_op.reset()
    assert scale_op.used_factor() == 5
    assert scale_op.used_factor(length=6) == 5  # 5 and 6 have one bucket
    assert scale_op.used_factor(length=7) == 2
    explanation = str(scale_op.registry.explain("scale", jnp.ones(5)))
    assert f"scale.two with Config(factor=5), by disk ({folder})" in explanation
    assert f"remembered as scale {exact.digest}, measured" in explanation
    assert "on cpu: 0.25 ms" in explanation


def test_a_call_with_a_record_on_disk_is_not_measured(scale_op):
    scale_op.tuner(5)
    assert scale_op.used_factor() == 5
    scale_op.reset()
    scale_op.tuner(6)
    assert scale_op.used_factor() == 5


@pytest.mark.parametrize(
    ("old_milliseconds", "milliseconds", "factor"),
    [(1.0, 0.5, 5), (1.0, 1.0, 5), (1.0, 1.5, 4), (None, 0.1, 4)],
    ids=["faster", "as fast", "slower", "by hand"],
)
def test_a_bucket_keeps_the_faster_record_and_one_put_by_hand(scale_op, old_milliseconds, milliseconds, factor):
    cache, (exact, bucket_key) = default_cache(), scale_op.keys()
    record = scale_op.record(4, old_milliseconds) if old_milliseconds else Record(scale_op.Config(4), "two")
    for key in (exact, bucket_key):
        cache.put(key, record)
    record_of_tuner = scale_op.record(5, milliseconds)
    inv = scale_op.registry.invocation("scale", jnp.ones(5))
    policy.config_selected(inv, Choice("two", record_of_tuner.cfg, "a tuner", record=record_of_tuner, measured=True))
    assert cache.get(exact) == scale_op.Config(5)
    assert cache.get(bucket_key) == scale_op.Config(factor)


def test_an_unreadable_record_of_a_bucket_is_replaced(scale_op):
    cache, (_, bucket_key) = default_cache(), scale_op.keys()
    cache.put(bucket_key, scale_op.record(4, 0.001))
    file = cache.file(bucket_key, "two")
    file.write_text(file.read_text().replace('"schema": 2', '"schema": 3'))
    with pytest.raises(RecordError):
        cache.read(bucket_key, "two")
    scale_op.tuner(5)
    assert scale_op.used_factor() == 5
    assert cache.get(bucket_key) == scale_op.Config(5)


def test_ejkernel_cache_dir_is_read_at_the_first_call(scale_op, tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "later"))
    scale_op.tuner(5)
    assert scale_op.used_factor() == 5
    assert {file.parts[len(tmp_path.parts)] for file in files(tmp_path)} == {"later"}


def test_the_policy_is_installed(folder):
    registry = Registry(plugins="ejkernel-cache")
    assert registry.names("ejkernel.policies") == ("cache",)
    ((entry, fault),) = registry.inspect()
    assert (entry.value, entry.distribution, fault) == ("ejkernel_cache.policy", "ejkernel-cache", None)
    assert not folder.exists()


def test_records_are_used_under_jit_and_vmap(scale_op):
    import jax

    cache = default_cache()
    cache.put(scale_op.keys(4)[0], scale_op.record(6))
    registry = scale_op.registry
    result = jax.jit(lambda x: registry.call("scale", x))(jnp.arange(4.0))
    assert result.tolist() == [0, 6, 12, 18]
    assert jax.vmap(lambda x: registry.call("scale", x))(jnp.ones((2, 4))).tolist() == [[6.0] * 4] * 2


# -- other processes -------------------------------------------------------------------------------------------------

OPERATION = """
    from ejkernel_core import Operation

    def scale(x): ...

    operation = Operation(name="scale", signature=scale, outputs=lambda a: (a["x"],))
"""

KERNEL = """
    import attrs
    from ejkernel_core import hookimpl

    @attrs.frozen
    class Config:
        factor: int = 2

    @hookimpl
    def heuristic_cfg(inv):
        return Config()

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * cfg.factor
"""

TUNER = """
    from ejkernel_core import Choice, Provenance, Record, hookimpl
    from scale_kernel import Config

    @hookimpl
    def select_config(inv, candidates):
        provenance = Provenance(when="2026-11-20T12:00:00+00:00", device="cpu", milliseconds=1.0, backends=("two",))
        return Choice("two", Config(5), "a tuner", record=Record(Config(5), "two", provenance), measured=True)
"""

RECORDS = """
    from ejkernel_cache import PackagedRecords

    records = PackagedRecords(__name__)
"""

CALL = """
    import jax.numpy as jnp
    import ejkernel_core
    print(int(ejkernel_core.call("scale", jnp.ones(5))[0]), ejkernel_core.plan("scale", jnp.ones(5)).origin)
"""


def scale_distribution(distribution, version: str) -> Path:
    return distribution(
        "scale-dist",
        {"scale_operation.py": OPERATION, "scale_kernel.py": KERNEL},
        version,
        operations={"scale": "scale_operation:operation"},
        kernels={"scale.two": "scale_kernel"},
    )


@pytest.mark.long
def test_records_in_other_processes_with_other_versions_and_in_a_package(distribution, run_python, folder):
    first_site, second_site = scale_distribution(distribution, "1.0"), scale_distribution(distribution, "2.0")
    tuner = distribution("tuner-dist", {"scale_tuner.py": TUNER}, policies={"guess": "scale_tuner"})
    assert run_python(CALL, first_site) == "2 heuristic"
    assert not folder.exists()
    assert run_python(CALL, first_site, tuner) == "5 memory"
    assert len(files(folder)) == 1
    assert run_python(CALL, first_site) == f"5 disk ({folder})"
    assert run_python(CALL, second_site) == "2 heuristic"
    assert run_python(CALL, first_site, EJKERNEL_CACHE_DIR=str(folder / "other")) == "2 heuristic"

    # A backend for another platform, in any version and with its own compilers, does not affect records.
    kernel = KERNEL + '\n    PLATFORMS = {"tpu": 90}\n    COMPILERS = ("scale-tpu",)\n'
    for version in ("1.0", "2.0"):
        kernels = {"scale.tpu": "scale_tpu"}
        other_site = distribution("scale-tpu", {"scale_tpu.py": kernel}, version, kernels=kernels)
        assert run_python(CALL, first_site, other_site) == f"5 disk ({folder})"

    # A copy of the cache's folder is a package of records.
    package = distribution(
        "h200-records", {"h200_records/__init__.py": RECORDS}, policies={"h200": "h200_records:records"}
    )
    (device,) = (name for name in os.listdir(folder) if not name.startswith("."))
    shutil.copytree(folder / device, package / "h200_records" / device)
    empty = {"EJKERNEL_CACHE_DIR": str(folder / "empty")}
    assert run_python(CALL, second_site, package, **empty) == "5 packaged records (h200_records)"
    assert run_python(CALL, first_site, package, **empty) == "5 packaged records (h200_records)"
    assert run_python(CALL, first_site, package) == f"5 disk ({folder})"
    assert sorted(os.listdir(folder)) == [".tmp", device]
