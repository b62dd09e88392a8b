"""FlashAttention 3 and 4 and quack: called as their packages want it, by stand-ins of these that compute with NumPy."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import pytest

from ejkernel_bench import _flash_attention_peers, grouped_matmul, hopper
from ejkernel_bench._calls import PASSES, abstract_inputs, by_core, describe
from ejkernel_bench._flash_attention_peers import LIBRARY, by_fa3, by_fa4, whole_forward, whole_library
from ejkernel_bench._grouped_products import by_quack
from ejkernel_bench._peers import TorchFunction, program_of
from ejkernel_ops.flash_attention.sizes import self_attention
from ejkernel_ops.grouped_matmul.sizes import Layer

PLAIN = self_attention(2, 12, 4, 16, "bfloat16", kv_heads=2)
WINDOWED = self_attention(2, 12, 4, 16, "bfloat16", window=5)
TWO_SIDED = self_attention(2, 12, 4, 16, "bfloat16", causal=False, window=5)
CAPPED = self_attention(2, 12, 4, 16, "bfloat16", soft_cap=0.5)
WITH_SINKS = self_attention(2, 12, 4, 16, "bfloat16", sinks=True)
PACKED = self_attention(1, 12, 4, 16, "bfloat16", sequences=3)


class Tensor(np.ndarray):
    """A NumPy array with as much of PyTorch's interface as the peers use."""

    def to(self, dtype):
        return self.astype(dtype)

    def t(self):
        return self.T

    def transpose(self, first, second):
        return self.swapaxes(first, second)


def attention(q, k, v, causal, left, right, cap=0.0, sinks=None):
    """In float64. A side of None or below 0 has no limit."""
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    repeats = q.shape[2] // k.shape[2]
    k, v = (np.repeat(array, repeats, axis=2) for array in (k, v))
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    logits = cap * np.tanh(logits / cap) if cap else logits
    distance = np.arange(k.shape[1]) - np.arange(q.shape[1])[:, None]
    unlimited = [side is None or side < 0 for side in (left, right)]
    seen = (unlimited[0] | (distance >= -(left or 0))) & (unlimited[1] | (distance <= (right or 0)))
    weights = np.exp(logits) * (seen & (distance <= 0) if causal else seen)
    total = weights.sum(-1) + (0 if sinks is None else np.exp(np.asarray(sinks, np.float64))[:, None])
    return np.einsum("bhqk,bkhd->bqhd", weights / total[..., None], v)


def module(monkeypatch, name, **functions):
    stand_in = ModuleType(name)
    stand_in.__dict__.update(functions, __spec__=SimpleNamespace(submodule_search_locations=None))
    monkeypatch.setitem(sys.modules, name, stand_in)


@pytest.fixture
def library(monkeypatch, tmp_path):
    """The library of the whole FA3, in a folder of the path."""
    file = tmp_path / LIBRARY
    file.touch()
    loaded = []

    def fwd(*values):
        given = dict(zip(_flash_attention_peers.WHOLE_ARGUMENTS, values, strict=True))
        calls.append(given)
        assert len(values) == 37
        scale, causal, left, right, cap = values[23:28]
        assert scale == values[0].shape[-1] ** -0.5
        return attention(*values[:3], causal, left, right, cap, sinks=values[33]), "lse", None, None

    calls = []
    ops = SimpleNamespace(load_library=loaded.append, _vllm_fa3_C=SimpleNamespace(fwd=fwd))
    module(monkeypatch, "torch", ops=ops)
    monkeypatch.syspath_prepend(str(tmp_path))
    _flash_attention_peers._loaded.cache_clear()
    yield SimpleNamespace(file=file, loaded=loaded, calls=calls)
    _flash_attention_peers._loaded.cache_clear()


def values_of(example):
    arrays = {name: value for name, value in example.arguments(0).items() if hasattr(value, "shape")}
    return {name: np.asarray(value).view(Tensor) for name, value in arrays.items()}


def assert_right(function, example):
    arrays = {name: value for name, value in example.arguments(0).items() if hasattr(value, "shape")}
    expected = by_core(example, "reference")(**{name: array.astype("float32") for name, array in arrays.items()})
    np.testing.assert_allclose(np.asarray(function(**values_of(example))), np.asarray(expected), atol=2e-5)


# -- attention ---------------------------------------------------------------------------------------------------------


def test_fa3_computes_plain_calls_forward(monkeypatch):
    module(monkeypatch, "fa3_fwd_interface", flash_attn_func=lambda q, k, v, causal: attention(q, k, v, causal, -1, -1))
    peer = by_fa3(describe(PLAIN))
    assert_right(peer.function, PLAIN)
    assert [program_of(by_fa3, PLAIN, abstract_inputs(PLAIN), pass_name) is None for pass_name in PASSES] == [
        False,
        True,
    ]
    monkeypatch.setattr(_flash_attention_peers, "whole_library", lambda: None)
    others = (WINDOWED, CAPPED, WITH_SINKS, PACKED, self_attention(2, 12, 4, 16, "float32"))
    assert [by_fa3(describe(example)) for example in others] == [None] * 5


@pytest.mark.parametrize("example", [PLAIN, WINDOWED, TWO_SIDED, CAPPED, WITH_SINKS], ids=lambda example: example.name)
def test_the_whole_fa3_computes_windows_caps_and_sinks(library, example):
    assert_right(by_fa3(describe(example)).function, example)
    assert library.loaded == [str(library.file)]
    assert library.calls[-1]["num_splits"] == 1  # a plain call, as it is in training
    assert by_fa3(describe(PACKED)) is None


