"""What the proofs draw, whom they ask and what they tell: on an operation so small that each can be seen."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_testing as testing
from ejkernel_classes import Kernel
from ejkernel_core import Operation, Registry, gradient_signature, hookimpl
from ejkernel_testing import Case, _outcome

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
    """The squares, and the sum of what was squared, which only the backward and who asks for both get to see."""
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


def registry(mine: Compute = forward, bwd: Compute | None = backward, **kernels: Any) -> Registry:
    """The references, and the kernel ``mine``, with a backward of its own or without."""
    own = Registry(plugins="")
    own.register(FORWARD)
    own.register(BACKWARD)
    own.register(hooks(forward, 0), "square.reference")
    own.register(hooks(backward, 0), "square_bwd.reference")
    own.register(hooks(mine), "square.mine")
    if bwd is not None:
        own.register(hooks(bwd), "square_bwd.mine")
    for name, kernel in kernels.items():
        own.register(kernel, name.replace("__", "."))
    return own


def case(name: str = "some", dtype: str = "float32", **options: Any) -> Case:
    """A case whose argument is drawn as most people would draw it."""

    def arguments(draw: int) -> dict[str, Any]:
        return {"x": np.random.default_rng(draw).standard_normal(16), **options}

    return Case(name, "square", arguments, dtype=dtype, wrt=("x",))


CHECKS = ("values", "gradients", "accumulation", "rows")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("check", CHECKS)
def test_what_is_right_passes(check: str, both: bool, dtype: str) -> None:
    getattr(testing, check)(registry(), "square.mine", case(dtype=dtype, both=both))


# -- what is drawn ---------------------------------------------------------------------------------------------------


def test_a_backward_that_takes_the_input_for_the_cotangent_is_caught() -> None:
    def from_the_input(a: Mapping[str, Any]) -> tuple[Any, ...]:
        return (2 * a["factor"] * a["x"] * a["x"],)

    with pytest.raises(AssertionError, match=r"^gradients: square.mine on some: gradient of x is off by"):
        testing.gradients(registry(bwd=from_the_input), "square.mine", case(dtype="bfloat16"))


def weights(name: str) -> tuple[Any, ...]:
    return _outcome.weights(name, lambda arrays: (arrays["x"], arrays["x"]), {"x": np.zeros(1000, np.float32)})


def test_weights_are_those_of_the_case_and_the_result_alone() -> None:
    everything = [
        *weights("one"),
        *weights("another"),
        *(np.random.default_rng(s).standard_normal(1000) for s in range(9)),
    ]
    alike = np.abs(np.corrcoef(np.stack(everything)) - np.eye(len(everything)))
    assert alike.max() < 0.15
    np.testing.assert_array_equal(weights("one"), weights("one"))


def test_weights_have_few_digits() -> None:
    for weight in weights("one"):
        np.testing.assert_array_equal(weight, weight.astype(jnp.bfloat16).astype(np.float32))


def test_a_variation_is_weighted_as_its_case() -> None:
    """Other weights would move the gradients by more than the argument does, and hide it."""

    def blind(a: Mapping[str, Any]) -> tuple[Any, ...]:
        return backward({**a, "factor": 1.0})

    plain, changed = case("plain"), case("changed", factor=1.01)
    testing.sensitivity(registry(), "square.mine", plain, changed)
    with pytest.raises(AssertionError, match=r"^sensitivity: square.mine on plain: changed moves gradient of x by 0"):
        testing.sensitivity(registry(bwd=blind), "square.mine", plain, changed)


# -- what the caller does not see ------------------------------------------------------------------------------------


def other_total(a: Mapping[str, Any]) -> tuple[Any, ...]:
    return forward(a)[0], a["x"].sum() + 1


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("check", ["values", "accumulation"])
def test_every_result_of_the_kernel_is_compared(check: str, both: bool) -> None:
    with pytest.raises(AssertionError, match=f"^{check}: square.mine on some: result total is off by"):
        getattr(testing, check)(registry(other_total), "square.mine", case(both=both))


def test_a_result_that_has_to_be_nothing_is_compared_unseen() -> None:
    def dust(a: Mapping[str, Any]) -> tuple[Any, ...]:
        return forward(a)[0], a["x"].sum() + 1e-9

    def arguments(draw: int) -> dict[str, Any]:
        return {"x": np.zeros(16)}

    with pytest.raises(AssertionError, match="^rows: square.mine on zeros: result total is not 0 or -inf at 1 places"):
        testing.rows(registry(dust), "square.mine", Case("zeros", "square", arguments, wrt=("x",)))


def test_an_argument_that_moves_what_is_unseen_is_compared() -> None:
    def scaled(a: Mapping[str, Any]) -> tuple[Any, ...]:
        return forward(a)[0], a["x"].sum() * a["factor"]

    with pytest.raises(AssertionError, match="^sensitivity: square.mine on plain: changed moves result total by"):
        testing.sensitivity(registry(scaled), "square.mine", case("plain"), case("changed", factor=2.0))


def test_gradients_are_of_what_the_caller_sees() -> None:
    """Nothing depends on the total of a caller who does not get it, and the backward is told so."""
    cotangents: list[Any] = []

    def without_total(a: Mapping[str, Any]) -> tuple[Any, ...]:
        cotangents.append(a["d_total"])
        return backward({**a, "d_total": None})

    own = registry(bwd=without_total)
    testing.gradients(own, "square.mine", case())
    assert cotangents
    assert set(cotangents) == {None}
    with pytest.raises(AssertionError, match="^gradients: square.mine on both: gradient of x is off by"):
        testing.gradients(own, "square.mine", case("both", both=True))


# -- what is told ----------------------------------------------------------------------------------------------------


def wrong(a: Mapping[str, Any]) -> tuple[Any, ...]:
    return (backward(a)[0] * 1.5,)


def told(check: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as fault:
        check(*arguments, **options)
    return str(fault.value)


def test_the_backward_that_gave_a_wrong_gradient_is_named() -> None:
    mine = told(testing.gradients, registry(bwd=wrong), "square.mine", case())
    assert mine.endswith("; gradients by square_bwd.mine")
    others = registry(bwd=None, square_bwd__other=hooks(wrong))
    assert told(testing.gradients, others, "square.mine", case()).endswith("; gradients by square_bwd.other")


def test_a_wrong_move_of_a_gradient_names_its_backward() -> None:
    def blind(a: Mapping[str, Any]) -> tuple[Any, ...]:
        return backward({**a, "factor": 1.0})

    said = told(testing.sensitivity, registry(bwd=blind), "square.mine", case("plain"), case("changed", factor=2.0))
    assert said.endswith("; gradients by square_bwd.mine")


def test_a_wrong_result_names_no_backward() -> None:
    assert "gradients by" not in told(testing.values, registry(other_total), "square.mine", case())


def test_where_jax_differentiates_the_reference_it_is_named() -> None:
    own = registry()
    own.register(Operation(name="square", signature=square, results=FORWARD.results, prepare=prepare))
    assert _outcome.backward_kernels(own, "mine", case()) == ()
    testing.gradients(own, "square.mine", case())
    said = told(testing.gradients, own, "square.mine", case(), backward="square_bwd.mine")
    assert said == "gradients: square.mine on some: are given by the reference, not by square_bwd.mine as declared"


def test_gradients_of_another_backward_than_is_declared_are_told() -> None:
    testing.gradients(registry(), "square.mine", case(), backward="square_bwd.mine")
    missing = registry(bwd=None, square_bwd__other=hooks(backward, 20))
    testing.gradients(missing, "square.mine", case())  # right they are
    said = told(testing.gradients, missing, "square.mine", case(), backward="square_bwd.mine")
    assert said == "gradients: square.mine on some: are given by square_bwd.other, not by square_bwd.mine as declared"
    testing.gradients(missing, "square.mine", attrs.evolve(case(), wrt=()), backward="square_bwd.mine")


def test_proofs_declare_the_backward() -> None:
    class Proofs(testing.KernelProofs):
        kernel = "square.mine"
        registry = registry(bwd=None)
        backward = "square_bwd.mine"

    with pytest.raises(AssertionError, match="are given by square_bwd.reference, not by square_bwd.mine as declared"):
        Proofs().test_case(case())
    Proofs.registry = registry()
    Proofs().test_case(case())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("check", ["values", "accumulation"])
def test_how_far_the_reference_itself_is_off_is_told(check: str, dtype: str) -> None:
    def off(a: Mapping[str, Any]) -> tuple[Any, ...]:
        return forward(a)[0] * 1.25, forward(a)[1]

    said = told(getattr(testing, check), registry(off), "square.mine", case(dtype=dtype))
    numbers = re.fullmatch(
        rf"{check}: square.mine on some: result out is off by (\S+), allowed (\S+); "
        rf"the reference itself in {dtype} is off by (\S+)",
        said,
    )
    assert numbers, said
    own, allowed, reference = map(float, numbers.groups())
    exact = _outcome.outcome(registry(), "reference", case(dtype=dtype), precise=True)["result out"]
    rounded = _outcome.outcome(registry(), "reference", case(dtype=dtype))["result out"].astype(np.float64)
    assert reference == pytest.approx(np.linalg.norm(rounded - exact) / np.linalg.norm(exact), rel=0.01)
    assert own == pytest.approx(0.25, rel=0.03)
    assert 0 < reference < allowed < own


def test_how_far_the_references_move_is_off_is_told() -> None:
    def blind(a: Mapping[str, Any]) -> tuple[Any, ...]:
        return forward({**a, "factor": 1.0})

    plain, changed = case("plain", "bfloat16"), case("changed", "bfloat16", factor=2.0)
    said = told(testing.sensitivity, registry(blind), "square.mine", plain, changed)
    assert re.search(r"differ by 1.00e\+00 of it, allowed \S+; the reference's own in bfloat16 by \d\.\d\de-\d\d", said)


def test_a_kernel_that_is_registered_anew_is_proved_anew() -> None:
    own, one = registry(lambda a: (a["x"] * 0, a["x"].sum())), case()
    with pytest.raises(AssertionError, match="values: square.mine on some: result out is off"):
        testing.values(own, "square.mine", one)
    own.register(hooks(forward), "square.mine")
    testing.values(own, "square.mine", one)


def test_the_reference_is_computed_once_for_all_registries_that_have_it() -> None:
    traced: list[str] = []

    def noted(compute: Compute) -> SimpleNamespace:
        return hooks(lambda a: traced.append("") or compute(a), 0)

    def holding(forward_reference: Any, backward_reference: Any) -> Registry:
        own = registry()
        own.register(forward_reference, "square.reference")
        own.register(backward_reference, "square_bwd.reference")
        return own

    references, one = (noted(forward), noted(backward)), case("shared")
    testing.values(holding(*references), "square.mine", one)
    count = len(traced)
    assert count
    for again in (one, attrs.evolve(one, checks=frozenset())):
        testing.values(holding(*references), "square.mine", again)
        testing.gradients(holding(*references), "square.mine", again)
    assert len(traced) == count
    # What else it is computed from makes it another one.
    other_wrt, other_dtype = attrs.evolve(one, wrt=()), attrs.evolve(one, dtype="bfloat16")
    for other in (case("other"), other_wrt, other_dtype, attrs.evolve(one, arguments=case(factor=2.0).arguments)):
        testing.values(holding(*references), "square.mine", other)
        assert len(traced) > count
        count = len(traced)


def test_a_changed_reference_is_computed_anew() -> None:
    """With the same name, for the same case, in the same registry or another."""
    own, one = registry(), case("changed")
    testing.values(own, "square.mine", one)
    for where in (own, registry()):
        where.register(hooks(lambda a: (2 * a["x"] ** 2, a["x"].sum()), 0), "square.reference")
        said = told(testing.values, where, "square.mine", one)
        assert said.startswith("values: square.mine on changed: result out is off by 5.00e-01")
    testing.values(registry(), "square.mine", one)


def test_another_operation_with_the_same_reference_is_computed_anew() -> None:
    """It may prepare its arguments otherwise."""

    def doubled(arguments: dict[str, Any]) -> Any:
        return prepare({**arguments, "factor": 2 * arguments["factor"]})

    reference, mine, one = hooks(forward, 0), hooks(forward), case("prepared")
    wanted = []
    for prepared in (prepare, doubled):
        own = registry()
        own.register(attrs.evolve(FORWARD, prepare=prepared))
        own.register(reference, "square.reference")
        own.register(mine, "square.mine")
        testing.values(own, "square.mine", one)
        wanted.append(_outcome.outcome(own, "reference", one, precise=True)["result out"])
    np.testing.assert_array_equal(wanted[1], 2 * wanted[0])


class Cube(Kernel[None, Any]):
    """A class that differentiates itself, right or wrong."""

    factor = 3

    def run(self, x: Any, *, cfg: Any) -> Any:
        return x**3

    def heuristic_cfg(self, inv: Any) -> Any:
        return None

    def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
        return (cotangents[0] * self.factor * primals[0] ** 2,)


def test_the_gradient_of_a_class_is_compared_with_that_of_plain_jax() -> None:
    one = Case("some", "Cube", lambda draw: {"x": np.random.default_rng(draw).normal(size=8)}, wrt=("x",))
    for factor in (3, 4):
        kernel, own = Cube(), Registry(plugins="")
        kernel.factor = factor
        own.register(kernel)
        own.register(hooks(lambda a: (a["x"] ** 3,), 0), "Cube.reference")
        testing.values(own, "Cube.run", one)
        if factor == 3:
            testing.gradients(own, "Cube.run", one)
            testing.programs(own, "Cube.run", one, "second_derivative")
        else:
            with pytest.raises(AssertionError, match="gradient of x is off"):
                testing.gradients(own, "Cube.run", one)
            with pytest.raises(AssertionError, match="1 pairs of sets of differentiated arrays are wrong"):
                testing.programs(own, "Cube.run", one, "jit")


@pytest.mark.parametrize(
    ("field", "words", "told"),
    [
        ("checks", frozenset({"value"}), "case 'some': checks has no 'value'; it has values, accumulation,"),
        ("checks", frozenset({"transforms"}), "checks has no 'transforms'; it has .*, jit, vmap"),
        ("checks", "values", "checks takes several words; got the text 'values'"),
        ("wrt", ("y",), "wrt has no 'y'; it has x"),
    ],
)
def test_a_misspelt_word_of_a_case_is_told(field: str, words: Any, told: str) -> None:
    class Proofs(testing.KernelProofs):
        kernel = "square.mine"

        def cases(self) -> Any:
            return [attrs.evolve(case(), **{field: words})]

    Proofs.registry = registry()
    with pytest.raises((TypeError, ValueError), match=told):
        Proofs()._sound_cases()
