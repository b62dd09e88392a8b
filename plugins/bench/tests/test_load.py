"""Times under sustained load, on a device that is simulated: its work, its clock and NVML's answers are known."""

from __future__ import annotations

import ctypes
import doctest
from types import SimpleNamespace

import jax
import pytest

from ejkernel_bench import _clocks, _figures, _load
from ejkernel_bench._clocks import Reading, reader_of, summary, watched
from ejkernel_bench._figures import Figures, figures_of
from ejkernel_bench._load import Queue
from ejkernel_bench._peers import TorchArray
from ejkernel_bench._rows import Rows
from ejkernel_bench._timing import Times
from ejkernel_tuning import Timing

#: What a call takes the host.
HOST_S = 20e-6


class Device:
    """A device that runs one call after another, and takes ``ahead`` calls that it has not begun."""

    def __init__(self, ahead=32):
        self.now, self.free, self.idle_s, self.ahead = 0.0, 0.0, 0.0, ahead
        self.ends, self.calls = [], []

    def call(self, name, seconds, array=None):
        waiting = [end for end in self.ends if end > self.now]
        if len(waiting) >= self.ahead:
            self.now = waiting[-self.ahead]
        self.now += HOST_S
        self.idle_s += max(0.0, self.now - self.free)
        self.free = max(self.now, self.free) + (seconds() if callable(seconds) else seconds)
        self.ends = [*waiting, self.free]
        self.calls.append(name)
        return (array or Result)(self, self.free)

    def contender(self, name, seconds, array=None):
        return lambda: self.call(name, seconds, array)


class Result:
    def __init__(self, device, end):
        self.device, self.end = device, end

    def block_until_ready(self):
        self.device.now = max(self.device.now, self.end)
        return self


class TorchResult(TorchArray):
    """Its work would run beside that of JAX, were any of it in the queue."""

    def __init__(self, device, end):
        super().__init__(None)
        object.__setattr__(self, "device", device)

    def block_until_ready(self):
        self.device.now = max(self.device.now, self.device.free)
        return self


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(_load.time, "perf_counter", lambda: device.now)
    return device


def under_load(contenders, rounds):
    return _load.under_load(_load.warm(contenders), rounds)


# -- queues ------------------------------------------------------------------------------------------------------------


def test_times_are_those_of_the_device_and_it_never_waits(device):
    contenders = {
        "a": device.contender("a", 3e-4),
        "b": device.contender("b", 1.1e-3),
        "c": device.contender("c", 0.05),
    }
    queues = _load.warm(contenders)
    assert {name: queue.count for name, queue in queues.items()} == {"a": 200, "b": 55, "c": 3}
    device.idle_s, first = 0.0, len(device.calls)
    times = _load.under_load(queues, rounds=4)
    for name, seconds in {"a": 3e-4, "b": 1.1e-3, "c": 0.05}.items():
        assert times[name].seconds == pytest.approx([seconds] * 4, rel=5e-4)
    # It waits for the first call, and where a round begins with the contender that has ended the one before.
    assert device.idle_s == pytest.approx(4 * HOST_S)
    assert len(device.calls) - first == 4 * (200 + 55 + 3) + 3


def test_contenders_take_turns_and_each_follows_every_other(device):
    queues = _load.warm({name: device.contender(name, 0.03) for name in "ab"})
    first = len(device.calls)
    _load.under_load(queues, rounds=3)
    assert "".join(device.calls[first:]) == "bbb" + "aaabbb" + "bbbaaa" + "aaabbb"


def test_a_slower_clock_under_load_is_in_the_times(device):
    begun = device.now

    def seconds():
        return 1e-3 if device.free - begun < 0.2 else 1.2e-3

    times = under_load({"a": device.contender("a", seconds)}, rounds=5)
    assert times["a"].median == pytest.approx(1.2e-3, rel=1e-3)


def test_work_of_pytorch_does_not_run_beside_that_of_jax(device):
    waiting = []

    def torch_call():
        waiting.append(device.free > device.now)
        return device.call("torch", 1e-3, TorchResult)

    def jax_call():
        if device.calls and device.calls[-1] == "torch":
            waiting.append(device.free > device.now)
        return device.call("jax", 1e-3)

    queues = _load.warm({"jax": jax_call, "torch": torch_call, "other": device.contender("other", 1e-3)})
    assert [queue.is_in_order for queue in queues.values()] == [True, False, True]
    waiting.clear()
    times = _load.under_load(queues, rounds=3)
    assert times["torch"].seconds == pytest.approx([1e-3] * 3, rel=1e-3)
    # In its queue, a call of PyTorch follows others of it. The first of each of three queues finds the device idle, and
    # so does that of JAX in the one round where it follows.
    assert waiting.count(False) == 3 + 1
    assert Queue(jax_call).can_follow(Queue(torch_call, is_in_order=False)) is False


