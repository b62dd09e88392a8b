"""``moe_route`` on any device JAX runs on, by its definition."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.moe_route import definition
from ejkernel_xla.moe_order import ordered

VERSION = 1
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, ...]:
    weights, experts = definition.chosen(inv)
    return weights, experts, *ordered(experts, inv["router_logits"].shape[-1])
