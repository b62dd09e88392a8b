"""Many processes in one cache, some killed in the middle of writing: nothing is lost, nothing is broken."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from ejkernel_cache import PersistentCache

CROWD = Path(__file__).with_name("crowd.py")


@pytest.fixture(scope="module")
def crowd():
    spec = importlib.util.spec_from_file_location("crowd", CROWD)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Under the name that it has where it writes.
    module.Config.__module__ = "__main__"
    return module


@pytest.mark.parametrize(
    ("processes", "threads", "entries"),
    [(8, 4, 400), pytest.param(16, 8, 2000, marks=pytest.mark.long)],
)
def test_a_crowd(crowd, tmp_path, record_property, processes, threads, entries):
    folder = tmp_path / "crowded"
    command = [sys.executable, str(CROWD), str(folder), *map(str, (processes, threads, entries))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["failed"] == 0, done.stderr
    assert done.stderr == ""
    assert told["interrupted"] >= 3  # or nobody was killed in the middle of anything

    cache, committed = PersistentCache(folder), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for log in folder.with_suffix(".logs").iterdir():
            entries_of_it = [int(line) for line in log.read_text().splitlines()]
            assert len(entries_of_it) == entries or int(log.name) >= crowd.VICTIMS
            committed += len(entries_of_it)
            for entry in entries_of_it:
                crowd.check(cache, int(log.name), entry)
    assert committed >= processes * entries
    assert os.listdir(folder / ".tmp") == []
    assert not (folder / ".damaged").exists()
    record_property("figures", {**told, "committed": committed})
    print(told, committed)
