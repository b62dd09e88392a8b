"""The resources of a card that each configuration of the decode kernel takes: no spills, and as much as is estimated.

They are in `decode_resources.json`, with a hash of what decides them. Few of those whose hash has changed are compiled
at once, and all of them in the long sweep. `python -m plugins.triton.tests.test_decode_resources` writes the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import jax
import pytest

import ejkernel_core
from ejkernel_triton import flash_attention_decode
from ejkernel_triton.interpreter._lock import Lock, key
from ejkernel_triton.interpreter._resources import CARDS, Case, Program, Resources, programs
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability_by_name

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

LOCK_FILE = Path(__file__).with_name("decode_resources.json")
LOCK = Lock.read(LOCK_FILE)
BATCH, HEADS, KV_HEADS, SLOTS = 16, 32, 8, 8192
LENGTHS, RING = ("kv_lengths",), ("kv_positions",)
PLAIN: dict[str, Any] = {}
FULL = {"causal": True, "sliding_window": (1023, 0), "logits_soft_cap": 30.0}
#: Queries, head dim, dtype, the arguments that are arrays, and options.
CALLS = (
    *((queries, dim, "bfloat16", (), PLAIN) for dim in (64, 128, 256) for queries in (1, 16)),
    *((4, dim, "bfloat16", LENGTHS, FULL) for dim in (96, 128, 192)),
    *((queries, 128, "bfloat16", RING, FULL) for queries in (1, 4)),
    *((queries, dim, "float32", LENGTHS, FULL) for dim in (128, 256) for queries in (1, 16)),
    (4, 64, "float32", (), PLAIN),
)
QUICK = CALLS[3]
#: The shared memory of the combination, by which warps exchange the sums of their splits.
COMBINATION = 16 << 10
#: Up to three registers, with a head dim of 256 in float32 and every option, on these cards.
SPILLED = {("NVIDIA H200", 256, "float32"): 4, ("NVIDIA GB200", 256, "float32"): 12}


def name_of(call: tuple[Any, ...]) -> str:
    queries, dim, dtype, arrays, options = call
    return " ".join([f"{queries} queries D{dim} {dtype}", *arrays, *options])


def cases_of(card: str, call: tuple[Any, ...]) -> Iterator[Case]:
    """Every configuration."""
    queries, dim, dtype, arrays, options = call
    shapes = {"query": (queries, HEADS), "key": (SLOTS, KV_HEADS), "value": (SLOTS, KV_HEADS)}
    given = {name: jax.ShapeDtypeStruct((BATCH, *sizes, dim), dtype) for name, sizes in shapes.items()}
    integers = {"kv_lengths": (BATCH,), "kv_positions": (BATCH, SLOTS), "q_start": (BATCH,)}
    present = (*arrays, "q_start") if arrays else ()
    given |= {name: jax.ShapeDtypeStruct(integers[name], "int32") for name in present}
    inv = ejkernel_core.invocation("flash_attention", **given, **options)
    inv = attrs.evolve(inv, platform="gpu", device_kind=card, compute_capability=capability_by_name(card))
    for number, cfg in enumerate(flash_attention_decode.config_space(inv)):
        kernel = "flash_attention.triton_decode"
        yield Case(card, kernel, flash_attention_decode, name_of(call), inv, cfg, number == 0)


def check(case: Case, program: Program, resources: Resources) -> None:
    most = case.estimates().get(program.name, COMBINATION)
    assert resources.shared_memory <= most, f"{case}, {program.name}: {resources}; at most {most} are estimated"
    query = case.invocation["query"]
    spilled = SPILLED.get((case.card, query.shape[3], str(query.dtype)), 0)
    assert resources.spilled <= spilled, f"{case}, {program.name}: {resources}"


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("call", CALLS, ids=name_of)
def test_every_configuration_fits_and_spills_nothing(card: str, call: tuple[Any, ...]) -> None:
    for case, program in programs(cases_of(card, call)):
        resources = LOCK.get(program)
        if resources is None and case.is_heuristic and call == QUICK and card == CARDS[0]:
            resources = program.compile()
        if resources is not None:
            check(case, program, resources)


@pytest.mark.long
@pytest.mark.parametrize("card", CARDS[:2])
@pytest.mark.parametrize("call", CALLS, ids=name_of)
def test_the_compiler_reports_what_is_recorded(card: str, call: tuple[Any, ...]) -> None:
    for case, program in programs(cases_of(card, call)):
        recorded = LOCK.get(program)
        if recorded is None or case.is_heuristic:
            resources = program.compile()
            check(case, program, resources)
            assert recorded in (None, resources), f"{case}, {program.name}: {LOCK_FILE.name} differs"


if __name__ == "__main__":
    for card in CARDS:
        for call in CALLS:
            for case, program, resources in LOCK.record(cases_of(card, call)):
                print(case, program.name, resources, flush=True)
        LOCK.write(LOCK_FILE)
    LOCK.remove(
        LOCK.rows.keys() - {key(*one) for card in CARDS for call in CALLS for one in programs(cases_of(card, call))}
    )
    LOCK.write(LOCK_FILE)
