"""``timer`` and ``get_memory_usage``: what is printed, what is waited for, and whose figures they are."""

from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_tuning import _usage, get_memory_usage, timer


class Pending:
    """An array that is ready once it was waited for."""

    def __init__(self, log: list[str], name: str, state: str = "") -> None:
        self.log, self.name, self.state = log, name, state

    def is_deleted(self) -> bool:
        return self.state == "deleted"

    def block_until_ready(self) -> None:
        assert self.state != "deleted"
        if self.state == "failed":
            raise RuntimeError("computed wrongly")
        self.log.append(f"waited for {self.name}")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, in order. Each look at the clock is a second after the one before."""
    log: list[str] = []
    arrays = [Pending(log, "a failed one", "failed"), Pending(log, "it"), Pending(log, "nothing", "deleted")]
    monkeypatch.setattr(jax, "live_arrays", lambda: arrays)

    def now() -> float:
        log.append("looked at the clock")
        return float(log.count("looked at the clock"))

    monkeypatch.setattr(_usage, "time", SimpleNamespace(perf_counter=now))
    return log


ORDER = ["waited for it", "looked at the clock", "worked", "waited for it", "looked at the clock"]


def test_the_work_is_waited_for_at_both_ends(clock: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with timer("Flash Attention") as elapsed:
        clock.append("worked")
        assert elapsed.seconds is None
        assert str(elapsed) == "Flash Attention is running"
    assert clock == ORDER
    assert elapsed.seconds == 1.0
    assert capsys.readouterr().out == "Flash Attention took 1.000 seconds\n"


def test_what_raises_is_timed_too(clock: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        clock.append("worked")
        raise KeyError("mine")

    timing = timer()
    with pytest.raises(KeyError, match="mine"), timing:
        work()
    assert clock == ORDER
    assert capsys.readouterr().out == "Operation took 1.000 seconds\n"


def test_timers_in_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with timer("outer") as outer, timer("inner") as inner:
        pass
    assert outer.seconds >= inner.seconds >= 0
    assert re.fullmatch(r"inner took \d+\.\d{3} seconds\nouter took \d+\.\d{3} seconds\n", capsys.readouterr().out)


def test_a_computation_is_ready_when_the_timer_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """By an event, not by the time: the result cannot be there before the host has let it go on."""
    go = threading.Event()

    def slow(x: Any) -> Any:
        assert go.wait(60)
        return x

    compute = jax.jit(lambda x: jax.pure_callback(slow, jax.ShapeDtypeStruct((), jnp.float32), x) + 1)
    releasing = threading.Timer(0.2, go.set)
    with timer("Waiting") as elapsed:
        releasing.start()
        result = compute(jnp.float32(1))
    assert go.is_set()
    assert result.is_ready()
    assert elapsed.seconds is not None
    assert "Waiting took" in capsys.readouterr().out


def test_the_memory_of_this_process() -> None:
    before = get_memory_usage()
    assert list(before) == ["allocated", "reserved", "limit"]
    assert all(type(value) is int for value in before.values())
    assert 0 < before["allocated"] < before["limit"]
    assert before["limit"] > 2**28
    held = np.ones(2**26, np.uint8)
    assert get_memory_usage(jax.devices("cpu")[0])["allocated"] - before["allocated"] > len(held) // 2


def test_the_resident_pages_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "statm").write_text("90000 7000 300 20 0 10 0\n")
    monkeypatch.setattr(_usage, "STATM", tmp_path / "statm")
    assert get_memory_usage()["allocated"] == 7000 * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("linux", 1024)])
def test_without_proc(platform: str, unit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import resource

    monkeypatch.setattr(_usage, "STATM", tmp_path / "absent")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=7000))
    assert get_memory_usage()["allocated"] == 7000 * unit


def test_the_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stats: dict[str, int] = {"bytes_in_use": 5, "bytes_reserved": 7, "bytes_limit": 11, "num_allocs": 3}
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "Device", SimpleNamespace)
    assert get_memory_usage(device) == {"allocated": 5, "reserved": 7, "limit": 11}
    del stats["bytes_reserved"]
    assert get_memory_usage(device) == {"allocated": 5, "reserved": 0, "limit": 11}


def test_what_is_no_device_is_told() -> None:
    with pytest.raises(TypeError, match="device: takes one of jax.devices"):
        get_memory_usage("cpu")