def test_a_contender_that_updates_arrays_does_not_take_those_that_are_waited_for(device):
    array = {}

    class Updated(Result):
        is_deleted = False

        def block_until_ready(self):
            assert not self.is_deleted
            return super().block_until_ready()

    def run():
        if array:
            array["last"].is_deleted = True
        array["last"] = device.call("update", 2e-3, Updated)
        return array["last"]

    times = under_load({"update": run, "other": device.contender("other", 1e-3)}, rounds=4)
    assert times["update"].median == pytest.approx(2e-3, rel=1e-2)


def test_warm_work_ends_when_the_clock_is_steady(device):
    def spent(readings):
        start, left = device.now, list(readings)
        _load.warm({"a": device.contender("a", 1e-3)}, lambda: left.pop(0) if len(left) > 1 else left[0])
        return device.now - start

    steady = spent([Reading(1500.0, 700.0)])
    falling = spent([Reading(2000.0 - 50 * number, 700.0) for number in range(30)] + [Reading(500.0, 700.0)])
    changing = spent([Reading(1000.0 + 500 * (number % 2), 700.0) for number in range(200)])
    assert _load.WARM_S <= steady < _load.WARM_S + 0.1
    assert steady + 0.5 < falling < _load.LONGEST_WARM_S
    assert _load.LONGEST_WARM_S <= changing < _load.LONGEST_WARM_S + 0.1


def test_the_host_is_told_from_the_device(device):
    assert _load.host_seconds(device.contender("a", 5e-3)) == pytest.approx(HOST_S)


# -- which way ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch, device):
    """The device's own clock, by which a call after a pause takes 0.9 times as long."""
    ways = []

    def on_the_device(contenders, rounds, warm_s=0.0):
        ways.append((rounds, warm_s))
        return {name: Times([0.9 * contender_seconds[name]] * rounds) for name in contenders}

    contender_seconds = {}
    readings = [Reading(1470.0, 699.6, ("power",))]
    monkeypatch.setattr(_figures, "on_the_device", on_the_device)
    monkeypatch.setattr(_figures.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_figures, "reader", lambda: lambda: readings[0])
    monkeypatch.setattr(_clocks, "reader", lambda: lambda: readings[0])

    def contenders(**seconds):
        contender_seconds.update(seconds)
        return {name: device.contender(name, each) for name, each in seconds.items()}

    return SimpleNamespace(contenders=contenders, ways=ways)


def test_long_calls_are_timed_under_load_and_bursts_are_shown_where_they_differ(gpu):
    figures = figures_of(gpu.contenders(ours=5e-4, peer=6e-4), rounds=3)
    assert gpu.ways == [(1, 0.0)]
    assert figures.times["ours"].seconds == pytest.approx([5e-4] * 3, rel=5e-4)
    assert figures.beside() == {
        "MHz": 1470,
        "W": 700,
        "limited by": "power",
        "ours burst": pytest.approx(0.45),
        "peer burst": pytest.approx(0.54),
    }
    nearly_equal = Figures({"ours": Times([1.0])}, {"ours": Times([1.02])})
    assert nearly_equal.beside() == {}


@pytest.mark.parametrize("short", [{"peer": 9e-5}, {"peer": 1.0e-4}])
def test_a_row_with_a_short_call_is_timed_by_the_device_after_warm_work(gpu, device, short):
    figures = figures_of(gpu.contenders(ours=5e-4, **short), rounds=3)
    assert gpu.ways == [(1, 0.0), (3, _figures.SHORT_WARM_S)]
    assert figures.times["ours"].seconds == pytest.approx([4.5e-4] * 3)
    assert device.now > _load.WARM_S
    assert figures.beside() == {"MHz": 1470, "W": 700, "limited by": "power"}


def test_a_copy_beside_long_calls_does_not_decide(gpu):
    figures = figures_of(gpu.contenders(ours=5e-4, copy=5e-5), rounds=2, aside=["copy"])
    assert figures.times["copy"].seconds == pytest.approx([5e-5] * 2, rel=5e-4)
    assert len(gpu.ways) == 1


def test_a_call_that_the_host_cannot_start_fast_enough_is_short(gpu, monkeypatch):
    monkeypatch.setattr(_figures, "host_seconds", lambda run: 4e-4)
    figures_of(gpu.contenders(ours=5e-4), rounds=2)
    assert len(gpu.ways) == 2


