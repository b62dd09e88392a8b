"""The proofs proved: each of these kernels is wrong in one way, and the check that is meant for it says so by name."""

from __future__ import annotations

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
from ejkernel_core import Registry, UnknownBackend, Unsupported, hookimpl
from ejkernel_ops.flash_attention.dense import dense_attention
from ejkernel_ops.flash_attention.examples import forward_cases
from ejkernel_testing import _checks

Results = tuple[jax.Array, ...]
Kernel = Callable[[Mapping[str, Any]], Results]

CASES = {case.name: case for case in forward_cases()}
REGISTRY = Registry()


def register(
    backend: str, forward: Kernel, backward: Kernel | None = None, able: Callable[[Any], None] | None = None
) -> None:
    """A kernel of the forward; without one of the backward, the backward is right whatever the forward does."""
    for name, run in {"flash_attention": forward, "flash_attention_bwd": backward}.items():
        if run is not None:
            REGISTRY.register(SimpleNamespace(**hooks(run, able)), f"{name}.{backend}")


def hooks(run: Kernel, able: Callable[[Any], None] | None) -> dict[str, Any]:
    @hookimpl
    def heuristic_cfg(inv: Any) -> Any:
        if able is not None:
            able(inv)
        return "the only one"

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        return run(inv)

    return {"heuristic_cfg": heuristic_cfg, "run_backend": run_backend}


def gradients(inv: Mapping[str, Any], forward: Kernel = dense_attention) -> Results:
    """The gradients of ``forward``, by JAX."""
    (out, lse), pull_back = jax.vjp(lambda moving: forward({**inv, **moving}), {n: inv[n] for n in inv["wrt"]})
    (found,) = pull_back(
        tuple(jnp.zeros_like(r) if inv[d] is None else inv[d] for r, d in ((out, "d_out"), (lse, "d_lse")))
    )
    return tuple(found[name] for name in inv["wrt"])


def changed(**change: Callable[[Mapping[str, Any]], Any]) -> tuple[Kernel, Kernel]:
    """Attention and its gradients on other arguments than were given."""

    def forward(inv: Mapping[str, Any]) -> Results:
        return dense_attention({**inv, **{name: to(inv) for name, to in change.items()}})

    def backward(inv: Mapping[str, Any]) -> Results:
        return gradients(inv, forward)

    return forward, backward


def of_gradients(name: str, change: Callable[[Any, Mapping[str, Any]], Any]) -> tuple[Kernel, Kernel]:
    """The right forward, and one gradient wrong."""

    def backward(inv: Mapping[str, Any]) -> Results:
        found = dict(zip(inv["wrt"], gradients(inv), strict=True))
        return tuple(change(found[n], inv) if n == name else found[n] for n in found)

    return dense_attention, backward


def first_of_large_batch(inv: Mapping[str, Any]) -> Any:
    """Blocks of batch entries, and the first one's keys for a whole block: right as long as a block is one entry."""
    key = inv["key"]
    return key if key.shape[0] <= 2 else jnp.broadcast_to(key[:1], key.shape)


def unwritten(value: float) -> Kernel:
    """The last rows, where the length is no multiple of the block, are what was in memory before."""

    def forward(inv: Mapping[str, Any]) -> Results:
        out, lse = dense_attention(inv)
        written = out.shape[1] // 64 * 64 if out.shape[1] > 64 else out.shape[1]
        return out.at[:, written:].set(value), lse

    return forward


def summed_in_bfloat16(inv: Mapping[str, Any]) -> Results:
    """Right softmax, then out = sum of weights times values, block after block, in the inputs' dtype."""
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
    """The gradients of 64 queries after 64 queries, added up in the inputs' dtype."""
    total = [jnp.zeros_like(inv[name]) for name in inv["wrt"]]
    for start in range(0, inv["query"].shape[1], 64):
        weight = jnp.zeros_like(inv["d_out"]).at[:, start : start + 64].set(inv["d_out"][:, start : start + 64])
        total = [a + b for a, b in zip(total, gradients({**inv, "d_out": weight}), strict=True)]
    return tuple(total)


def without_sinks_in_lse(inv: Mapping[str, Any]) -> Results:
    return dense_attention(inv)[0], dense_attention({**inv, "softmax_aux": None})[1]


