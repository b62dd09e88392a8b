"""The suites of the operations for mixtures of experts at tiny sizes: peers by value, faults, bars. No time is judged."""

from __future__ import annotations

import doctest
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_bench import _grouped_products, _profile, grouped_matmul, moe_permute_matmul, moe_route, moe_step
from ejkernel_bench._calls import benchmark_examples, draw
from ejkernel_bench._grouped_products import by_ragged_dot, by_tokamax, by_torch
from ejkernel_bench.grouped_matmul import DIRECTIONS, GLUON, OURS, PARTS, TORCH, TRITON, skewed
from ejkernel_ops.grouped_matmul.sizes import PEERS, Layer
from ejkernel_ops.moe_permute_matmul import examples as moe_permute_matmul_examples
from ejkernel_ops.moe_route import definition

LAYER = Layer("35 x 12 x 20, 4 groups", 35, 12, 20, 4)


def expected(arrays, transpose):
    """By a loop over groups, in float64."""
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    ends = arrays["boundaries"][1:] if "boundaries" in arrays else arrays["group_sizes"].cumsum()
    lhs = arrays["lhs"].astype(np.float64)
    groups = list(zip([0, *ends], ends, strict=False))
    if "d_out" in arrays:
        d_out = arrays["d_out"].astype(np.float64)
        return np.stack([lhs[start:end].T @ d_out[start:end] for start, end in groups])
    rhs = arrays["rhs"].astype(np.float64)
    matrices = rhs.swapaxes(1, 2) if transpose else rhs
    return np.concatenate([lhs[start:end] @ matrix for (start, end), matrix in zip(groups, matrices, strict=True)])


class Tensor:
    """As much of a tensor as a grouped product of PyTorch uses."""

    def __init__(self, array):
        self.array = np.asarray(array)

    def __getitem__(self, places):
        return Tensor(self.array[places.array if isinstance(places, Tensor) else places])

    def __floordiv__(self, number):
        return Tensor(self.array // number)

    def clone(self):
        return Tensor(self.array.copy())

    def t(self):
        return Tensor(self.array.T)

    def transpose(self, first, second):
        return Tensor(self.array.swapaxes(first, second))

    def to(self, dtype):
        return Tensor(self.array.astype(dtype))


def grouped_mm(left, right, offs):
    """``torch._grouped_mm``: the rows of the left or, of two matrices, the contracted axis is divided at ``offs``."""
    assert offs.array.dtype == np.int32
    left, right = left.array.astype(np.float64), right.array.astype(np.float64)
    groups = list(zip([0, *offs.array], offs.array, strict=False))
    if right.ndim == 2:
        return Tensor(np.stack([left[:, start:end] @ right[start:end] for start, end in groups]))
    return Tensor(np.concatenate([left[start:end] @ one for (start, end), one in zip(groups, right, strict=True)]))


@pytest.fixture
def torch(monkeypatch):
    cumsum = lambda tensor, axis: Tensor(tensor.array.cumsum(axis, dtype=np.int64))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_grouped_mm=grouped_mm, cumsum=cumsum, int32=np.int32))


@pytest.fixture
def tokamax(monkeypatch):
    """With a product that checks that its tuning would know the number of rows."""

    def ragged_dot_general(lhs, rhs, *, group_sizes, ragged_dot_dimension_numbers):
        assert group_sizes.rows == LAYER.rows
        return jax.lax.ragged_dot_general(lhs, rhs, group_sizes.value, ragged_dot_dimension_numbers)

    sizes = lambda value, rows: SimpleNamespace(value=value, rows=rows)
    module = SimpleNamespace(RaggedDotGroupSizes=sizes, ragged_dot_general=ragged_dot_general)
    monkeypatch.setitem(sys.modules, "tokamax", module)


