"""The check of operations that update an argument: right kernels pass, and each fault is found."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_testing as testing
from ejkernel_core import Axes, Example, Operation, Registry, hookimpl
from ejkernel_testing import _in_place

RNG = np.random.default_rng(8)
AXES = Axes(
    {"pages": "slots dim", "rows": "tokens dim", "slots": "tokens"},
    {"new_pages": "slots dim"},
    whole="slots tokens dim",
)


def arguments(draw: int) -> dict[str, Any]:
    rng = np.random.default_rng([draw, 8])
    return {
        "pages": rng.normal(size=(400, 6)),
        "rows": rng.normal(size=(3, 6)),
        "slots": np.array([39, 4, 17], np.int32),
    }


def right(inv: Any) -> Any:
    return inv["pages"].at[inv["slots"]].set(inv["rows"])


#: The address of the pages of the caller, as a kernel for a GPU gets it.
ADDRESS: list[int] = []


def writes_into_the_caller(inv: Any) -> Any:
    def write(pages: Any, rows: Any, slots: Any) -> Any:
        new_pages = np.array(pages)
        new_pages[np.asarray(slots)] = rows
        if ADDRESS:
            ctypes.memmove(ADDRESS.pop(), new_pages.ctypes.data, new_pages.nbytes)
        return new_pages

    return jax.pure_callback(write, inv["pages"], inv["pages"], inv["rows"], inv["slots"])


def copies(inv: Any) -> Any:
    """Both updates begin with the same pages, so one of them needs another array."""
    pages, slots, rows = inv["pages"], inv["slots"], inv["rows"]
    last = pages.at[slots[::-1]].set(rows[::-1])
    return jnp.where(rows.sum() > 1e9, last, pages.at[slots].set(rows))


def converts(inv: Any) -> Any:
    """All pages are there in another dtype, and no copy of them."""
    return inv["pages"].astype(jnp.complex64).at[inv["slots"]].set(inv["rows"]).real


def kernel_of(compute: Callable[[Any], Any]) -> SimpleNamespace:
    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        return compute(inv)

    return SimpleNamespace(run_backend=run_backend)


def make_proofs(run: Callable[[Any], Any], checks: frozenset[str] = frozenset({"values", "in_place"})) -> Any:
    registry = Registry(plugins="")
    example = Example("three", "store", arguments, checks=checks)
    operation = Operation(
        name="store",
        signature=lambda pages, rows, slots: None,
        axes=AXES,
        aliases={"new_pages": "pages"},
        examples=lambda: [example],
    )
    registry.register(operation)
    for backend, compute in (("reference", right), ("plain", run)):
        registry.register(kernel_of(compute), f"store.{backend}")
    return type("Proofs", (testing.KernelProofs,), {"registry": registry, "kernel": "store.plain", "example": example})


@pytest.mark.parametrize("kernel", ["store.plain", "store.reference"])
def test_a_right_kernel_passes(kernel: str) -> None:
    proofs = make_proofs(right)
    proofs.kernel = kernel
    proofs().test_example(proofs.example)
    proofs().test_in_place(proofs.example)


@pytest.mark.parametrize(
    ("run", "fault"),
    [
        (writes_into_the_caller, "it writes into pages, which the caller has not given away"),
        (copies, "under jit with donation, the program copies pages \\d times"),
        (converts, "under jit with donation, the program needs \\d+ bytes more; the arrays have 9600"),
    ],
)
def test_a_wrong_kernel_is_found(run: Callable[[Any], Any], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs, on_device = make_proofs(run), _in_place._on_device

    def remember(values: Any) -> Any:
        arrays = on_device(values)
        ADDRESS[:] = [arrays["pages"].unsafe_buffer_pointer()]
        return arrays

    monkeypatch.setattr(_in_place, "_on_device", remember)
    with pytest.raises(AssertionError, match=f"^in_place: store.plain on three: {fault}"):
        proofs().test_in_place(proofs.example)


def test_a_kernel_that_writes_into_a_part_of_an_array_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As XLA lets a custom call do that gets a slice without a copy."""
    proofs, on_device = make_proofs(writes_into_the_caller), _in_place._on_device

    def remember(values: Any) -> Any:
        arrays = on_device(values)
        pages = arrays["pages"]
        ADDRESS[:] = [pages.unsafe_buffer_pointer() + pages[0].nbytes] if pages.ndim == 3 else []
        return arrays

    monkeypatch.setattr(_in_place, "_on_device", remember)
    with pytest.raises(AssertionError, match="^in_place: .* it writes into the array of which pages is a part"):
        proofs().test_in_place(proofs.example)


def test_the_check_has_to_be_made() -> None:
    proofs = make_proofs(right, frozenset({"values"}))
    with pytest.raises(ValueError, match="^store.plain updates pages in place: give an example the check 'in_place'"):
        proofs._checked_examples()
