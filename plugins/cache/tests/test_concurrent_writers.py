"""Many processes write one cache, some are killed during a write: no entry is lost, and none is damaged."""

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

PROGRAM = Path(__file__).with_name("concurrent_writers.py")


@pytest.fixture(scope="module")
def writers():
    spec = importlib.util.spec_from_file_location("concurrent_writers", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The name of the module in the processes that write.
    module.Config.__module__ = "__main__"
    return module


@pytest.mark.long
@pytest.mark.parametrize(
    ("processes", "threads", "entries"),
    [(8, 4, 400), pytest.param(16, 8, 2000, marks=pytest.mark.long)],
)
def test_no_entry_of_concurrent_writers_is_lost(writers, tmp_path, record_property, processes, threads, entries):
    folder = tmp_path / "cache"
    command = [sys.executable, str(PROGRAM), str(folder), *map(str, (processes, threads, entries))]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    counts = json.loads(process.stdout)
    assert counts["failed"] == 0, process.stderr
    assert process.stderr == ""
    assert counts["interrupted"] >= 3  # enough writers were killed during a write

    cache, committed = PersistentCache(folder), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for log in folder.with_suffix(".logs").iterdir():
            logged_entries = [int(line) for line in log.read_text().splitlines()]
            assert len(logged_entries) == entries or int(log.name) >= writers.VICTIMS
            committed += len(logged_entries)
            for entry in logged_entries:
                writers.check(cache, int(log.name), entry)
    assert committed >= processes * entries
    assert os.listdir(folder / ".tmp") == []
    assert not (folder / ".damaged").exists()
    record_property("figures", {**counts, "committed": committed})
    print(counts, committed)
