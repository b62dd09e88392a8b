"""Tests of the proofs: each of these kernels has one fault, which the check for such faults finds and names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_testing as testing
from ejkernel_core import Axes, Example, Operation, Registry, UnknownBackend, Unsupported, hookimpl
from ejkernel_ops.flash_attention.dense import dense_attention
from ejkernel_ops.flash_attention.examples import examples
from ejkernel_testing import _checks

Results = tuple[jax.Array, ...]
Kernel = Callable[[Mapping[str, Any]], Results]

EXAMPLES = {example.name: example for example in examples()}
REGISTRY = Registry()


def register(
    backend: str, forward: Kernel, backward: Kernel | None = None, refuse: Callable[[Any], None] | None = None
) -> None:
    """A forward kernel, and a backward kernel. Without the latter, gradients are right whatever the forward does."""
    for name, run in {"flash_attention": forward, "flash_attention_bwd": backward}.items():
        if run is not None:
            REGISTRY.register(SimpleNamespace(**hooks(run, refuse)), f"{name}.{backend}")


def hooks(run: Kernel, refuse: Callable[[Any], None] | None) -> dict[str, Any]:
    @hookimpl
    def heuristic_cfg(inv: Any) -> Any:
        if refuse is not None:
            refuse(inv)
        return "the only configuration"

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        return run(inv)

    return {"heuristic_cfg": heuristic_cfg, "run_backend": run_backend}


def gradients(inv: Mapping[str, Any], forward: Kernel = dense_attention) -> Results:
    """The gradients of ``forward``, by JAX."""
    (out, lse), pullback = jax.vjp(lambda primals: forward({**inv, **primals}), {n: inv[n] for n in inv["wrt"]})
    (gradients,) = pullback(
        tuple(jnp.zeros_like(r) if inv[d] is None else inv[d] for r, d in ((out, "d_out"), (lse, "d_lse")))
    )
    return tuple(gradients[name] for name in inv["wrt"])


def with_changes(**changes: Callable[[Mapping[str, Any]], Any]) -> tuple[Kernel, Kernel]:
    """Attention and its gradients with other arguments than those of the call."""

    def forward(inv: Mapping[str, Any]) -> Results:
        return dense_attention({**inv, **{name: change(inv) for name, change in changes.items()}})

    def backward(inv: Mapping[str, Any]) -> Results:
        return gradients(inv, forward)

    return forward, backward


def with_changed_gradient(name: str, change: Callable[[Any, Mapping[str, Any]], Any]) -> tuple[Kernel, Kernel]:
    """The right forward, and a backward with one gradient changed."""

    def backward(inv: Mapping[str, Any]) -> Results:
        named_gradients = zip(inv["wrt"], gradients(inv), strict=True)
        return tuple(change(gradient, inv) if n == name else gradient for n, gradient in named_gradients)

    return dense_attention, backward


def first_of_large_batch(inv: Mapping[str, Any]) -> Any:
    """The keys of the first batch entry for a whole block of entries, which is right if a block has one entry."""
    key = inv["key"]
    return key if key.shape[0] <= 2 else jnp.broadcast_to(key[:1], key.shape)


def unwritten(value: float) -> Kernel:
    """The rows behind the last full block keep the value that was in memory."""

    def forward(inv: Mapping[str, Any]) -> Results:
        out, lse = dense_attention(inv)
        count = out.shape[1] // 64 * 64 if out.shape[1] > 64 else out.shape[1]
        return out.at[:, count:].set(value), lse

    return forward


def summed_in_bfloat16(inv: Mapping[str, Any]) -> Results:
    """The softmax is right. The sum of weights times values is accumulated over blocks in the inputs' dtype."""
    _, lse = dense_attention(inv)
    query, key, value = (inv[name].astype(jnp.float32) for name in ("query", "key", "value"))
    key, value = (jnp.repeat(array, query.shape[2] // key.shape[2], 2) for array in (key, value))
    weights = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", query, key) * inv["softmax_scale"] - lse[..., None])
    out = jnp.zeros((*query.shape[:3], value.shape[3]), inv["value"].dtype)
    for start in range(0, key.shape[1], 64):
        block = slice(start, start + 64)
        out += jnp.einsum("bhqk,bkhd->bqhd", weights[..., block], value[:, block]).astype(out.dtype)
    return out, lse


def gradients_summed_in_bfloat16(inv: Mapping[str, Any]) -> Results:
    """The gradients are accumulated over blocks of 64 queries in the inputs' dtype."""
    total = [jnp.zeros_like(inv[name]) for name in inv["wrt"]]
    for start in range(0, inv["query"].shape[1], 64):
        weight = jnp.zeros_like(inv["d_out"]).at[:, start : start + 64].set(inv["d_out"][:, start : start + 64])
        total = [a + b for a, b in zip(total, gradients({**inv, "d_out": weight}), strict=True)]
    return tuple(total)


def without_sinks_in_lse(inv: Mapping[str, Any]) -> Results:
    return dense_attention(inv)[0], dense_attention({**inv, "softmax_aux": None})[1]


def other_groups(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Query head h gets the key head h % kv_heads instead of h // group."""

    def repeated(inv: Mapping[str, Any]) -> Any:
        return jnp.tile(inv[name], (1, 1, inv["query"].shape[2] // inv[name].shape[2], 1))

    return repeated


def summed_over_other_groups(gradient: Any, inv: Mapping[str, Any]) -> Any:
    """The gradient of a key head is summed over the query heads h with the same h % kv_heads."""
    group = inv["query"].shape[2] // inv["key"].shape[2]
    wide = {**inv, **{name: jnp.repeat(inv[name], group, 2) for name in ("key", "value")}, "wrt": ("key",)}
    (heads,) = gradients(wide)
    return heads.reshape(*heads.shape[:2], group, gradient.shape[2], -1).sum(2).astype(gradient.dtype)


def top_left(inv: Mapping[str, Any]) -> Any:
    """A mask that aligns the first query with the first key, in place of causality."""
    q_length, k_length = inv["query"].shape[1], inv["key"].shape[1]
    return jnp.tril(jnp.ones((1, 1, q_length, k_length), bool)) if inv["causal"] else inv["attention_mask"]


def by_kv_head(inv: Mapping[str, Any]) -> Any:
    """All query heads of a kv head get the bias of the kv head's index."""
    bias, kv_heads = inv["bias"], inv["key"].shape[2]
    if bias is None or bias.shape[1] == 1:
        return bias
    return jnp.repeat(bias[:, :kv_heads], bias.shape[1] // kv_heads, 1)


def without_zero_window(inv: Mapping[str, Any]) -> Any:
    return inv["sliding_window"] if any(inv["sliding_window"] or ()) else None


def cap_before_scale(inv: Mapping[str, Any]) -> Any:
    return inv["logits_soft_cap"] and inv["logits_soft_cap"] * inv["softmax_scale"]


def next_seed(inv: Mapping[str, Any]) -> Any:
    return None if inv["dropout_seed"] is None else inv["dropout_seed"] + 1


def one_seed(inv: Mapping[str, Any]) -> Any:
    return None if inv["dropout_seed"] is None else jnp.uint32(7)


def mean_over_batch(gradient: Any, inv: Mapping[str, Any]) -> Any:
    """The gradient of a bias that the batch shares is not summed over the batch (here, it is the mean)."""
    return gradient / inv["query"].shape[0] if gradient.shape[0] == 1 else gradient


def sinks_gradient_by_rounded_results(gradient: Any, inv: Mapping[str, Any]) -> Any:
    """As kernels compute it: weights times row sums of the rounded results times their gradients."""
    out, d_out, d_lse = (inv[name].astype(jnp.float32) for name in ("out", "d_out", "d_lse"))
    row_sums = (out * d_out).sum(-1).swapaxes(1, 2) - d_lse
    weights = jnp.exp(inv["softmax_aux"].astype(jnp.float32)[:, 0, None] - inv["lse"])
    return -(weights * row_sums).sum((0, 2))[:, None].astype(gradient.dtype)


def tiny_values_in_masked_rows(inv: Mapping[str, Any]) -> Results:
    out, lse = dense_attention(inv)
    return jnp.where(jnp.isinf(lse).swapaxes(1, 2)[..., None], 1e-7, out).astype(out.dtype), lse


register("right", dense_attention, gradients)
register("ignores_window", *with_changes(sliding_window=lambda inv: None))
register("drops_bias", *with_changes(bias=lambda inv: None))
register("wrong_under_vmap", *with_changes(key=first_of_large_batch))
register("leaves_rows_unwritten", unwritten(jnp.nan))
register("leaves_rows_stale", unwritten(0.0))
register("accumulates_in_bfloat16", summed_in_bfloat16)
register("accumulates_gradients_in_bfloat16", dense_attention, gradients_summed_in_bfloat16)
register("takes_zero_window_for_none", *with_changes(sliding_window=without_zero_window))
register("lse_without_sinks", without_sinks_in_lse)
register("other_groups", *with_changes(key=other_groups("key"), value=other_groups("value")))
register("other_groups_in_backward", *with_changed_gradient("key", summed_over_other_groups))
register("bias_by_kv_head", *with_changes(bias=by_kv_head))
register("top_left", *with_changes(attention_mask=top_left, causal=lambda inv: False))
register("caps_before_scale", *with_changes(logits_soft_cap=cap_before_scale))
register("ignores_seed", *with_changes(dropout_seed=one_seed))
register("other_dropout_in_backward", dense_attention, with_changes(dropout_seed=next_seed)[1])
register("no_dropout_in_backward", dense_attention, with_changes(dropout_prob=lambda inv: 0.0)[1])
register("bias_gradient_not_reduced", *with_changed_gradient("bias", mean_over_batch))
register("no_bias_gradient", *with_changed_gradient("bias", lambda gradient, inv: jnp.zeros_like(gradient)))
register("rounded_results", *with_changed_gradient("softmax_aux", sinks_gradient_by_rounded_results))
register("sinks_too_great", *with_changed_gradient("softmax_aux", lambda gradient, inv: gradient * 1.1))
register("no_lse_gradient", dense_attention, lambda inv: gradients({**inv, "d_lse": None}))
register("tiny_values_in_masked_rows", tiny_values_in_masked_rows)

#: The kernel, the check that has to find its fault, and the example.
FAULTS = [
    ("ignores_window", "values", "window-more-queries-than-keys"),
    ("ignores_window", "sensitivity sliding_window", "one-at-a-time"),
    ("drops_bias", "values", "bias-of-each-query-head"),
    ("drops_bias", "gradients", "bias-gradient-of-its-own-shape"),
    ("drops_bias", "sensitivity bias", "one-at-a-time"),
    ("wrong_under_vmap", "transforms: vmap", "all-that-folds"),
    ("wrong_under_vmap", "transforms: vmap_of_grad", "all-that-folds"),
    ("leaves_rows_unwritten", "values", "lse-of-odd-length"),
    ("leaves_rows_stale", "values", "lse-of-odd-length"),
    ("accumulates_in_bfloat16", "accumulation", "sums-over-8192-keys"),
    pytest.param("accumulates_gradients_in_bfloat16", "accumulation", "sums-over-8192-queries", marks=pytest.mark.long),
    ("takes_zero_window_for_none", "values", "window-of-itself-only"),
    ("lse_without_sinks", "values", "sinks-once-over-many-blocks"),
    ("lse_without_sinks", "sensitivity softmax_aux", "one-at-a-time"),
    ("other_groups", "values", "plain"),
    ("other_groups_in_backward", "gradients", "gqa-strides-in-the-backward"),
    ("bias_by_kv_head", "values", "bias-of-each-query-head"),
    ("top_left", "values", "causal-fewer-queries-than-keys"),
    ("top_left", "values", "causal-more-queries-than-keys"),
    ("caps_before_scale", "values", "soft-cap-then-bias"),
    ("ignores_seed", "sensitivity dropout_seed", "one-at-a-time"),
    ("other_dropout_in_backward", "gradients", "dropout-in-the-backward"),
    ("no_dropout_in_backward", "gradients", "dropout-in-the-backward"),
    ("bias_gradient_not_reduced", "gradients", "bias-gradient-of-its-own-shape"),
    ("no_bias_gradient", "gradients", "bias-gradient-of-its-own-shape"),
    ("no_lse_gradient", "gradients", "lse-of-odd-length"),
    ("tiny_values_in_masked_rows", "rows", "fully-masked-rows"),
]

#: The same kernels where their fault has no effect: a check that always fails would prove nothing.
PASSES = [
    ("ignores_window", "values", "causal-decode"),
    ("drops_bias", "values", "plain"),
    ("wrong_under_vmap", "values", "all-that-folds"),
    ("wrong_under_vmap", "gradients", "all-that-folds"),
    ("leaves_rows_unwritten", "values", "plain"),
    ("accumulates_in_bfloat16", "values", "mqa"),
    ("takes_zero_window_for_none", "values", "window-to-the-right"),
    ("lse_without_sinks", "values", "lse-of-odd-length"),
    ("other_groups", "values", "mqa"),
    ("other_groups_in_backward", "values", "gqa-strides-in-the-backward"),
    ("bias_by_kv_head", "values", "soft-cap-then-bias"),
    ("top_left", "values", "plain"),
    ("other_dropout_in_backward", "values", "dropout-in-the-backward"),
    ("no_bias_gradient", "values", "bias-gradient-of-its-own-shape"),
    ("no_lse_gradient", "values", "lse-of-odd-length"),
    ("tiny_values_in_masked_rows", "values", "fully-masked-rows"),
]


#: For kernels that take 16-bit arrays only, the proofs run in 16 bits.
FAULTS_IN_16_BITS = [
    ("ignores_window", "sensitivity sliding_window", "one-at-a-time"),
    pytest.param("drops_bias", "sensitivity bias", "one-at-a-time", marks=pytest.mark.long),
    pytest.param("lse_without_sinks", "sensitivity softmax_aux", "one-at-a-time", marks=pytest.mark.long),
    ("wrong_under_vmap", "transforms: vmap", "all-that-folds"),
    pytest.param("wrong_under_vmap", "transforms: vmap_of_grad", "all-that-folds", marks=pytest.mark.long),
]


def check(kernel: str, name: str, example: str, dtype: str | None = None) -> None:
    check_name, _, parameter = name.partition(" ")
    subject = EXAMPLES[example]
    if dtype is not None:
        variations = tuple(attrs.evolve(variation, dtype=dtype) for variation in subject.variations)
        subject = attrs.evolve(subject, dtype=dtype, variations=variations)
    arguments: tuple[Any, ...] = (REGISTRY, f"flash_attention.{kernel}", subject)
    if check_name == "sensitivity":
        testing.sensitivity(*arguments, next(v for v in subject.variations if v.name == parameter))
    elif check_name == "transforms:":
        testing.transforms(*arguments, parameter)
    else:
        getattr(testing, check_name)(*arguments)


@pytest.mark.parametrize(("kernel", "name", "example"), FAULTS, ids=None)
def test_the_check_of_a_fault_finds_it(kernel: str, name: str, example: str) -> None:
    prefix = name if name.startswith("transforms") else name.split()[0]
    with pytest.raises(AssertionError, match=f"^{prefix}: flash_attention.{kernel} on {example}"):
        check(kernel, name, example)


@pytest.mark.parametrize(("kernel", "name", "example"), PASSES, ids=None)
def test_a_kernel_passes_where_its_fault_has_no_effect(kernel: str, name: str, example: str) -> None:
    check(kernel, name, example)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.long)])
@pytest.mark.parametrize(("kernel", "name", "example"), FAULTS_IN_16_BITS, ids=None)
def test_the_check_of_a_fault_finds_it_in_16_bits(kernel: str, name: str, example: str, dtype: str) -> None:
    prefix = name if name.startswith("transforms") else name.split()[0]
    with pytest.raises(AssertionError, match=f"^{prefix}: flash_attention.{kernel} on {example}"):
        check(kernel, name, example, dtype)
    check("right", name, example, dtype)


@pytest.mark.long
def test_sums_that_cancel_may_have_the_error_that_rounded_results_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    original = next(example for name, example in EXAMPLES.items() if name.startswith("grid03-float32-63x63-d64"))
    absent = {"bias", "attention_mask", "dropout_prob", "dropout_seed"}

    def arguments(draw: int) -> dict[str, Any]:
        return {name: x for name, x in original.arguments(draw).items() if name not in absent}

    wrt = tuple(name for name in original.wrt if name not in absent)
    # The weights depend on the name: with one name in fifty, the sums nearly cancel.
    sinks = attrs.evolve(original, name="rows-of-one-token-49", arguments=arguments, wrt=wrt, dtype="bfloat16")
    testing.gradients(REGISTRY, "flash_attention.rounded_results", sinks)
    with pytest.raises(AssertionError, match=r"gradient of softmax_aux is off by 9.9\de-02"):
        testing.gradients(REGISTRY, "flash_attention.sinks_too_great", sinks)
    monkeypatch.setattr(_checks, "PROPAGATION_FACTOR", 0.0)
    with pytest.raises(AssertionError, match=r"gradient of softmax_aux is off by 1.9\de-02"):
        testing.gradients(REGISTRY, "flash_attention.rounded_results", sinks)


class TestRightKernel(testing.KernelProofs):
    """What a third party writes for a kernel that is registered at run time, with some of the examples."""

    kernel = "flash_attention.right"
    registry = REGISTRY

    def examples(self) -> Sequence[Example]:
        return [
            EXAMPLES[name]
            for name in (
                "plain",
                "everything",
                "with-packing",
                "sharded",
                "tiny",
                "everything-in-loops",
                "tiny-of-second-order",
            )
        ]


@pytest.mark.parametrize(
    ("axes", "weight_gradient", "fault"),
    [
        ({"independent": "rows", "whole": "columns"}, lambda x, d: (x * d).sum(0), None),
        ({"independent": "rows columns"}, lambda x, d: (x * d).sum(0), "axis 1 of x sharded: .* is off by"),
        # Each shard returns the mean over its rows, and the sum of two means is not a mean.
        (
            {"independent": "rows", "whole": "columns"},
            lambda x, d: (x * d).mean(0),
            "axis 0 of x sharded: .*'weight'.* is off by",
        ),
    ],
)
def test_axes_that_are_not_independent_are_found(axes: Any, weight_gradient: Any, fault: str | None) -> None:
    """A kernel that subtracts the mean of each row, times a weight."""

    def forward(inv: Mapping[str, Any]) -> Any:
        return (inv["x"] - inv["x"].mean(1, keepdims=True)) * inv["weight"]

    def backward(inv: Mapping[str, Any]) -> Any:
        x, d = inv["x"] - inv["x"].mean(1, keepdims=True), inv["d_out"] * inv["weight"]
        gradients = {"x": d - d.mean(1, keepdims=True), "weight": weight_gradient(x, inv["d_out"])}
        results = [gradients[name] for name in inv["wrt"]]
        return tuple(results) if len(results) > 1 else results[0]

    def arguments(draw: int) -> dict[str, Any]:
        numbers = np.random.default_rng(draw)
        return {"x": numbers.standard_normal((4, 6)), "weight": numbers.standard_normal(6)}

    operation = Operation(
        name="centred",
        signature=lambda x, weight: None,
        axes=Axes({"x": "rows columns", "weight": "columns"}, {"out": "rows columns"}, **axes),
        backward="centred_bwd",
    )
    registry = Registry(plugins="")
    registry.register(operation)
    registry.register(operation.gradients())
    for backend in ("reference", "plain"):
        registry.register(SimpleNamespace(**hooks(forward, None)), f"centred.{backend}")
        registry.register(SimpleNamespace(**hooks(backward, None)), f"centred_bwd.{backend}")
    example = Example("rows", "centred", arguments, wrt=("x", "weight"))
    with pytest.raises(AssertionError, match=fault) if fault else contextlib.nullcontext():
        testing.transforms(registry, "centred.plain", example, "sharding")


# -- refusals --------------------------------------------------------------------------------------------------------


def refuse_bias(inv: Any) -> None:
    if inv["bias"] is not None:
        raise Unsupported("no bias here")


def not_implemented(inv: Any) -> None:
    raise NotImplementedError("no bias here")


def refuse_when_run(inv: Mapping[str, Any]) -> Results:
    raise Unsupported("no bias here")


register("refuses_bias", dense_attention, refuse=refuse_bias)
register("raises_another_error", dense_attention, refuse=not_implemented)
register("refuses_in_run_backend", refuse_when_run)
register("refuses_bias_gradients", dense_attention)
REGISTRY.register(SimpleNamespace(**hooks(gradients, refuse_bias)), "flash_attention_bwd.refuses_bias_gradients")


def is_refused(kernel: str, example: str, *features: str, gradients: tuple[str, ...] = ()) -> bool:
    name = f"flash_attention.{kernel}"
    return not testing.refusals(REGISTRY, name, EXAMPLES[example], frozenset(features), frozenset(gradients))


def test_refusals_as_declared() -> None:
    assert is_refused("refuses_bias", "bias-of-each-query-head", "bias")
    assert is_refused("refuses_bias_gradients", "bias-of-each-query-head", gradients=("bias",))
    assert not is_refused("refuses_bias", "plain", "bias")


@pytest.mark.parametrize(
    ("kernel", "features", "message"),
    [
        (
            "refuses_bias",
            (),
            r"refuses_bias on bias-of-each-query-head: is refused, but no feature of it \(bias, .*no bias here",
        ),
        ("refuses_bias_gradients", (), "flash_attention_bwd.refuses_bias_gradients on .*: is refused, but"),
        ("raises_another_error", ("bias",), "is not refused by Unsupported.*NotImplementedError"),
        ("right", ("bias",), "is not refused, but the kernel is declared to refuse bias"),
    ],
)
def test_refusals_that_are_not_as_declared(kernel: str, features: tuple[str, ...], message: str) -> None:
    with pytest.raises(AssertionError, match=f"^refusals: .*{message}"):
        is_refused(kernel, "bias-of-each-query-head", *features)


def test_refusal_in_run_backend() -> None:
    with pytest.raises(
        AssertionError, match="^refusals: flash_attention.refuses_in_run_backend on plain: refused in run_backend"
    ):
        check("refuses_in_run_backend", "values", "plain")


def test_declared_refusal_skips_the_example() -> None:
    class Proofs(testing.KernelProofs):
        kernel = "flash_attention.refuses_bias"
        refuses = frozenset({"bias"})
        registry = REGISTRY

    with pytest.raises(pytest.skip.Exception, match="refuses bias-of-each-query-head, as declared"):
        Proofs().test_example(EXAMPLES["bias-of-each-query-head"])


# -- the examples ----------------------------------------------------------------------------------------------------


def test_every_argument_has_a_variation() -> None:
    arguments = {
        name for example in EXAMPLES.values() for v in example.variations for name in changed_arguments(example, v)
    }
    parameters = set(REGISTRY.operation("flash_attention").signature.parameters)
    assert arguments == parameters - {"query", "key", "value"}


def changed_arguments(example: Example, variation: Example) -> set[str]:
    before, after = example.arguments(0), variation.arguments(0)
    return {name for name in after if not np.array_equal(before.get(name), after[name])}


def test_names_are_unique_and_all_draws_have_the_same_shapes() -> None:
    assert len(EXAMPLES) == len(list(examples()))
    for example in EXAMPLES.values():
        first, second = (jax.tree.map(np.shape, example.arguments(draw)) for draw in (0, 1))
        assert first == second, example.name


FACTORS = {"a": range(5), "b": range(4), "c": "xyz", "d": (False, True)}


def test_pairwise_has_every_pair() -> None:
    rows = testing.pairwise(FACTORS)
    for (one, ones), (two, twos) in combinations(FACTORS.items(), 2):
        assert {(row[one], row[two]) for row in rows} == set(product(ones, twos))
    assert len(rows) < 30
    assert rows == testing.pairwise(FACTORS)


def test_pairwise_leaves_invalid_rows_out() -> None:
    def allowed(row: Mapping[str, Any]) -> bool:
        return not (row.get("c") == "x" and row.get("d")) and not (row.get("a") == 4 and row.get("c") in ("y", "z"))

    rows = testing.pairwise(FACTORS, allowed)
    assert all(allowed(row) for row in rows)
    assert {(row["a"], row["c"]) for row in rows} == {(a, c) for a in range(4) for c in "xyz"} | {(4, "x")}
    assert not any(row["a"] == 4 and row["d"] for row in rows)  # the pair is valid, but no row that has it is
    assert {(row["a"], row["b"]) for row in rows} == set(product(range(5), range(4)))


@pytest.mark.parametrize(
    ("kernel", "error"), [("flash_attention.missing", UnknownBackend), ("flash_attention_bwd.reference", TypeError)]
)
def test_proofs_without_examples_do_not_pass(kernel: str, error: type[Exception]) -> None:
    class Proofs(testing.KernelProofs):
        pass

    Proofs.kernel = kernel
    with pytest.raises(error):
        Proofs().examples()
