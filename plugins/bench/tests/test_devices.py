"""The suite of several devices at tiny sizes: it has right results, and finds wrong ones. No time is judged."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel_bench import _devices, _overlap, _processes, devices


def labels(report):
    return [row[0] for table in report.tables for row in table.rows]


@pytest.mark.long
@pytest.mark.parametrize("part", ["sharded", "rows"])
def test_every_way_to_shard_is_right_and_counted(part):
    report = devices.run(part, rounds=1, small=True)
    assert report.faults == ()
    ways = ("one card", "auto", "explicit", "shard_map")
    subjects = {"sharded": ("batch", "heads"), "rows": ("queries", "rms_norm")}[part]
    expected = [f"{name}, {p}, {way}" for name in subjects for p in ("forward", "forward+backward") for way in ways]
    assert labels(report) == expected
    collectives = {row[0]: row[4] for row in report.tables[0].rows}
    assert collectives[f"{subjects[0]}, forward, shard_map"] == "none"
    assert collectives[f"{subjects[1]}, forward, auto"] == "none"
    if part == "rows":
        assert collectives["rms_norm, forward+backward, shard_map"] == "1 all-reduce"


@pytest.mark.long
def test_context_attention_is_right_and_counted():
    report = devices.run("context-8k", rounds=1, small=True)
    assert report.faults == ()
    expected = [f"{p}, {name}" for p in ("forward", "forward+backward") for name in ("one card", *devices.KERNELS)]
    assert labels(report) == expected
    collectives = {row[0]: row[4] for row in report.tables[0].rows}
    assert collectives["forward, ring"] == "7 collective-permute"
    assert collectives["forward, gather"] == "2 all-gather"


@pytest.mark.long
def test_experts_on_devices_are_right_and_no_weight_is_gathered():
    report = devices.run("experts", rounds=1, small=True)
    assert report.faults == ()
    ways = ("one card", "all tokens on all", "tokens exchanged")
    assert labels(report) == [f"{p}, {way}" for p in ("forward", "forward+backward") for way in ways]
    collectives = {row[0]: row[4] for row in report.tables[0].rows}
    assert collectives["forward, all tokens on all"] == "1 all-reduce"
    assert collectives["forward, tokens exchanged"] == "3 all-to-all"
    assert [bar.measured for bar in report.bars] == [0] * 4


def test_rows_without_room_are_dropped_the_last_ones_first():
    layer = attrs.evolve(devices.SMALL_LAYER, room=0.75)
    programs = {name: make() for name, make in devices._expert_programs(layer, "forward")}
    (result,) = programs["tokens exchanged"]()
    x, router, up, down, _ = programs["one card"].arguments
    devices_count, room = 8, math.ceil(0.75 * 16 / 8)
    expected, dropped = np.zeros(x.shape), 0
    for first in range(0, 64, 8):  # the tokens of a device
        routes = layer._routes(x[first : first + 8], router)
        experts = np.asarray(routes.experts).reshape(-1)[routes.token_order]
        rows_to = np.zeros(devices_count, int)
        for place, expert in zip(np.asarray(routes.token_order), experts, strict=True):
            rows_to[expert // 2] += 1
            if rows_to[expert // 2] > room:
                dropped += 1
                continue
            token = place // 2
            gate, value = np.split(x[first + token] @ up[expert], 2)
            weight = routes.weights[token, place % 2]
            expected[first + token] += weight * ((gate / (1 + np.exp(-gate)) * value) @ down[expert])
    assert 0 < dropped < 100
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-5)


def test_an_exchange_with_too_little_room_is_reported():
    layer = attrs.evolve(devices.SMALL_LAYER, room=0.1)
    programs, messages = devices._right_programs("forward", devices._expert_programs(layer, "forward"), "float32")
    assert [*programs] == ["one card", "all tokens on all"]
    assert messages[0].startswith("forward, tokens exchanged: the result on")


@pytest.mark.long
def test_the_overlap_is_measured_with_and_without():
    report = devices.run("overlap", rounds=1, small=True)
    assert report.faults == ()
    assert labels(report) == ["ring, forward, one card", "ring, forward, with overlap", "ring, forward, without"]
    assert report.bars == ()


def test_one_wrong_shard_is_reported():
    mesh = jax.make_mesh((8,), ("cards",))
    whole = jnp.arange(32.0)
    wrong = _devices.placed(whole.at[9].set(-1.0), mesh, P("cards"))
    (message,) = _devices.faults("a call", [wrong], [whole], "float32")
    assert message.startswith(f"a call: the result on {jax.devices()[2]} is off by 5.2e-01 (norm)")
    right = _devices.placed(whole, mesh, P("cards"))
    assert _devices.faults("a call", [right, right], [whole, whole], "float32") == []


def test_a_program_that_fails_is_reported_and_the_others_run():
    def fails():
        raise RuntimeError("too large")

    def program():
        return _devices.compiled(lambda x: (x + 1,), [jnp.ones(3)])

    programs = iter([("one card", program), ("auto", fails), ("explicit", program)])
    right, messages = devices._right_programs("batch, forward", programs, "float32")
    assert (list(right), messages) == (["one card", "explicit"], ["batch, forward, auto: RuntimeError: too large"])


def profile(*lines):
    """Events as (name, start, duration) of the streams of one GPU."""
    events = [[SimpleNamespace(name=n, start_ns=s, duration_ns=d) for n, s, d in line] for line in lines]
    streams = [SimpleNamespace(name=f"Stream #{i}", events=line) for i, line in enumerate(events)]
    others = [SimpleNamespace(name="XLA Ops", events=events[0])]
    host = SimpleNamespace(name="/host:CPU", lines=streams)
    return SimpleNamespace(planes=[SimpleNamespace(name="/device:GPU:0", lines=[*streams, *others]), host])


def test_the_share_of_transfers_inside_attention():
    attention = [("attention", 0, 100), ("add", 100, 5), ("attention", 110, 100)]
    inside = _overlap.share_in_profile(profile(attention, [("ncclDevKernel_SendRecv", 10, 40)]))
    partly = _overlap.share_in_profile(profile(attention, [("ncclDevKernel_SendRecv", 90, 40)]))
    after = _overlap.share_in_profile(profile(attention, [("ncclDevKernel_SendRecv", 210, 40)]))
    np.testing.assert_allclose((inside, partly, after), (1.0, 0.75, 0.0))
    assert _overlap.share_in_profile(profile(attention)) is None


def test_two_kernels_at_once_count_once():
    kernels = [("attention", 0, 100)], [("attention", 50, 100)], [("MemcpyP2P", 60, 100)]
    np.testing.assert_allclose(_overlap.share_in_profile(profile(*kernels)), 0.9)


def test_help_describes_the_suite_and_its_parts(ejkernel):
    code, output, _ = ejkernel("bench", "devices", "--help")
    assert code == 0
    assert all(f"--part {part}" in output for part in devices.PARTS)
    assert "JAX_COORDINATOR_ADDRESS" in output


@pytest.mark.parametrize(
    ("suite", "part", "message"),
    [
        ("devices", "all", "no part of devices is called all; there are sharded, rows, context-8k"),
        ("ranking", "rows", "ranking has no parts; --part is for devices"),
    ],
)
def test_an_unknown_part_is_an_error(ejkernel, suite, part, message):
    code, _, error = ejkernel("bench", suite, "--part", part)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_variable_is_named(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    with pytest.raises(ValueError, match="is set, and JAX_NUM_PROCESSES, JAX_PROCESS_ID is not"):
        _processes.join_processes()


@pytest.mark.long
def test_two_processes_measure_the_same_calls():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "JAX_NUM_PROCESSES": "2"}
    arguments = [sys.executable, "-m", "ejkernel_cli", "bench", "devices", "--small", "--rounds", "1", "--part", "rows"]
    processes = [
        subprocess.Popen(
            arguments,
            env={**environment, "JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for number, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, output
        assert f"2 cards, process {number} of 2" in output
        assert "queries, forward+backward, shard_map" in output
