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
from ejkernel_core import Choice, Example, Invocation
from ejkernel_ops.flash_attention.sizes import TRAINED, self_attention

pytestmark = pytest.mark.usefixtures("all_compilers")

CARD = "NVIDIA H100 80GB HBM3"
FILES = sorted(Path(ejkernel_tuned.__file__).parent.glob("NVIDIA%20H100%2080GB%20HBM3/*.jsonl"))
RECORDS: list[dict[str, Any]] = [json.loads(line) for file in FILES for line in file.read_text().splitlines()]
NORMALIZATIONS = [
    example
    for op in ("rms_norm", "layer_norm")
    for example in benchmark_examples(op)
    if example.name.startswith(("16384 x 4096", "65536 x 4096", "16384 x 8192", "8192 x 8192", "1024 x 65536"))
]

#: The operations of experts that have records.
RECORDED = ("grouped_matmul", "grouped_matmul_d_rhs", "moe_permute_matmul", "moe_route")


def backends(example: Example, card: str = CARD) -> list[str | None]:
    """What the records choose for the passes of an example."""
    choices = [select(inv, card) for inv in calls_of(example)]
    return [choice and choice.backend for choice in choices]


def select(inv: Invocation, card: str = CARD) -> Choice | None:
    on_card = attrs.evolve(inv, platform="gpu", device_kind=card, compute_capability=(9, 0))
    candidates, _ = ejkernel_core.registry.candidates(on_card)
    return ejkernel_tuned.records.select_config(on_card, candidates)


def test_every_record_was_measured_on_the_device() -> None:
    assert len(RECORDS) >= 450
    for record in RECORDS:
        provenance = record["provenance"]
        assert record["problem"]["device"] == ["gpu", CARD]
        assert provenance["device"].startswith(f"{CARD} (cuda ")
        assert {"triton", "xla"} <= {*provenance["backends"]}
        times = [time for _, time in provenance["tried"] if isinstance(time, float)]
        # A profile has whole nanoseconds, and a median of two is between them; a clock divides by the number of calls.
        assert all(time * 2e6 == pytest.approx(round(time * 2e6), abs=1e-3) for time in times)
        assert provenance["milliseconds"] <= 1.02 * min(times)


def test_no_two_records_apply_to_the_same_call() -> None:
    calls = Counter(json.dumps(record["problem"], sort_keys=True) for record in RECORDS)
    assert [call for call, count in calls.items() if count > 1] == []


@pytest.mark.parametrize("example", NORMALIZATIONS, ids=lambda example: f"{example.op}, {example.name}")
def test_large_normalizations_are_tritons(example: Example) -> None:
    assert backends(example) == ["triton", "triton"]
    assert backends(example, "NVIDIA H200") == [None, None]


#: By (batch, length, heads, head dim), causal in bfloat16: the kernels of the forward and of the backward.
ATTENTION = {
    (1, 512, 16, 64): ["triton", "triton"],
    (1, 1024, 16, 64): ["gluon_sm90", "gluon_sm90"],
    (1, 16384, 16, 64): ["gluon_sm90", "gluon_sm90"],
    (1, 512, 16, 128): ["triton", "triton"],
    (32, 512, 16, 128): ["gluon_sm90", "triton"],
    (16, 1024, 16, 128): ["gluon_sm90", "triton"],
    (4, 4096, 16, 128): ["gluon_sm90", "gluon_sm90"],
    (1, 16384, 16, 128): ["gluon_sm90", "gluon_sm90"],
    (1, 512, 16, 256): ["gluon_sm90", "cudnn"],
    (1, 1024, 16, 256): ["gluon_sm90", "gluon_sm90"],
    (1, 16384, 16, 256): ["gluon_sm90", "cudnn"],
}


@pytest.mark.parametrize("sizes", ATTENTION)
def test_attention_has_the_fastest_kernel_of_each_pass(sizes: tuple[int, int, int, int]) -> None:
    assert backends(self_attention(*sizes, "bfloat16")) == ATTENTION[sizes]


@pytest.mark.parametrize("example", TRAINED, ids=lambda example: example.name)
def test_grouped_heads_have_the_fastest_kernel_of_each_pass(example: Example) -> None:
    """cuDNN has the fastest backward for groups of eight heads, and Gluon for those of four."""
    groups_of_eight = "H32/8" not in example.name
    assert backends(example) == ["gluon_sm90", "cudnn" if groups_of_eight else "gluon_sm90"]


def test_every_call_that_benchmarks_measure_has_records() -> None:
    for example in benchmark_examples("flash_attention"):
        assert None not in backends(example), example.name


@pytest.mark.long
@pytest.mark.parametrize("op", RECORDED)
def test_layers_of_well_known_models_have_records_of_their_own(op: str) -> None:
    """With gradients in training, and without for fewer tokens."""
    for example in benchmark_examples(op):
        is_training = re.search(r"\b(64|2048) tokens|^512 x", example.name) is None
        if is_training or (op != "grouped_matmul_d_rhs" and "transposed" not in example.name):
            for inv in calls_of(example if is_training else attrs.evolve(example, wrt=())):
                if inv.op in RECORDED:
                    choice = select(inv)
                    assert choice is not None, (example.name, inv.op)
                    assert choice.distance == 0, (example.name, inv.op)


def test_a_forward_that_is_left_to_xla_has_no_record() -> None:
    """Between two products XLA has it for nothing. A record would be of the kernel alone."""
    for example in benchmark_examples("rms_norm"):
        rows, dim = map(int, example.name.split(" bfloat16")[0].split(" x "))
        if rows * dim <= 1 << 21:
            assert backends(example)[0] is None