def test_pages_are_given_to_the_whole_fa3_by_name(library):
    arrays = values_of(PLAIN)
    given = {"q": arrays["query"], "k": arrays["key"], "v": arrays["value"], "softmax_scale": 0.25}
    whole_forward(**given, page_table="pages", seqused_k="lengths", causal=True)
    call = library.calls[-1]
    assert {name: value for name, value in call.items() if value is not None and name not in given} == {
        "page_table": "pages",
        "seqused_k": "lengths",
        "causal": True,
        "window_left": -1,
        "window_right": -1,
        "softcap": 0.0,
        "rotary_interleaved": True,
        "num_splits": 0,
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }
    with pytest.raises(TypeError, match="FA3 has no arguments pages"):
        whole_forward(pages=1)


def test_fa4_computes_windows_in_both_passes(monkeypatch):
    def flash_attn_func(q, k, v, causal, window_size):
        return attention(q, k, v, causal, *window_size), "lse"

    for name in ("flash_attn", "flash_attn.cute"):
        module(monkeypatch, name)
    module(monkeypatch, "flash_attn.cute.interface", flash_attn_func=flash_attn_func)
    for example in (PLAIN, WINDOWED, TWO_SIDED):
        assert_right(by_fa4(describe(example)).function, example)
        for pass_name in PASSES:
            assert isinstance(program_of(by_fa4, example, abstract_inputs(example), pass_name), TorchFunction)
    assert [by_fa4(describe(example)) for example in (CAPPED, WITH_SINKS, PACKED)] == [None] * 3


def test_what_is_installed_is_found_without_an_import(monkeypatch, tmp_path):
    found = {"torch"}
    monkeypatch.setattr(_flash_attention_peers, "is_installed", lambda name: name in found)
    assert whole_library() is None
    assert _flash_attention_peers.peers() == {"FA3": None, "FA4": None}
    package = tmp_path / "vllm" / "vllm_flash_attn"
    package.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('it is not imported')")
    (package / LIBRARY).touch()
    cute = tmp_path / "flash_attn" / "cute"
    cute.mkdir(parents=True)
    (cute / "interface.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert whole_library() == package / LIBRARY
    assert _flash_attention_peers.peers() == {"FA3": by_fa3, "FA4": by_fa4}
    found.clear()
    assert _flash_attention_peers.peers() == {"FA3": None, "FA4": None}


def test_hopper_shows_further_peers():
    example = self_attention(1, 24, 2, 16, "bfloat16")

    def our_peer(arguments):
        return lambda **arrays: by_core(example, "reference")(**arrays)

    def refuses(arguments):
        return None

    report = hopper.compare([example], "xla", 1, {"FA3": our_peer, "FA4": refuses, "FA5": None})
    assert (report.faults, report.text) == ((), "flash_attention: not installed, and not measured: FA5")
    for row in (dict(zip(report.tables[0].columns, row, strict=True)) for row in report.tables[0].rows):
        assert row["FA3 / ejkernel"] == pytest.approx(row["FA3"] / row["ejkernel"])
        assert row["FA4"] == "-"


# -- grouped products --------------------------------------------------------------------------------------------------


@pytest.fixture
def quack(monkeypatch):
    """``gemm``, whose left rows or, of two matrices, contracted axis is divided at the ends."""
    tunings = []

    def gemm(a, b, cu_seqlens_m=None, cu_seqlens_k=None, tuned=True):
        tunings.append(tuned)
        starts = cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m
        assert starts.dtype == np.int32
        assert starts[0] == 0
        a, b = (np.asarray(array, np.float64) for array in (a, b))
        pairs = list(itertools.pairwise(starts))
        if cu_seqlens_m is None:
            return np.stack([a[:, start:end] @ b[start:end] for start, end in pairs])
        return np.concatenate([a[start:end] @ b[number] for number, (start, end) in enumerate(pairs)])

    module(monkeypatch, "quack")
    module(monkeypatch, "quack.gemm_interface", gemm=gemm)
    cumsum = lambda array, axis: np.cumsum(array, axis).view(Tensor)
    functional = SimpleNamespace(pad=lambda array, widths: np.pad(array, widths).view(Tensor))
    module(monkeypatch, "torch", cumsum=cumsum, int32=np.int32, nn=SimpleNamespace(functional=functional))
    return tunings


@pytest.mark.parametrize("direction", ["forward", "d_lhs", "d_rhs"])
def test_quack_computes_all_directions(quack, direction):
    example = grouped_matmul.DIRECTIONS[direction](Layer("tiny", 26, 8, 6, 4))
    arguments = example.arguments(0)
    product = by_quack(describe(example)).function
    for _ in range(2):  # the ends are computed once
        out = product(**values_of(example))
    arrays = {name: value for name, value in arguments.items() if hasattr(value, "shape")}
    wide = {name: value.astype("float32") if value.dtype == "bfloat16" else value for name, value in arrays.items()}
    np.testing.assert_allclose(np.asarray(out), np.asarray(by_core(example, "reference")(**wide)), atol=2e-5)
    assert quack == [True, True]
    assert by_quack({**describe(example), "bias": jax.ShapeDtypeStruct((4, 6), "float32")}) is None


def test_quack_need_not_tune(quack):
    example = grouped_matmul.DIRECTIONS["forward"](Layer("tiny", 26, 8, 6, 4))
    by_quack(describe(example), is_tuned=False).function(**values_of(example))
    assert quack == [False]
