"""``timer`` and ``get_memory_usage``: what they print, which arrays they wait for, and which figures they return."""

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
    """An array that logs when it is waited for."""

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
    """The log of waits and clock readings. Each reading is one second after the previous one."""
    log: list[str] = []
    arrays = [Pending(log, "a failed one", "failed"), Pending(log, "the array"), Pending(log, "nothing", "deleted")]
    monkeypatch.setattr(jax, "live_arrays", lambda: arrays)

    def perf_counter() -> float:
        log.append("read the clock")
        return float(log.count("read the clock"))

    monkeypatch.setattr(_usage, "time", SimpleNamespace(perf_counter=perf_counter))
    return log


ORDER = ["waited for the array", "read the clock", "worked", "waited for the array", "read the clock"]


def test_a_timer_waits_for_arrays_when_it_starts_and_ends(clock: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with timer("Flash Attention") as elapsed:
        clock.append("worked")
        assert elapsed.seconds is None
        assert str(elapsed) == "Flash Attention is running"
    assert clock == ORDER
    assert elapsed.seconds == 1.0
    assert capsys.readouterr().out == "Flash Attention took 1.000 seconds\n"


def test_a_block_that_raises_is_timed(clock: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        clock.append("worked")
        raise KeyError("mine")

    timer_of_work = timer()
    with pytest.raises(KeyError, match="mine"), timer_of_work:
        work()
    assert clock == ORDER
    assert capsys.readouterr().out == "Operation took 1.000 seconds\n"


def test_nested_timers(capsys: pytest.CaptureFixture[str]) -> None:
    with timer("outer") as outer, timer("inner") as inner:
        pass
    assert outer.seconds >= inner.seconds >= 0
    assert re.fullmatch(r"inner took \d+\.\d{3} seconds\nouter took \d+\.\d{3} seconds\n", capsys.readouterr().out)


def test_a_computation_is_ready_when_the_timer_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """The computation waits for an event, so the result cannot be ready before the host sets it."""
    event = threading.Event()

    def wait_for_event(x: Any) -> Any:
        assert event.wait(60)
        return x

    compute = jax.jit(lambda x: jax.pure_callback(wait_for_event, jax.ShapeDtypeStruct((), jnp.float32), x) + 1)
    releaser = threading.Timer(0.2, event.set)
    with timer("Waiting") as elapsed:
        releaser.start()
        result = compute(jnp.float32(1))
    assert event.is_set()
    assert result.is_ready()
    assert elapsed.seconds is not None
    assert "Waiting took" in capsys.readouterr().out


def test_the_memory_of_this_process() -> None:
    before = get_memory_usage()
    assert list(before) == ["allocated", "reserved", "limit"]
    assert all(type(value) is int for value in before.values())
    assert 0 < before["allocated"] < before["limit"]
    assert before["limit"] > 2**28
    array = np.ones(2**26, np.uint8)
    assert get_memory_usage(jax.devices("cpu")[0])["allocated"] - before["allocated"] > len(array) // 2


def test_allocated_memory_is_the_resident_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "statm").write_text("90000 7000 300 20 0 10 0\n")
    monkeypatch.setattr(_usage, "STATM", tmp_path / "statm")
    assert get_memory_usage()["allocated"] == 7000 * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("linux", 1024)])
def test_memory_of_this_process_without_proc(
    platform: str, unit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_a_device_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="device: takes one of jax.devices"):
        get_memory_usage("cpu")
