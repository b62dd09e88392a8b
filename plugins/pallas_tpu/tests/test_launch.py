"""Launches: the memories of arrays and scratch, copies that a kernel makes itself, and outputs that are operands."""

from __future__ import annotations

import re
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from ejkernel_pallas_tpu.launch import Launch, Operand, Output, Scratch, Semaphores, grid_indices

INTERPRETERS = {
    "fast": True,
    "of a whole TPU": pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
}
MIB = 2**20
PLACES = jnp.array([4, 0, 3], jnp.int32)
ROWS = jnp.arange(3 * 8 * 128, dtype=jnp.int32).reshape(3, 8, 128)
WEIGHTS = jnp.arange(2, 5, dtype=jnp.int32).reshape(3, 1, 1) * jnp.ones((1, 1, 128), jnp.int32)
PAGES = -jnp.arange(5 * 8 * 128, dtype=jnp.int32).reshape(5, 8, 128)


@pytest.fixture(autouse=True)
def _fresh_memory():
    pltpu.reset_tpu_interpret_mode_state()
    yield
    pltpu.reset_tpu_interpret_mode_state()


def update(rows: Any, weights: Any, pages: Any, memory: Any = "any", waits: bool = True) -> Launch:
    """Pages in which each row is added, times its weight, to the page at its place; and the sum of the weights so far.

    Rows and pages are copied by the kernel. There are scratch of integers in both memories, and scalars in blocks.
    """

    def kernel(places: Any, refs: Any) -> None:
        (step,) = grid_indices(1)

        @pl.when(step == 0)
        def _() -> None:
            refs.total[0] = 0

        refs.total[0] += refs.weights[0, 0]
        page = refs.pages.at[places[step]]
        copies = [
            pltpu.make_async_copy(refs.rows.at[step], refs.row, refs.arrived.at[0]),
            pltpu.make_async_copy(page, refs.page, refs.arrived.at[1]),
        ]
        for copy in copies:
            copy.start()
        if waits:
            for copy in copies:
                copy.wait()
        refs.page[...] += refs.row[...] * refs.weights[0, 0]
        back = pltpu.make_async_copy(refs.page, page, refs.written)
        back.start()
        back.wait()
        refs.totals[...] = jnp.full((8, 128), refs.total[0], jnp.int32)

    return Launch(
        name="update",
        kernel=kernel,
        grid=(rows.shape[0],),
        semantics=("arbitrary",),
        tile_map=lambda step, places: (step,),
        operands={
            "rows": Operand(rows, memory="hbm"),
            "weights": Operand(weights, (None, 1, 128), lambda step: (step, 0, 0), "smem"),
            "pages": Operand(pages, memory=memory),
        },
        outputs={
            "totals": Output((rows.shape[0], 8, 128), jnp.int32, (None, 8, 128), lambda step: (step, 0, 0)),
            "new_pages": Output(pages.shape, pages.dtype, memory=memory),
        },
        scratch={
            "row": Scratch((8, 128), "int32"),
            "page": Scratch((8, 128), "int32"),
            "total": Scratch((1,), "int32", "smem"),
            "arrived": Semaphores((2,)),
            "written": Semaphores(),
        },
        aliases={"new_pages": "pages"},
    )


def updated() -> tuple[np.ndarray, np.ndarray]:
    """What ``update`` returns, by NumPy."""
    pages, weights = np.array(PAGES), np.array(WEIGHTS[:, 0, 0])
    pages[np.array(PLACES)] += np.array(ROWS) * weights[:, None, None]
    return np.broadcast_to(np.cumsum(weights)[:, None, None], ROWS.shape), pages


@pytest.mark.parametrize("interpreter", INTERPRETERS)
@pytest.mark.parametrize("memory", ["any", "hbm"])
def test_a_kernel_that_copies_and_has_scratch_of_integers(interpreter, memory):
    out = update(ROWS, WEIGHTS, PAGES, memory)((PLACES,), INTERPRETERS[interpreter], 16 * MIB)
    for result, expected in zip(out, updated(), strict=True):
        assert np.array_equal(result, expected)
    assert np.array_equal(PAGES, -np.arange(PAGES.size).reshape(PAGES.shape))  # the caller's array


def test_a_copy_that_is_not_waited_for_is_found():
    """The fast interpreter copies at once: it cannot find this."""
    launch = update(ROWS, WEIGHTS, PAGES, waits=False)
    try:
        _, pages = launch((PLACES,), INTERPRETERS["of a whole TPU"], None)
        is_right = np.array_equal(pages, updated()[1])
    except Exception:  # JAX 0.12 raises that a semaphore is not 0 at the end, JAX 0.10 prints it
        is_right = False
    assert not is_right


def test_an_output_that_is_an_operand_is_not_copied():
    def call(pages: Any) -> Any:
        return update(ROWS, WEIGHTS, pages)((PLACES,), True, None)[1]

    compiled: Any = jax.jit(call, donate_argnums=0).lower(PAGES).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == PAGES.nbytes
    assert not re.search(r"= s32\[5,8,128\]\S* copy\(", compiled.as_text())
    pages = jnp.array(PAGES)
    assert np.array_equal(compiled(pages), updated()[1])
    assert pages.is_deleted()


