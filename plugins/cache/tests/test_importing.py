"""Importing the package reads and writes no file, and does not look up the cache folder."""

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


def test_importing_has_no_effects(run_python, tmp_path, folder):
    effects = json.loads(run_python(PROGRAM, HOME=str(tmp_path)))
    events = [
        event for event in effects["touched"] if "site-packages" not in event[1] and "ejkernel_cache" not in event[1]
    ]
    assert [event for event in events if event[0] in ("os.mkdir",) or str(tmp_path) in event[1]] == []
    assert effects["read"] == []
    for module in ("platformdirs", "cattrs"):
        assert module not in effects["modules"]
    assert not folder.exists()
    assert list(tmp_path.iterdir()) == []


def test_platformdirs_is_imported_only_for_the_users_folder(run_python, tmp_path):
    program = """
        import sys
        from ejkernel_cache import PersistentCache
        PersistentCache().path, PersistentCache("here").path
        first = "platformdirs" in sys.modules
        import os
        del os.environ["EJKERNEL_CACHE_DIR"]
        print(first, PersistentCache().path.name, "platformdirs" in sys.modules)
    """
    assert run_python(program, HOME=str(tmp_path)) == "False configs True"
    assert list(tmp_path.iterdir()) == []
