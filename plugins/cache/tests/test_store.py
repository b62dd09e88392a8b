"""The interface of the caches: records that are put can be read by key, also by the next instance."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

import attrs
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_cache import PersistentCache, default_cache
from ejkernel_core import ConfigCache, Key, Record, RecordError, overlay_cache, stable_json

FLOAT32 = np.dtype("float32")


@attrs.frozen
class Block:
    rows: int
    dtype: np.dtype = FLOAT32


@dataclasses.dataclass(frozen=True)
class Tile:
    shape: tuple[int, ...]


def key(op: str = "scale", device: str = "NVIDIA H200", number: int = 0) -> Key:
    problem = {"operation": [op, 1], "arguments": {"x": (number, 2.5)}, "device": ["gpu", device, (9, 0)]}
    return Key(op, device, stable_json(problem))


@pytest.fixture(params=["disk", "memory"])
def cache(request, folder):
    """A cache on disk or in memory, which have the same interface."""
    return PersistentCache(folder) if request.param == "disk" else ConfigCache()


def test_records_that_are_put_can_be_read(cache):
    assert cache.get(key()) is None
    assert cache.get(key(), "nothing") == "nothing"
    assert key() not in cache
    assert cache.put(key(), Block(16)) is None
    assert cache.get(key()) == Block(16)
    assert cache.records(key()) == (Record(Block(16)),)
    assert key() in cache
    assert key(number=1) not in cache
    assert len(cache) == 1


def test_one_record_per_backend_with_the_last_one_first(cache):
    for record in (Record(Block(1), "one"), Record(Block(2), "two"), Record(Tile((3, 4))), Record(Block(5), "one")):
        cache.put(key(), record)
    assert cache.records(key()) == (Record(Block(5), "one"), Record(Tile((3, 4))), Record(Block(2), "two"))
    assert cache.get(key()) == Block(5)
    assert len(cache) == 1


def test_keys_items_and_clear(cache):
    keys = [key(number=n) for n in range(3)] + [key("other"), key(device="cpu")]
    for n, k in enumerate(keys):
        cache.put(k, Block(n))
    assert set(cache) == set(keys)
    assert len(list(cache)) == len(cache) == 5
    assert sorted(cache.items(), key=str) == sorted(((k, (Record(Block(n)),)) for n, k in enumerate(keys)), key=str)
    cache.clear()
    assert (list(cache), len(cache), cache.get(key())) == ([], 0, None)
    cache.put(key(), Block(9))
    assert cache.get(key()) == Block(9)


def test_the_next_instance_reads_the_record(folder):
    PersistentCache(folder).put(key(), Block(16, np.dtype("bfloat16")))
    other_cache = PersistentCache(folder)
    assert other_cache.get(key(), kind=Block) == Block(16, np.dtype("bfloat16"))
    assert list(other_cache) == [key()]
    assert stable_json(next(iter(other_cache))) == stable_json(key())


def test_the_keys_of_calls_are_read_back(folder, scale_op):
    cache = PersistentCache(folder)
    for k in (keys := [*scale_op.keys(5), *scale_op.keys(8)]):
        cache.put(k, scale_op.Config(3))
    assert set(PersistentCache(folder)) == set(keys)


@pytest.mark.parametrize("name", ["..", "a/b", "", "x" * 500, "é\0"])
def test_a_key_with_any_name_is_read_back_and_stays_inside_the_cache(tmp_path, folder, name):
    cache = PersistentCache(folder)
    cache.put(key(op=name, device=name), Record(Block(1), name))
    assert list(PersistentCache(folder)) == [key(op=name, device=name)]
    assert cache.records(key(op=name, device=name)) == (Record(Block(1), name),)
    assert os.listdir(tmp_path) == ["cache"]


def test_a_key_without_names_in_its_problem_is_read_back_from_the_folders(folder):
    key_of_text = Key("an op", "a device", '{"n":{"!tuple":[1]}}')
    PersistentCache(folder).put(key_of_text, Block(1))
    assert list(PersistentCache(folder)) == [key_of_text]


def test_the_layout_on_disk(folder):
    cache = PersistentCache(folder)
    cache.put(key(), Record(Block(16), "triton"))
    cache.put(key(), Block(8))
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.json"))
    name = f"{key().kind}-{key().digest}.json"
    assert files == [f"NVIDIA%20H200/scale/{backend}/{name}" for backend in ("%any", "triton")]
    assert cache.file(key(), "triton") == folder / "NVIDIA%20H200" / "scale" / "triton" / name
    document = json.loads(cache.file(key(), "triton").read_text())
    assert document["problem"] == json.loads(key().problem)
    assert document["kernel"] == "scale.triton"
    assert document["config"] == {"rows": 16, "dtype": {"!dtype": "float32"}}
    assert list((folder / ".tmp").iterdir()) == []


def test_a_given_config_type_is_used_to_read(folder):
    PersistentCache(folder).put(key(), Record(Block(16), "one"))
    PersistentCache(folder).put(key(), Record(Tile((1,)), "two"))
    assert PersistentCache(folder).get(key(), kind=Block) == Block(16)
    assert PersistentCache(folder).records(key(), kind=Tile) == (Record(Tile((1,)), "two"),)


def test_overlay_cache_takes_a_persistent_cache(folder, scale_op):
    cache = PersistentCache(folder / "elsewhere")
    cache.put(scale_op.keys()[0], scale_op.Config(6))
    assert scale_op.used_factor() == 2
    with overlay_cache(cache):
        assert (scale_op.used_factor(), scale_op.origin()) == (6, "overlay")


def test_find_returns_the_last_record_for_the_kernel_or_for_any(folder, scale_op):
    cache, candidate, (exact, _) = PersistentCache(folder), scale_op.candidate(), scale_op.keys()
    assert cache.find(exact, candidate) is None
    for factor, backend in ((3, "two"), (4, None), (5, "two")):
        record = Record(scale_op.Config(factor), backend)
        cache.put(exact, record)
        assert PersistentCache(folder).find(exact, candidate) == record
    cache.put(exact, Record(Block(1)))
    assert cache.find(exact, candidate) == Record(scale_op.Config(5), "two")
    cache.put(exact, Record(scale_op.Config(6), "three"))
    assert cache.find(exact, candidate) == Record(scale_op.Config(5), "two")


@pytest.mark.parametrize("other", ["scale", 5, None, ("scale", "cpu")])
def test_a_key_of_another_type_is_refused(folder, other):
    cache = PersistentCache(folder)
    for use in (cache.get, cache.records, cache.__contains__, cache.file, lambda k: cache.put(k, Block(1))):
        with pytest.raises(TypeError, match=r"a key is an ejkernel_core\.Key"):
            use(other)
    assert not folder.exists()


# -- folders ---------------------------------------------------------------------------------------------------------


def test_the_folder_is_determined_at_the_first_use(tmp_path, monkeypatch):
    cache = PersistentCache()
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "later"))
    cache.put(key(), Block(1))
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "too late"))
    assert cache.get(key()) == Block(1)
    assert os.listdir(tmp_path) == ["later"]
    assert default_cache() is default_cache()
    assert default_cache().path == tmp_path / "too late"


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_the_folder_is_in_the_users_cache(tmp_path, monkeypatch, value):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", value) if value is not None else monkeypatch.delenv("EJKERNEL_CACHE_DIR")
    assert PersistentCache().path == tmp_path / "xdg" / "ejkernel" / "configs"


def test_a_tilde_is_expanded_and_a_relative_folder_stays_fixed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PersistentCache("~/x").path == tmp_path / "x"
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "~/y")
    assert PersistentCache().path == tmp_path / "y"
    monkeypatch.chdir(tmp_path)
    cache = PersistentCache("here")
    cache.put(key(), Block(1))
    monkeypatch.chdir("/")
    assert cache.get(key()) == Block(1)


# -- values that are refused-----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "attrs class or a dataclass"),
        (Block("x" * 2_000_000), "would be read back|too large|rows"),
        (Tile(("x" * 1_100_000,)), "rows|too large|shape"),
        (Block(object()), "cannot be written down|rows"),
    ],
)
def test_an_unwritable_configuration_is_refused_and_harms_no_other(folder, value, message):
    cache = PersistentCache(folder)
    with pytest.raises(RecordError, match=message):
        cache.put(key(), value)
    assert not folder.exists()
    cache.put(key(), Block(3))
    assert cache.get(key()) == Block(3)


def test_a_record_that_is_too_large_is_refused(folder):
    @attrs.frozen
    class Text:
        text: str

    cache = PersistentCache(folder)
    with pytest.raises(RecordError, match="too large to be kept; 1048576 is the most"):
        cache.put(key(), Text("x" * (1 << 20)))
    cache.put(key(), Text("x" * ((1 << 20) - 2000)))
    assert len(cache.get(key()).text) == (1 << 20) - 2000


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("step", ["mkdir", "open", "fsync", "replace", "lstat", "fstat", "scandir"])
def test_the_folder_may_be_deleted_at_any_time(folder, monkeypatch, step):
    cache, original, pending_deletions = PersistentCache(folder), getattr(os, step), []

    def delete_before(*args, **kwargs):
        if pending_deletions:
            pending_deletions.pop()
            shutil.rmtree(folder, ignore_errors=True)
        return original(*args, **kwargs)

    monkeypatch.setattr(os, step, delete_before)
    for times in (1, 2, 5):
        pending_deletions += [step] * times
        cache.put(key(), Block(1))
        pending_deletions += [step] * times
        assert cache.get(key()) in (None, Block(1))
        pending_deletions += [step] * times
        assert (len(cache), list(cache)) in ((0, []), (1, [key()]), (1, []), (0, [key()]))
        pending_deletions.clear()
        cache.put(key(), Block(2))
        assert cache.items() == [(key(), (Record(Block(2)),))]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", ["mkdir", "open", "fsync", "replace"])
def test_another_process_may_write_at_any_time(folder, monkeypatch, step, moment):
    cache, other, original, moments = PersistentCache(folder), PersistentCache(folder), getattr(os, step), []

    def step_of_writer(*args, **kwargs):
        if len(moments) % 2:  # of the other writer
            return original(*args, **kwargs)
        write_meanwhile("before")
        result = original(*args, **kwargs)
        write_meanwhile("after")
        return result

    def write_meanwhile(now):
        if now == moment:
            moments.append("begin")
            assert other.read(key(), "one", Block) in (None, Record(Block(1), "one"), Record(Block(2), "one"))
            for backend, number in (("two", 0), ("one", 1), ("one", 0)):
                other.put(key(number=number), Record(Block(2), backend))
            moments.append("end")

    monkeypatch.setattr(os, step, step_of_writer)
    cache.put(key(), Record(Block(1), "one"))
    monkeypatch.undo()
    assert moments
    third = PersistentCache(folder)
    # Of two records in one place, either stays.
    assert third.read(key(), "one", Block).cfg in (Block(1), Block(2))
    assert third.read(key(), "two", Block).cfg == Block(2)
    assert third.read(key(number=1), "one", Block).cfg == Block(2)
    assert os.listdir(folder / ".tmp") == []


def test_a_jax_array_is_refused(folder):
    with pytest.raises(RecordError):
        PersistentCache(folder).put(key(), Block(jnp.ones(3)))


def test_records_of_other_versions_stay_on_disk(folder, scale_op):
    cache, key = PersistentCache(folder), scale_op.keys()[0]

    def record_of(factor: int, jax_version: str) -> Record:
        record = scale_op.record(factor)
        return attrs.evolve(record, provenance=attrs.evolve(record.provenance, software={"jax": jax_version}))

    def record_for(jax_version: str) -> Record | None:
        return PersistentCache(folder).find(key, attrs.evolve(scale_op.candidate(), software={"jax": jax_version}))

    for factor, jax_version in [(3, "1"), (4, "2"), (5, "1"), (6, "3")]:
        cache.put(key, record_of(factor, jax_version))
    assert [record_for(version) for version in "123"] == [record_of(5, "1"), record_of(4, "2"), record_of(6, "3")]
    assert record_for("4") == record_of(6, "3")  # no record has this version, so the last one is returned
    assert cache.records(key) == (record_of(6, "3"),)
    assert cache.predecessor(key, record_of(7, "1")) == record_of(5, "1")
    assert list(cache) == [key]
    cache.put(key, Record(scale_op.Config(8), "two"))
    assert {record_for(version) for version in "123"} == {Record(scale_op.Config(8), "two")}
    cache.clear()
    assert [record_for(version) for version in "123"] == [None] * 3
