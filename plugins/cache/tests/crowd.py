"""Processes that write and read one cache at once, some of them killed in the middle of it.

``python crowd.py FOLDER PROCESSES THREADS ENTRIES`` prints what came of it as JSON. Each writer notes in a file of its
own, FOLDER.logs/<number>, every entry for which ``put`` has returned. ``test_crowd`` looks at what is there afterwards.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import attrs

from ejkernel_cache import CacheWarning, PersistentCache
from ejkernel_core import Key, Record

#: Of so many entries, one goes to a key that everybody writes.
SHARED_EVERY, SHARED = 4, 50
#: The numbers of the writers that are killed start here.
VICTIMS = 1000


@attrs.frozen
class Config:
    writer: int
    entry: int
    #: Follows from the other two: a mixture of two writes shows.
    text: str


def config(writer: int, entry: int) -> Config:
    return Config(writer, entry, f"{writer}:{entry};" * (entry % 500))


def key_of(writer: int, entry: int) -> Key:
    """One of its own, or one that all writers share."""
    number = f'["all",{entry % SHARED}]' if entry % SHARED_EVERY == 0 else f"[{writer},{entry}]"
    return Key("scale", "cpu", f'{{"n":{number}}}')


def check(cache: PersistentCache, writer: int, entry: int) -> None:
    """What was put can be read, and is whole. At a shared key, it is somebody's."""
    record = cache.read(key_of(writer, entry), "two", Config)
    assert record is not None, f"entry {entry} of writer {writer} is lost"
    found = record.cfg
    assert found == config(found.writer, found.entry), f"a mixture: {found}"
    assert key_of(found.writer, found.entry) == key_of(writer, entry), f"of another key: {found}"


def work(cache: PersistentCache, writer: int, entries: range, log: int) -> None:
    chance = random.Random(f"{writer} {entries}")
    for entry in entries:
        cache.put(key_of(writer, entry), Record(config(writer, entry), "two"))
        os.write(log, f"{entry}\n".encode())
        check(cache, writer, entry)
        check(cache, writer, chance.randrange(entries.start, entry + 1, entries.step))


def write(folder: Path, writer: int, threads: int, entries: int) -> None:
    """All that one process does. It ends with 1 as soon as anything is wrong."""
    warnings.simplefilter("error", CacheWarning)
    log = os.open(folder.with_suffix(".logs") / str(writer), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    cache = PersistentCache(folder)

    def one(thread: int) -> None:
        try:
            work(cache, writer, range(thread, entries, threads), log)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    crew = [threading.Thread(target=one, args=(thread,)) for thread in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()


def forked(*arguments: object) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        write(*arguments)  # type: ignore[arg-type]
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(folder: Path, processes: int, threads: int, entries: int) -> None:
    # JAX warns of forking; it has started no thread here.
    warnings.simplefilter("ignore", RuntimeWarning)
    folder.with_suffix(".logs").mkdir()
    start, chance = time.monotonic(), random.Random(0)
    running = {forked(folder, writer, threads, entries) for writer in range(processes)}
    failed = kills = interrupted = 0
    # A few more, where the others were done before three had been met in the middle.
    while running or (interrupted < 3 and kills < 200):
        victim = forked(folder, VICTIMS + kills, threads, 10**9)
        time.sleep(chance.uniform(0.05, 0.3))
        os.kill(victim, signal.SIGKILL)
        failed += os.waitpid(victim, 0)[1] != signal.SIGKILL
        kills += 1
        # Who was killed may have been the first to come, and not have made it yet.
        unfinished = os.listdir(folder / ".tmp") if (folder / ".tmp").exists() else []
        interrupted += any(f"-{victim}-" in name for name in unfinished)
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.remove(pid)
                failed += status != 0
    print(
        json.dumps({"seconds": time.monotonic() - start, "failed": failed, "kills": kills, "interrupted": interrupted})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