@pytest.mark.parametrize("is_skewed", [False, True], ids=["routed", "skewed"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_peers_compute_all_directions(torch, tokamax, direction, is_skewed):
    example = DIRECTIONS[direction](LAYER)
    example = skewed(example) if is_skewed else example
    arguments = example.arguments(0)
    arrays = draw(example).arrays
    right = expected(arrays, arguments.get("transpose_rhs"))
    assert right.shape == {"forward": (35, 20), "d_lhs": (35, 12), "d_rhs": (4, 12, 20)}[direction]
    for peer in (by_ragged_dot, by_tokamax):
        out = np.asarray(peer(arguments)(**arrays), np.float64)
        np.testing.assert_allclose(out, right, rtol=0.02, atol=0.02)
    tensors = {name: Tensor(array) for name, array in arrays.items()}
    product = by_torch(arguments).function
    np.testing.assert_allclose(product(**tensors).array, right, rtol=1e-12)
    np.testing.assert_allclose(product(**tensors).array, right, rtol=1e-12)  # with the ends that it has kept


def test_peers_refuse_what_they_do_not_have():
    arguments = DIRECTIONS["forward"](LAYER).arguments(0)
    for others in ({"activation": "silu_gated"}, {"rhs_bias": jnp.ones((4, 20))}, {"group_offset": jnp.ones(1, int)}):
        assert [peer(arguments | others) for peer in (by_ragged_dot, by_tokamax, by_torch)] == [None] * 3


def test_half_of_the_rows_are_in_one_group():
    for direction in ("forward", "d_rhs"):
        arguments = skewed(DIRECTIONS[direction](LAYER)).arguments(0)
        sizes = np.diff(arguments["boundaries"]) if direction == "d_rhs" else arguments["group_sizes"]
        assert (sizes.sum(), sizes[2], len(sizes)) == (35, 17, 4)


def test_bytes_are_those_of_matrices_that_have_rows():
    inputs = draw(DIRECTIONS["forward"](LAYER))
    inputs.arrays["group_sizes"] = jnp.array([20, 0, 15, 0])
    assert grouped_matmul.used_bytes(inputs) == 2 * 12 * 20 * 2


def test_the_published_shapes_are_in_the_parts():
    counts = {name: len(grouped_matmul._layers(name, small=False)) for name in PARTS}
    assert counts == {name: 1 if name == "decode" else 8 for name in PARTS}
    assert len(PEERS) == 9


def cells_of(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_a_direction_is_measured():
    report = grouped_matmul.measure("d_rhs", [LAYER], None, rounds=1)
    assert report.faults == ()
    (routed,), (one_group,) = map(cells_of, report.tables)
    assert (routed[""], one_group[""]) == (f"{LAYER.name}, forward", f"{LAYER.name}, half in one, forward")
    assert all(isinstance(routed[name], float) for name in (OURS, "xla", "ragged_dot"))
    assert routed["TFLOP/s"] == pytest.approx(2 * 35 * 12 * 20 / routed[OURS] / 1e9)
    assert routed[f"ragged_dot / {OURS}"] == pytest.approx(routed["ragged_dot"] / routed[OURS])
    assert routed["over the best"] == pytest.approx(routed[OURS] / routed["xla"])
    assert "ragged_dot" not in one_group
    assert routed["kernels"] == "grouped_matmul_d_rhs.xla"
    assert (routed[GLUON], routed[TRITON], one_group[GLUON]) == ("-", "-", "-")
    skew = next(bar for bar in report.bars if "one group" in bar.name)
    assert skew.name == f"{LAYER.name}: half of the rows in one group / as routed"
    assert skew.measured == pytest.approx(one_group[OURS] / routed[OURS])


def test_want_of_memory_is_told_and_a_wrong_peer_is_a_fault(monkeypatch):
    def fails(arguments):
        def run(**arrays):
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

        return run

    def is_wrong(arguments):
        product = by_ragged_dot(arguments)
        return lambda **arrays: product(**arrays).at[3, 7].add(1.0)

    monkeypatch.setattr(grouped_matmul, "peers", lambda: {"fails": fails, "is wrong": is_wrong, "absent": None})
    report = grouped_matmul.measure("forward", [LAYER], None, rounds=1)
    (fault,) = report.faults
    assert fault.startswith(f"is wrong, forward, {LAYER.name}: out is off by")
    (row,) = cells_of(report.tables[0])
    assert (row["fails"], row["is wrong"]) == ("-", "-")
    assert report.text.splitlines() == [
        "grouped_matmul: not installed, and not measured: absent",
        f"fails, forward, {LAYER.name}: RuntimeError: RESOURCE_EXHAUSTED: out of memory",
    ]


def test_a_peer_that_fails_beside_others_is_compiled_alone(monkeypatch):
    attempts = []

    def fails_once(arguments):
        attempts.append(arguments)
        if len(attempts) == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return by_ragged_dot(arguments)

    monkeypatch.setattr(grouped_matmul, "peers", lambda: {"fails once": fails_once})
    report = grouped_matmul.measure("forward", [LAYER], None, rounds=1)
    assert (report.faults, report.text) == ((), "")
    (row,) = cells_of(report.tables[0])
    assert isinstance(row["fails once"], float)


def test_what_tokamax_does_not_tune_is_told(tokamax, monkeypatch):
    monkeypatch.setattr(grouped_matmul, "peers", lambda: {"tokamax": by_tokamax})
    call = SimpleNamespace(cached_autotuning_data=None)
    sys.modules["tokamax"].autotuning = SimpleNamespace(get_bound_args=lambda lowered: [call])
    monkeypatch.setattr(grouped_matmul, "TUNING_S", -1.0)
    report = grouped_matmul.measure("tuned-forward", [LAYER], None, rounds=1)
    assert report.faults == ()
    assert report.text.endswith("NotTuned: its tuning took too long: 0 of 1 calls are tuned")
    sys.modules["tokamax"].autotune = lambda calls, progress_bar: Tuned([1])
    monkeypatch.setattr(grouped_matmul, "TUNING_S", 60.0)
    report = grouped_matmul.measure("tuned-forward", [LAYER], None, rounds=1)
    (row,) = cells_of(report.tables[0])
    assert (report.faults, report.text) == ((), "")
    assert row[f"tokamax tuned / {OURS}"] == pytest.approx(row["tokamax tuned"] / row[OURS])


def bars_of(routed, skewed_ones=None, **fields):
    bars = grouped_matmul.bars(grouped_matmul.Part("forward", **fields), routed, skewed_ones or {})
    return {bar.name: (bar.measured, bar.is_held) for bar in bars}


def test_bars_are_means_worst_cases_and_limits():
    first = {OURS: 1.0, GLUON: 1.0, TRITON: 1.6, TORCH: 0.9, "tokamax": 1.5}
    second = {OURS: 2.0, GLUON: 1.9, TRITON: 2.2, TORCH: 4.0, "tokamax": 4.0, "ragged_dot": 40.0}
    bars = bars_of({"a": first, "b": second}, {"a, half in one": {OURS: 1.2, GLUON: 0.5}})
    expected_bars = {
        "over torch, geometric mean of 2": ((0.9 * 2) ** 0.5, True),
        "over torch, the worst of 2": (0.9, False),
        "over tokamax, geometric mean of 2": ((1.5 * 2) ** 0.5, True),
        "over ragged_dot, geometric mean of 1": (20.0, True),
        "triton over gluon_sm90, geometric mean of 2": ((1 / 1.6 * 1.9 / 2.2) ** 0.5, False),
        "a: chosen / best": (1.0, True),
        "b: chosen / best": (2.0 / 1.9, False),
        "a: half of the rows in one group / as routed": (1.2, False),
    }
    assert {*bars} == {*expected_bars}
    for name, (measured, is_held) in expected_bars.items():
        assert bars[name] == (pytest.approx(measured), is_held), name


def test_the_bar_of_decoding_is_the_copy_rate():
    bars = bars_of({"a": {OURS: 1.0, "copy": 0.95}}, is_decode=True)
    assert bars == {"a: of the copy rate": (0.95, True)}


# -- tokamax's own tuning ----------------------------------------------------------------------------------------------


class Tuned:
    """The result of tuning, which is merged."""

    def __init__(self, data):
        self.data = tuple(data)

    def __or__(self, other):
        return Tuned(self.data + other.data)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def tuning(monkeypatch, calls, autotune=lambda calls, progress_bar: Tuned(calls)):
    autotuning = SimpleNamespace(get_bound_args=lambda lowered: calls)
    monkeypatch.setitem(sys.modules, "tokamax", SimpleNamespace(autotuning=autotuning, autotune=autotune))


def bound_call(has_record=False):
    return SimpleNamespace(op=1, cached_autotuning_data="a record" if has_record else None)


def test_all_calls_are_tuned(monkeypatch):
    calls = [bound_call(), bound_call()]
    tuning(monkeypatch, calls)
    assert _grouped_products.tuning_of_tokamax("program", float("inf")).data == tuple(calls)


@pytest.mark.parametrize(
    ("calls", "deadline", "autotune", "reason"),
    [
        ([], float("inf"), None, "has no calls of tokamax"),
        ([bound_call()] * 3, 0.0, None, "took too long: 0 of 3 calls are tuned"),
        ([bound_call()], float("inf"), lambda calls, progress_bar: Tuned([]), "failed for int"),
    ],
)
def test_a_tuning_without_a_result_says_why(monkeypatch, calls, deadline, autotune, reason):
    tuning(monkeypatch, calls, **({} if autotune is None else {"autotune": autotune}))
    with pytest.raises(_grouped_products.NotTuned, match=reason):
        _grouped_products.tuning_of_tokamax("program", deadline)


def test_a_call_that_has_a_record_needs_no_tuning(monkeypatch):
    tuning(monkeypatch, [bound_call(has_record=True)], lambda calls, progress_bar: Tuned([]))
    assert _grouped_products.tuning_of_tokamax("program", float("inf")).data == ()


# -- moe_route ---------------------------------------------------------------------------------------------------------


def routes():
    logits = jax.random.normal(jax.random.key(0), (50, 12))
    return definition.forward(
        {
            "router_logits": logits,
            "k": 3,
            "score": "softmax",
            "expert_bias": None,
            "num_groups": None,
            "renormalize": True,
            "scaling_factor": 1.0,
        }
    )


def test_right_routes_have_no_fault():
    assert list(moe_route.wrong_routes(routes(), routes())) == []


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, lambda weights: weights.at[4, 1].add(1e-3), "weights of the same experts are off by up to 1.0e-03"),
        (0, lambda weights: weights.at[4, 1].set(jnp.nan), "weights of the same experts are off by up to nan"),
        (1, lambda experts: experts.at[4, 1].add(1), "a share of 6.7e-03 of the experts differs"),
        (2, lambda sizes: sizes.at[2].add(1).at[3].add(-1), "group_sizes are not those of the experts"),
        (3, lambda order: order.at[jnp.array([5, 6])].set(order[jnp.array([6, 5])]), "token_order is not that"),
    ],
    ids=["weight", "nan", "expert", "sizes", "order"],
)
def test_each_wrong_result_is_told(place, change, message):
    results = list(routes())
    results[place] = change(results[place])
    assert any(one.startswith(message) for one in moe_route.wrong_routes(results, routes()))


