"""What every shape that is offered takes of a card: compiled for it, on a machine that has none."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import pytest

import ejkernel_core
from ejkernel_triton.interpreter import __main__ as command
from ejkernel_triton.interpreter import compiled_for
from ejkernel_triton.interpreter.__main__ import Case, cases
from ejkernel_triton.launch import _jax_triton

if _jax_triton.missing():
    pytest.skip(_jax_triton.missing(), allow_module_level=True)

H200, A100, L40S, GB200 = command.CARDS
KIB = 1024
#: What CUDA gives to a program, written down anew: the limit that chose the shapes is under test.
LIMITS = {H200: 227 * KIB, A100: 163 * KIB, L40S: 99 * KIB, GB200: 227 * KIB}

#: The bytes that a shape may spill, the most of all versions of Triton: by card (None for all), pass, dtype, padded head
#: dim and shape.
SPILLED: dict[tuple[str | None, str, str, int, tuple[int, int, int, int]], int] = {
    # At a head dim of 96 alone, and with Triton 3.6 alone.
    (None, "forward", "float32", 128, (32, 32, 8, 1)): 48,
    # In float32 the operands of wide heads are more than a program's registers, in any shape.
    (None, "forward", "float32", 256, (16, 32, 8, 1)): 96,
    (None, "keys", "float32", 256, (16, 16, 8, 1)): 1024,
    (None, "queries", "float32", 256, (16, 16, 8, 1)): 192,
}


def check(case: Case) -> None:
    found = case.compiled()
    limit = LIMITS[case.card]
    assert found.num_warps >= case.shape[2], case  # more where Triton has warps of its own for what it fetches
    assert found.shared_memory <= min(case.promised, limit), f"{case}: {case.promised} were promised, {limit} there are"
    padded = next(most for most in (64, 128, 256) if case.head_dim <= most)
    allowed = max(SPILLED.get((card, case.which, case.dtype, padded, case.shape), 0) for card in (case.card, None))
    assert found.spilled <= allowed, f"{case}: {found.registers} registers, {allowed} bytes may be spilled"


def heuristics(chosen: Iterable[Case]) -> list[Case]:
    """The first shape of each pass."""
    first: dict[tuple[object, ...], Case] = {}
    for case in chosen:
        first.setdefault((case.card, case.which, case.head_dim), case)
    return list(first.values())


QUICK = heuristics(cases((H200, A100), (64, 128)))
EVERY = [*cases(), *cases((H200, A100), dtype="float32")]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_the_heuristics_shapes_fit_and_spill_nothing(case: Case) -> None:
    check(case)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in EVERY if case not in QUICK], ids=str)
def test_every_shape_fits_and_spills_nothing(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("name", ["bias", "attention_mask"])
def test_an_odd_length_loads_planes_as_an_even_one_does(name: str) -> None:
    def loads(length: int) -> tuple[int, ...]:
        array = jax.ShapeDtypeStruct((1, length, 4, 128), jnp.bfloat16)
        plane = jax.ShapeDtypeStruct((1, 4, length, length), jnp.bfloat16 if name == "bias" else jnp.bool_)
        given = {"query": array, "key": array, "value": array, name: plane}
        (found,) = compiled_for(
            H200, lambda a: ejkernel_core.call("flash_attention", **a, causal=True, backend="triton"), given
        )
        return tuple(map(found.count, ("ld.global.b8", "ld.global.b16", "cp.async.ca", "cp.async.cg")))

    assert loads(1023) == loads(1024)
    assert loads(1024)[:2] == (0, 0)  # no element alone


def test_what_may_be_spilled_is_offered() -> None:
    """No exception outlives its shape."""
    offered = set()
    for dtype in ("bfloat16", "float32"):
        for case in cases(dtype=dtype):
            offered |= {(card, case.which, dtype, case.head_dim, case.shape) for card in (case.card, None)}
    assert set(SPILLED) <= offered


def test_the_table_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = heuristics(cases((A100,), (64,), ("forward",)))
    for which in command.PASSES:
        monkeypatch.setitem(command.PASSES, which, lambda inv, which=which: [case.shape] * (which == "forward"))
    assert command.main(["--card", A100, "--head-dim", "64"]) == 0
    title, _, row = capsys.readouterr().out.splitlines()
    assert title == "| card | pass | head dim | queries, keys, warps, stages | shared KiB | registers | spilled bytes |"
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    found = case.compiled()
    shape = ", ".join(map(str, case.shape))
    assert cells == [A100, "forward", "64", shape, f"{found.shared_memory / KIB:.1f}", str(found.registers), "0"]


def test_a_card_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--card", "NVIDIA K80"])
    assert "invalid choice: 'NVIDIA K80'" in capsys.readouterr().err
