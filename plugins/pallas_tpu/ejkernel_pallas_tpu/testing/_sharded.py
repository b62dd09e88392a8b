"""A call on four chips, batch and heads cut in two: does a kernel bring communication with it?"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import ejkernel_core

from ._compiler import Compiler

#: What chips say to each other, in the compiler's words.
COLLECTIVE = re.compile(r" ((?:all-|reduce-scatter|collective-|ragged-)[\w-]*)\(")


def collectives(compiler: Compiler, generation: str) -> tuple[list[str], list[str]]:
    """The kernels of a forward and a backward pass inside ``shard_map``, and the communication in their program."""
    mesh = compiler.mesh(generation, (2, 2), ("batch", "heads"))
    cut = PartitionSpec("batch", None, "heads", None)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return ejkernel_core.call("flash_attention", q, k, v, causal=True, backend="pallas_tpu")

    def both(q: Any, k: Any, v: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(jnp.ones_like(out))

    query, key = (jax.ShapeDtypeStruct((4, 1024, heads, 128), jnp.bfloat16) for heads in (8, 4))
    sharded = jax.shard_map(both, mesh=mesh, in_specs=cut, out_specs=cut)
    program = compiler.compile(sharded, query, key, key, mesh=mesh, sharding=NamedSharding(mesh, cut))
    return program.kernels, COLLECTIVE.findall(program.text)
