"""The weights, the results, the caches and the messages of the proofs, on a small operation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_testing as testing
from ejkernel_classes import Kernel
from ejkernel_core import Example, Operation, Registry, gradient_signature, hookimpl
from ejkernel_testing import _checks, _outcome, _transforms

Compute = Callable[[Mapping[str, Any]], tuple[Any, ...]]


def square(x, *, factor=1.0, both=False): ...


def prepare(arguments: dict[str, Any]) -> Any:
    return arguments, lambda results: results if arguments["both"] else results[0]


FORWARD = Operation(
    name="square",
    signature=square,
    results=("out", "total"),
    prepare=prepare,
    outputs=lambda a: (like(a["x"]), jax.ShapeDtypeStruct((), a["x"].dtype)),
    backward="square_bwd",
)
BACKWARD = Operation(
    name="square_bwd",
    signature=gradient_signature(FORWARD.signature, FORWARD.results),
    arrays=("x", "out", "total", "d_out", "d_total"),
    outputs=lambda a: (like(a["x"]),),
)


def like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def forward(a: Mapping[str, Any]) -> tuple[Any, ...]:
    """The squares, and the sum of the arguments, which only the backward gets, and the caller if ``both`` is set."""
    return a["factor"] * a["x"] ** 2, a["x"].sum()


def backward(a: Mapping[str, Any]) -> tuple[Any, ...]:
    gradient = 0 * a["x"] if a["d_out"] is None else 2 * a["factor"] * a["x"] * a["d_out"]
    return (gradient if a["d_total"] is None else gradient + a["d_total"],)


def hooks(compute: Compute, rank: int = 10) -> SimpleNamespace:
    @hookimpl
    def heuristic_cfg(inv):
        return None

    @hookimpl
    def run_backend(inv, cfg):
        return compute(inv)

    return SimpleNamespace(PLATFORMS={"cpu": rank}, heuristic_cfg=heuristic_cfg, run_backend=run_backend)


def new_registry(mine: Compute = forward, bwd: Compute | None = backward, **kernels: Any) -> Registry:
    """The references, and the kernel ``mine``, with or without a backward kernel."""
    registry = Registry(plugins="")
    registry.register(FORWARD)
    registry.register(BACKWARD)
    registry.register(hooks(forward, 0), "square.reference")
    registry.register(hooks(backward, 0), "square_bwd.reference")
    registry.register(hooks(mine), "square.mine")
    if bwd is not None:
        registry.register(hooks(bwd), "square_bwd.mine")
    for name, kernel in kernels.items():
        registry.register(kernel, name.replace("__", "."))
    return registry


def example(name: str = "some", dtype: str = "float32", **options: Any) -> Example:
    """An example whose argument is drawn as usual, from a small seed."""

    def arguments(draw: int) -> dict[str, Any]:
        return {"x": np.random.default_rng(draw).standard_normal(16), **options}

    return Example(name, "square", arguments, dtype=dtype, wrt=("x",))


CHECKS = ("values", "gradients", "accumulation", "rows")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("check", CHECKS)
def test_right_kernels_pass(check: str, both: bool, dtype: str) -> None:
    getattr(testing, check)(new_registry(), "square.mine", example(dtype=dtype, both=both))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_result_that_is_always_of_16_bits_may_be_rounded_more_than_once(dtype: str) -> None:
    """The reference has no error then, whatever the dtype of the call: its float64 is rounded to the same numbers."""
    registry = Registry(plugins="")
    registry.register(
        Operation(
            name="square",
            signature=square,
            results=("out", "total"),
            outputs=lambda a: (jax.ShapeDtypeStruct(a["x"].shape, jnp.bfloat16), like(a["x"])),
        )
    )

    def squares_with_error(error: float, a: Mapping[str, Any]) -> tuple[Any, ...]:
        return (a["x"] ** 2 * (1 + error)).astype(jnp.bfloat16), a["x"]

    for name, error in {"reference": 0.0, "twice": 2**-9, "wrong": 2**-6}.items():
        registry.register(hooks(partial(squares_with_error, error), 10 * (name != "reference")), f"square.{name}")
    testing.values(registry, "square.twice", example(dtype=dtype))
    with pytest.raises(AssertionError, match=r"^values: square.wrong on some: result out is off by"):
        testing.values(registry, "square.wrong", example(dtype=dtype))


def registry_of_rounded_squares(share: float = 1.0) -> Registry:
    """Squares in float32 with the digits of ``x``: by the reference, by a kernel that rounds one of two factors, and by
    one that does not round, but changes with the factor by a ``share`` of what is right.
    """

    def wide(x: jax.Array) -> jax.Array:
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def rounded(array: jax.Array, like: jax.Array) -> jax.Array:
        digits = jnp.finfo(like.dtype)
        return jax.lax.reduce_precision(array, digits.nexp, digits.nmant)  # XLA may leave out casts

    kernels: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "reference": lambda a: rounded(a["factor"] * wide(a["x"]) ** 2, a["x"]),
        "early": lambda a: rounded(a["factor"] * wide(a["x"]), a["x"]) * wide(a["x"]),
        "share": lambda a: (1 + share * (a["factor"] - 1)) * wide(a["x"]) ** 2,
    }
    registry = Registry(plugins="")
    registry.register(Operation(name="square", signature=square))
    for rank, (name, compute) in enumerate(kernels.items()):
        registry.register(hooks(compute, rank), f"square.{name}")
    return registry


def change_with_factor(registry: Registry, kernel: str, factor: float, dtype: str) -> None:
    plain, variation = (attrs.evolve(example(f"by-{f}", dtype, factor=f), wrt=()) for f in (1.0, factor))
    testing.sensitivity(registry, kernel, plain, variation)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_change_may_be_as_far_off_as_that_of_the_reference(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where results have more digits than what they are made of."""
    change_with_factor(registry_of_rounded_squares(), "square.early", 1.1, dtype)
    monkeypatch.setattr(_checks, "PROPAGATION_FACTOR", 0.0)
    with pytest.raises(AssertionError, match=r"with by-1.1, result out .*; that of the reference itself in b?float16"):
        change_with_factor(registry_of_rounded_squares(), "square.early", 1.1, dtype)