def test_blocks_of_an_output_that_is_an_operand():
    """Blocks that no tile writes stay as they are; the others are what was there, and one more."""

    def kernel(places: Any, refs: Any) -> None:
        refs.new[...] = refs.old[...] + 1

    block = ((None, 8, 128), lambda page: (page, 0, 0))
    launch = Launch(
        name="increment",
        kernel=kernel,
        grid=(3,),
        semantics=("parallel",),
        tile_map=lambda step, places: (places[step],),
        operands={"old": Operand(PAGES, *block)},
        outputs={"new": Output(PAGES.shape, PAGES.dtype, *block)},
        aliases={"new": "old"},
    )
    expected = np.array(PAGES)
    expected[np.array(PLACES)] += 1
    for interpret in INTERPRETERS.values():
        (out,) = launch((PLACES,), interpret, None)
        assert np.array_equal(out, expected)


def lowered(launch: Any) -> str:
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("TPU v5e", 1, "tpu"))

    def call(places: Any, rows: Any, weights: Any, pages: Any) -> Any:
        launch(rows, weights, pages)((places,), False, 16 * MIB)
        return pages

    with use_abstract_mesh(mesh):
        traced = jax.jit(call).trace(PLACES, ROWS, WEIGHTS, PAGES)
        return str(traced.lower(lowering_platforms=("tpu",)).as_text())


def test_a_tpu_gets_the_output_in_the_memory_of_the_operand():
    """After the places, rows and weights, pages are operand 3; they are output 1."""
    text = lowered(lambda *arrays: attrs.evolve(update(*arrays), has_side_effects=True))
    assert text.count("tpu_custom_call") == 1
    alias = re.search(r"output_operand_aliases = \[(.*?)\]>\]", text)
    assert alias is not None
    assert re.sub(r"\s", "", alias[1]).endswith("output_tuple_indices=[1],operand_index=3,operand_tuple_indices=[")


def test_a_kernel_with_side_effects_runs_without_results():
    """Of two whose results are not used, XLA keeps that one."""
    with_effects = lowered(lambda *arrays: attrs.evolve(update(*arrays), has_side_effects=True))
    assert "has_side_effect = true" in with_effects
    assert "has_side_effect" not in lowered(update)


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Operand(ROWS, memory="HBM"), "memory: Operand takes 'vmem', 'smem', 'any', 'hbm'; got 'HBM'"),
        (lambda: Output((8,), "int32", memory="cmem"), "memory: Output takes .*; got 'cmem'"),
        (lambda: Scratch((8,), memory="hbm"), "memory: Scratch takes 'vmem', 'smem'; got 'hbm'"),
    ],
)
def test_an_unknown_memory(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def change(field: str, **values: Any) -> Launch:
    launch = update(ROWS, WEIGHTS, PAGES)
    return attrs.evolve(launch, **{field: {**getattr(launch, field), **values}})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: change("outputs", new_pages=Output((5, 8, 256), "int32", memory="any")),
            r"aliases: new_pages: pages: new_pages is int32\[5, 8, 256\] in 'any', and pages int32\[5, 8, 128\] in",
        ),
        (
            lambda: change("outputs", new_pages=Output(PAGES.shape, "float32", memory="any")),
            r"new_pages is float32\[5, 8, 128\] in 'any', and pages int32\[5, 8, 128\] in 'any'",
        ),
        (
            lambda: change("outputs", new_pages=Output(PAGES.shape, "int32", memory="hbm")),
            r"new_pages is int32\[5, 8, 128\] in 'hbm', and pages int32\[5, 8, 128\] in 'any'",
        ),
        (lambda: change("aliases", new_rows="rows"), "aliases: new_rows: rows: takes an output, and the operand that"),
        (lambda: change("aliases", totals="page"), "aliases: totals: page: takes an output, and the operand that"),
        (
            lambda: attrs.evolve(
                change("outputs", totals=Output(PAGES.shape, "int32", memory="any")),
                aliases={"totals": "pages", "new_pages": "pages"},
            ),
            "aliases: an operand becomes one output; got",
        ),
        (lambda: change("scratch", rows=Semaphores()), "update: rows: each operand, output and scratch has its own"),
        (
            lambda: change("operands", rows=Operand(ROWS, (None, 8, 128), lambda step: (step, 0, 0), "hbm")),
            "update: rows: an array in 'hbm' has no blocks: the kernel copies parts of it itself",
        ),
        (
            lambda: change("operands", rows=Operand(ROWS, (None, 8, 128))),
            "update: rows: an array in blocks has block and index_map",
        ),
    ],
)
def test_a_launch_that_does_not_go_together(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("scratch", "words"),
    [
        (
            Scratch((4096, 1024), "float32"),
            "update: blocks and scratch take 16.0 MiB of 'vmem', which has 16.0; the largest is more, with 16.0",
        ),
        (Scratch((33, 4096, 100), "int8"), "of 'vmem', which has 16.0; the largest is more, with 16.5"),
        (Scratch((2048, 128), "int32", "smem"), "take 1.0 MiB of 'smem', which has 1.0; the largest is more, with 1.0"),
    ],
)
def test_scratch_that_does_not_fit(scratch, words):
    launch = change("scratch", more=scratch)
    with pytest.raises(ValueError, match=words):
        launch((PLACES,), True, 16 * MIB)


def test_scratch_that_fits():
    """With 12,288 bytes for the other scratch and a block; those of main memory do not count."""
    launch = change("scratch", more=Scratch((16 * MIB - 3 * 4096,), "int8"))
    assert np.array_equal(launch((PLACES,), True, 16 * MIB)[1], updated()[1])
    with pytest.raises(ValueError, match="the largest is more"):
        launch((PLACES,), True, 16 * MIB - 1)
