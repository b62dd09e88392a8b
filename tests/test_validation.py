"""``validate=True``: an operation checks the values of arrays before anything runs."""

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
INVALID = np.array([2, -1, 4])


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
    validations: int = 0


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def registry(counts: Counts) -> Registry:
    """``sums`` with one kernel. ``counts`` has the number of traces and of validations."""

    def count_and_check(arguments: Mapping[str, Any]) -> None:
        counts.validations += 1
        check_lengths(arguments)

    return registry_of(attrs.evolve(SUMS, validate=count_and_check), counts)


def registry_of(operation: Operation, counts: Counts) -> Registry:
    @hookimpl
    def heuristic_cfg(inv: Any) -> None:
        return None

    @hookimpl
    def run_backend(inv: Any, cfg: None) -> Any:
        counts.traces += 1
        x, lengths = inv["x"], inv["lengths"]
        ends = jnp.cumsum(lengths)[:, None]
        positions = jnp.arange(x.shape[0])
        inside = (positions >= ends - lengths[:, None]) & (positions < ends)
        return (inv["scale"] * jnp.where(inside, x, 0).sum(1),)

    registry = Registry("")
    registry.register(operation, "sums")
    registry.register(SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend), "sums.reference")
    return registry


def test_invalid_values_are_refused_before_anything_runs(registry: Registry, counts: Counts) -> None:
    with pytest.raises(ValueError, match=r"^sums: lengths\[1\] takes at least 0; got -1$"):
        registry.call("sums", X, INVALID, validate=True)
    assert counts == Counts(traces=0, validations=1)


def test_valid_values_give_the_same_results_without_a_new_trace(registry: Registry, counts: Counts) -> None:
    expected = registry.call("sums", X, LENGTHS, scale=2.0)
    np.testing.assert_array_equal(expected, [2.0, 0.0, 28.0])
    for _ in range(2):
        np.testing.assert_array_equal(registry.call("sums", X, LENGTHS, scale=2.0, validate=True), expected)
    np.testing.assert_array_equal(registry.call("sums", X, LENGTHS, scale=2.0, validate=False), expected)
    assert counts == Counts(traces=1, validations=2)


def test_the_first_call_may_validate(registry: Registry, counts: Counts) -> None:
    for validate in (True, False, True):
        registry.call("sums", X, LENGTHS, validate=validate)
    assert counts == Counts(traces=1, validations=2)


def test_without_validate_no_value_is_checked(registry: Registry, counts: Counts) -> None:
    with pytest.raises(ValueError, match="takes at least 0"):
        registry.call("sums", X, INVALID, validate=True)
    np.testing.assert_array_equal(registry.call("sums", X, INVALID), [1.0, 0.0, 1.0 + 2.0 + 3.0 + 4.0])
    assert counts.validations == 1


def test_the_check_gets_the_callers_arguments_and_the_defaults(counts: Counts) -> None:
    argument_dicts: list[Mapping[str, Any]] = []
    registry = registry_of(attrs.evolve(SUMS, validate=argument_dicts.append), counts)
    lengths = np.array([2**32 + 1, 0, 4])  # in JAX's 32 bits, the first is 1
    np.testing.assert_array_equal(registry.call("sums", X, lengths=lengths, validate=True), [0.0, 0.0, 10.0])
    (arguments,) = argument_dicts
    assert list(arguments) == ["x", "lengths", "scale"]
    assert arguments["x"] is X
    assert arguments["lengths"] is lengths
    assert arguments["scale"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lengths": np.array([[-1]])}, ValueError, r"lengths: takes one axis; got shape \(1, 1\)"),
        ({"lengths": [-1]}, TypeError, r"sums: lengths takes an array; got list \[-1\]"),
        ({"lengths": 2**70}, ValueError, r"sums: lengths takes an int from -2\*\*31"),
        ({"scale": jnp.ones(3)}, TypeError, r"sums: scale is a static option .* got an array of shape \(3,\)"),
        ({"lenghts": INVALID}, TypeError, "sums: .*did you mean 'lengths'"),
    ],
)
def test_invalid_arguments_are_refused_before_values_are_checked(
    registry: Registry, counts: Counts, arguments: Any, error: Any, message: str
) -> None:
    for validate in (False, True):
        with pytest.raises(error, match=message):
            registry.call("sums", x=X, validate=validate, **{"lengths": INVALID, **arguments})
    assert counts.validations == 0


