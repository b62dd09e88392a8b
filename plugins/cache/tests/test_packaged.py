"""Records installed with a package: they apply with any versions of software, and are never changed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from ejkernel_cache import PackagedRecords, PersistentCache, default_cache
from ejkernel_cache._names import component
from ejkernel_core import Record, Unsupported


def state(folder: Path) -> list[tuple[str, float, bytes]]:
    return [(str(f), f.stat().st_mtime, f.read_bytes()) for f in sorted(folder.rglob("*")) if f.is_file()]


@pytest.fixture
def packaged(scale_op, folder, tmp_path) -> Path:
    """A copy of a cache that has factor 7 for the call, while the cache itself is empty."""
    scale_op.on_disk()
    shutil.move(folder, tmp_path / "shipped")
    shutil.rmtree(tmp_path / "shipped" / ".tmp")
    return tmp_path / "shipped"


def file_in(packaged: Path) -> Path:
    (file,) = packaged.rglob("*.json")
    return file


def set_software(file: Path, **software: str) -> None:
    provenance = json.loads(file.read_text())["provenance"]
    edit(file, provenance={**provenance, "software": software})


def edit(file: Path, name: str | None = None, **changes: object) -> None:
    document = {**json.loads(file.read_text()), **changes}
    file.with_name(name or file.name).write_text(json.dumps(document))


def register(scale_op, *layers: PackagedRecords) -> None:
    for number, records in enumerate(layers):
        scale_op.registry.register(records, f"packaged{number}")


def test_a_packaged_record_is_used_and_named_as_the_origin(scale_op, packaged, folder):
    before = state(packaged)
    register(scale_op, PackagedRecords(packaged))
    assert scale_op.used_factor() == 7
    assert scale_op.origin() == f"packaged records ({packaged})"
    assert f"remembered as scale {scale_op.keys()[0].digest}, measured" in str(
        scale_op.registry.plan("scale", jnp.ones(5))
    )
    assert scale_op.used_factor(length=8) == 2
    assert state(packaged) == before
    assert not folder.exists()


def test_a_packaged_record_applies_with_other_versions(scale_op, packaged):
    set_software(file_in(packaged), jax="0.1")
    register(scale_op, PackagedRecords(packaged))
    assert scale_op.used_factor() == 7
    assert f"measured with other versions: jax was 0.1, is {jax.__version__}" in str(
        scale_op.registry.plan("scale", jnp.ones(5))
    )


def test_a_configuration_outside_of_the_space_applies_only_if_it_was_put_by_hand(scale_op, packaged):
    scale_op.use(scale_op.Config(), lambda inv: [scale_op.Config(), scale_op.Config(3)])
    register(scale_op, PackagedRecords(packaged))
    assert scale_op.reason("packaged0") == "two does not offer Config(factor=7) here"
    assert scale_op.used_factor() == 2
    edit(file_in(packaged), provenance=None)
    scale_op.reset()
    scale_op.use(scale_op.Config(), lambda inv: [scale_op.Config(), scale_op.Config(3)])
    register(scale_op, PackagedRecords(packaged))
    assert scale_op.used_factor() == 7


def test_a_kernel_whose_space_refuses_offers_nothing(scale_op, packaged):
    def config_space(inv):
        raise Unsupported("not here")

    scale_op.use(scale_op.Config(), config_space)
    register(scale_op, PackagedRecords(packaged))
    assert scale_op.reason("packaged0") == "two does not offer Config(factor=7) here"


def test_a_record_of_the_same_versions_comes_first_and_then_the_latest(scale_op, packaged):
    file = file_in(packaged)
    document = json.loads(file.read_text())

    def add_record(name, factor, software, **provenance):
        provenance = {**document["provenance"], "software": software, **provenance}
        edit(file, name, config={"factor": factor}, provenance=provenance)

    add_record("a.json", 3, {"jax": "0.1"}, when="2024-01-01T00:00:00+00:00")
    add_record("b.json", 4, {"jax": "0.2"}, when="2025-01-01T00:00:00+00:00")
    register(scale_op, PackagedRecords(packaged))
    assert scale_op.used_factor() == 7
    file.unlink()
    register(scale_op, PackagedRecords(packaged))
    assert scale_op.used_factor() == 4


def test_the_measurement_with_the_same_versions_comes_first(scale_op, packaged):
    """It comes first even if another measurement selected a faster kernel."""
    (document,) = (json.loads(file.read_text()) for file in packaged.rglob("*.json"))
    shutil.rmtree(packaged)

    def write_record(backend, factor, milliseconds, year, **software):
        changes_of_provenance = {
            "milliseconds": milliseconds,
            "when": f"{year}-01-01T00:00:00+00:00",
            "backends": ["one", "two"],
        }
        changes_of_provenance["software"] = {"jax": jax.__version__, **software}
        changes = {
            "kernel": f"scale.{backend}",
            "config": {"factor": factor},
            "provenance": {**document["provenance"], **changes_of_provenance},
        }
        file = packaged / component(scale_op.keys()[0].device) / "scale" / backend / "record.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**document, **changes}))

    def used_factor():
        scale_op.reset()
        scale_op.use(scale_op.Config(), backend="one")
        register(scale_op, PackagedRecords(packaged))
        return scale_op.used_factor()

    write_record("one", 3, 1.0, 2026, jax="0.1")
    assert used_factor() == 3
    write_record("two", 4, 2.0, 2025)
    assert used_factor() == 4
    write_record("two", 4, 2.0, 2025, jax="0.2")  # no record has these versions, so the latest applies
    assert used_factor() == 3
    write_record("two", 4, 2.0, 2027, jax="0.2")
    assert used_factor() == 4


def test_the_order_of_disk_and_packaged_records(scale_op, packaged, tmp_path):
    register(scale_op, PackagedRecords(packaged))
    cache = default_cache()
    cache.put(scale_op.keys()[0], scale_op.record(9))
    scale_op.reset()
    register(scale_op, PackagedRecords(packaged))
    assert (scale_op.used_factor(), scale_op.origin()) == (9, f"disk ({cache.path})")
    cache.clear()
    assert scale_op.origin() == f"packaged records ({packaged})"
    (tmp_path / "nothing").mkdir()
    scale_op.reset()
    register(scale_op, PackagedRecords(tmp_path / "nothing"), PackagedRecords(tmp_path / "missing"))
    assert (scale_op.used_factor(), scale_op.origin()) == (2, "heuristic")


def test_a_record_without_a_backend_and_one_for_the_bucket(scale_op, folder, tmp_path):
    cache = PersistentCache(tmp_path / "shipped")
    exact, bucket_key = scale_op.keys()
    cache.put(bucket_key, Record(scale_op.Config(8)))
    register(scale_op, PackagedRecords(tmp_path / "shipped"))
    assert (scale_op.used_factor(), scale_op.used_factor(length=6)) == (8, 8)
    cache.put(exact, Record(scale_op.Config(9)))
    register(scale_op, PackagedRecords(tmp_path / "shipped"))
    assert (scale_op.used_factor(), scale_op.used_factor(length=6)) == (9, 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no record: JSONDecodeError"),
        (b"[]", "no record: TypeError"),
        (b"\xff", "no UTF-8"),
        (b"[" * 100_000, "no record: RecursionError"),
        (b" " * 2_000_000, "larger than 1048576 bytes"),
        (None, "is not a regular file"),
    ],
    ids=["empty", "list", "no text", "deep", "huge", "fifo"],
)
def test_an_unreadable_file_is_reported_and_stays(scale_op, packaged, folder, content, message):
    file = file_in(packaged)
    file.unlink()
    os.mkfifo(file) if content is None else file.write_bytes(content)
    register(scale_op, PackagedRecords(packaged))
    assert scale_op.reason("packaged0").startswith(f"{file.relative_to(packaged)}: {message}")
    assert scale_op.used_factor() == 2
    assert os.path.lexists(file)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"schema": 9}, "$.schema is 9"), ({"config": {"other": 3}}, "extra fields found (other)")],
    ids=["schema", "fields"],
)
def test_a_record_that_does_not_apply_is_reported(scale_op, packaged, changes, message):
    file = file_in(packaged)
    edit(file, **changes)
    register(scale_op, PackagedRecords(packaged))
    assert scale_op.reason("packaged0").startswith(f"{file.relative_to(packaged)}: {message}")


def test_a_record_with_a_negative_time_is_reported(scale_op, packaged):
    file = file_in(packaged)
    edit(file, provenance=json.loads(file.read_text())["provenance"] | {"tried": [["two a", 1.0], ["two b", -5.0]]})
    register(scale_op, PackagedRecords(packaged))
    message = "tried[1]: takes a finite number of at least 0; got -5.0 @ $.provenance"
    assert scale_op.reason("packaged0") == f"{file.relative_to(packaged)}: {message}"


def test_a_package_is_read_at_the_first_call_even_in_a_zip(scale_op, packaged, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "site.zip", "w") as site:
        site.writestr("zipped_records/__init__.py", "")
        site.write(file_in(packaged), f"zipped_records/{file_in(packaged).relative_to(packaged)}")
    records = PackagedRecords("zipped_records")
    register(scale_op, records)
    assert "zipped_records" not in sys.modules
    monkeypatch.syspath_prepend(str(tmp_path / "site.zip"))
    assert scale_op.used_factor() == 7
    assert scale_op.origin() == "packaged records (zipped_records)"
    monkeypatch.delitem(sys.modules, "zipped_records")


def test_a_missing_package_breaks_no_call(scale_op):
    register(scale_op, PackagedRecords("no_such_package"))
    assert scale_op.used_factor() == 2
    (verdict,) = (v for v in scale_op.registry.plan("scale", jnp.ones(5)).verdicts if v.name == "packaged0")
    assert verdict.reason == "select_config raised ModuleNotFoundError: No module named 'no_such_package'"


@pytest.mark.parametrize("path", ["/some/folder", "records/h200", "", "a..b"])
def test_a_folder_has_to_be_a_path(path):
    with pytest.raises(ValueError, match="takes the name of a package, or a Path"):
        PackagedRecords(path)
