"""A file never chooses the class of a configuration: it causes no import, no call and no object of another class."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import types
from types import SimpleNamespace

import attrs
import jax.numpy as jnp
import pytest

from ejkernel_cache import CacheWarning, PackagedRecords, PersistentCache, _documents
from ejkernel_core import Key, Record, RecordError, hookimpl, record_to_json
from ejkernel_core.extend import config_types


@attrs.frozen
class Block:
    rows: int


def key() -> Key:
    return Key("scale", "cpu", "{}")


def test_a_type_is_never_imported(folder, tmp_path, monkeypatch):
    (tmp_path / "some_configs.py").write_text("import attrs\n\n@attrs.frozen\nclass C:\n    n: int\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import some_configs

    cache = PersistentCache(folder)
    cache.put(key(), some_configs.C(3))
    assert cache.get(key()) == some_configs.C(3)
    monkeypatch.delitem(sys.modules, "some_configs")
    with pytest.warns(
        CacheWarning,
        match=r"\$.type is some_configs.C, which is not the Config of a loaded kernel of scale; pass kind=",
    ):
        assert PersistentCache(folder).get(key(), "nothing") == "nothing"
    assert "some_configs" not in sys.modules
    assert PersistentCache(folder).get(key(), kind=some_configs.C) == some_configs.C(3)


def test_the_getattr_of_a_module_is_not_called(folder, monkeypatch):
    names = []
    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = names.append
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    cache = PersistentCache(folder)
    cache.put(key(), Block(1))
    file = cache.file(key())
    file.write_text(file.read_text().replace(f"{__name__}.Block", "lazy.Block"))
    with pytest.warns(CacheWarning, match="is not the Config of a loaded kernel of scale"):
        assert cache.get(key()) is None
    assert names == []


@pytest.mark.parametrize("name", ["subprocess.Popen", "json", "builtins.int", "os.path.join", "a", ".", ""])
def test_only_the_type_of_a_configuration_is_instantiated(folder, name, monkeypatch):
    monkeypatch.setattr(_documents, "config_types", {})  # other tests may have loaded a kernel whose Config is int
    cache = PersistentCache(folder)
    cache.put(key(), Block(1))
    file = cache.file(key())
    file.write_text(file.read_text().replace(f"{__name__}.Block", name))
    with pytest.warns(CacheWarning, match="is not the Config of a loaded kernel of scale"):
        assert cache.get(key()) is None


def test_a_local_type_is_found_only_by_the_cache_that_wrote_it(folder):
    @attrs.frozen
    class Local:
        n: int

    cache = PersistentCache(folder)
    cache.put(key(), Local(3))
    assert cache.get(key()) == Local(3)
    with pytest.warns(CacheWarning, match="is not the Config of a loaded kernel of scale"):
        assert PersistentCache(folder).get(key()) is None


# -- what constructs something ---------------------------------------------------------------------------------------

constructed: list[str] = []


@attrs.frozen
class AttrsTrap:
    """A class of the process that a file may name. Its objects would be noticed."""

    factor: int = 0

    def __attrs_post_init__(self) -> None:
        constructed.append(type(self).__name__)


@dataclasses.dataclass(frozen=True)
class DataclassTrap:
    factor: int = 0

    def __post_init__(self) -> None:
        constructed.append(type(self).__name__)


@hookimpl
def run_without_config(inv, cfg):
    return inv["x"] * 2


def trap_record(key: Key, kernel: str | None, trap: type) -> str:
    """A record with a configuration of a class that the file names."""
    document = json.loads(record_to_json(key, Record(None, "two")))
    document |= {"kernel": kernel, "config": {"factor": 7}, "type": f"{trap.__module__}.{trap.__qualname__}"}
    return json.dumps(document)


@pytest.mark.parametrize("trap", [AttrsTrap, DataclassTrap])
@pytest.mark.parametrize("kernel", ["scale.two", None])
@pytest.mark.parametrize("has_config", [True, False])
def test_a_record_constructs_nothing_but_the_config_of_its_kernel(scale_op, folder, tmp_path, trap, kernel, has_config):
    if not has_config:
        scale_op.registry.register(SimpleNamespace(run_backend=run_without_config), "scale.two")
    call_key = scale_op.keys()[0]
    cache = PersistentCache()
    file = cache.file(call_key, kernel and "two")
    file.parent.mkdir(parents=True)
    file.write_text(trap_record(call_key, kernel, trap))
    shutil.copytree(folder, tmp_path / "package")
    scale_op.registry.register(PackagedRecords(tmp_path / "package"), "packaged")
    constructed.clear()
    plan = scale_op.registry.explain("scale", jnp.ones(5)).plan
    reasons = {v.name: v.reason for v in plan.verdicts if v.name in ("cache", "packaged")}
    expected = "$.type is '" if has_config else '$.config is {"factor": 7}, and nothing is wanted'
    assert (len(reasons), all(expected in reason for reason in reasons.values())) == (2, True)
    assert scale_op.used_factor() == 2
    with pytest.warns(CacheWarning):
        assert (cache.get(call_key), cache.items(), cache.records(call_key)) == (None, [], ())
    assert constructed == []


def test_the_config_of_another_operation_is_not_constructed(scale_op, monkeypatch):
    """Neither where the file names its kernel, nor where a backend with a dot makes it the kernel of another one."""
    monkeypatch.setitem(config_types, "scale.more.two", AttrsTrap)
    monkeypatch.setitem(config_types, "other.two", AttrsTrap)
    call_key, cache = scale_op.keys()[0], PersistentCache()
    for kernel, backend in (("other.two", "two"), ("scale.more.two", "more.two")):
        file = cache.file(call_key, backend)
        file.parent.mkdir(parents=True)
        file.write_text(trap_record(call_key, kernel, AttrsTrap))
        constructed.clear()
        with pytest.warns(CacheWarning, match="not a kernel of scale|which is not known here"):
            assert (cache.get(call_key), cache.items()) == (None, [])
        with pytest.raises(RecordError):
            cache.read(call_key, backend)
        assert constructed == []
        cache.clear()


def test_a_record_without_a_backend_is_read_as_the_config_of_a_loaded_kernel(scale_op):
    PersistentCache().put(scale_op.keys()[0], scale_op.Config(3))
    assert PersistentCache().get(scale_op.keys()[0]) == scale_op.Config(3)
    assert [records[0].cfg for _, records in PersistentCache().items()] == [scale_op.Config(3)]