def other_groups(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Key head h % kv heads instead of h // group: all key heads written out in the wrong order."""

    def repeated(inv: Mapping[str, Any]) -> Any:
        return jnp.tile(inv[name], (1, 1, inv["query"].shape[2] // inv[name].shape[2], 1))

    return repeated


def summed_over_other_groups(gradient: Any, inv: Mapping[str, Any]) -> Any:
    """The right gradients of query heads, added up over those that are kv heads apart."""
    group = inv["query"].shape[2] // inv["key"].shape[2]
    wide = {**inv, **{name: jnp.repeat(inv[name], group, 2) for name in ("key", "value")}, "wrt": ("key",)}
    (every,) = gradients(wide)
    return every.reshape(*every.shape[:2], group, gradient.shape[2], -1).sum(2).astype(gradient.dtype)


def top_left(inv: Mapping[str, Any]) -> Any:
    """Causality counted from the first tokens, as a mask beside the right one taken away."""
    q_length, k_length = inv["query"].shape[1], inv["key"].shape[1]
    return jnp.tril(jnp.ones((1, 1, q_length, k_length), bool)) if inv["causal"] else inv["attention_mask"]


def by_kv_head(inv: Mapping[str, Any]) -> Any:
    """The bias of the kv head for all of its query heads."""
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


def of_one_batch_entry(gradient: Any, inv: Mapping[str, Any]) -> Any:
    """A bias for the whole batch whose gradient is that of one entry (here: their mean)."""
    return gradient / inv["query"].shape[0] if gradient.shape[0] == 1 else gradient


def of_sinks_by_rounded_results(gradient: Any, inv: Mapping[str, Any]) -> Any:
    """As kernels compute it: every weight times what its row's result, in few digits, is times the gradient of that."""
    out, d_out, d_lse = (inv[name].astype(jnp.float32) for name in ("out", "d_out", "d_lse"))
    rows = (out * d_out).sum(-1).swapaxes(1, 2) - d_lse
    weights = jnp.exp(inv["softmax_aux"].astype(jnp.float32)[:, 0, None] - inv["lse"])
    return -(weights * rows).sum((0, 2))[:, None].astype(gradient.dtype)


def dust_where_nothing_is_seen(inv: Mapping[str, Any]) -> Results:
    out, lse = dense_attention(inv)
    return jnp.where(jnp.isinf(lse).swapaxes(1, 2)[..., None], 1e-7, out).astype(out.dtype), lse


register("right", dense_attention, gradients)
register("ignores_window", *changed(sliding_window=lambda inv: None))
register("drops_bias", *changed(bias=lambda inv: None))
register("wrong_under_vmap", *changed(key=first_of_large_batch))
register("leaves_rows_unwritten", unwritten(jnp.nan))
register("leaves_rows_stale", unwritten(0.0))
register("accumulates_in_bfloat16", summed_in_bfloat16)
register("accumulates_gradients_in_bfloat16", dense_attention, gradients_summed_in_bfloat16)
register("takes_zero_window_for_none", *changed(sliding_window=without_zero_window))
register("lse_without_sinks", without_sinks_in_lse)
register("other_groups", *changed(key=other_groups("key"), value=other_groups("value")))
register("other_groups_in_backward", *of_gradients("key", summed_over_other_groups))
register("bias_by_kv_head", *changed(bias=by_kv_head))
register("top_left", *changed(attention_mask=top_left, causal=lambda inv: False))
register("caps_before_scale", *changed(logits_soft_cap=cap_before_scale))
register("ignores_seed", *changed(dropout_seed=one_seed))
register("other_dropout_in_backward", dense_attention, changed(dropout_seed=next_seed)[1])
register("no_dropout_in_backward", dense_attention, changed(dropout_prob=lambda inv: 0.0)[1])
register("bias_gradient_not_reduced", *of_gradients("bias", of_one_batch_entry))
register("no_bias_gradient", *of_gradients("bias", lambda gradient, inv: jnp.zeros_like(gradient)))
register("rounded_results", *of_gradients("softmax_aux", of_sinks_by_rounded_results))
register("sinks_too_great", *of_gradients("softmax_aux", lambda gradient, inv: gradient * 1.1))
register("no_lse_gradient", dense_attention, lambda inv: gradients({**inv, "d_lse": None}))
register("dust_where_nothing_is_seen", dust_where_nothing_is_seen)

#: What is wrong, the check that has to find it, and the case it finds it on.
CAUGHT = [
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
    ("dust_where_nothing_is_seen", "rows", "fully-masked-rows"),
]

#: The same kernels where their fault does not show: a check that says no to everything proves nothing.
PASSED = [
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
    ("dust_where_nothing_is_seen", "values", "fully-masked-rows"),
]


#: Proofs of kernels that take nothing else are in 16 bits.
CAUGHT_IN_16_BITS = [
    ("ignores_window", "sensitivity sliding_window", "one-at-a-time"),
    pytest.param("drops_bias", "sensitivity bias", "one-at-a-time", marks=pytest.mark.long),
    pytest.param("lse_without_sinks", "sensitivity softmax_aux", "one-at-a-time", marks=pytest.mark.long),
    ("wrong_under_vmap", "transforms: vmap", "all-that-folds"),
    pytest.param("wrong_under_vmap", "transforms: vmap_of_grad", "all-that-folds", marks=pytest.mark.long),
]


def check(kernel: str, name: str, case: str, dtype: str | None = None) -> None:
    word, _, rest = name.partition(" ")
    proved = CASES[case]
    if dtype is not None:
        variations = tuple(attrs.evolve(one, dtype=dtype) for one in proved.variations)
        proved = attrs.evolve(proved, dtype=dtype, variations=variations)
    arguments: tuple[Any, ...] = (REGISTRY, f"flash_attention.{kernel}", proved)
    if word == "sensitivity":
        testing.sensitivity(*arguments, next(v for v in proved.variations if v.name == rest))
    elif word == "transforms:":
        testing.transforms(*arguments, rest)
    else:
        getattr(testing, word)(*arguments)


@pytest.mark.parametrize(("kernel", "name", "case"), CAUGHT, ids=None)
def test_wrong_kernel_is_caught_by_name(kernel: str, name: str, case: str) -> None:
    start = name if name.startswith("transforms") else name.split()[0]
    with pytest.raises(AssertionError, match=f"^{start}: flash_attention.{kernel} on {case}"):
        check(kernel, name, case)


@pytest.mark.parametrize(("kernel", "name", "case"), PASSED, ids=None)
def test_wrong_kernel_passes_where_its_fault_does_not_show(kernel: str, name: str, case: str) -> None:
    check(kernel, name, case)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.long)])