def test_the_error_of_the_check_is_the_cause(registry: Registry) -> None:
    with pytest.raises(ValueError, match="sums: ") as fault:
        registry.call("sums", X, INVALID, validate=True)
    assert str(fault.value.__cause__) == "lengths[1] takes at least 0; got -1"


TRANSFORMS = {
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


@pytest.mark.parametrize("name", TRANSFORMS)
def test_validate_refuses_traced_arrays(registry: Registry, counts: Counts, name: str) -> None:
    array = "x" if name in ("jit", "grad", "jvp", "vmap", "checkpoint", "eval_shape") else "lengths"
    with pytest.raises(TypeError) as fault:
        TRANSFORMS[name](lambda x, lengths: registry.call("sums", x, lengths, validate=True))
    assert str(fault.value) == (
        f"sums: validate=True looks at values, and {array} has none while it is traced (jit, grad, vmap, scan): leave it "
        "out there, and make such a call once with it outside"
    )
    assert counts == Counts(traces=0, validations=0)


def test_validate_works_with_disabled_jit(registry: Registry) -> None:
    with jax.disable_jit():
        np.testing.assert_array_equal(registry.call("sums", X, LENGTHS, validate=True), [1.0, 0.0, 14.0])
        with pytest.raises(ValueError, match=r"lengths\[1\]"):
            registry.call("sums", X, INVALID, validate=True)


def test_validate_checks_constants_of_a_traced_function(registry: Registry) -> None:
    result = jax.jit(lambda: registry.call("sums", X, LENGTHS, validate=True))()
    np.testing.assert_array_equal(result, [1.0, 0.0, 14.0])
    with pytest.raises(ValueError, match=r"sums: lengths\[1\]"):
        jax.jit(lambda: registry.call("sums", X, INVALID, validate=True))()


def test_validate_is_refused_for_an_operation_without_a_check(counts: Counts) -> None:
    registry = registry_of(attrs.evolve(SUMS, validate=None), counts)
    np.testing.assert_array_equal(registry.call("sums", X, LENGTHS, validate=False), [1.0, 0.0, 14.0])
    with pytest.raises(
        TypeError, match="sums: validate=True has nothing to check, because the operation has no validate$"
    ):
        registry.call("sums", X, LENGTHS, validate=True)


@pytest.mark.parametrize("value", [1, 0, None, "yes", LENGTHS])
def test_validate_takes_true_or_false(registry: Registry, value: Any) -> None:
    with pytest.raises(TypeError, match=f"sums: validate takes True or False; got {type(value).__name__}"):
        registry.call("sums", X, LENGTHS, validate=value)


def test_validate_takes_numpy_booleans(registry: Registry, counts: Counts) -> None:
    for validate in (np.True_, np.False_):
        registry.call("sums", X, LENGTHS, validate=validate)
    assert counts.validations == 1


@pytest.mark.parametrize("method", ["plan", "explain", "invocation"])
@pytest.mark.parametrize("validate", [True, False])
def test_methods_that_take_shapes_refuse_validate(registry: Registry, method: str, validate: bool) -> None:
    with pytest.raises(
        TypeError, match="sums: validate checks values, but only shapes are used here: pass it to call or"
    ):
        getattr(registry, method)("sums", X, LENGTHS, validate=validate)


def test_the_backward_operation_has_the_same_check() -> None:
    axes = Axes({"x": "rows"}, {"out": "rows"}, independent="rows", whole="", counts="rows")
    forward = Operation(name="f", signature=lambda x: None, axes=axes, backward="f_bwd", validate=check_lengths)
    assert forward.gradients().validate is check_lengths
    assert forward.gradients(validate=None).validate is None
