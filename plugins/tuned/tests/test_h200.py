"""Every record can be read, has a provenance, and is chosen for the call that was measured."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest

import ejkernel_core
import ejkernel_tuned
from ejkernel_bench._calls import benchmark_examples
from ejkernel_bench.records import calls_of
from ejkernel_core import Candidate, Choice, Example, Invocation
from ejkernel_cudnn.flash_attention import library
from ejkernel_ops.flash_attention.sizes import self_attention
from ejkernel_triton.launch import _jax_triton

pytestmark = pytest.mark.usefixtures("all_compilers")

FILES = sorted(Path(ejkernel_tuned.__file__).parent.glob("NVIDIA%20H200/*.jsonl"))
RECORDS: list[dict[str, Any]] = [json.loads(line) for file in FILES for line in file.read_text().splitlines()]
EXAMPLES = benchmark_examples("flash_attention")
#: The operations of experts that have records.
RECORDED = ("grouped_matmul", "grouped_matmul_d_rhs", "moe_permute_matmul", "moe_route")
#: The heuristic's configuration stays unless another one is faster by this factor.
HEURISTIC_MARGIN = 1.02


def on_h200(example: Example) -> list[Invocation]:
    card = {"platform": "gpu", "device_kind": "NVIDIA H200", "compute_capability": (9, 0)}
    return [attrs.evolve(inv, **card) for inv in calls_of(example)]


#: Records that are older than the kernel's declaration of these lack them.
CUDNN = {"nvidia-cudnn-cu12", "nvidia-cudnn-cu13"}


def select(inv: Invocation, **software: str) -> tuple[Choice | None, list[Candidate]]:
    candidates, _ = ejkernel_core.registry.candidates(inv)
    candidates = [attrs.evolve(candidate, software={**candidate.software, **software}) for candidate in candidates]
    return ejkernel_tuned.records.select_config(inv, candidates), candidates


def test_every_record_has_a_provenance() -> None:
    attention, products = ["flash_attention", "flash_attention_bwd"], ["grouped_matmul", "grouped_matmul_d_rhs"]
    without_gluon = ["moe_permute_matmul", "moe_route"]
    assert [file.stem for file in FILES] == [*attention, *products, *without_gluon]
    assert len(RECORDS) >= 430
    for record in RECORDS:
        op, _, backend = record["kernel"].rpartition(".")
        provenance = record["provenance"]
        assert record["problem"]["device"] == ["gpu", "NVIDIA H200"]
        assert provenance["device"].startswith("NVIDIA H200 (cuda ")
        assert {"triton", "xla"} <= {*provenance["backends"]}
        arguments = record["problem"].get("arguments") or record["problem"]["bucket"]
        assert ("gluon_sm90" in provenance["backends"]) == (op not in without_gluon and "bias" not in arguments)
        versions = {"jax", "jaxlib", "triton", "jax-triton", *(f"{op}.{name}" for name in provenance["backends"])}
        assert {*provenance["software"]} - CUDNN == versions
        times = {variant: time for variant, time in provenance["tried"] if isinstance(time, float)}
        own_times = [time for variant, time in times.items() if variant.startswith(f"{backend} ")]
        assert provenance["milliseconds"] in own_times
        assert 0 < provenance["milliseconds"] <= HEURISTIC_MARGIN * min(times.values())


def test_no_two_records_apply_to_the_same_call() -> None:
    """Two would remain if a call was measured again and another kernel was the fastest."""
    calls = Counter(
        json.dumps([record["problem"], record["provenance"]["software"]["triton"]], sort_keys=True)
        for record in RECORDS
    )
    assert [call for call, count in calls.items() if count > 1] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_a_measured_call_has_a_choice(example: Example) -> None:
    for inv in on_h200(example):
        choice, candidates = select(inv)
        assert choice is not None
        assert choice.origin.startswith("packaged records")
        (candidate,) = (candidate for candidate in candidates if candidate.backend == choice.backend)
        assert isinstance(choice.cfg, candidate.config_type)


@pytest.mark.parametrize("name", ["gpt-oss-120b, 16384 tokens, up", "OLMoE, 16384 tokens, down"])
def test_products_of_training_are_gluons(name: str) -> None:
    (example,) = (example for example in benchmark_examples("grouped_matmul") if example.name == name)
    choices = [select(inv)[0] for inv in on_h200(example) if not inv.op.endswith("_bwd")]
    assert [choice and (choice.backend, choice.distance) for choice in choices] == [("gluon_sm90", 0)] * 3


@pytest.mark.long
@pytest.mark.parametrize("op", RECORDED)
def test_layers_of_well_known_models_have_records_of_their_own(op: str) -> None:
    """With gradients in training, and without for fewer tokens."""
    for example in benchmark_examples(op):
        is_training = re.search(r"\b(64|2048) tokens|^512 x", example.name) is None
        if is_training or (op != "grouped_matmul_d_rhs" and "transposed" not in example.name):
            for inv in on_h200(example if is_training else attrs.evolve(example, wrt=())):
                if inv.op in RECORDED:
                    choice, _ = select(inv)
                    assert choice is not None, (example.name, inv.op)
                    assert choice.distance == 0, (example.name, inv.op)


def test_products_of_decoding_are_tritons() -> None:
    examples = [example for example in benchmark_examples("grouped_matmul") if example.name.endswith("64 tokens, up")]
    choices = [select(on_h200(example)[0])[0] for example in examples]
    backends = [choice.backend for choice in choices if choice is not None]
    assert len(backends) >= 3
    assert {*backends} == {"triton"}


def test_a_kernel_that_is_no_candidate_leaves_the_others_their_heuristics() -> None:
    """Gluon is the fastest of this call, and portable Triton of 4,096 rows, with a tile that would be too small here."""
    examples = {example.name: example for example in benchmark_examples("grouped_matmul")}
    inv = on_h200(examples["131072 x 2048 x 768, 128 groups"])[0]
    candidates = [candidate for candidate in select(inv)[1] if candidate.backend != "gluon_sm90"]
    assert "triton" in [candidate.backend for candidate in candidates]
    assert ejkernel_tuned.records.select_config(inv, candidates) is None


def test_tokens_are_multiplied_in_place_but_where_matrices_have_many_columns() -> None:
    examples = benchmark_examples("moe_permute_matmul")
    choices = {example.name: select(on_h200(example)[0])[0] for example in examples}
    assert [name for name, choice in choices.items() if choice is None or choice.distance] == []
    by_parts = [name for name, choice in choices.items() if choice is not None and choice.backend == "by_parts"]
    assert by_parts == ["Mixtral 8x7B, 16384 tokens", "Mixtral 8x7B, 2048 tokens", "gpt-oss-20b, 2048 tokens"]


@pytest.mark.parametrize(("version", "backend"), [("3.6.0", "cudnn"), ("3.9.0", "gluon_sm90")])
@pytest.mark.parametrize("length", [4096, 8192, 16384])
def test_cudnn_is_chosen_for_the_backward_of_wide_heads_with_an_old_triton(
    version: str, backend: str, length: int
) -> None:
    forward, backward = (
        select(inv, triton=version)[0] for inv in on_h200(self_attention(1, length, 16, 256, "bfloat16"))
    )
    assert forward.backend == "gluon_sm90"
    assert backward.backend == backend


def test_cudnn_is_not_chosen_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_library", lambda: "not here")
    _, backward = on_h200(self_attention(1, 8192, 16, 256, "bfloat16"))
    choice, _ = select(backward, triton="3.6.0")
    # The record of another version of Triton, with which cuDNN was slower.
    assert (choice.backend, choice.distance) == ("gluon_sm90", 0)
    assert "triton was 3.9.0, is 3.6.0" in choice.note


def test_records_apply_to_similar_sizes_and_not_to_other_devices() -> None:
    example = self_attention(3, 3800, 16, 128, "bfloat16")
    assert [select(inv)[0].backend for inv in on_h200(example)] == ["gluon_sm90", "gluon_sm90"]
    assert [select(inv)[0].distance for inv in on_h200(example)] == [0.0, 0.0]
    for inv in on_h200(example):
        assert select(attrs.evolve(inv, device_kind="NVIDIA A100-SXM4-80GB"))[0] is None
        assert select(attrs.evolve(inv, platform="cpu", device_kind="cpu", compute_capability=None))[0] is None


def test_a_record_whose_kernel_cannot_run_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax_triton, "version", lambda: (0, 3, 1))
    for inv in on_h200(EXAMPLES[0]):
        choice, candidates = select(inv)
        assert choice is None
        assert "gluon_sm90" not in [candidate.backend for candidate in candidates]
