"""``ConfigCache``: records in memory by key, with an optional bound, shared by threads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from ejkernel_core import ConfigCache, Provenance, Record, RecordError


@attrs.frozen
class Config:
    block: int = 64


@attrs.frozen
class Other:
    block: int = 64


def provenance(milliseconds: float = 1.0) -> Provenance:
    return Provenance(when="2026-11-20T12:00:00+00:00", device="cpu", milliseconds=milliseconds, backends=("a", "b"))


def candidate(backend: str, config_type: type | None = Config) -> Any:
    kernel = SimpleNamespace(name=f"double.{backend}")
    return SimpleNamespace(kernel=kernel, backend=backend, config_type=config_type, software={})


def test_get_returns_what_was_put() -> None:
    cache = ConfigCache()
    assert (len(cache), list(cache), cache.items(), "k" in cache) == (0, [], [], False)
    cache.put("k", Config(1))
    cache.put("l", Config(2))
    assert (cache.get("k"), cache.get("l"), cache.get("m")) == (Config(1), Config(2), None)
    assert cache.get("m", Config(9)) == Config(9)
    assert ("k" in cache, "m" in cache, len(cache), list(cache)) == (True, False, 2, ["k", "l"])
    assert cache.items() == [("k", (Record(Config(1)),)), ("l", (Record(Config(2)),))]


def test_get_returns_the_last_configuration_put() -> None:
    cache = ConfigCache()
    for block in (1, 2, 3):
        cache.put("k", Config(block))
    assert cache.get("k") == Config(3)
    assert cache.records("k") == (Record(Config(3)),)
    assert len(cache) == 1


def test_none_is_a_configuration() -> None:
    """The record of a kernel without configurations says that the kernel is the fastest."""
    cache = ConfigCache()
    cache.put("k", None)
    assert "k" in cache
    assert cache.get("k", "default") is None
    assert cache.records("k") == (Record(None),)


def test_each_backend_has_its_own_record() -> None:
    cache = ConfigCache()
    first, second = Record(Config(1), "a", provenance(1.0)), Record(Other(2), "b", provenance(2.0))
    cache.put("k", first)
    cache.put("k", second)
    assert cache.records("k") == (second, first)
    assert cache.get("k") == Other(2)
    assert cache.find("k", candidate("a")) == first
    assert cache.find("k", candidate("b", Other)) == second
    with pytest.raises(RecordError, match=r"it has Other\(.*\) for the call, not a configuration of double.b"):
        cache.find("k", candidate("b", Config))
    assert cache.find("k", candidate("c")) is None
    better = Record(Config(3), "a", provenance(0.5))
    cache.put("k", better)
    assert cache.records("k") == (better, second)
    assert len(cache) == 1


def test_a_plain_configuration_applies_to_every_kernel_of_its_type() -> None:
    cache = ConfigCache()
    cache.put("k", Config(1))
    for backend in ("a", "b"):
        assert cache.find("k", candidate(backend)) == Record(Config(1))
        for kind in (None, Other):  # None: a kernel without configurations
            with pytest.raises(RecordError, match=f"not a configuration of double.{backend}"):
                cache.find("k", candidate(backend, kind))


def test_the_least_recently_used_key_is_dropped_first() -> None:
    cache = ConfigCache(maxsize=3)
    for name in "abc":
        cache.put(name, Config())
    cache.get("a")
    cache.find("b", candidate("x"))
    assert "c" in cache  # ``in`` does not count as a use
    cache.put("d", Config())
    assert list(cache) == ["a", "b", "d"]
    cache.put("a", Config(2))
    cache.put("e", Config())
    assert list(cache) == ["d", "a", "e"]


@pytest.mark.parametrize("size", [0, -1])
def test_a_bound_below_one_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="maxsize: takes at least 1, or None for no bound"):
        ConfigCache(maxsize=size)


def test_clear_drops_everything() -> None:
    cache = ConfigCache(maxsize=2)
    cache.put("k", Config())
    cache.clear()
    assert (len(cache), "k" in cache, cache.get("k"), cache.records("k")) == (0, False, None, ())
    cache.put("k", Config(2))
    assert cache.get("k") == Config(2)


def test_only_changes_increase_the_generation() -> None:
    cache = ConfigCache()
    generations = [cache.generation]
    for change in (lambda: cache.put("k", Config()), lambda: cache.put("k", Config()), cache.clear):
        change()
        generations.append(cache.generation)
    assert generations == sorted(set(generations))
    cache.get("k"), cache.items(), list(cache), len(cache), "k" in cache, cache.find("k", candidate("a"))
    assert cache.generation == generations[-1]


def test_a_cache_may_change_during_iteration() -> None:
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
def frequent_thread_switches() -> Iterator[None]:
    """Python switches between threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_thread_switches")
def test_threads_can_share_a_cache() -> None:
    """Eight threads put, get, iterate and clear: nothing fails, and the size never exceeds the bound."""
    cache, faults, start = ConfigCache(maxsize=16), [], threading.Barrier(8)

    def work(number: int) -> None:
        try:
            start.wait()
            for i in range(2000):
                key = (number * 7 + i) % 40
                cache.put(key, Record(Config(key), f"b{number % 3}"))
                cfg = cache.get((key + i) % 40)
                records = cache.items() if i % 50 == 0 else []
                if len(cache) > 16 or not (cfg is None or isinstance(cfg, Config)):
                    faults.append((number, i, cfg))
                faults.extend((k, r) for k, records_of_key in records for r in records_of_key if r.cfg != Config(k))
                if i == 1000 and number == 0:
                    cache.clear()
        except Exception as fault:
            faults.append(repr(fault))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert len(cache) == 16
    assert cache.generation == 8 * 2000 + 1


@attrs.frozen(eq=False)
class YieldingKey:
    """A key whose hash lets other threads run."""

    name: int

    def __hash__(self) -> int:
        time.sleep(0)
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, YieldingKey) and self.name == other.name


@pytest.mark.usefixtures("frequent_thread_switches")
def test_no_put_is_lost_between_threads() -> None:
    """All threads put under the same keys at the same time, each for its own backend."""
    cache, start, rounds = ConfigCache(), threading.Barrier(8), 60

    def work(number: int) -> None:
        start.wait()
        for i in range(rounds):
            cache.put(YieldingKey(i), Record(Config(number), f"b{number}"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {(f"b{number}", number) for number in range(8)}
    assert [{(r.backend, r.cfg.block) for r in records} for _, records in cache.items()] == [expected] * rounds
    assert cache.generation == 8 * rounds
