"""A type of configuration is found by name in imported modules. Files cause no import and no call."""

from __future__ import annotations

import sys
import types

import attrs
import pytest

from ejkernel_cache import CacheWarning, PersistentCache
from ejkernel_core import Key


@attrs.frozen
class Block:
    rows: int


def key() -> Key:
    return Key("scale", "cpu", "{}")


def test_a_type_is_never_imported(folder, tmp_path, monkeypatch):
    (tmp_path / "some_configs.py").write_text("import attrs\n\n@attrs.frozen\nclass C:\n    n: int\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import some_configs

    PersistentCache(folder).put(key(), some_configs.C(3))
    assert PersistentCache(folder).get(key()) == some_configs.C(3)
    monkeypatch.delitem(sys.modules, "some_configs")
    with pytest.warns(CacheWarning, match=r"\$.type is some_configs.C, which nothing has imported; pass kind="):
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
    with pytest.warns(CacheWarning, match="nothing has imported"):
        assert cache.get(key()) is None
    assert names == []


@pytest.mark.parametrize("name", ["subprocess.Popen", "json", "builtins.int", "os.path.join", "a", ".", ""])
def test_only_the_type_of_a_configuration_is_instantiated(folder, name):
    cache = PersistentCache(folder)
    cache.put(key(), Block(1))
    file = cache.file(key())
    file.write_text(file.read_text().replace(f"{__name__}.Block", name))
    with pytest.warns(CacheWarning, match="nothing has imported"):
        assert cache.get(key()) is None


def test_a_local_type_is_found_only_by_the_cache_that_wrote_it(folder):
    @attrs.frozen
    class Local:
        n: int

    cache = PersistentCache(folder)
    cache.put(key(), Local(3))
    assert cache.get(key()) == Local(3)
    with pytest.warns(CacheWarning, match="nothing has imported"):
        assert PersistentCache(folder).get(key()) is None