def test_routing_is_measured():
    report = moe_route.run(rounds=1, small=True)
    assert report.faults == ()
    (row,) = report.tables[0].rows
    cells = dict(zip(report.tables[0].columns, row, strict=True))
    assert cells[f"XLA / {OURS}"] == pytest.approx(cells["XLA"] / cells[OURS])
    assert cells["kernels"].startswith("moe_route.")
    (bar,) = report.bars
    assert (bar.name, bar.measured) == (f"{moe_route.SMALL.name}: chosen / best", cells["over the best"])
    assert cells["over the best"] == pytest.approx(cells[OURS] / cells["xla"])
    assert {*moe_route.LIMITS} <= {example.name for example in benchmark_examples("moe_route")}


# -- moe_permute_matmul ------------------------------------------------------------------------------------------------


def test_tokens_in_place_are_measured_beside_the_parts():
    report = moe_permute_matmul.run(rounds=1, small=True)
    assert report.faults == ()
    forward, both = (dict(zip(report.tables[0].columns, row, strict=True)) for row in report.tables[0].rows)
    assert (forward[""], both[""]) == ("small, forward", "small, forward+backward")
    assert "moe_permute_matmul_bwd.by_parts" in both["kernels"]
    assert {bar.name for bar in report.bars} == {
        f"small, {name}: over by_parts" for name in ("forward", "forward+backward")
    }


