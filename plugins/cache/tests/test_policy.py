"""The policy: what was measured is on disk, nothing else is, and the next process finds it."""

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


# -- what is written -------------------------------------------------------------------------------------------------


def test_a_heuristic_is_never_on_disk(scale_op, folder):
    assert (scale_op.used(), scale_op.origin()) == (2, "heuristic")
    assert not folder.exists()


def test_an_explicit_configuration_is_never_on_disk(scale_op, folder):
    scale_op.tuner(5)
    assert scale_op.used(cfg=scale_op.Config(4)) == 4
    assert not folder.exists()


def test_what_was_measured_is_on_disk_for_the_call_and_for_those_like_it(scale_op, folder):
    scale_op.tuner(5, milliseconds=0.25)
    assert scale_op.used() == 5
    cache, (exact, alike) = PersistentCache(folder), scale_op.keys()
    assert set(cache) == {exact, alike}
    (record,) = cache.records(exact)
    assert cache.records(alike) == (record,)
    # A tuner need not know the versions that it measured with.
    software = record.provenance.software
    assert software.keys() == {"jax", "jaxlib", "scale.two"}
    without = attrs.evolve(record, provenance=attrs.evolve(record.provenance, software={}))
    assert without == scale_op.record(5, 0.25)
    scale_op.fresh()
    assert scale_op.used() == 5
    assert scale_op.used(length=6) == 5  # 5 and 6 are alike
    assert scale_op.used(length=7) == 2
    told = str(scale_op.registry.explain("scale", jnp.ones(5)))
    assert f"scale.two with Config(factor=5), by disk ({folder})" in told
    assert f"remembered as scale {exact.digest}, measured" in told
    assert "on cpu: 0.25 ms" in told


def test_what_is_on_disk_is_not_measured_again(scale_op):
    scale_op.tuner(5)
    assert scale_op.used() == 5
    scale_op.fresh()
    scale_op.tuner(6)
    assert scale_op.used() == 5


@pytest.mark.parametrize(
    ("old", "milliseconds", "left"),
    [(1.0, 0.5, 5), (1.0, 1.0, 5), (1.0, 1.5, 4), (None, 0.1, 4)],
    ids=["faster", "as fast", "slower", "by hand"],
)
def test_a_bucket_keeps_the_faster_one_and_what_was_put_by_hand(scale_op, old, milliseconds, left):
    cache, (exact, alike) = default_cache(), scale_op.keys()
    record = scale_op.record(4, old) if old else Record(scale_op.Config(4), "two")
    for key in (exact, alike):
        cache.put(key, record)
    new = scale_op.record(5, milliseconds)
    inv = scale_op.registry.invocation("scale", jnp.ones(5))
    policy.config_selected(inv, Choice("two", new.cfg, "a tuner", record=new, measured=True))
    assert cache.get(exact) == scale_op.Config(5)
    assert cache.get(alike) == scale_op.Config(left)


def test_a_bucket_that_cannot_be_read_is_written_anew(scale_op):
    cache, (_, alike) = default_cache(), scale_op.keys()
    cache.put(alike, scale_op.record(4, 0.001))
    file = cache.file(alike, "two")
    file.write_text(file.read_text().replace('"schema": 2', '"schema": 3'))
    with pytest.raises(RecordError):
        cache.read(alike, "two")
    scale_op.tuner(5)
    assert scale_op.used() == 5
    assert cache.get(alike) == scale_op.Config(5)


def test_the_variable_is_read_at_the_first_call(scale_op, tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "later"))
    scale_op.tuner(5)
    assert scale_op.used() == 5
    assert {file.parts[len(tmp_path.parts)] for file in files(tmp_path)} == {"later"}


def test_it_is_installed(folder):
    registry = Registry(plugins="ejkernel-cache")
    assert registry.names("ejkernel.policies") == ("cache",)
    ((entry, broken),) = registry.inspect()
    assert (entry.value, entry.distribution, broken) == ("ejkernel_cache.policy", "ejkernel-cache", None)
    assert not folder.exists()


def test_a_function_that_jax_compiled_and_a_batch_find_it_too(scale_op):
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


def scaling(distribution, version: str) -> Path:
    return distribution(
        "scale-dist",
        {"scale_operation.py": OPERATION, "scale_kernel.py": KERNEL},
        version,
        operations={"scale": "scale_operation:operation"},
        kernels={"scale.two": "scale_kernel"},
    )


def test_the_next_process_finds_it_another_version_does_not_and_a_package_serves_both(distribution, python, folder):
    one, two = scaling(distribution, "1.0"), scaling(distribution, "2.0")
    tuner = distribution("tuner-dist", {"scale_tuner.py": TUNER}, policies={"guess": "scale_tuner"})
    assert python(CALL, one) == "2 heuristic"
    assert not folder.exists()
    assert python(CALL, one, tuner) == "5 memory"
    assert len(files(folder)) == 1
    assert python(CALL, one) == f"5 disk ({folder})"
    assert python(CALL, two) == "2 heuristic"
    assert python(CALL, one, EJKERNEL_CACHE_DIR=str(folder / "other")) == "2 heuristic"

    # A backend for another platform, with compilers of its own, loses nobody's record; in any of its versions.
    kernel = KERNEL + '\n    PLATFORMS = {"tpu": 90}\n    COMPILERS = ("scale-tpu",)\n'
    for version in ("1.0", "2.0"):
        kernels = {"scale.tpu": "scale_tpu"}
        elsewhere = distribution("scale-tpu", {"scale_tpu.py": kernel}, version, kernels=kernels)
        assert python(CALL, one, elsewhere) == f"5 disk ({folder})"

    # What a cache holds becomes a package by copying it.
    package = distribution(
        "h200-records", {"h200_records/__init__.py": RECORDS}, policies={"h200": "h200_records:records"}
    )
    (device,) = (name for name in os.listdir(folder) if not name.startswith("."))
    shutil.copytree(folder / device, package / "h200_records" / device)
    empty = {"EJKERNEL_CACHE_DIR": str(folder / "empty")}
    assert python(CALL, two, package, **empty) == "5 packaged records (h200_records)"
    assert python(CALL, one, package, **empty) == "5 packaged records (h200_records)"
    assert python(CALL, one, package) == f"5 disk ({folder})"
    assert sorted(os.listdir(folder)) == [".tmp", device]
