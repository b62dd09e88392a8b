"""The kernel: a copy for each token and array, from its row to its slot, in main memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas_tpu.launch import Launch, Operand, Output, Semaphores, grid_indices


def copy_rows(rows: Sequence[jax.Array], pages: Sequence[jax.Array], cores: int, in_flight: int) -> Launch:
    """The launch. Rows are (tokens, heads, dim) and pages (slots, heads, dim), of one array or of keys and values.

    Its scalars are a slot for each token, behind the last one for a token that is not stored. Each core has its own
    part of the tokens, and copies at most so many at a time: it waits for one before it starts another.
    """
    arrays, tokens, slots = range(len(rows)), rows[0].shape[0], pages[0].shape[0]
    share = -(-tokens // cores)

    def kernel(slot_of: Any, refs: Any) -> None:
        (core,) = grid_indices(1)

        def copies(token: Any, slot: Any) -> list[Any]:
            return [
                pltpu.make_async_copy(
                    getattr(refs, f"rows_{i}").at[token], getattr(refs, f"pages_{i}").at[slot], refs.arrived
                )
                for i in arrays
            ]

        def wait_for_one() -> None:
            """The semaphore counts bytes, and all tokens have as many: any may be the one."""
            for copy in copies(0, 0):
                copy.wait()

        def start(token: Any, started: Any) -> Any:
            slot = slot_of[token]
            is_stored = slot < slots
            pl.when(is_stored & (started >= in_flight))(wait_for_one)

            @pl.when(is_stored)
            def _() -> None:
                for copy in copies(token, slot):
                    copy.start()

            return started + is_stored.astype(jnp.int32)

        first = core * share
        started = jax.lax.fori_loop(first, jnp.minimum(first + share, tokens), start, jnp.int32(0))
        jax.lax.fori_loop(0, jnp.minimum(started, in_flight), lambda _, __: wait_for_one(), None)

    return Launch(
        name="update_kv_pages",
        kernel=kernel,
        grid=(cores,),
        semantics=("parallel",),
        tile_map=lambda core, *_: (core,),
        operands={
            **{f"rows_{i}": Operand(rows[i], memory="any") for i in arrays},
            **{f"pages_{i}": Operand(pages[i], memory="any") for i in arrays},
        },
        outputs={f"new_pages_{i}": Output(pages[i].shape, pages[i].dtype, memory="any") for i in arrays},
        scratch={"arrived": Semaphores()},
        aliases={f"new_pages_{i}": f"pages_{i}" for i in arrays},
    )
