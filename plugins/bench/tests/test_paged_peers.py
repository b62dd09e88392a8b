"""Peers of attention over pages: called as their packages want it, by stand-ins of these that compute with NumPy."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_bench import _flash_attention_peers, _paged_peers
from ejkernel_bench._calls import PASSES, describe, draw
from ejkernel_bench._flash_attention_peers import LIBRARY, METADATA_ARGUMENTS, WHOLE_ARGUMENTS, whole_metadata
from ejkernel_bench._paged_calls import OP, PagedCall, Sequences
from ejkernel_bench._paged_peers import CUDNN, CUDNN_MODULE, FA3, FA4, FLASHINFER

DECODE = PagedCall((Sequences(3, 13),), 4, 2, 16, 4)
RAGGED = PagedCall((Sequences(3, 30, fewest=2),), 4, 2, 16, 4)
MIXED = PagedCall((Sequences(2, 13), Sequences(1, 30, 20)), 4, 2, 16, 4)
SPECULATIVE = PagedCall((Sequences(2, 30, 4, 9),), 4, 2, 16, 4)
WINDOWED = PagedCall(MIXED.sequences, 4, 2, 16, 4, window=6, has_sinks=True)
INTERLEAVED = PagedCall(MIXED.sequences, 4, 2, 16, 4, is_interleaved=True)
FP8 = PagedCall(MIXED.sequences, 4, 2, 16, 4, narrow="fp8")
FORWARD = PASSES[0]


class Tensor(np.ndarray):
    """A NumPy array with as much of PyTorch's interface as the peers use."""

    device = "card"

    def to(self, dtype):
        return self.astype(dtype)

    def float(self):
        return self.astype(np.float32)

    def new_ones(self, shape):
        return np.ones(shape, self.dtype).view(Tensor)