def test_without_a_gpu_times_are_as_before(monkeypatch):
    monkeypatch.setattr(_figures.jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(_figures, "on_the_device", lambda contenders, rounds: {"a": Times([1.0] * rounds)})
    figures = figures_of({"a": None}, rounds=2)
    assert (figures.times["a"].seconds, figures.beside()) == ((1.0, 1.0), {})


def test_columns_beside_are_last_and_only_where_a_row_has_them():
    rows = Rows("times", ("", "ours"))
    rows.add("first", 1.0)
    rows.add("second", 2.0, beside={"MHz": 1500})
    rows.add("third", 3.0, beside={"MHz": 1470, "ours burst": 2.5})
    table = rows.table()
    assert table.columns == ("", "ours", "MHz", "ours burst")
    assert table.rows == (("first", 1.0, "-", "-"), ("second", 2.0, 1500, "-"), ("third", 3.0, 1470, 2.5))


# -- the clock ---------------------------------------------------------------------------------------------------------


class Nvml(SimpleNamespace):
    """As much of NVML as is read."""

    def __init__(self, **functions):
        super().__init__(
            nvmlInit_v2=lambda: 0,
            nvmlDeviceGetHandleByIndex_v2=lambda index, device: self.set(device, ctypes.c_void_p(100 + index.value)),
            nvmlDeviceGetHandleByUUID=lambda uuid, device: self.set(device, ctypes.c_void_p(len(uuid))),
            nvmlDeviceGetClockInfo=lambda device, kind, mhz: self.set(mhz, ctypes.c_uint(1470 + device.value)),
            nvmlDeviceGetPowerUsage=lambda device, milliwatts: self.set(milliwatts, ctypes.c_uint(673_400)),
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda device, bits: self.set(bits, ctypes.c_ulonglong(4)),
        )
        self.__dict__.update(functions)

    @staticmethod
    def set(reference, value):
        reference._obj.value = value.value
        return 0


def test_nvml_is_read_by_number_and_by_uuid():
    assert reader_of("1", lambda name: Nvml())() == Reading(1571.0, 673.4, ("power",))
    assert reader_of("GPU-12", lambda name: Nvml())() == Reading(1476.0, 673.4, ("power",))
    new_name = Nvml(nvmlDeviceGetCurrentClocksEventReasons=lambda device, bits: Nvml.set(bits, ctypes.c_ulonglong(0)))
    assert reader_of("2", lambda name: new_name)() == Reading(1572.0, 673.4)


def no_library(name):
    raise OSError(name)


@pytest.mark.parametrize(
    "load",
    [
        no_library,
        lambda name: SimpleNamespace(),
        lambda name: Nvml(nvmlInit_v2=lambda: 9),
        lambda name: Nvml(nvmlDeviceGetPowerUsage=lambda device, milliwatts: 3),
    ],
    ids=["no library", "no functions", "no driver", "no power"],
)
def test_without_answers_there_are_no_readings(load):
    read = reader_of("0", load)
    assert read() is None
    with watched(read) as readings:
        pass
    assert readings == []
    assert summary(readings) is None


def test_the_gpu_is_that_of_jax(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(local_hardware_id=1)])
    for visible, number in (("", "1"), ("3,5", "5"), ("GPU-a, GPU-b", "GPU-b")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert _clocks._number_of_gpu() == number
    if jax.default_backend() != "gpu":
        assert _clocks.reader()() is None


def test_readings_are_taken_while_work_runs():
    with watched(lambda: Reading(1500.0, 700.0)) as readings:
        while len(readings) < 3:
            pass
    count = len(readings)
    assert summary(readings) == Reading(1500.0, 700.0)
    assert len(readings) == count


def test_doctests():
    results = doctest.testmod(_clocks)
    assert results.attempted
    assert not results.failed


def test_the_timing_of_the_tuner_is_what_bursts_are_made_of(monkeypatch):
    busy = []
    monkeypatch.setattr(_figures.jax, "default_backend", lambda: "cpu")
    from ejkernel_bench import _timing

    monkeypatch.setattr(_timing, "benchmark", lambda run, **counts: Timing([2.0], "device"))
    monkeypatch.setattr(_timing, "_keep_busy", lambda run, seconds: busy.append((run, seconds)))
    times = _timing.on_the_device({"a": "a", "b": "b"}, rounds=2, warm_s=0.5)
    assert times["a"].seconds == (2e-3, 2e-3)
    assert busy == [("a", 0.5), ("b", 0.5), ("b", 0.5), ("a", 0.5)]
