"""A call that is sharded over four chips, by batch and heads: does its program communicate?"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ejkernel_core

from ._compiler import Compiler

#: The operations in a compiled program by which chips communicate.
COLLECTIVE = re.compile(r" ((?:all-|reduce-scatter|collective-|ragged-)[\w-]*)\(")


def kernels_and_collectives(compiler: Compiler, generation: str, kind: AxisType) -> tuple[list[str], list[str]]:
    """The kernels of a forward and a backward pass, and the communication in their program: on a mesh of explicit axes,
    or inside ``shard_map`` where the axes are automatic.
    """
    mesh = compiler.mesh(generation, (2, 2), ("batch", "heads"), kind)
    spec = PartitionSpec("batch", None, "heads", None)

    def attend(query: Any, key: Any, value: Any) -> Any:
        return ejkernel_core.call("flash_attention", query, key, value, causal=True, backend="pallas_tpu")

    def with_gradients(query: Any, key: Any, value: Any) -> Any:
        out, pull = jax.vjp(attend, query, key, value)
        return out, pull(jnp.ones_like(out))

    sharding = NamedSharding(mesh, spec)
    query, key = (jax.ShapeDtypeStruct((4, 1024, heads, 128), jnp.bfloat16, sharding=sharding) for heads in (8, 4))
    sharded: Any = with_gradients
    if kind is AxisType.Auto:
        sharded = jax.shard_map(with_gradients, mesh=mesh, in_specs=spec, out_specs=spec)
    lowered = compiler.lower(sharded, query, key, key, mesh=mesh)
    program = compiler.compile(lowered)
    return program.kernels, COLLECTIVE.findall(program.text)