@pytest.mark.parametrize(("kernel", "name", "case"), CAUGHT_IN_16_BITS, ids=None)
def test_wrong_kernel_is_caught_in_16_bits(kernel: str, name: str, case: str, dtype: str) -> None:
    start = name if name.startswith("transforms") else name.split()[0]
    with pytest.raises(AssertionError, match=f"^{start}: flash_attention.{kernel} on {case}"):
        check(kernel, name, case, dtype)
    check("right", name, case, dtype)


def test_sums_that_cancel_may_be_off_by_what_rounded_results_make_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = next(one for name, one in CASES.items() if name.startswith("grid03-float32-63x63-d64"))
    left_out = {"bias", "attention_mask", "dropout_prob", "dropout_seed"}

    def arguments(draw: int) -> dict[str, Any]:
        return {name: x for name, x in wide.arguments(draw).items() if name not in left_out}

    wrt = tuple(name for name in wide.wrt if name not in left_out)
    # The weights are the name's: one of fifty has sums that nearly cancel.
    sinks = attrs.evolve(wide, name="rows-of-one-token-49", arguments=arguments, wrt=wrt, dtype="bfloat16")
    testing.gradients(REGISTRY, "flash_attention.rounded_results", sinks)
    with pytest.raises(AssertionError, match=r"gradient of softmax_aux is off by 9.9\de-02"):
        testing.gradients(REGISTRY, "flash_attention.sinks_too_great", sinks)
    monkeypatch.setattr(_checks, "GRADIENT_MOVES", 0.0)
    with pytest.raises(AssertionError, match=r"gradient of softmax_aux is off by 1.9\de-02"):
        testing.gradients(REGISTRY, "flash_attention.rounded_results", sinks)


