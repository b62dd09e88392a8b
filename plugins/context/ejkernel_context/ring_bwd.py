"""``context_attention_bwd`` by a ring.

The weights of a part of the keys are exp(x - lse) with the lse of all keys. So the gradients of a part follow from the
results of the whole call, and nothing of the forward's steps is kept. The gradients of the keys travel with the keys,
in float32, and are at home after one more hop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel_core
from ejkernel_core import Invocation, NoConfig, NoKernel, Unsupported, hookimpl
from ejkernel_core.extend import Target, abstract_call
from ejkernel_ops.flash_attention.operation import backward as attention_bwd

from .mesh import check_inside
from .parts import apart, gradient_call, gradients, in_order, plain_gradients, sink_gradients
from .ring import (
    PLATFORMS,
    VERSION,
    Keys,
    both_pairs,
    halves,
    is_earlier,
    refuse_uneven_steps,
    step_call,
    whole_step_call,
)

__all__ = ["PLATFORMS", "VERSION"]

PARTS = ("flash_attention_bwd",)

Gradients = dict[str, jax.Array]
RESULTS = ("out", "lse", "d_out", "d_lse")


@hookimpl
def heuristic_cfg(inv: Invocation) -> None:
    """What the forward refuses is refused, and steps that only the reference could do."""
    refuse_uneven_steps(inv)
    names = _names(inv)
    if inv["axis_size"] > 1 and names:
        first_step = {**whole_step_call(inv, Keys.own(inv), causal=inv["causal"]), **_results(inv)}
        _step_backend(inv, gradient_call(inv, names, **first_step))


def _step_backend(inv: Invocation, call: Mapping[str, Any]) -> str:
    """The best kernel for the call of a step, on the device of ``inv``: never the reference, whatever was measured.

    The reference does not take the lse of all keys: it would compute that of the part. A tuner cannot know this, and
    for small calls the reference may be the fastest.
    """
    step = abstract_call(ejkernel_core.registry, attention_bwd.name, (), dict(call))
    try:
        # Not by ``ejkernel_core.plan``, whose plan is for this machine, even if JAX compiles for another one.
        plan = step.request.plan(step.avals, Target(inv.platform, inv.device_kind, inv.compute_capability))
    except (NoKernel, NoConfig) as error:
        raise Unsupported(f"flash_attention_bwd has no kernel for its steps: {error}") from error
    able = [verdict.name.rpartition(".")[2] for verdict in plan.verdicts if verdict.status == "able"]
    backends = [name for name in (plan.kernel.backend, *able) if name != attention_bwd.reference]
    if not backends:
        raise Unsupported(
            "only the reference of flash_attention_bwd can do its steps, and it does not take the lse of all keys; "
            "install a kernel (pip install ejkernel-xla), or use gather or ulysses"
        )
    return backends[0]


def _step_gradients(inv: Invocation, names: tuple[str, ...], call: Mapping[str, Any]) -> Gradients:
    return gradients(inv, names, backend=_step_backend(inv, gradient_call(inv, names, **call)), **call)


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order."""
    if inv["axis_size"] == 1:
        return plain_gradients(inv)
    check_inside(inv)
    names = _names(inv)
    by_name = (_causal(inv, names) if inv["causal"] else _full(inv, names)) if names else {}
    if "softmax_aux" in inv["wrt"]:
        by_name["softmax_aux"] = sink_gradients(inv)
    return in_order(inv, by_name)


def _names(inv: Invocation) -> tuple[str, ...]:
    """The gradients of a step. Those of keys and values travel together."""
    has_keys = {"key", "value"} & {*inv["wrt"]}
    return (*(("query",) if "query" in inv["wrt"] else ()), *(("key", "value") if has_keys else ()))


def _own(inv: Invocation) -> Keys:
    """The keys of this device. What they were when the forward sent them around is not kept."""
    key, value = apart(inv["key"], inv["value"])
    return Keys(key, value, inv["kv_segment_ids"])


def _results(inv: Invocation) -> dict[str, Any]:
    return {name: inv[name] for name in RESULTS}


def _added(total: Gradients, new: Gradients, inv: Invocation, step: int) -> Gradients:
    """The gradients so far and those of a step. Those of the keys are of the device before, and come from there."""
    if step:
        total = {**total, **_hop(total, inv)}
    return {name: total[name] + new[name] for name in new} if total else new


def _hop(by_name: Gradients, inv: Invocation) -> Gradients:
    if "key" not in by_name:
        return {}
    moved = Keys(by_name["key"], by_name["value"], None).hop(inv)
    return {"key": moved.key, "value": moved.value}


def _full(inv: Invocation, names: tuple[str, ...]) -> Gradients:
    keys, total = _own(inv), dict[str, jax.Array]()
    for step in range(inv["axis_size"]):
        following = keys.hop(inv) if step < inv["axis_size"] - 1 else keys
        new = _step_gradients(inv, names, {**whole_step_call(inv, keys), **_results(inv)})
        total = _added(total, new, inv, step)
        keys = following
    return {**total, **_hop(total, inv)}


def _causal(inv: Invocation, names: tuple[str, ...]) -> Gradients:
    own = _own(inv)
    keys = own.hop(inv)
    total = _step_gradients(inv, names, {**whole_step_call(inv, own, causal=True), **_results(inv)})
    for step in range(1, inv["axis_size"]):
        following = keys.hop(inv) if step < inv["axis_size"] - 1 else keys
        earlier = is_earlier(inv, step)
        call = {**step_call(inv, keys, earlier), **_results_of_pairs(inv, earlier)}
        new = _step_gradients(inv, names, call)
        total = _added(total, _of_shard(new, earlier), inv, step)
        keys = following
    return {**total, **_hop(total, inv)}


def _results_of_pairs(inv: Invocation, earlier: Any) -> dict[str, Any]:
    """What the two pairs of a step have of the results and their cotangents."""
    rows = {name: both_pairs(earlier, inv[name]) for name in ("out", "d_out")}
    return {**rows, **{name: both_pairs(earlier, inv[name], dim=2) for name in ("lse", "d_lse")}}


def _of_shard(of_pairs: Gradients, earlier: Any) -> Gradients:
    """The gradients of the shard from those of the two pairs."""
    by_name = {}
    for name, gradient in of_pairs.items():
        one, other = halves(gradient, 0)
        of_first, of_last = jnp.where(earlier, other, 0), jnp.where(earlier, 0, other)
        # The first pair has the second half of the queries, and the first half of the keys.
        of_halves = [of_first, one + of_last] if name == "query" else [one + of_first, of_last]
        by_name[name] = jnp.concatenate(of_halves, axis=1)
    return by_name
