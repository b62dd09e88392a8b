"""``validate=True``: an operation looks at the values of arrays before anything runs, or says that it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import Axes, Operation, Registry, hookimpl

X = jnp.arange(6.0)
LENGTHS = jnp.array([2, 0, 4])
WRONG = np.array([2, -1, 4])


def sums(x, lengths, *, scale=1.0): ...


def check_lengths(arguments: Mapping[str, Any]) -> None:
    lengths = np.asarray(arguments["lengths"])
    below = np.flatnonzero(lengths < 0)
    if len(below):
        raise ValueError(f"lengths[{below[0]}] takes at least 0; got {lengths[below[0]]}")


def prepare(arguments: Any) -> Any:
    if arguments["lengths"].ndim != 1:
        raise ValueError(f"lengths: takes one axis; got shape {arguments['lengths'].shape}")
    return arguments, lambda results: results[0]


def outputs(arguments: Mapping[str, Any]) -> Any:
    return (jax.ShapeDtypeStruct(arguments["lengths"].shape, arguments["x"].dtype),)


SUMS = Operation(name="sums", signature=sums, prepare=prepare, outputs=outputs, validate=check_lengths)


@attrs.define
class Counts:
    traces: int = 0
    looks: int = 0


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def registry(counts: Counts) -> Registry:
    """``sums`` by one kernel; how often that is traced and the operation looks is counted."""

    def look(arguments: Mapping[str, Any]) -> None:
        counts.looks += 1
        check_lengths(arguments)

    return registry_of(attrs.evolve(SUMS, validate=look), counts)


def registry_of(operation: Operation, counts: Counts) -> Registry:
    @hookimpl
    def heuristic_cfg(inv: Any) -> None:
        return None

    @hookimpl
    def run_backend(inv: Any, cfg: None) -> Any:
        counts.traces += 1
        x, lengths = inv["x"], inv["lengths"]
        ends = jnp.cumsum(lengths)[:, None]
        places = jnp.arange(x.shape[0])
        inside = (places >= ends - lengths[:, None]) & (places < ends)
        return (inv["scale"] * jnp.where(inside, x, 0).sum(1),)

    own = Registry("")
    own.register(operation, "sums")
    own.register(SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend), "sums.reference")
    return own


def test_what_is_wrong_is_told_by_the_operation_before_anything_runs(registry: Registry, counts: Counts) -> None:
    with pytest.raises(ValueError, match=r"^sums: lengths\[1\] takes at least 0; got -1$"):
        registry.call("sums", X, WRONG, validate=True)
    assert counts == Counts(traces=0, looks=1)


def test_what_is_right_gives_the_same_and_is_not_traced_again(registry: Registry, counts: Counts) -> None:
    plain = registry.call("sums", X, LENGTHS, scale=2.0)
    np.testing.assert_array_equal(plain, [2.0, 0.0, 28.0])
    for _ in range(2):
        np.testing.assert_array_equal(registry.call("sums", X, LENGTHS, scale=2.0, validate=True), plain)
    np.testing.assert_array_equal(registry.call("sums", X, LENGTHS, scale=2.0, validate=False), plain)
    assert counts == Counts(traces=1, looks=2)


def test_the_first_call_may_be_the_one_that_looks(registry: Registry, counts: Counts) -> None:
    for validate in (True, False, True):
        registry.call("sums", X, LENGTHS, validate=validate)
    assert counts == Counts(traces=1, looks=2)


def test_without_it_nothing_is_looked_at(registry: Registry, counts: Counts) -> None:
    with pytest.raises(ValueError, match="takes at least 0"):
        registry.call("sums", X, WRONG, validate=True)
    np.testing.assert_array_equal(registry.call("sums", X, WRONG), [1.0, 0.0, 1.0 + 2.0 + 3.0 + 4.0])
    assert counts.looks == 1


def test_it_gets_what_the_caller_wrote_and_the_defaults(counts: Counts) -> None:
    seen: list[Mapping[str, Any]] = []
    registry = registry_of(attrs.evolve(SUMS, validate=seen.append), counts)
    lengths = np.array([2**32 + 1, 0, 4])  # in JAX's 32 bits, the first is 1
    np.testing.assert_array_equal(registry.call("sums", X, lengths=lengths, validate=True), [0.0, 0.0, 10.0])
    (arguments,) = seen
    assert list(arguments) == ["x", "lengths", "scale"]
    assert arguments["x"] is X
    assert arguments["lengths"] is lengths
    assert arguments["scale"] == 1.0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"lengths": np.array([[-1]])}, ValueError, r"lengths: takes one axis; got shape \(1, 1\)"),
        ({"lengths": [-1]}, TypeError, r"sums: lengths takes an array; got list \[-1\]"),
        ({"lengths": 2**70}, ValueError, r"sums: lengths takes an int from -2\*\*31"),
        ({"scale": jnp.ones(3)}, TypeError, r"sums: scale is a static option .* got an array of shape \(3,\)"),
        ({"lenghts": WRONG}, TypeError, "sums: .*did you mean 'lengths'"),
    ],
)
def test_what_is_wrong_without_values_is_told_first(
    registry: Registry, counts: Counts, given: Any, error: Any, message: str
) -> None:
    for validate in (False, True):
        with pytest.raises(error, match=message):
            registry.call("sums", x=X, validate=validate, **{"lengths": WRONG, **given})
    assert counts.looks == 0


def test_its_own_error_is_kept_as_the_cause(registry: Registry) -> None:
    with pytest.raises(ValueError, match="sums: ") as fault:
        registry.call("sums", X, WRONG, validate=True)
    assert str(fault.value.__cause__) == "lengths[1] takes at least 0; got -1"


TRACED = {
    "jit": lambda call: jax.jit(call)(X, LENGTHS),
    "jit of one array": lambda call: jax.jit(lambda lengths: call(X, lengths))(LENGTHS),
    "grad": lambda call: jax.grad(lambda x: call(x, LENGTHS).sum())(X),
    "jvp": lambda call: jax.jvp(lambda x: call(x, LENGTHS), (X,), (X,)),
    "vmap": lambda call: jax.vmap(call, (0, None))(X[None], LENGTHS),
    "scan": lambda call: jax.lax.scan(lambda carry, lengths: (carry, call(X, lengths)), 0, LENGTHS[None]),
    "checkpoint": lambda call: jax.checkpoint(call)(X, LENGTHS),
    "eval_shape": lambda call: jax.eval_shape(call, X, LENGTHS),
    "a shape": lambda call: call(X, jax.ShapeDtypeStruct(LENGTHS.shape, LENGTHS.dtype)),
}


@pytest.mark.parametrize("name", TRACED)
def test_what_is_traced_has_no_values(registry: Registry, counts: Counts, name: str) -> None:
    which = "x" if name in ("jit", "grad", "jvp", "vmap", "checkpoint", "eval_shape") else "lengths"
    with pytest.raises(TypeError) as fault:
        TRACED[name](lambda x, lengths: registry.call("sums", x, lengths, validate=True))
    assert str(fault.value) == (
        f"sums: validate=True looks at values, and {which} has none while it is traced (jit, grad, vmap, scan): leave it "
        "out there, and make such a call once with it outside"
    )
    assert counts == Counts(traces=0, looks=0)


def test_where_nothing_is_jitted_there_are_values(registry: Registry) -> None:
    with jax.disable_jit():
        np.testing.assert_array_equal(registry.call("sums", X, LENGTHS, validate=True), [1.0, 0.0, 14.0])
        with pytest.raises(ValueError, match=r"lengths\[1\]"):
            registry.call("sums", X, WRONG, validate=True)


def test_constants_of_a_traced_function_have_values(registry: Registry) -> None:
    found = jax.jit(lambda: registry.call("sums", X, LENGTHS, validate=True))()
    np.testing.assert_array_equal(found, [1.0, 0.0, 14.0])
    with pytest.raises(ValueError, match=r"sums: lengths\[1\]"):
        jax.jit(lambda: registry.call("sums", X, WRONG, validate=True))()


def test_an_operation_that_says_nothing_of_values_cannot_check_any(counts: Counts) -> None:
    registry = registry_of(attrs.evolve(SUMS, validate=None), counts)
    np.testing.assert_array_equal(registry.call("sums", X, LENGTHS, validate=False), [1.0, 0.0, 14.0])
    with pytest.raises(
        TypeError, match="sums: validate=True has nothing to check, for the operation says nothing of val"
    ):
        registry.call("sums", X, LENGTHS, validate=True)


@pytest.mark.parametrize("wrong", [1, 0, None, "yes", LENGTHS])
def test_it_takes_true_or_false(registry: Registry, wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"sums: validate takes True or False; got {type(wrong).__name__}"):
        registry.call("sums", X, LENGTHS, validate=wrong)


def test_it_takes_those_of_numpy(registry: Registry, counts: Counts) -> None:
    for validate in (np.True_, np.False_):
        registry.call("sums", X, LENGTHS, validate=validate)
    assert counts.looks == 1


@pytest.mark.parametrize("question", ["plan", "explain", "invocation"])
@pytest.mark.parametrize("validate", [True, False])
def test_what_is_made_of_shapes_takes_none(registry: Registry, question: str, validate: bool) -> None:
    with pytest.raises(
        TypeError, match="sums: validate looks at values, and this at shapes alone: give it to call, or"
    ):
        getattr(registry, question)("sums", X, LENGTHS, validate=validate)


def test_the_backward_operation_looks_at_the_same() -> None:
    axes = Axes({"x": "rows"}, {"out": "rows"}, independent="rows", whole="", counts="rows")
    forward = Operation(name="f", signature=lambda x: None, axes=axes, backward="f_bwd", validate=check_lengths)
    assert forward.gradients().validate is check_lengths
    assert forward.gradients(validate=None).validate is None
