"""Configurations in memory: a mapping from keys to records, bounded if asked, and shared by threads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from ejkernel_core import ConfigCache, Provenance, Record


@attrs.frozen
class Config:
    block: int = 64


@attrs.frozen
class Other:
    block: int = 64


def provenance(milliseconds: float = 1.0) -> Provenance:
    return Provenance(when="2026-11-20T12:00:00+00:00", device="cpu", milliseconds=milliseconds, backends=("a", "b"))


def candidate(backend: str, kind: type | None = Config) -> Any:
    return SimpleNamespace(backend=backend, config_type=kind, software={})


def test_what_was_put_is_there_and_nothing_else() -> None:
    cache = ConfigCache()
    assert (len(cache), list(cache), cache.items(), "k" in cache) == (0, [], [], False)
    cache.put("k", Config(1))
    cache.put("l", Config(2))
    assert (cache.get("k"), cache.get("l"), cache.get("m")) == (Config(1), Config(2), None)
    assert cache.get("m", Config(9)) == Config(9)
    assert ("k" in cache, "m" in cache, len(cache), list(cache)) == (True, False, 2, ["k", "l"])
    assert cache.items() == [("k", (Record(Config(1)),)), ("l", (Record(Config(2)),))]


def test_the_last_one_put_is_the_one_got() -> None:
    cache = ConfigCache()
    for block in (1, 2, 3):
        cache.put("k", Config(block))
    assert cache.get("k") == Config(3)
    assert cache.records("k") == (Record(Config(3)),)
    assert len(cache) == 1


def test_no_configuration_is_a_configuration() -> None:
    """Of a kernel that has none, it is remembered that it is the best."""
    cache = ConfigCache()
    cache.put("k", None)
    assert "k" in cache
    assert cache.get("k", "default") is None
    assert cache.records("k") == (Record(None),)


def test_every_backend_has_its_record() -> None:
    cache = ConfigCache()
    first, second = Record(Config(1), "a", provenance(1.0)), Record(Other(2), "b", provenance(2.0))
    cache.put("k", first)
    cache.put("k", second)
    assert cache.records("k") == (second, first)
    assert cache.get("k") == Other(2)
    assert cache.find("k", candidate("a")) == first
    assert cache.find("k", candidate("b", Other)) == second
    assert cache.find("k", candidate("b", Config)) is None
    assert cache.find("k", candidate("c")) is None
    better = Record(Config(3), "a", provenance(0.5))
    cache.put("k", better)
    assert cache.records("k") == (better, second)
    assert len(cache) == 1


def test_what_was_put_by_hand_is_for_every_kernel_that_takes_its_type() -> None:
    cache = ConfigCache()
    cache.put("k", Config(1))
    for backend in ("a", "b"):
        assert cache.find("k", candidate(backend)) == Record(Config(1))
        assert cache.find("k", candidate(backend, None)) is None  # a kernel without configurations
        assert cache.find("k", candidate(backend, Other)) is None


def test_what_was_not_asked_for_the_longest_goes_first() -> None:
    cache = ConfigCache(maxsize=3)
    for name in "abc":
        cache.put(name, Config())
    cache.get("a")
    cache.find("b", candidate("x"))
    assert "c" in cache  # to look whether it is there is no use of it
    cache.put("d", Config())
    assert list(cache) == ["a", "b", "d"]
    cache.put("a", Config(2))
    cache.put("e", Config())
    assert list(cache) == ["d", "a", "e"]


@pytest.mark.parametrize("size", [0, -1])
def test_a_bound_is_at_least_one(size: int) -> None:
    with pytest.raises(ValueError, match="maxsize: takes at least 1, or None for no bound"):
        ConfigCache(maxsize=size)


def test_clear_forgets_everything() -> None:
    cache = ConfigCache(maxsize=2)
    cache.put("k", Config())
    cache.clear()
    assert (len(cache), "k" in cache, cache.get("k"), cache.records("k")) == (0, False, None, ())
    cache.put("k", Config(2))
    assert cache.get("k") == Config(2)


def test_every_change_is_a_new_generation_and_no_question_is() -> None:
    cache = ConfigCache()
    seen = [cache.generation]
    for change in (lambda: cache.put("k", Config()), lambda: cache.put("k", Config()), cache.clear):
        change()
        seen.append(cache.generation)
    assert seen == sorted(set(seen))
    cache.get("k"), cache.items(), list(cache), len(cache), "k" in cache, cache.find("k", candidate("a"))
    assert cache.generation == seen[-1]


def test_it_may_change_while_it_is_gone_through() -> None:
    cache = ConfigCache()
    cache.put("a", Config())
    cache.put("b", Config())
    for key in cache:
        cache.put(f"{key}{key}", Config())
    assert list(cache) == ["a", "b", "aa", "bb"]


def test_a_key_has_to_be_hashable() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        ConfigCache().put(["k"], Config())  # type: ignore[arg-type]


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless")
def test_threads_share_it() -> None:
    """Eight threads put, get, go through it and clear it: nothing fails, and the bound holds at every moment."""
    cache, wrong, start = ConfigCache(maxsize=16), [], threading.Barrier(8)

    def work(number: int) -> None:
        try:
            start.wait()
            for i in range(2000):
                key = (number * 7 + i) % 40
                cache.put(key, Record(Config(key), f"b{number % 3}"))
                found = cache.get((key + i) % 40)
                records = cache.items() if i % 50 == 0 else []
                if len(cache) > 16 or not (found is None or isinstance(found, Config)):
                    wrong.append((number, i, found))
                wrong.extend((k, r) for k, several in records for r in several if r.cfg != Config(k))
                if i == 1000 and number == 0:
                    cache.clear()
        except Exception as fault:
            wrong.append(repr(fault))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(cache) == 16
    assert cache.generation == 8 * 2000 + 1


@attrs.frozen(eq=False)
class Slow:
    """A key that lets other threads run whenever it is looked up."""

    name: int

    def __hash__(self) -> int:
        time.sleep(0)
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slow) and self.name == other.name


@pytest.mark.usefixtures("restless")
def test_no_put_is_lost_among_threads() -> None:
    """All put under the same keys at the same time, each for a backend of its own."""
    cache, start, rounds = ConfigCache(), threading.Barrier(8), 60

    def work(number: int) -> None:
        start.wait()
        for i in range(rounds):
            cache.put(Slow(i), Record(Config(number), f"b{number}"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = {(f"b{number}", number) for number in range(8)}
    assert [{(r.backend, r.cfg.block) for r in records} for _, records in cache.items()] == [every] * rounds
    assert cache.generation == 8 * rounds
