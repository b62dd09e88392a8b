"""The first call in a new process at a small size: it is measured, and wrong results and torch are reported."""

from __future__ import annotations

import pytest

from ejkernel_bench import first_call
from ejkernel_bench.first_call import EMPTY, FULL, OURS, PEER, FirstCall
from ejkernel_ops.flash_attention.sizes import self_attention


@pytest.mark.long
def test_both_are_measured_with_empty_and_with_full_caches(monkeypatch):
    monkeypatch.setattr(first_call, "ON_CPU", self_attention(1, 32, 2, 16))
    report = first_call.run("xla", rounds=1)
    assert report.faults == ()
    rows = {(name, caches): (kernel, torch) for name, kernel, caches, *_, torch in report.tables[0].rows}
    kernels = {OURS: "flash_attention.xla", PEER: "XLA"}
    assert rows == {(name, caches): (kernels[name], "no") for name in kernels for caches in (EMPTY, FULL)}
    assert [(bar.limit, bar.unit) for bar in report.bars] == [(4.0, "s"), (1.0, "s")]


def test_wrong_results_and_an_import_of_torch_are_reported(monkeypatch):
    results = {OURS: FirstCall(3.0, 0.5, True, "kernel"), PEER: FirstCall(1.0, 0.0, False, "XLA")}
    monkeypatch.setattr(first_call, "first_call", lambda name, *arguments: results[name])
    report = first_call.run(rounds=2)
    assert report.faults == (f"{OURS}: the relative error is 5.0e-01, over 2.0e-05", f"{OURS} has imported torch")
    assert [bar.measured for bar in report.bars] == [2.0, 2.0]
    assert [bar.is_held for bar in report.bars] == [True, False]


def test_a_process_with_its_caches_in_a_folder_writes_them_there(tmp_path):
    first_call.first_call(OURS, self_attention(1, 32, 2, 16), "xla", tmp_path)
    assert list((tmp_path / "JAX_COMPILATION_CACHE_DIR").iterdir())