class TestRightKernel(testing.KernelProofs):
    """What a third party writes, for a kernel that is registered at run time; on a part of the cases."""

    kernel = "flash_attention.right"
    registry = REGISTRY

    def cases(self) -> Sequence[testing.Case]:
        return [
            CASES[name]
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


# -- refusals --------------------------------------------------------------------------------------------------------


def refuse_bias(inv: Any) -> None:
    if inv["bias"] is not None:
        raise Unsupported("no bias here")


def not_implemented(inv: Any) -> None:
    raise NotImplementedError("no bias here")


def too_late(inv: Mapping[str, Any]) -> Results:
    raise Unsupported("no bias here")


register("refuses_bias", dense_attention, able=refuse_bias)
register("refuses_otherwise", dense_attention, able=not_implemented)
register("refuses_late", too_late)
register("refuses_bias_gradients", dense_attention)
REGISTRY.register(SimpleNamespace(**hooks(gradients, refuse_bias)), "flash_attention_bwd.refuses_bias_gradients")


def refused(kernel: str, case: str, *features: str, gradients: tuple[str, ...] = ()) -> bool:
    named = f"flash_attention.{kernel}"
    return not testing.refusals(REGISTRY, named, CASES[case], frozenset(features), frozenset(gradients))


def test_refusal_as_declared() -> None:
    assert refused("refuses_bias", "bias-of-each-query-head", "bias")
    assert refused("refuses_bias_gradients", "bias-of-each-query-head", gradients=("bias",))
    assert not refused("refuses_bias", "plain", "bias")


@pytest.mark.parametrize(
    ("kernel", "features", "message"),
    [
        ("refuses_bias", (), "refuses_bias on bias-of-each-query-head: is not declared to refuse this: .*no bias here"),
        ("refuses_bias_gradients", (), "flash_attention_bwd.refuses_bias_gradients on .*: is not declared"),
        ("refuses_otherwise", ("bias",), "does not refuse by Unsupported.*NotImplementedError"),
        ("right", ("bias",), "takes it, though it is declared to refuse bias"),
    ],
)
def test_refusal_against_what_is_declared(kernel: str, features: tuple[str, ...], message: str) -> None:
    with pytest.raises(AssertionError, match=f"^refusals: .*{message}"):
        refused(kernel, "bias-of-each-query-head", *features)


def test_refusal_that_comes_too_late() -> None:
    with pytest.raises(AssertionError, match="^refusals: flash_attention.refuses_late on plain: .*run_backend"):
        check("refuses_late", "values", "plain")


def test_declared_refusal_skips_the_case() -> None:
    class Proofs(testing.KernelProofs):
        kernel = "flash_attention.refuses_bias"
        refuses = frozenset({"bias"})
        registry = REGISTRY

    with pytest.raises(pytest.skip.Exception, match="refuses bias-of-each-query-head, as declared"):
        Proofs().test_case(CASES["bias-of-each-query-head"])


# -- the cases -------------------------------------------------------------------------------------------------------


def test_every_argument_is_varied() -> None:
    varied = {name for case in CASES.values() for v in case.variations for name in changes(case, v)}
    parameters = set(REGISTRY.operation("flash_attention").signature.parameters)
    assert varied == parameters - {"query", "key", "value"}


def changes(case: testing.Case, variation: testing.Case) -> set[str]:
    before, after = case.arguments(0), variation.arguments(0)
    return {name for name in after if not np.array_equal(before.get(name), after[name])}


def test_names_are_unique_and_draws_alike() -> None:
    assert len(CASES) == len(list(forward_cases()))
    for case in CASES.values():
        first, second = (jax.tree.map(np.shape, case.arguments(draw)) for draw in (0, 1))
        assert first == second, case.name


FACTORS = {"a": range(5), "b": range(4), "c": "xyz", "d": (False, True)}


def test_pairwise_has_every_pair() -> None:
    rows = testing.pairwise(FACTORS)
    for (one, ones), (two, twos) in combinations(FACTORS.items(), 2):
        assert {(row[one], row[two]) for row in rows} == set(product(ones, twos))
    assert len(rows) < 30
    assert rows == testing.pairwise(FACTORS)


def test_pairwise_keeps_what_is_not_allowed_out() -> None:
    def allowed(row: Mapping[str, Any]) -> bool:
        return not (row.get("c") == "x" and row.get("d")) and not (row.get("a") == 4 and row.get("c") in ("y", "z"))

    rows = testing.pairwise(FACTORS, allowed)
    assert all(allowed(row) for row in rows)
    assert {(row["a"], row["c"]) for row in rows} == {(a, c) for a in range(4) for c in "xyz"} | {(4, "x")}
    assert not any(row["a"] == 4 and row["d"] for row in rows)  # each is allowed with the other, but with no third
    assert {(row["a"], row["b"]) for row in rows} == set(product(range(5), range(4)))


@pytest.mark.parametrize(
    ("kernel", "error"), [("flash_attention.nobodys", UnknownBackend), ("flash_attention_bwd.reference", TypeError)]
)
def test_a_proof_of_nothing_does_not_pass(kernel: str, error: type[Exception]) -> None:
    class Proofs(testing.KernelProofs):
        pass

    Proofs.kernel = kernel
    with pytest.raises(error):
        Proofs().cases()
