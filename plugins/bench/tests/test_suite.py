"""The suite of any operation: contenders, checks, rates and minimum ratios; on a toy operation, on the CPU."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_bench import layer_norm, rms_norm, suite
from ejkernel_bench._calls import benchmark_examples, by_core, draw, jitted
from ejkernel_bench._peers import TorchArray, bound, is_installed
from ejkernel_bench._suites import GROUP
from ejkernel_core import Axes, Cost, Example, Operation, Registry, Unsupported, hookimpl
from ejkernel_ops.rms_norm.axes import FORMATS
from ejkernel_ops.rms_norm.examples import sweep

SIZE = 8 * 128


def scaled(x, factor):
    return x * factor * 2.0


def kernel(function=scaled, reason=""):
    """A kernel of the toy operation."""

    @hookimpl
    def heuristic_cfg(inv):
        if reason:
            raise Unsupported(reason)

    @hookimpl
    def run_backend(inv, cfg):
        return function(inv["x"], inv["factor"])

    return SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend)


def arguments(draw):
    return {
        "x": jax.random.normal(jax.random.key(draw), (8, 128)),
        "factor": jnp.full(128, 1.5, jnp.float32),
        "steps": 2,
    }


EXAMPLE = Example("rows 8", "scaled", arguments, wrt=("x", "factor"), checks=frozenset(), uses=frozenset({"benchmark"}))
FORWARD_ONLY = Example("no gradients", "scaled", arguments, checks=frozenset(), uses=frozenset({"benchmark"}))
OTHER_USE = Example("for compilers", "scaled", arguments, uses=frozenset({"resources"}))


@pytest.fixture
def registry(monkeypatch):
    registry = Registry(plugins="")
    operation = Operation(
        name="scaled",
        signature=lambda x, factor, *, steps: None,
        cost=lambda arguments: Cost(2.0 * SIZE, 4.0 * (2 * SIZE + 128)),
        examples=lambda: (EXAMPLE, FORWARD_ONLY, OTHER_USE),
    )
    registry.register(operation)
    registry.register(kernel(), "scaled.reference")
    registry.register(kernel(lambda x, factor: 2.0 * (x * factor)), "scaled.fast")
    registry.register(kernel(reason="it has no such card"), "scaled.elsewhere")
    return registry


def by_xla(arguments):
    steps = arguments["steps"]
    assert isinstance(arguments["x"], jax.ShapeDtypeStruct)
    return lambda x, factor: x * factor * steps


def measure(registry, peers=None, minima=(), names=("rows 8",), **options):
    return suite.run("scaled", peers, minima, names=names, rounds=1, registry=registry, **options)


def test_each_pass_and_contender_is_measured(registry):
    report = measure(registry, {"XLA": by_xla, "refuses": lambda arguments: None})
    assert list(report.faults) == []
    (table,) = report.tables
    columns = ("copy", "range", "elsewhere", "range", "fast", "range", "reference", "range", "XLA", "range")
    start = ("", "ejkernel", "range", "TFLOP/s", "TB/s", "of copy rate")
    assert table.columns == (*start, *columns, "refuses", "range", "kernels")
    forward = table.rows[0]
    assert [row[0] for row in table.rows] == ["rows 8, forward", "rows 8, forward+backward"]
    seconds = forward[1] * 1e-3
    assert forward[3] == pytest.approx(2 * SIZE / seconds / 1e12)
    assert forward[4] == pytest.approx(4 * (2 * SIZE + 128) / seconds / 1e12)
    assert forward[5] == pytest.approx(forward[6] / forward[1])
    for row in table.rows:
        assert row[8:10] == row[16:18] == ("-", "-")  # they refuse
        assert all(isinstance(row[index], float) for index in (6, 10, 12, 14))
    assert forward[-1].startswith("scaled.")


def test_an_example_without_gradients_runs_forward_alone(registry):
    report = measure(registry, names=("no gradients",))
    assert [row[0] for row in report.tables[0].rows] == ["no gradients, forward"]


def test_a_backend_is_measured_alone(registry):
    report = measure(registry, backend="fast")
    assert report.tables[0].columns[6:] == ("copy", "range", "kernels")
    assert report.tables[0].rows[0][-1] == "scaled.fast"


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (lambda x, factor: scaled(x, factor).at[3, 7].add(0.1), "forward, rows 8: out is off by"),
        (lambda x, factor: scaled(x, factor).at[3, 7].set(jnp.nan), "out is off by nan"),
        (lambda x, factor: scaled(x, factor).at[3, 7].set(jnp.inf), "out is off by"),
        (lambda x, factor: scaled(x, jax.lax.stop_gradient(factor)), "forward+backward, rows 8: d_factor is off by"),
    ],
    ids=["one entry", "nan", "infinity", "gradient"],
)
def test_a_wrong_contender_is_reported_and_not_timed(registry, function, fault):
    report = measure(registry, {"wrong": lambda arguments: function})
    assert any(message.startswith("wrong, ") and fault in message for message in report.faults)
    rows = {row[0]: row for row in report.tables[0].rows}
    pass_name = fault.split(", rows")[0] if "rows" in fault else "forward"
    assert rows[f"rows 8, {pass_name}"][-3:-1] == ("-", "-")


def test_a_wrong_kernel_of_ours_has_no_time(registry):
    registry.register(kernel(lambda x, factor: 1.01 * scaled(x, factor)), "scaled.wrong")
    report = measure(registry, backend="wrong")
    assert report.tables[0].rows == ()
    assert {fault.partition(",")[0] for fault in report.faults} == {"ejkernel"}


def test_a_contender_that_fails_is_reported(registry):
    def raise_error(x, factor):
        raise RuntimeError("no such library")

    report = measure(
        registry, {"broken": lambda arguments: raise_error, "absent": lambda arguments: raise_error(None, None)}
    )
    assert [fault.split(", ")[0] for fault in report.faults] == ["broken", "absent", "broken", "absent"]
    assert all("RuntimeError: no such library" in fault for fault in report.faults)
    assert len(report.tables[0].rows) == 2


def test_a_pass_that_runs_out_of_memory_leaves_the_others(registry, monkeypatch):
    timed, runs_timed = suite.figures_of, []

    def timed_but_the_second(runs, rounds, **options):
        runs_timed.append([*runs])
        if len(runs_timed) == 2:
            raise MemoryError("no 7 GiB")
        return timed(runs, rounds, **options)

    monkeypatch.setattr(suite, "figures_of", timed_but_the_second)
    report = measure(registry, names=("rows 8", "no gradients"))
    assert len(runs_timed) == 3
    assert [row[0] for row in report.tables[0].rows] == ["rows 8, forward", "no gradients, forward"]
    assert list(report.faults) == ["forward+backward, rows 8: MemoryError: no 7 GiB"]


def test_minimum_ratios_are_of_the_same_run(registry):
    minima = [
        suite.Minimum("forward", suite.COPY, 0.92),
        suite.Minimum("forward+backward", "XLA", 1.35),
        suite.Minimum("forward", "fast", 0.5, applies=lambda example: example.name != "rows 8"),
        suite.Minimum("forward", "XLA", 0.95, is_worst=True),
    ]
    report = measure(registry, {"XLA": by_xla}, minima, names=("rows 8", "no gradients"))
    rows = {row[0]: row for row in report.tables[0].rows}
    bars = {bar.name: bar for bar in report.bars}
    over_copy = bars["rows 8, forward: over copy"]
    assert over_copy.measured == pytest.approx(rows["rows 8, forward"][5])
    assert (over_copy.limit, over_copy.at_least) == (0.92, True)
    both = rows["rows 8, forward+backward"]
    assert bars["rows 8, forward+backward: over XLA"].measured == pytest.approx(both[14] / both[1])
    assert "no gradients, forward: over fast" in bars
    assert "rows 8, forward: over fast" not in bars
    ratios = {name: rows[f"{name}, forward"][14] / rows[f"{name}, forward"][1] for name in ("rows 8", "no gradients")}
    worst = min(ratios, key=ratios.get)
    assert bars[f"{worst}, forward: over XLA, the worst of 2"].measured == pytest.approx(ratios[worst])


def test_a_kernel_itself_may_have_a_minimum(registry):
    minima = [suite.Minimum("forward", "XLA", 0.95, of=backend) for backend in ("fast", "elsewhere")]
    report = measure(registry, {"XLA": by_xla}, minima)
    (bar,) = report.bars  # the other kernel refuses
    forward = report.tables[0].rows[0]
    assert bar.name == "rows 8, forward: fast over XLA"
    assert bar.measured == pytest.approx(forward[14] / forward[10])


def test_backends_are_selected(registry):
    report = measure(registry, backends=("fast",))
    assert report.tables[0].columns[6:] == ("copy", "range", "fast", "range", "kernels")


def test_a_peer_that_is_not_installed_is_named(registry):
    report = measure(registry, {"XLA": by_xla, "Liger": None})
    assert str(report).startswith("scaled: not installed, and not measured: Liger\n")
    assert "Liger" not in report.tables[0].columns


def test_a_peer_may_have_a_reason_why_it_is_not_measured(registry):
    report = measure(registry, {"FA3": "there is no library", "Liger": None, "XLA": by_xla})
    lines = report.text.splitlines()
    assert lines == [
        "scaled: not installed, and not measured: Liger",
        "scaled: FA3 is not measured: there is no library",
    ]
    assert {"FA3", "Liger"}.isdisjoint(report.tables[0].columns)


@pytest.mark.parametrize(("tolerance", "is_right"), [(None, False), (0.02, True)])
def test_a_peer_of_fewer_bits_has_a_tolerance_of_its_own(registry, tolerance, is_right):
    function = lambda x, factor: 1.01 * scaled(x, factor)
    peer = suite.OnOtherArrays(function, tolerance=tolerance, arrays=lambda **arrays: arrays)
    report = measure(registry, {"8 bits": lambda arguments: peer})
    assert [row[0] for row in report.tables[0].rows] == ["rows 8, forward", "rows 8, forward+backward"]
    times = [row[-3] for row in report.tables[0].rows]
    assert [isinstance(time, float) for time in times] == [is_right, False]  # it has no gradients
    assert ["8 bits, forward, rows 8: out is off by" in fault for fault in report.faults] == [True] * (not is_right)


def test_other_arrays_are_made_before_anything_is_timed(registry):
    made = []

    def arrays(x, factor):
        made.append(x.shape)
        return {"doubled": 2.0 * x, "factor": factor}

    peer = suite.OnOtherArrays(lambda doubled, factor: doubled * factor, arrays=arrays)
    report = measure(registry, {"XLA": lambda arguments: peer}, names=("no gradients",))
    assert list(report.faults) == []
    assert isinstance(report.tables[0].rows[0][-3], float)
    assert made == [(8, 128)]


def test_the_work_of_values_is_that_of_the_suite(registry):
    report = measure(registry, work=lambda example, pass_name: Cost(3e6 * len(pass_name), 0.0))
    rates = {row[0]: row[1] * row[3] for row in report.tables[0].rows}
    assert rates == {f"rows 8, {name}": pytest.approx(3e-3 * len(name)) for name in suite.PASSES}


def test_arrays_of_8_bits_stay_in_the_reference():
    inputs = suite.Inputs({"x": jnp.ones(2, "bfloat16"), "pages": jnp.ones(2, "float8_e4m3fn")}, (), (), (), ())
    assert {name: str(array.dtype) for name, array in inputs.astype("float32").arrays.items()} == {
        "x": "float32",
        "pages": "float8_e4m3fn",
    }


def test_programs_are_compiled_before_they_run(registry, monkeypatch):
    programs = suite._Contenders(registry, None, ("fast",), {"XLA": by_xla}, "reference").programs(EXAMPLE)
    inputs = suite.draw(EXAMPLE, registry)
    with monkeypatch.context() as patched:
        patched.setattr("jax._src.compiler.compile_or_get_cached", lambda *_, **__: pytest.fail("it compiles"))
        for pass_name in suite.PASSES:
            for run in programs.runs(pass_name, inputs).values():
                run()


@pytest.mark.parametrize(("off", "is_right"), [(1, True), (2, False)])
def test_numbers_of_8_bits_may_be_neighbours(off, is_right):
    def rounded(x, factor):
        return jnp.rint(x * factor * 10).astype(jnp.int8)

    registry = Registry(plugins="")
    registry.register(Operation(name="scaled", signature=lambda x, factor, *, steps: None))
    registry.register(kernel(rounded), "scaled.reference")
    registry.register(kernel(lambda x, factor: rounded(x, factor).at[0, 0].add(off)), "scaled.fast")
    examples = [Example("mine", "scaled", lambda draw: arguments(draw) | {"x": 8 * jnp.ones((8, 128))}, "bfloat16")]
    faults = measure(registry, examples=examples, names=("mine",), backend="fast").faults
    assert (list(faults) == []) == is_right


def test_the_whole_suite_needs_an_accelerator(registry):
    if jax.default_backend() != "cpu":
        pytest.skip("there is one")
    report = suite.run("scaled", registry=registry)
    assert report.text == "scaled: there is no accelerator here; --small measures on the CPU"


def test_an_unknown_example_is_an_error(registry):
    with pytest.raises(ValueError, match="scaled has no examples rows 9"):
        measure(registry, names=("rows 8", "rows 9"))


def test_a_suite_may_have_examples_of_its_own(registry):
    report = measure(registry, examples=[Example("mine", "scaled", arguments)], names=("mine",))
    assert [row[0] for row in report.tables[0].rows] == ["mine, forward"]


def test_the_examples_of_benchmarks_are_selected(registry):
    assert benchmark_examples("scaled", registry) == [EXAMPLE, FORWARD_ONLY]
    assert len(benchmark_examples("flash_attention", ejkernel_core.registry)) == 44


def test_infinities_have_to_be_the_same(registry):
    def log(x, factor):
        return jnp.where(jnp.arange(128) == 5, -jnp.inf, x * factor)

    for backend in ("reference", "fast"):
        registry = Registry(plugins="")
        registry.register(Operation(name="scaled", signature=lambda x, factor, *, steps: None))
        registry.register(kernel(log), "scaled.reference")
        registry.register(kernel(log if backend == "reference" else scaled), "scaled.fast")
        examples = [Example("mine", "scaled", arguments)]
        faults = measure(registry, examples=examples, names=("mine",), backend="fast").faults
        assert bool(faults) == (backend == "fast")


def test_torch_is_a_peer(registry):
    torch = pytest.importorskip("torch")

    def by_torch(arguments):
        return suite.TorchFunction(lambda x, factor: x * factor * arguments["steps"])

    report = measure(registry, {"torch": by_torch})
    assert list(report.faults) == []
    assert isinstance(report.tables[0].rows[1][-3], float)
    half = TorchArray(torch.ones(3, dtype=torch.bfloat16)).block_until_ready()
    np.testing.assert_array_equal(np.asarray(half), np.ones(3, np.float32))


class Tensor:
    """As much of a tensor as a pass of PyTorch uses."""

    is_cuda, itemsize = False, 4

    def __init__(self, array):
        self.array = np.asarray(array)

    def itself(self):
        return self

    detach = clone = cpu = requires_grad_ = itself

    def is_floating_point(self):
        return True

    def numpy(self):
        return self.array


def test_a_pass_of_torch_has_results_and_gradients_in_order(registry, monkeypatch):
    def grad(results, arrays, cotangents):
        (out,), (d_out,) = results, cotangents
        np.testing.assert_array_equal(out.array, x.array * factor.array * 2)
        assert [len(array.array.shape) for array in arrays] == [2, 1]
        return [Tensor(d_out.array * factor.array * 2), Tensor((d_out.array * x.array * 2).sum(0))]

    torch = SimpleNamespace(from_dlpack=Tensor, autograd=SimpleNamespace(grad=grad))
    monkeypatch.setitem(sys.modules, "torch", torch)
    arrays = EXAMPLE.arguments(0)
    x, factor = Tensor(arrays["x"]), Tensor(arrays["factor"])
    peer = suite.TorchFunction(lambda x, factor: Tensor(x.array * factor.array * 2))
    report = measure(registry, {"torch": lambda arguments: peer})
    assert list(report.faults) == []
    assert all(isinstance(row[-3], float) for row in report.tables[0].rows)


PAGES_EXAMPLE = Example(
    "pages", "store", lambda draw: {"pages": jnp.zeros((64, 128)), "row": jnp.ones(128)}, uses=frozenset({"benchmark"})
)


def registry_of_store(store):
    """An operation that adds a row to the first page: so it has another result each time."""
    registry = Registry(plugins="")
    axes = Axes({"pages": "pages dim", "row": "dim"}, {"new_pages": "pages dim"}, whole="pages dim")
    operation = Operation(
        name="store",
        signature=lambda pages, row: None,
        axes=axes,
        aliases={"new_pages": "pages"},
        examples=lambda: (PAGES_EXAMPLE,),
    )
    registry.register(operation)
    plain = SimpleNamespace(run_backend=hookimpl(lambda inv, cfg: inv["pages"].at[0].add(inv["row"])))
    registry.register(plain, "store.reference")
    registry.register(SimpleNamespace(run_backend=hookimpl(store), PLATFORMS={"cpu": 1}), "store.fast")
    return registry


def test_each_run_updates_what_the_one_before_returned():
    registry = registry_of_store(lambda inv, cfg: inv["pages"].at[0].add(inv["row"]))
    inputs = draw(PAGES_EXAMPLE, registry)
    program = jitted(by_core(PAGES_EXAMPLE, None, registry), "forward", inputs)
    program.compile()
    (pages,) = program()
    place = pages.unsafe_buffer_pointer()
    for count in (2.0, 3.0):
        (again,) = program()
        assert pages.is_deleted()
        assert again.unsafe_buffer_pointer() == place
        np.testing.assert_array_equal(again[0], np.full(128, count))
        pages = again
    assert not inputs.arrays["pages"].any()
    (from_the_start,) = bound(program, "forward", inputs)()
    np.testing.assert_array_equal(from_the_start[0], np.ones(128))


def test_what_updates_in_place_is_checked_and_timed(monkeypatch):
    run = lambda store: suite.run("store", names=("pages",), rounds=1, registry=registry_of_store(store))
    report = run(lambda inv, cfg: inv["pages"].at[0].set(inv["row"] + inv["pages"][0]))
    assert list(report.faults) == []
    (row,) = report.tables[0].rows
    assert all(isinstance(row[report.tables[0].columns.index(name)], float) for name in (suite.OURS, "reference"))
    report = run(lambda inv, cfg: inv["pages"].at[1].add(inv["row"]))
    assert "fast, forward, pages: new_pages is off by" in report.faults[0]


#: The suites with an example that a CPU can run, whose name is ``SMALL``, and a peer in plain JAX, ``by_xla``.
WITH_SMALL_CALL = {
    point.name: point.load()
    for point in entry_points(group=GROUP)
    if point.dist.name == "ejkernel-bench" and hasattr(point.load(), "by_xla")
    if isinstance(getattr(point.load(), "SMALL", None), str)
}


@pytest.mark.parametrize("name", WITH_SMALL_CALL)
def test_a_suite_measures_its_small_call_with_all_peers(name, monkeypatch):
    report = WITH_SMALL_CALL[name].run(rounds=1, small=True)
    assert list(report.faults) == []
    for table in report.tables:
        for column in (suite.OURS, "xla", "XLA"):
            assert isinstance(table.rows[0][table.columns.index(column)], float)
    assert ("torch" in report.text) == (not is_installed("torch"))
    by_xla = WITH_SMALL_CALL[name].by_xla

    def negative(arguments):
        return lambda **arrays: jax.tree.map(lambda result: -1 - result, by_xla(arguments)(**arrays))

    monkeypatch.setattr(WITH_SMALL_CALL[name], "by_xla", negative)
    faults = WITH_SMALL_CALL[name].run(rounds=1, small=True).faults
    assert len(faults) >= len(report.tables)  # a fault for each result
    for fault in faults:
        assert f"XLA, forward, {WITH_SMALL_CALL[name].SMALL}" in fault


NORMS = {"rms_norm": rms_norm, "layer_norm": layer_norm}


@pytest.mark.long
@pytest.mark.parametrize("name", NORMS)
def test_a_normalization_is_measured_against_plain_jax(name):
    report = NORMS[name].run(rounds=1, small=True)
    assert list(report.faults) == []
    both_passes = 2 * len(rms_norm.SMALL) * len(suite.PASSES)
    forward_alone = 2 * len(rms_norm.SMALL)
    assert [len(table.rows) for table in report.tables] == [both_passes, forward_alone, forward_alone, 2]
    for table in report.tables:
        assert all(isinstance(row[table.columns.index("XLA")], float) for row in table.rows)
    bars = [bar.name for bar in report.bars]
    prefixes = [f"{name}, ", f"{name}, ", f"{name}_bwd, ", f"{name}_quantized, ", *[f"{name} between products, "] * 2]
    assert len(bars) == len(prefixes)
    assert all(bar.startswith(prefix) for bar, prefix in zip(bars, prefixes, strict=True))
    assert ("torch" in report.text) == (not is_installed("torch"))


def test_minima_of_normalizations_are_for_calls_of_the_sweep():
    sizes = list(sweep())
    assert set(rms_norm.LARGE) <= set(sizes)
    calls = [call for place, size in enumerate(sizes) for call in rms_norm._calls("rms_norm", *size, place)]
    assert all(len({call.name for call in calls if call.op == op}) for op in ("rms_norm", "rms_norm_bwd"))
    formats = {call.name.rpartition(", ")[2] for call in calls if call.op == "rms_norm_quantized"}
    assert formats == set(FORMATS)
    for op, counts in {"rms_norm": [3, 3, 3, 0, 0, 0, 0], "rms_norm_bwd": [0] * 4, "rms_norm_quantized": [6]}.items():
        minima = [minimum for minimum in rms_norm._minima(op, "triton") if not minimum.is_worst]
        applicable = [sum(minimum.applies(call) for call in calls if call.op == op) for minimum in minima]
        assert applicable == counts[: len(minima)]
    for names, is_taken in ((("x", "weight"), True), (("x", "weight", "residual"), False), (("x",), False)):
        assert (rms_norm._torch_peer(rms_norm.by_torch, dict.fromkeys(names, 1)) is not None) == is_taken


def test_a_quick_run_has_the_extremes_and_all_rows_and_dims():
    sizes, all_sizes = rms_norm._sizes(quick=True), rms_norm._sizes(quick=False)
    assert (len(sizes), len(all_sizes)) == (13, 31)
    assert set(rms_norm.LARGE) <= set(sizes) < set(all_sizes) == set(sweep())
    for place in (0, 1):
        assert {size[place] for size in sizes} == {size[place] for size in all_sizes}
