"""Records that come with a package: they answer for their problem whatever the software, and are never touched."""

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
def shipped(scale_op, folder, tmp_path) -> Path:
    """A folder copied from a cache that knows factor 7 for the call, and an empty cache."""
    scale_op.on_disk()
    shutil.move(folder, tmp_path / "shipped")
    shutil.rmtree(tmp_path / "shipped" / ".tmp")
    return tmp_path / "shipped"


def the_file(shipped: Path) -> Path:
    (file,) = shipped.rglob("*.json")
    return file


def with_software(file: Path, **software: str) -> None:
    provenance = json.loads(file.read_text())["provenance"]
    edited(file, provenance={**provenance, "software": software})


def edited(file: Path, name: str | None = None, **changes: object) -> None:
    document = {**json.loads(file.read_text()), **changes}
    file.with_name(name or file.name).write_text(json.dumps(document))


def use(scale_op, *layers: PackagedRecords) -> None:
    for number, layer in enumerate(layers):
        scale_op.registry.register(layer, f"packaged{number}")


def test_a_record_is_found_and_named(scale_op, shipped, folder):
    before = state(shipped)
    use(scale_op, PackagedRecords(shipped))
    assert scale_op.used() == 7
    assert scale_op.origin() == f"packaged records ({shipped})"
    assert f"remembered as scale {scale_op.keys()[0].digest}, measured" in str(
        scale_op.registry.plan("scale", jnp.ones(5))
    )
    assert scale_op.used(length=8) == 2
    assert state(shipped) == before
    assert not folder.exists()


def test_it_holds_for_any_software(scale_op, shipped):
    with_software(the_file(shipped), jax="0.1")
    use(scale_op, PackagedRecords(shipped))
    assert scale_op.used() == 7
    assert f"measured with other versions: jax was 0.1, is {jax.__version__}" in str(
        scale_op.registry.plan("scale", jnp.ones(5))
    )


def test_what_a_kernel_does_not_offer_here_is_passed_over_unless_it_was_put_there_by_hand(scale_op, shipped):
    scale_op.use(scale_op.Config(), lambda inv: [scale_op.Config(), scale_op.Config(3)])
    use(scale_op, PackagedRecords(shipped))
    assert scale_op.reason("packaged0") == "two does not offer Config(factor=7) here"
    assert scale_op.used() == 2
    edited(the_file(shipped), provenance=None)
    scale_op.fresh()
    scale_op.use(scale_op.Config(), lambda inv: [scale_op.Config(), scale_op.Config(3)])
    use(scale_op, PackagedRecords(shipped))
    assert scale_op.used() == 7


def test_a_kernel_that_refuses_to_say_what_it_offers_offers_nothing(scale_op, shipped):
    def refused(inv):
        raise Unsupported("not here")

    scale_op.use(scale_op.Config(), refused)
    use(scale_op, PackagedRecords(shipped))
    assert scale_op.reason("packaged0") == "two does not offer Config(factor=7) here"


def test_of_several_the_same_software_goes_first_and_then_the_latest(scale_op, shipped):
    file = the_file(shipped)
    document = json.loads(file.read_text())

    def also(name, factor, software, **provenance):
        provenance = {**document["provenance"], "software": software, **provenance}
        edited(file, name, config={"factor": factor}, provenance=provenance)

    also("a.json", 3, {"jax": "0.1"}, when="2024-01-01T00:00:00+00:00")
    also("b.json", 4, {"jax": "0.2"}, when="2025-01-01T00:00:00+00:00")
    use(scale_op, PackagedRecords(shipped))
    assert scale_op.used() == 7
    file.unlink()
    use(scale_op, PackagedRecords(shipped))
    assert scale_op.used() == 4


def test_of_several_contests_that_counts_which_was_held_with_versions_like_ours(scale_op, shipped):
    """Though another kernel won the other one, in less time."""
    (document,) = (json.loads(file.read_text()) for file in shipped.rglob("*.json"))
    shutil.rmtree(shipped)

    def held(backend, factor, milliseconds, year, **software):
        told = {"milliseconds": milliseconds, "when": f"{year}-01-01T00:00:00+00:00", "backends": ["one", "two"]}
        told["software"] = {"jax": jax.__version__, **software}
        changes = {
            "kernel": f"scale.{backend}",
            "config": {"factor": factor},
            "provenance": {**document["provenance"], **told},
        }
        file = shipped / component(scale_op.keys()[0].device) / "scale" / backend / "record.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**document, **changes}))

    def used():
        scale_op.fresh()
        scale_op.use(scale_op.Config(), backend="one")
        use(scale_op, PackagedRecords(shipped))
        return scale_op.used()

    held("one", 3, 1.0, 2026, jax="0.1")
    assert used() == 3
    held("two", 4, 2.0, 2025)
    assert used() == 4
    held("two", 4, 2.0, 2025, jax="0.2")  # neither's: the latest
    assert used() == 3
    held("two", 4, 2.0, 2027, jax="0.2")
    assert used() == 4