def attention(query, key_pages, value_pages, tables, lengths, starts, left=-1, cap=0.0, sinks=None):
    """One query after another, in float64."""
    query, key_pages, value_pages = (np.asarray(array, np.float64) for array in (query, key_pages, value_pages))
    rows = []
    for sequence, length in enumerate(lengths):
        pages = tables[sequence][: -(-length // key_pages.shape[1])]
        key, value = (array[pages].reshape(-1, *array.shape[2:])[:length] for array in (key_pages, value_pages))
        key, value = (np.repeat(array, query.shape[1] // key.shape[1], axis=1) for array in (key, value))
        for token in range(starts[sequence], starts[sequence + 1]):
            position = length - starts[sequence + 1] + token
            first = max(position - left, 0) if left >= 0 else 0
            logits = np.einsum("hd,khd->hk", query[token], key[first : position + 1]) * query.shape[2] ** -0.5
            weights = np.exp(cap * np.tanh(logits / cap) if cap else logits)
            total = weights.sum(-1) + (0 if sinks is None else np.exp(np.asarray(sinks, np.float64)))
            rows.append(np.einsum("hk,khd->hd", weights / total[:, None], value[first : position + 1]))
    return np.stack(rows)


def module(monkeypatch, name, **functions):
    stand_in = ModuleType(name)
    stand_in.__dict__.update(functions, __spec__=SimpleNamespace(submodule_search_locations=None))
    monkeypatch.setitem(sys.modules, name, stand_in)


def tensors(call):
    return {name: np.asarray(array).view(Tensor) for name, array in draw(call.example()).arrays.items()}


def expected(call):
    return ejkernel_core.call(OP, **call.arguments(0), backend="reference")


def assert_right(result, call, tolerance=2e-2):
    np.testing.assert_allclose(np.asarray(result, np.float32), np.asarray(expected(call), np.float32), atol=tolerance)


# -- of PyTorch --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fa3(monkeypatch):
    """The library of FA3: the metadata and the calls that it gets."""
    calls = SimpleNamespace(planned=[], forward=[])

    def get_scheduler_metadata(*values):
        calls.planned.append(dict(zip(METADATA_ARGUMENTS, values, strict=True)))
        return f"plan {len(calls.planned)}"

    def fwd(*values):
        given = dict(zip(WHOLE_ARGUMENTS, values, strict=True))
        calls.forward.append(given)
        assert given["scheduler_metadata"] == f"plan {len(calls.planned)}"
        assert (given["causal"], given["num_splits"], given["window_right"]) == (True, 0, 0)
        q, k, v = (np.asarray(given[name], np.float64) for name in "qkv")
        if given["k_descale"] is not None:
            assert given["q_descale"].shape == (len(given["seqused_k"]), k.shape[2])
            k, v = k * given["k_descale"][0, 0], v * given["v_descale"][0, 0]
        lengths = (given["page_table"], given["seqused_k"], given["cu_seqlens_q"])
        options = {"left": given["window_left"], "cap": given["softcap"], "sinks": given["s_aux"]}
        return attention(q, k, v, *lengths, **options), "lse", None, None

    library = SimpleNamespace(fwd=fwd, get_scheduler_metadata=get_scheduler_metadata)
    monkeypatch.setattr(_flash_attention_peers, "_loaded", lambda: library)
    return calls


@pytest.mark.parametrize("call", [DECODE, RAGGED, MIXED, WINDOWED, INTERLEAVED, FP8], ids=lambda call: call.name)
def test_fa3_gets_pages_and_a_plan_that_is_made_once(fa3, call):
    peer = _paged_peers.by_fa3(describe(call.example()))
    for _ in range(2):
        assert_right(peer.function(**tensors(call)), call)
    (planned,), given = fa3.planned, fa3.forward[0]
    longest = max(group.queries for group in call.sequences), int(call.lengths()[1].max())
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == longest
    common = ("max_seqlen_q", "max_seqlen_k", "causal", "window_left", "window_right", "num_splits")
    assert all(planned[name] == given[name] for name in common)
    sizes = ("batch_size", "num_heads", "num_heads_k", "headdim", "headdim_v", "page_size", "has_softcap")
    assert [planned[name] for name in sizes] == [len(call.lengths()[0]), 4, 2, 16, 16, 4, False]
    assert (given["window_left"], peer.tolerance) == ((call.window or 0) - 1, 6e-2 if call.narrow else None)
    assert planned["qkv_dtype"] == given["q"].dtype == given["k"].dtype


def test_fa3_has_no_int8_and_metadata_no_unknown_argument(fa3):
    assert _paged_peers.by_fa3(describe(PagedCall(DECODE.sequences, 4, 2, 16, 4, narrow="int8").example())) is None
    with pytest.raises(TypeError, match="FA3 has no arguments pages"):
        whole_metadata(pages=1)


@pytest.mark.parametrize("call", [RAGGED, MIXED, WINDOWED], ids=lambda call: call.name)
def test_fa4_gets_its_varlen_form(monkeypatch, call):
    def varlen(q, k, v, *, cu_seqlens_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k, learnable_sink, **options):
        assert (max_seqlen_q, max_seqlen_k) == (max(g.queries for g in call.sequences), int(call.lengths()[1].max()))
        assert options == {
            "causal": True,
            "softcap": 0.0,
            "window_size": (call.window - 1, 0) if call.window else (None, None),
        }
        left = -1 if options["window_size"][0] is None else options["window_size"][0]
        return attention(q, k, v, page_table, seqused_k, cu_seqlens_q, left, sinks=learnable_sink), None

    module(monkeypatch, "flash_attn.cute.interface", flash_attn_varlen_func=varlen)
    assert_right(_paged_peers.by_fa4(describe(call.example())).function(**tensors(call)), call)
    assert _paged_peers.by_fa4(describe(FP8.example())) is None


def test_flashinfer_is_planned_once(monkeypatch):
    plans = []

    class Wrapper:
        def __init__(self, room, layout, use_tensor_cores):
            assert (layout, use_tensor_cores) == ("NHD", True)

        def plan(self, starts, pages, last, heads, kv_heads, dim, page_size, **options):
            assert (heads, kv_heads, dim, page_size) == (4, 2, 16, 4)
            counts = np.diff(starts)
            tables = np.zeros((len(counts), counts.max()), int)
            for table, first, count in zip(tables, starts, counts, strict=False):
                table[:count] = pages[first : first + count]
            plans.append((tables, (counts - 1) * page_size + last, options["window_left"]))

        def run(self, query, pages):
            tables, lengths, left = plans[-1]
            return attention(query, *pages, tables, lengths, np.arange(len(query) + 1), left)

    numbers = {"int32": np.int32, "uint8": np.uint8, "tensor": lambda values, dtype, device: np.array(values, dtype)}
    module(monkeypatch, "torch", empty=lambda *shape, dtype, device: np.zeros(1), **numbers)
    module(monkeypatch, "flashinfer", BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    call = attrs.evolve(RAGGED, window=6)
    peer = _paged_peers.by_flashinfer(describe(call.example()))
    for _ in range(2):
        assert_right(peer.function(**tensors(call)), call)
    assert len(plans) == 1
    assert all(_paged_peers.by_flashinfer(describe(other.example())) is None for other in (MIXED, WINDOWED, FP8))


# -- of JAX ------------------------------------------------------------------------------------------------------------


def test_cudnn_gets_tables_of_the_whole_pool(monkeypatch):
    def paged_attention(query, key, value, q_seqlen, kv_seqlen, page_table_k, page_table_v, *, scale, mask_type):
        batch, one, _, dim = query.shape
        assert (one, scale, mask_type, key.shape[0]) == (1, dim**-0.5, "padding", batch * page_table_k.shape[2])
        assert page_table_k.shape == (batch, 1, 4, 1)
        assert (np.asarray(q_seqlen) == 1).all()
        given = (np.asarray(page_table_k)[:, 0, :, 0], np.asarray(kv_seqlen), np.arange(batch + 1))
        return jnp.asarray(attention(query[:, 0], key, value, *given), query.dtype)[:, None]

    module(monkeypatch, CUDNN_MODULE, paged_attention=paged_attention, MaskType=SimpleNamespace(PADDING="padding"))
    assert_right(_paged_peers.by_cudnn(describe(DECODE.example()))(**draw(DECODE.example()).arrays), DECODE)
    others = (MIXED, RAGGED, WINDOWED, FP8, attrs.evolve(DECODE, is_interleaved=True), attrs.evolve(DECODE, window=3))
    assert all(_paged_peers.by_cudnn(describe(call.example())) is None for call in others)


@pytest.mark.parametrize(
    "call",
    [
        *(DECODE, RAGGED, SPECULATIVE),
        *(attrs.evolve(SPECULATIVE, **f) for f in ({"window": 5}, {"narrow": "int8"}, {"is_interleaved": True})),
        attrs.evolve(RAGGED, dtype="float32", window=3),
    ],
    ids=lambda call: call.name,
)
def test_a_gather_is_right(call):
    tolerance = 1e-5 if call.dtype == "float32" else 3e-2
    assert_right(_paged_peers.by_gather(describe(call.example()))(**draw(call.example()).arrays), call, tolerance)


def test_a_gather_takes_sequences_of_as_many_queries():
    assert _paged_peers.by_gather(describe(MIXED.example())) is None
    assert _paged_peers.by_gather(describe(attrs.evolve(DECODE, has_sinks=True).example())) is None


@pytest.mark.parametrize(
    "call",
    [attrs.evolve(one, dtype="float32") for one in (MIXED, WINDOWED, INTERLEAVED)],
    ids=lambda call: call.name,
)
def test_prompts_on_contiguous_keys_are_right(call):
    peer = _paged_peers.on_contiguous_keys(describe(call.example()))
    assert_right(peer.prepared(draw(call.example()), FORWARD)()[0], call, 2e-5)
    assert _paged_peers.on_contiguous_keys(describe(DECODE.example())) is None


# -- what is there -----------------------------------------------------------------------------------------------------


def test_each_peer_that_is_missing_has_its_reason(monkeypatch):
    assert {name: peer for name, peer in _paged_peers.peers().items() if isinstance(peer, str)} == dict.fromkeys(
        (FA3, FA4, FLASHINFER, CUDNN), "there is no NVIDIA GPU"
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_paged_peers, "is_installed", lambda name: False)
    reasons = _paged_peers.peers()
    assert reasons[FA3] == "torch is not installed"
    assert reasons[FA4] == "torch or flash_attn.cute is not installed"
    assert reasons[FLASHINFER] == "flashinfer is not installed"
    assert reasons[CUDNN] == _paged_peers.by_cudnn
    monkeypatch.setattr(_paged_peers, "is_installed", lambda name: True)
    assert _paged_peers.peers()[FA3] == f"{LIBRARY} is neither in vLLM's package nor in a folder of sys.path"
    assert _paged_peers.peers()[FLASHINFER] == _paged_peers.by_flashinfer
    module(monkeypatch, CUDNN_MODULE)
    assert _paged_peers.peers()[CUDNN] == f"this version of JAX has no paged_attention in {CUDNN_MODULE}"


@pytest.mark.parametrize(("parameters", "is_there"), [("page_table", True), ("seqused_k", False)])
def test_fa4_needs_pages_in_its_interface(monkeypatch, parameters, is_there):
    function = eval(f"lambda q, {parameters}=None: None")
    module(monkeypatch, "flash_attn.cute.interface", flash_attn_varlen_func=function)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_flash_attention_peers, "peers", lambda: {FA4: "installed"})
    found = _paged_peers.peers()[FA4]
    assert found == (_paged_peers.by_fa4 if is_there else "its function takes no page_table")
