"""The rule by which a kernel is chosen; the choice is never measured, and the calls inside it are ordinary ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import ejkernel_core
from ejkernel_context import context_attention
from ejkernel_core import Choice, Unsupported, hookimpl, policy_override
from ejkernel_tuning import autotune_recorded, find_labels_in_lowered, recording


def plan(
    shards: int, heads: tuple[int, int], length: int = 4096, dtype: str = "bfloat16", op: Any = None, **options: Any
) -> Any:
    """The plan for a shard of so many tokens, from shapes alone."""
    query, key = (jax.ShapeDtypeStruct((1, length, count, 128), dtype) for count in heads)
    options = {"axis": "seq", "axis_size": shards, "causal": True, **options}
    return ejkernel_core.plan("context_attention", query, key, key, **options)


@pytest.mark.parametrize(
    ("shards", "heads", "expected"),
    [
        (2, (32, 8), "gather"),
        (4, (32, 8), "gather"),
        (8, (32, 8), "ulysses"),
        (4, (32, 32), "ulysses"),
        (16, (32, 8), "gather"),  # the key heads cannot be divided
        (8, (12, 4), "gather"),
        (3, (32, 32), "gather"),
        (1, (32, 8), "gather"),
    ],
)
def test_few_keys(shards: int, heads: tuple[int, int], expected: str) -> None:
    assert plan(shards, heads).kernel.backend == expected


@pytest.mark.parametrize(
    ("shards", "heads", "length", "options", "expected"),
    [
        (4, (32, 8), 2**17, {}, "ulysses"),
        (8, (36, 4), 2**16, {}, "gather"),  # 1 GiB
        (8, (36, 4), 2**16 + 2, {}, "ring"),
        (3, (32, 8), 2**17, {}, "ring"),
        (3, (32, 8), 2**17, {"layout": "contiguous"}, "gather"),  # the ring refuses it
        (3, (32, 8), 2**17, {"layout": "contiguous", "causal": False}, "ring"),
        (3, (32, 8), 2**17, {"sliding_window": 512}, "gather"),
        (3, (32, 8), 128, {"sliding_window": 64, "causal": False}, "reference"),  # gather refuses it
    ],
)
def test_too_many_keys(shards: int, heads: tuple[int, int], length: int, options: Any, expected: str) -> None:
    assert plan(shards, heads, length, **options).kernel.backend == expected


def test_explain_says_why_and_what_the_others_refuse() -> None:
    query, key = (jax.ShapeDtypeStruct((1, 64, heads, 16), "float32") for heads in (6, 3))
    options = {"axis": "seq", "axis_size": 4, "causal": True, "layout": "contiguous"}
    explanation = ejkernel_core.explain("context_attention", query, key, key, **options)
    assert "it communicates, so that it is never measured" in str(explanation)
    reasons = {verdict.name: verdict.reason for verdict in explanation.verdicts}
    assert "its 6 heads cannot be divided among the 4 devices of 'seq'" in reasons["context_attention.ulysses"]
    assert "use layout='zigzag'" in reasons["context_attention.ring"]
    assert explanation.backward is not None
    assert explanation.backward.plan.kernel.name == "context_attention_bwd.gather"


def test_the_ring_does_not_use_the_reference_for_its_steps(use_registry: Callable[[Any], None]) -> None:
    """The reference of attention's backward does not take the lse of all keys: its gradients would be wrong."""
    use_registry(ejkernel_core.Registry(plugins="ejkernel-ops,ejkernel-context"))
    query = jax.ShapeDtypeStruct((1, 8, 2, 16), "float32")
    explanation = ejkernel_core.explain(
        "context_attention", query, query, query, axis="seq", axis_size=4, causal=True, backend="ring"
    )
    assert explanation.plan.kernel.backend == "ring"
    assert "it does not take the lse of all keys" in str(explanation.backward)


def test_the_ring_is_right_where_the_reference_was_the_fastest(
    use_registry: Callable[[Any], None], compare: Callable[..., None], make_case: Any
) -> None:
    """For small calls, a tuner may select the reference."""

    @hookimpl
    def select_config(inv: Any, candidates: Any, scope: Any) -> Choice | None:
        if inv.op != "flash_attention_bwd":
            return None
        reference = [candidate for candidate in candidates if candidate.backend == "reference"]
        return Choice("reference", reference[0].cfg, "a tuner") if reference else None

    registry = ejkernel_core.Registry()
    registry.register(SimpleNamespace(select_config=select_config, RANK=90), "tuner of references")
    use_registry(registry)
    compare(make_case(backend="ring", options={"causal": True}))