@pytest.mark.parametrize(
    ("share", "factor", "dtype"),
    [
        (1.01, 1.1, "float16"),
        (1.01, 3.0, "bfloat16"),
        # The reference's own change is off by more than a third of this, and the limit is below.
        (1.08, 1.05, "bfloat16"),
        (1.005, 3.0, "float32"),
    ],
)
def test_a_change_that_is_further_off_is_wrong(share: float, factor: float, dtype: str) -> None:
    change_with_factor(registry_of_rounded_squares(), "square.share", factor, dtype)
    with pytest.raises(AssertionError, match=f"^sensitivity: square.share on by-1.0: with by-{factor}, result out"):
        change_with_factor(registry_of_rounded_squares(share), "square.share", factor, dtype)


def test_a_second_derivative_is_allowed_the_roundings_of_the_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits only, and no other transformation is."""

    class Proofs(testing.KernelProofs):
        kernel = "square.mine"
        registry = new_registry(bwd=lambda a: (131 / 128 * backward(a)[0],))

        def refused(self, dtype: str, transform: str = "jacrev_of_jacrev") -> str:
            request: Any = None
            return message_of(self.test_transforms, example(dtype=dtype), transform, request)

    monkeypatch.setattr(_transforms, "_second_derivatives", lambda *_, is_float64: 128 if is_float64 else 131)
    assert "allowed 7.81e-03" in Proofs().refused("bfloat16")
    Proofs.roundings = 3.0
    Proofs().test_transforms(example(dtype="bfloat16"), "jacrev_of_jacrev", None)
    assert "allowed 2.00e-05" in Proofs().refused("float32")
    assert "allowed 7.81e-03" in Proofs().refused("bfloat16", "forward_mode")


# -- weights --------------------------------------------------------------------------------------------------------


def test_a_backward_that_uses_the_input_as_cotangent_fails() -> None:
    def gradient_of_input(a: Mapping[str, Any]) -> tuple[Any, ...]:
        return (2 * a["factor"] * a["x"] * a["x"],)

    with pytest.raises(AssertionError, match=r"^gradients: square.mine on some: gradient of x is off by"):
        testing.gradients(new_registry(bwd=gradient_of_input), "square.mine", example(dtype="bfloat16"))


def weights(name: str) -> tuple[Any, ...]:
    return _outcome.weights(name, lambda arrays: (arrays["x"], arrays["x"]), {"x": np.zeros(1000, np.float32)})


def test_weights_depend_on_the_example_and_the_result_only() -> None:
    samples = [
        *weights("one"),
        *weights("another"),
        *(np.random.default_rng(s).standard_normal(1000) for s in range(9)),
    ]
    correlations = np.corrcoef(np.stack(samples)) - np.eye(len(samples))
    assert np.abs(correlations).max() < 0.15
    np.testing.assert_array_equal(weights("one"), weights("one"))


def test_weights_have_few_digits() -> None:
    for weight in weights("one"):
        np.testing.assert_array_equal(weight, weight.astype(jnp.bfloat16).astype(np.float32))


def test_a_variation_has_the_weights_of_its_example() -> None:
    """Other weights would change the gradients by more than the argument does."""

    def without_factor(a: Mapping[str, Any]) -> tuple[Any, ...]:
        return backward({**a, "factor": 1.0})

    plain, variation = example("plain"), example("factor", factor=1.01)
    testing.sensitivity(new_registry(), "square.mine", plain, variation)
    with pytest.raises(
        AssertionError, match=r"^sensitivity: square.mine on plain: with factor, gradient of x changes by 0"
    ):
        testing.sensitivity(new_registry(bwd=without_factor), "square.mine", plain, variation)


# -- results that the caller does not get -------------------------------------------------------------------------------


def other_total(a: Mapping[str, Any]) -> tuple[Any, ...]:
    return forward(a)[0], a["x"].sum() + 1


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("check", ["values", "accumulation"])
def test_every_result_of_the_kernel_is_compared(check: str, both: bool) -> None:
    with pytest.raises(AssertionError, match=f"^{check}: square.mine on some: result total is off by"):
        getattr(testing, check)(new_registry(other_total), "square.mine", example(both=both))


def test_rows_checks_results_that_the_caller_does_not_get() -> None:
    def nonzero_total(a: Mapping[str, Any]) -> tuple[Any, ...]:
        return forward(a)[0], a["x"].sum() + 1e-9

    def arguments(draw: int) -> dict[str, Any]:
        return {"x": np.zeros(16)}

    with pytest.raises(AssertionError, match="^rows: square.mine on zeros: result total is not 0 or -inf in 1 places"):
        testing.rows(new_registry(nonzero_total), "square.mine", Example("zeros", "square", arguments, wrt=("x",)))


def test_sensitivity_checks_results_that_the_caller_does_not_get() -> None:
    def scaled_total(a: Mapping[str, Any]) -> tuple[Any, ...]:
        return forward(a)[0], a["x"].sum() * a["factor"]

    with pytest.raises(
        AssertionError, match="^sensitivity: square.mine on plain: with factor, result total changes by"
    ):
        testing.sensitivity(new_registry(scaled_total), "square.mine", example("plain"), example("factor", factor=2.0))


def test_gradients_are_those_of_the_results_that_the_caller_gets() -> None:
    """Without the total, the backward gets None as its cotangent."""
    cotangents: list[Any] = []

    def without_total(a: Mapping[str, Any]) -> tuple[Any, ...]:
        cotangents.append(a["d_total"])
        return backward({**a, "d_total": None})

    registry = new_registry(bwd=without_total)
    testing.gradients(registry, "square.mine", example())
    assert cotangents
    assert set(cotangents) == {None}
    with pytest.raises(AssertionError, match="^gradients: square.mine on both: gradient of x is off by"):
        testing.gradients(registry, "square.mine", example("both", both=True))


def test_a_backward_gets_the_results_of_its_forward() -> None:
    """With any other results, this backward would be wrong."""

    def from_results(a: Mapping[str, Any]) -> tuple[Any, ...]:
        return (2 * a["out"] / a["x"] * a["d_out"] + (a["total"] - a["x"].sum()),)

    testing.gradients(new_registry(bwd=from_results), "square.mine", example(), backward="square_bwd.mine")


# -- messages -------------------------------------------------------------------------------------------------------


def wrong(a: Mapping[str, Any]) -> tuple[Any, ...]:
    return (backward(a)[0] * 1.5,)


def message_of(check: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as error_info:
        check(*arguments, **options)
    return str(error_info.value)


def test_the_message_names_the_kernel_of_a_wrong_gradient() -> None:
    mine = message_of(testing.gradients, new_registry(bwd=wrong), "square.mine", example())
    assert mine.endswith("; gradients by square_bwd.mine")
    others = new_registry(bwd=None, square_bwd__other=hooks(wrong))
    assert message_of(testing.gradients, others, "square.mine", example()).endswith("; gradients by square_bwd.other")


def test_the_message_of_sensitivity_names_the_kernel_of_a_gradient() -> None:
    def without_factor(a: Mapping[str, Any]) -> tuple[Any, ...]:
        return backward({**a, "factor": 1.0})

    message = message_of(
        testing.sensitivity,
        new_registry(bwd=without_factor),
        "square.mine",
        example("plain"),
        example("factor", factor=2.0),
    )
    assert message.endswith("; gradients by square_bwd.mine")


def test_the_message_of_a_wrong_result_names_no_backward() -> None:
    assert "gradients by" not in message_of(testing.values, new_registry(other_total), "square.mine", example())


def test_the_message_names_the_reference_where_jax_differentiates_it() -> None:
    registry = new_registry()
    registry.register(Operation(name="square", signature=square, results=FORWARD.results, prepare=prepare))
    assert _outcome.backward_kernels(registry, "mine", example()) == ()
    testing.gradients(registry, "square.mine", example())
    message = message_of(testing.gradients, registry, "square.mine", example(), backward="square_bwd.mine")
    assert (
        message
        == "gradients: square.mine on some: the gradients are those of the reference; square_bwd.mine is declared"
    )


def test_gradients_of_another_backward_than_declared_fail() -> None:
    testing.gradients(new_registry(), "square.mine", example(), backward="square_bwd.mine")
    missing = new_registry(bwd=None, square_bwd__other=hooks(backward, 20))
    testing.gradients(missing, "square.mine", example())  # they are right
    message = message_of(testing.gradients, missing, "square.mine", example(), backward="square_bwd.mine")
    assert (
        message
        == "gradients: square.mine on some: the gradients are those of square_bwd.other; square_bwd.mine is declared"
    )
    testing.gradients(missing, "square.mine", attrs.evolve(example(), wrt=()), backward="square_bwd.mine")


def test_proofs_check_the_backward_that_is_declared() -> None:
    class Proofs(testing.KernelProofs):
        kernel = "square.mine"
        registry = new_registry(bwd=None)
        backward = "square_bwd.mine"

    with pytest.raises(
        AssertionError, match="the gradients are those of square_bwd.reference; square_bwd.mine is declared"
    ):
        Proofs().test_example(example())
    Proofs.registry = new_registry()
    Proofs().test_example(example())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("check", ["values", "accumulation"])
def test_the_message_has_the_error_of_the_reference(check: str, dtype: str) -> None:
    def wrong_squares(a: Mapping[str, Any]) -> tuple[Any, ...]:
        return forward(a)[0] * 1.25, forward(a)[1]

    message = message_of(getattr(testing, check), new_registry(wrong_squares), "square.mine", example(dtype=dtype))
    numbers = re.fullmatch(
        rf"{check}: square.mine on some: result out is off by (\S+), allowed (\S+); "
        rf"the reference itself in {dtype} is off by (\S+)",
        message,
    )
    assert numbers, message
    error, tolerance, reference = map(float, numbers.groups())
    exact = _outcome.outcome_arrays(new_registry(), "reference", example(dtype=dtype), is_float64=True)["result out"]
    rounded = _outcome.outcome_arrays(new_registry(), "reference", example(dtype=dtype))["result out"].astype(
        np.float64
    )
    assert reference == pytest.approx(np.linalg.norm(rounded - exact) / np.linalg.norm(exact), rel=0.01)
    assert error == pytest.approx(0.25, rel=0.03)
    assert 0 < reference < tolerance < error


def test_the_message_of_sensitivity_has_the_error_of_the_reference() -> None:
    def without_factor(a: Mapping[str, Any]) -> tuple[Any, ...]:
        return forward({**a, "factor": 1.0})

    plain, variation = example("plain", "bfloat16"), example("factor", "bfloat16", factor=2.0)
    message = message_of(testing.sensitivity, new_registry(without_factor), "square.mine", plain, variation)
    assert re.search(
        r"off by 1.00e\+00, allowed \S+; that of the reference itself in bfloat16 is off by \d\.\d\de-\d\d", message
    )


def test_a_kernel_that_is_registered_again_is_proved_again() -> None:
    registry, one = new_registry(lambda a: (a["x"] * 0, a["x"].sum())), example()
    with pytest.raises(AssertionError, match="values: square.mine on some: result out is off"):
        testing.values(registry, "square.mine", one)
    registry.register(hooks(forward), "square.mine")
    testing.values(registry, "square.mine", one)


def test_the_reference_is_computed_once_for_all_registries_that_have_it() -> None:
    traces: list[str] = []

    def with_trace_count(compute: Compute) -> SimpleNamespace:
        return hooks(lambda a: traces.append("") or compute(a), 0)

    def registry_with(forward_reference: Any, backward_reference: Any) -> Registry:
        registry = new_registry()
        registry.register(forward_reference, "square.reference")
        registry.register(backward_reference, "square_bwd.reference")
        return registry

    references, one = (with_trace_count(forward), with_trace_count(backward)), example("shared")
    testing.values(registry_with(*references), "square.mine", one)
    count = len(traces)
    assert count
    for same in (one, attrs.evolve(one, checks=frozenset())):
        testing.values(registry_with(*references), "square.mine", same)
        testing.gradients(registry_with(*references), "square.mine", same)
    assert len(traces) == count
    # The reference is computed again for another example, call, dtype or set of arrays.
    other_wrt, other_dtype = attrs.evolve(one, wrt=()), attrs.evolve(one, dtype="bfloat16")
    for other in (example("other"), other_wrt, other_dtype, attrs.evolve(one, arguments=example(factor=2.0).arguments)):
        testing.values(registry_with(*references), "square.mine", other)
        assert len(traces) > count
        count = len(traces)


def test_a_changed_reference_is_computed_again() -> None:
    """It has the same name, and the example is the same, in the same registry or another one."""
    first, one = new_registry(), example("changed")
    testing.values(first, "square.mine", one)
    for registry in (first, new_registry()):
        registry.register(hooks(lambda a: (2 * a["x"] ** 2, a["x"].sum()), 0), "square.reference")
        message = message_of(testing.values, registry, "square.mine", one)
        assert message.startswith("values: square.mine on changed: result out is off by 5.00e-01")
    testing.values(new_registry(), "square.mine", one)


def test_the_reference_is_computed_again_for_another_operation() -> None:
    """Another operation may prepare its arguments in another way."""

    def with_double_factor(arguments: dict[str, Any]) -> Any:
        return prepare({**arguments, "factor": 2 * arguments["factor"]})

    reference, mine, one = hooks(forward, 0), hooks(forward), example("prepared")
    results = []
    for prepare_arguments in (prepare, with_double_factor):
        registry = new_registry()
        registry.register(attrs.evolve(FORWARD, prepare=prepare_arguments))
        registry.register(reference, "square.reference")
        registry.register(mine, "square.mine")
        testing.values(registry, "square.mine", one)
        results.append(_outcome.outcome_arrays(registry, "reference", one, is_float64=True)["result out"])
    np.testing.assert_array_equal(results[1], 2 * results[0])


class Cube(Kernel[None, Any]):
    """A class with a custom_vjp, which is right if the factor is 3."""

    factor = 3

    def run(self, x: Any, *, cfg: Any) -> Any:
        return x**3

    def heuristic_cfg(self, inv: Any) -> Any:
        return None

    def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
        return (cotangents[0] * self.factor * primals[0] ** 2,)


def test_the_gradient_of_a_class_is_compared_with_that_of_plain_jax() -> None:
    one = Example("some", "Cube", lambda draw: {"x": np.random.default_rng(draw).normal(size=8)}, wrt=("x",))
    for factor in (3, 4):
        kernel, registry = Cube(), Registry(plugins="")
        kernel.factor = factor
        registry.register(kernel)
        registry.register(hooks(lambda a: (a["x"] ** 3,), 0), "Cube.reference")
        testing.values(registry, "Cube.run", one)
        if factor == 3:
            testing.gradients(registry, "Cube.run", one)
            testing.programs(registry, "Cube.run", one, "second_derivative")
        else:
            with pytest.raises(AssertionError, match="gradient of x is off"):
                testing.gradients(registry, "Cube.run", one)
            with pytest.raises(
                AssertionError, match="gradients are wrong for 1 pairs of sets of differentiated arrays"
            ):
                testing.programs(registry, "Cube.run", one, "jit")


@pytest.mark.parametrize(
    ("field", "words", "message"),
    [
        ("checks", frozenset({"value"}), "example 'some': checks takes values, accumulation, .*; got 'value'"),
        ("checks", frozenset({"transforms"}), "checks takes .*, jit, vmap, .*; got 'transforms'"),
        ("checks", "values", "checks takes a collection of words; got the string 'values'"),
        ("wrt", ("y",), "wrt takes x; got 'y'"),
    ],
)
def test_unknown_words_of_an_example_are_refused(field: str, words: Any, message: str) -> None:
    class Proofs(testing.KernelProofs):
        kernel = "square.mine"

        def examples(self) -> Any:
            return [attrs.evolve(example(), **{field: words})]

    Proofs.registry = new_registry()
    with pytest.raises((TypeError, ValueError), match=message):
        Proofs()._checked_examples()