def test_the_layers_are_asked_in_order(scale_op, shipped, tmp_path):
    use(scale_op, PackagedRecords(shipped))
    cache = default_cache()
    cache.put(scale_op.keys()[0], scale_op.record(9))
    scale_op.fresh()
    use(scale_op, PackagedRecords(shipped))
    assert (scale_op.used(), scale_op.origin()) == (9, f"disk ({cache.path})")
    cache.clear()
    assert scale_op.origin() == f"packaged records ({shipped})"
    (tmp_path / "nothing").mkdir()
    scale_op.fresh()
    use(scale_op, PackagedRecords(tmp_path / "nothing"), PackagedRecords(tmp_path / "missing"))
    assert (scale_op.used(), scale_op.origin()) == (2, "heuristic")


def test_a_record_without_a_backend_and_one_for_the_bucket(scale_op, folder, tmp_path):
    cache = PersistentCache(tmp_path / "shipped")
    exact, alike = scale_op.keys()
    cache.put(alike, Record(scale_op.Config(8)))
    use(scale_op, PackagedRecords(tmp_path / "shipped"))
    assert (scale_op.used(), scale_op.used(length=6)) == (8, 8)
    cache.put(exact, Record(scale_op.Config(9)))
    use(scale_op, PackagedRecords(tmp_path / "shipped"))
    assert (scale_op.used(), scale_op.used(length=6)) == (9, 8)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no record: JSONDecodeError"),
        (b"[]", "no record: TypeError"),
        (b"\xff", "no UTF-8"),
        (b"[" * 100_000, "no record: RecursionError"),
        (b" " * 2_000_000, "larger than 1048576 bytes"),
        (None, "is no regular file"),
    ],
    ids=["empty", "list", "no text", "deep", "huge", "fifo"],
)
def test_what_cannot_be_read_is_told_and_left(scale_op, shipped, folder, content, why):
    file = the_file(shipped)
    file.unlink()
    os.mkfifo(file) if content is None else file.write_bytes(content)
    use(scale_op, PackagedRecords(shipped))
    assert scale_op.reason("packaged0").startswith(f"{file.relative_to(shipped)}: {why}")
    assert scale_op.used() == 2
    assert os.path.lexists(file)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"schema": 9}, "$.schema is 9"), ({"config": {"other": 3}}, "extra fields found (other)")],
    ids=["schema", "fields"],
)
def test_another_kind_of_record_is_told(scale_op, shipped, changes, why):
    file = the_file(shipped)
    edited(file, **changes)
    use(scale_op, PackagedRecords(shipped))
    assert scale_op.reason("packaged0").startswith(f"{file.relative_to(shipped)}: {why}")


def test_a_package_is_read_when_it_is_first_asked_in_a_zip_too(scale_op, shipped, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "site.zip", "w") as site:
        site.writestr("zipped_records/__init__.py", "")
        site.write(the_file(shipped), f"zipped_records/{the_file(shipped).relative_to(shipped)}")
    records = PackagedRecords("zipped_records")
    use(scale_op, records)
    assert "zipped_records" not in sys.modules
    monkeypatch.syspath_prepend(str(tmp_path / "site.zip"))
    assert scale_op.used() == 7
    assert scale_op.origin() == "packaged records (zipped_records)"
    monkeypatch.delitem(sys.modules, "zipped_records")


def test_a_package_that_is_not_there_breaks_no_call(scale_op):
    use(scale_op, PackagedRecords("no_such_package"))
    assert scale_op.used() == 2
    (told,) = (v for v in scale_op.registry.plan("scale", jnp.ones(5)).verdicts if v.name == "packaged0")
    assert told.reason == "select_config raised ModuleNotFoundError: No module named 'no_such_package'"


@pytest.mark.parametrize("where", ["/some/folder", "records/h200", "", "a..b"])
def test_a_folder_is_given_as_a_path(where):
    with pytest.raises(ValueError, match="takes the name of a package, or a Path"):
        PackagedRecords(where)