@pytest.mark.long
@pytest.mark.parametrize("backend", ["ring", "gather", "ulysses"])
def test_the_calls_inside_are_for_the_device_that_jax_compiles_for(backend: str) -> None:
    """Also the steps of a ring, whose kernel is chosen before they are lowered."""
    pytest.importorskip("triton")
    card = AbstractDevice("NVIDIA H200", None, "gpu")
    mesh = AbstractMesh((2,), ("seq",), axis_types=(AxisType.Auto,), abstract_device=card)
    query, key = (jax.ShapeDtypeStruct((1, 512, heads, 64), "bfloat16") for heads in (4, 2))
    call = partial(context_attention, axis="seq", causal=True, backend=backend)
    run = jax.shard_map(call, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))
    gradient = jax.jit(jax.grad(lambda *arrays: run(*arrays).astype(jnp.float32).sum(), argnums=(0, 1)))
    with use_abstract_mesh(mesh):
        lowered = gradient.trace(query, key, key).lower(lowering_platforms=("cuda",))
    kernels = {f"{label.name}.{label.backend}" for label in find_labels_in_lowered(lowered)}
    inside = {name for name in kernels if name.startswith("flash_attention")}
    assert {name.partition(".")[0] for name in inside} == {"flash_attention", "flash_attention_bwd"}
    assert not {"flash_attention.xla", "flash_attention_bwd.xla"} & inside


def ring(length: int, axis: Any) -> Any:
    mesh = jax.make_mesh((4,), ("seq",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))

    def loss(query: Any, key: Any) -> Any:
        return context_attention(query, key, key, axis=axis, causal=True, backend="ring").sum()[None]

    run = jax.shard_map(loss, mesh=mesh, in_specs=P(None, "seq"), out_specs=P("seq"))
    arrays = [jax.ShapeDtypeStruct((1, 4 * length, heads, 16), "float32") for heads in (4, 2)]
    return jax.jit(jax.grad(lambda *arrays: run(*arrays).sum(), argnums=(0, 1))), arrays


def test_the_calls_inside_are_ordinary_calls() -> None:
    function, arrays = ring(16, "seq")
    with recording() as recorder:
        function.lower(*arrays)
    forward = [inv for inv in recorder if inv.op == "flash_attention"]
    shapes = [(inv["query"].shape, inv["causal"]) for inv in forward]
    assert shapes[0] == ((1, 16, 4, 16), True)
    assert set(shapes[1:]) == {((2, 8, 4, 16), False)}
    query, key = (jax.ShapeDtypeStruct((2, 8, heads, 16), "float32") for heads in (4, 2))
    direct = ejkernel_core.invocation("flash_attention", query, key, key, return_lse=True)
    assert forward[1].tuning_keys[-1] == direct.tuning_keys[-1]
    backward = [(inv["query"].shape, inv["causal"]) for inv in recorder if inv.op == "flash_attention_bwd"]
    assert set(backward) == set(shapes)


def test_the_choice_is_the_same_where_a_miss_is_an_error() -> None:
    with policy_override(mode="error_on_miss"):
        assert plan(2, (8, 8)).kernel.backend == "ulysses"


@pytest.mark.long
def test_only_the_calls_inside_are_measured() -> None:
    function, arrays = ring(8, "seq")
    values = [jnp.ones(array.shape) for array in arrays]
    with policy_override(autotune=True, budget_s=10):
        jax.block_until_ready(function(*values))
    query, key = (jax.ShapeDtypeStruct((2, 4, heads, 16), "float32") for heads in (4, 2))
    inside = ejkernel_core.plan("flash_attention", query, key, key, return_lse=True)
    assert inside.choice.record is not None
    options = {"axis": "seq", "axis_size": 4, "causal": True, "backend": "ring"}
    shapes = [jax.ShapeDtypeStruct((1, 8, heads, 16), "float32") for heads in (4, 2, 2)]
    assert ejkernel_core.plan("context_attention", *shapes, **options).origin == "heuristic"


def test_tuning_by_hand_says_why_not() -> None:
    function, arrays = ring(8, "seq")
    with recording() as recorder:
        function.lower(*arrays)
    (inv, *_) = [inv for inv in recorder if inv.op == "context_attention"]
    assert "the calls of flash_attention inside it are measured" in str(autotune_recorded([inv], remember=False))
    with pytest.raises(Unsupported, match="communicates with other devices"):
        inv.operation.samples(inv.arguments, jax.random.key(0))
