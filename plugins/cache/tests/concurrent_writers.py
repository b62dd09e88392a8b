"""Processes that write and read one cache at the same time, while some of them are killed.

``python concurrent_writers.py FOLDER PROCESSES THREADS ENTRIES`` prints the counts as JSON. Each writer logs in its own
file, FOLDER.logs/<number>, every entry for which ``put`` has returned. ``test_concurrent_writers`` checks the cache.
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

#: One of SHARED_EVERY entries has one of the SHARED keys that all writers write.
SHARED_EVERY, SHARED = 4, 50
#: The numbers of the writers that are killed start here.
VICTIMS = 1000


@attrs.frozen
class Config:
    writer: int
    entry: int
    #: Follows from the other two fields, so that a mixture of two writes is found.
    text: str


def config(writer: int, entry: int) -> Config:
    return Config(writer, entry, f"{writer}:{entry};" * (entry % 500))


def key_of(writer: int, entry: int) -> Key:
    """A key of this writer alone, or one that all writers share."""
    number = f'["all",{entry % SHARED}]' if entry % SHARED_EVERY == 0 else f"[{writer},{entry}]"
    return Key("scale", "cpu", f'{{"n":{number}}}')


def check(cache: PersistentCache, writer: int, entry: int) -> None:
    """Check that an entry can be read and is consistent. At a shared key it may be of any writer."""
    record = cache.read(key_of(writer, entry), "two", Config)
    assert record is not None, f"entry {entry} of writer {writer} is lost"
    cfg = record.cfg
    assert cfg == config(cfg.writer, cfg.entry), f"a mixture: {cfg}"
    assert key_of(cfg.writer, cfg.entry) == key_of(writer, entry), f"of another key: {cfg}"


def work(cache: PersistentCache, writer: int, entries: range, log: int) -> None:
    generator = random.Random(f"{writer} {entries}")
    for entry in entries:
        cache.put(key_of(writer, entry), Record(config(writer, entry), "two"))
        os.write(log, f"{entry}\n".encode())
        check(cache, writer, entry)
        check(cache, writer, generator.randrange(entries.start, entry + 1, entries.step))


def write(folder: Path, writer: int, threads: int, entries: int) -> None:
    """The work of one process. It exits with 1 at the first fault."""
    warnings.simplefilter("error", CacheWarning)
    log = os.open(folder.with_suffix(".logs") / str(writer), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    cache = PersistentCache(folder)

    def work_of_thread(thread: int) -> None:
        try:
            work(cache, writer, range(thread, entries, threads), log)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    workers = [threading.Thread(target=work_of_thread, args=(thread,)) for thread in range(threads)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()


def fork_writer(*arguments: object) -> int:
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
    # JAX warns of forking, but it has started no thread here.
    warnings.simplefilter("ignore", RuntimeWarning)
    folder.with_suffix(".logs").mkdir()
    start, generator = time.monotonic(), random.Random(0)
    pids = {fork_writer(folder, writer, threads, entries) for writer in range(processes)}
    failed = kills = interrupted = 0
    # Start more victims until three have been killed during a write.
    while pids or (interrupted < 3 and kills < 200):
        victim = fork_writer(folder, VICTIMS + kills, threads, 10**9)
        time.sleep(generator.uniform(0.05, 0.3))
        os.kill(victim, signal.SIGKILL)
        failed += os.waitpid(victim, 0)[1] != signal.SIGKILL
        kills += 1
        # The victim may have been killed before the folder was made.
        unfinished = os.listdir(folder / ".tmp") if (folder / ".tmp").exists() else []
        interrupted += any(f"-{victim}-" in name for name in unfinished)
        for pid in list(pids):
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid:
                pids.remove(pid)
                failed += status != 0
    print(
        json.dumps({"seconds": time.monotonic() - start, "failed": failed, "kills": kills, "interrupted": interrupted})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