def test_torch_gathers_the_rows_of_tokens(torch):
    example = next(one for one in moe_permute_matmul_examples.examples() if one.name == "two-calls")
    arguments = example.arguments(0)
    assert moe_permute_matmul.by_torch(arguments) is None  # it has a bias and an activation
    plain = {**arguments, "rhs_bias": None, "activation": None}
    arrays = {name: array for name, array in plain.items() if isinstance(array, np.ndarray)}
    lhs = arrays["x"][arrays["token_order"] // plain["k"]]
    rows = int(arrays["group_sizes"].sum())
    product = moe_permute_matmul.by_torch(plain).function
    out = product(**{name: Tensor(array) for name, array in arrays.items()}).array
    right = expected({"lhs": lhs, "rhs": arrays["rhs"], "group_sizes": arrays["group_sizes"]}, transpose=False)
    assert right.shape == (rows, 32)
    np.testing.assert_allclose(out, right, rtol=1e-12)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_all_parts_run_on_a_cpu():
    report = grouped_matmul.run(rounds=1, small=True)
    assert report.faults == ()
    assert [len(table.rows) for table in report.tables] == [2, 2, 2, 2, 2, 2, 1]
    (decode,) = cells_of(report.tables[-1])
    assert isinstance(decode["TB/s"], float)


@pytest.mark.parametrize("suite", ["grouped_matmul", "moe-step"])
def test_an_unknown_part_is_an_error(ejkernel, suite):
    code, _, error = ejkernel("bench", suite, "--part", "backward")
    assert code == 2
    assert f"no part of {suite} is called backward; there are" in error


@pytest.mark.parametrize("module", [grouped_matmul, moe_step, _profile], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module):
    failures, count = doctest.testmod(module)
    assert (failures, count > 0) == (0, True)
