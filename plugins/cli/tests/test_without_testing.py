"""Where ejkernel-testing is not installed, no call needs the examples that are made with it."""

from __future__ import annotations

import sys

from ejkernel_cli import parse_call


def test_a_call_is_described_without_the_examples(monkeypatch):
    for module in [name for name in sys.modules if name.startswith(("ejkernel_testing", "ejkernel_ops.rms_norm.ex"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "ejkernel_testing", None)
    call = parse_call("rms_norm", ["--shape", "3x8", "--weight", "8"])
    assert {name: (array.shape, array.dtype.name) for name, array in call.arrays.items()} == {
        "x": ((3, 8), "float32"),
        "weight": ((8,), "float32"),
    }
