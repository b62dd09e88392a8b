"""Importing does nothing: no file, no folder, no lookup of where they would be."""

from __future__ import annotations

import json

PROGRAM = """
    import json, os, sys
    import ejkernel_core
    before = set(sys.modules)
    events = []
    sys.addaudithook(lambda name, args: events.append([name, str(args[0])]) if name in ("open", "os.mkdir", "os.listdir", "os.scandir") else None)
    read, environ = [], type(os.environ).__getitem__
    type(os.environ).__getitem__ = lambda self, name: read.append(name) or environ(self, name)

    import ejkernel_cache
    import ejkernel_cache.policy
    cache = ejkernel_cache.PersistentCache()
    ejkernel_cache.default_cache()
    ejkernel_cache.PackagedRecords("no_such_package")

    touched = [event for event in events if not event[1].endswith((".py", ".pyc")) and "importlib" not in event[0]]
    loaded = sorted(set(sys.modules) - before)
    print(json.dumps({"touched": touched, "read": read, "modules": sorted(sys.modules), "loaded": loaded}))
"""


def test_importing_does_nothing(python, tmp_path, folder):
    found = json.loads(python(PROGRAM, HOME=str(tmp_path)))
    ours = [event for event in found["touched"] if "site-packages" not in event[1] and "ejkernel_cache" not in event[1]]
    assert [event for event in ours if event[0] in ("os.mkdir",) or str(tmp_path) in event[1]] == []
    assert found["read"] == []
    for late in ("platformdirs", "cattrs"):
        assert late not in found["modules"]
    assert not folder.exists()
    assert list(tmp_path.iterdir()) == []


def test_platformdirs_is_imported_only_for_the_users_folder(python, tmp_path):
    program = """
        import sys
        from ejkernel_cache import PersistentCache
        PersistentCache().path, PersistentCache("here").path
        first = "platformdirs" in sys.modules
        import os
        del os.environ["EJKERNEL_CACHE_DIR"]
        print(first, PersistentCache().path.name, "platformdirs" in sys.modules)
    """
    assert python(program, HOME=str(tmp_path)) == "False configs True"
    assert list(tmp_path.iterdir()) == []
