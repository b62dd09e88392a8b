"""How explanations and errors report the faults of plugins, overlays and declarations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest

import ejkernel_core
from ejkernel_core import (
    Axes,
    Choice,
    NoKernel,
    NotDifferentiable,
    Operation,
    PluginError,
    Provenance,
    Record,
    Registry,
    Unsupported,
    hookimpl,
    overlay_cache,
    policy_override,
)

X = jnp.arange(1.0, 6.0)
AXES = Axes({"x": "length"}, {"out": "length"}, independent="length", counts="length")


@attrs.frozen
class Config:
    factor: int = 2


def scale(x, *, shift=0.0): ...


def kernel(cfg: Any = Config(), refusal: str = "") -> SimpleNamespace:
    @hookimpl
    def heuristic_cfg(inv):
        if refusal:
            raise Unsupported(refusal)
        return cfg

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * (3 if cfg is None else cfg.factor) + inv["shift"]

    return SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend, **({"Config": Config} if cfg else {}))


@pytest.fixture
def registry() -> Registry:
    registry = Registry(plugins="")
    registry.register(Operation(name="scale", signature=scale, axes=AXES))
    registry.register(kernel(), "scale.two")
    return registry


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (lambda: 1 / 0, "measure raised ZeroDivisionError"),
        (tuple, "measure raised PluginError: it gives no record"),
        (lambda: None, "measure raised PluginError: it gives no record"),
    ],
)
def test_explanations_report_a_tuner_that_failed_until_it_succeeds(registry, outcome, reason):
    @hookimpl
    def measure(inv):
        return outcome()

    registry.register(SimpleNamespace(measure=measure), "tuner")
    assert "tuner" not in str(registry.explain("scale", X))
    with policy_override(autotune=True):
        assert registry.call("scale", X).tolist() == (2 * X).tolist()
    (verdict,) = [v for v in registry.explain("scale", X).verdicts if v.name == "tuner"]
    assert (verdict.status, verdict.reason.startswith(reason)) == ("broken", True), verdict


OUTCOMES = {
    "slower": ({"one Config(factor=2)": 2.0, "one Config(factor=3)": 3.0}, "slower when it was measured"),
    "wrong": (
        {"one Config(factor=2)": "slow to compile", "one Config(factor=3)": "wrong: by 0.5"},
        "excluded when it was measured, wrong: by 0.5",
    ),
    "slower and wrong": (
        {"one Config(factor=2)": 2.0, "one Config(factor=3)": "wrong: by 0.5", "one None": "wrong: by 0.1"},
        "slower when it was measured; 2 of its 3 configurations were wrong: by 0.5",
    ),
    "failed": ({"one None": "running raised: no"}, "excluded when it was measured, running raised: no"),
    "of a kernel with a longer name": ({"one_more None": "wrong: by 0.5"}, "slower when it was measured"),
    "not measured": (None, "it was not measured"),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_an_explanation_says_why_an_able_kernel_was_not_selected(registry, name):
    tried, reason = OUTCOMES[name]
    registry.register(kernel(), "scale.one")
    plan = registry.plan("scale", X)
    backends = ("two",) if tried is None else ("two", "one")
    provenance = Provenance(
        when="",
        device="",
        milliseconds=1.0,
        backends=backends,
        tried=tuple((tried or {"two Config(factor=2)": 1.0}).items()),
    )
    choice = Choice("two", Config(), "a store", record=Record(Config(), "two", provenance))
    registry.register(SimpleNamespace(select_config=hookimpl(lambda: choice)), "store")
    explanation = registry.explain("scale", X)
    assert explanation.plan.kernel.name == "scale.two" != plan.kernel.name
    assert f"scale.one (registered at run time): able, {reason}\n" in f"{explanation}\n"


def test_an_explanation_without_a_measurement_says_by_what_another_kernel_was_chosen(registry):
    registry.register(kernel(), "scale.one")

    def reason():
        (verdict,) = [v for v in registry.explain("scale", X).verdicts if v.status == "able"]
        return verdict.name, verdict.reason

    assert reason() == ("scale.two", "with a lower rank")
    registry.remember(registry.invocation("scale", X).key, Record(Config(9), "two"))
    assert reason() == ("scale.one", "another one was chosen by memory")


def test_an_explanation_without_a_plan_has_the_verdicts(registry):
    registry.register(kernel(refusal="it is Tuesday"), "scale.two")
    explanation = registry.explain("scale", X)
    assert explanation.plan is None
    assert [(v.name, v.status, v.reason) for v in explanation.verdicts] == [("scale.two", "refused", "it is Tuesday")]
    registry.register(kernel(), "scale.two")
    assert [v.status for v in registry.explain("scale", X).verdicts] == ["chosen"]


def test_the_calls_that_a_kernel_makes_are_explained_each_once(registry):
    @hookimpl
    def by_scale(inv, cfg):
        x = inv["x"]
        twice = registry.call("scale", registry.call("scale", x))
        return jax.lax.cond(x[0] > 0, lambda: registry.call("scale", x, shift=1.0), lambda: twice)

    @hookimpl
    def by_twice(inv, cfg):
        return registry.call("twice", inv["x"], shift=inv["shift"])

    for name, run, parts in (("twice", by_scale, ("scale",)), ("nested", by_twice, ("twice",))):
        registry.register(Operation(name=name, signature=scale, axes=AXES))
        registry.register(SimpleNamespace(run_backend=run, PARTS=parts), f"{name}.by_another")
    explanation = registry.explain("nested", X)
    (twice,) = explanation.parts
    assert [part.plan.invocation["shift"] for part in twice.parts] == [0.0, 1.0]
    assert [part.parts for part in twice.parts] == [(), ()]
    lines = str(explanation).splitlines()
    first = lines.index(f"  part: {twice.plan.invocation.call_text}")
    assert lines[first + 1] == "    twice.by_another, by heuristic"
    assert lines[first + 2] == f"    part: {twice.parts[0].plan.invocation.call_text}"
    assert lines[first + 3] == "      scale.two with Config(factor=2), by heuristic"
    assert f"part: {twice.parts[1].plan.invocation.call_text}" in explanation._repr_html_()


def test_a_kernel_that_cannot_be_traced_here_is_explained_without_parts(registry):
    @hookimpl
    def run_backend(inv, cfg):
        raise RuntimeError("only on Mondays")

    registry.register(SimpleNamespace(run_backend=run_backend, PLATFORMS={"cpu": 99}, PARTS=("other",)), "scale.three")
    explanation = registry.explain("scale", X)
    assert (explanation.plan.kernel.name, explanation.parts) == ("scale.three", ())


def test_a_missing_backward_operation_is_reported_with_its_forward(registry):
    registry.register(Operation(name="scale", signature=scale, axes=AXES, backward="scale_bwd"))
    explanation = registry.explain("scale", X)
    assert explanation.plan is not None
    reason = "'scale' has its gradients from the operation 'scale_bwd', which no installed plugin brings"
    assert (explanation.backward.op, explanation.backward.error) == ("scale_bwd", reason)
    with pytest.raises(NotDifferentiable, match=reason):
        jax.grad(lambda x: registry.call("scale", x).sum())(X)


@pytest.mark.parametrize("value", [3, {"factor": 3}, SimpleNamespace])
def test_an_overlay_with_a_value_of_another_type_is_reported(registry, value):
    with overlay_cache({registry.invocation("scale", X).key: value}):
        plan = registry.plan("scale", X)
    assert plan.origin == "heuristic"
    (verdict,) = [v for v in plan.verdicts if v.name == "built-in overlay"]
    assert "not a configuration of scale.two" in verdict.reason


@pytest.mark.parametrize("value", [3, {"factor": 3}, SimpleNamespace])
def test_a_remembered_value_of_another_type_is_in_the_explanation(registry, value):
    registry.remember(registry.invocation("scale", X).key, value)
    plan = registry.plan("scale", X)
    assert plan.origin == "heuristic"
    (verdict,) = [v for v in plan.verdicts if v.name == "built-in memory"]
    assert verdict.status == "no answer"
    assert "not a configuration of scale.two" in verdict.reason


def test_the_lines_of_a_reason_are_apart_from_the_next_verdict(registry):
    registry.register(kernel(refusal="one\ntwo"), "scale.loud")
    lines = str(registry.explain("scale", X)).splitlines()
    first = next(n for n, line in enumerate(lines) if line.endswith("refused, one"))
    assert lines[first + 1] == "    two"


def test_a_kernel_without_configurations_gets_none(registry):
    registry.register(kernel(None), "scale.two")
    registry.remember(registry.invocation("scale", X).key, "junk")
    assert registry.call("scale", X).tolist() == (3 * X).tolist()


@pytest.mark.parametrize("name", ["backend", "cfg", "validate"])
def test_an_operation_cannot_have_a_parameter_that_every_call_has(name):
    namespace: dict[str, Any] = {}
    exec(f"def f(x, *, {name}=None): ...", namespace)
    with pytest.raises(ValueError, match=f"f: '{name}' is an option of every call"):
        Operation(name="f", signature=namespace["f"])


def test_an_operation_without_a_name_is_refused():
    with pytest.raises(ValueError, match="takes a name"):
        Operation(name="", signature=scale)


def test_an_operation_without_known_results_raises_with_what_to_declare():
    registry = Registry(plugins="")
    registry.register(Operation(name="scale", signature=scale))
    registry.register(kernel(), "scale.two")
    with pytest.raises(PluginError, match=r"scale: nothing says what it returns. .* or a kernel scale.reference"):
        registry.call("scale", X)


def test_a_class_instead_of_a_configuration_is_refused(registry):
    with pytest.raises(NoKernel, match="cfg is the class .*Other itself, not its Config"):
        registry.call("scale", X, cfg=attrs.make_class("Other", ["factor"]))


def test_a_traced_number_inside_an_option_is_refused(registry):
    with pytest.raises(TypeError, match="shift is a static option and takes a plain Python value.* got a traced array"):
        jax.jit(lambda s: registry.call("scale", X, shift=(s, 1)))(1.0)


def test_the_plan_before_a_measurement_is_the_nearest_record(registry):
    long, short = jnp.ones(64), jnp.ones(8)
    registry.remember(registry.invocation("scale", long).tuning_keys[-1], Config(7))

    @hookimpl
    def measure(inv):
        raise Unsupported("no time")

    registry.register(SimpleNamespace(measure=measure), "tuner")
    with policy_override(autotune=True):
        plan = registry.plan("scale", short)
        assert (plan.cfg, "would be measured: 1 kernel; this is the plan until then" in str(plan)) == (Config(7), True)
        assert registry.call("scale", short).tolist() == [7.0] * 8


class UnprintableRefusal(Unsupported):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class ExitingError(Exception):
    def __str__(self) -> str:
        raise SystemExit("out")


@pytest.mark.parametrize("fault", [UnprintableRefusal(), ExitingError()])
def test_an_error_whose_str_raises_does_not_break_the_call(registry, fault):
    @hookimpl
    def heuristic_cfg(inv):
        raise fault

    @hookimpl
    def select_config(inv):
        raise fault

    bad = SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=kernel().run_backend, PLATFORMS={"cpu": 99})
    registry.register(bad, "scale.bad")
    registry.register(SimpleNamespace(select_config=select_config), "store")
    assert registry.call("scale", X).tolist() == (2 * X).tolist()
    reasons = [v.reason for v in registry.explain("scale", X).verdicts if v.name in ("scale.bad", "store")]
    assert len(reasons) == 2
    assert all(type(fault).__name__ in reason for reason in reasons)


def kernel_with_check() -> SimpleNamespace:
    @hookimpl
    def check_cfg(inv, cfg):
        if cfg.factor == 99:
            raise ZeroDivisionError("by 0")

    return SimpleNamespace(**vars(kernel()), check_cfg=check_cfg)


def test_an_error_in_check_cfg_is_reported_with_its_kernel(registry):
    registry.register(kernel_with_check(), "scale.two")
    reason = r"check_cfg of scale.two \(registered at run time\) raised ZeroDivisionError: by 0"
    with overlay_cache({registry.invocation("scale", X).key: Config(99)}), pytest.raises(PluginError, match=reason):
        registry.call("scale", X)
    registry.remember(registry.invocation("scale", X).key, Config(99))
    (verdict,) = [v for v in registry.explain("scale", X).verdicts if v.name == "built-in memory"]
    assert (verdict.status, "check_cfg of scale.two" in verdict.reason) == ("broken", True)
    assert registry.call("scale", X).tolist() == (2 * X).tolist()


@pytest.mark.parametrize("options", [{"jit": False}, {"jit": True}])
def test_strict_promotion_of_the_caller_does_not_reach_kernels(options):
    registry = Registry()
    query = jax.random.normal(jax.random.key(0), (1, 9, 2, 8)).astype("bfloat16")

    def loss(query, backend):
        return (
            registry.call("flash_attention", query, query, query, causal=True, backend=backend).astype("float32").sum()
        )

    for backend in ("xla", "reference"):
        gradient = jax.grad(lambda q, backend=backend: loss(q, backend))
        gradient = jax.jit(gradient) if options["jit"] else gradient
        expected = gradient(query)
        with jax.numpy_dtype_promotion("strict"):
            assert jnp.array_equal(gradient(query), expected)
            registry.plan("flash_attention", query, query, query)


def test_a_backward_operation_has_parameters_for_the_residuals(registry):
    registry.register(Operation(name="scale", signature=scale, axes=AXES, backward="other"))
    registry.register(Operation(name="other", signature=scale, axes=AXES))
    registry.register(kernel(), "other.two")
    with pytest.raises(PluginError, match="'other' cannot be the backward operation of 'scale': it has no 'out'"):
        jax.grad(lambda x: registry.call("scale", x).sum())(X)
    with pytest.raises(ValueError, match="backward names another operation"):
        Operation(name="scale", signature=scale, axes=AXES, backward="scale")


def test_a_kernel_that_returns_abstract_results_is_refused(registry):
    @hookimpl
    def run_backend(inv, cfg):
        return jax.ShapeDtypeStruct(inv["x"].shape, inv["x"].dtype)

    registry.register(SimpleNamespace(**{**vars(kernel()), "run_backend": run_backend}), "scale.two")
    with pytest.raises(PluginError, match=r"scale.two .* returned \(ShapeDtypeStruct\)"):
        registry.call("scale", X)


def test_a_masked_array_is_refused_by_its_type(registry):
    import numpy as np

    with pytest.raises(TypeError, match="scale: x takes an array; got MaskedArray"):
        registry.call("scale", np.ma.array([1.0, 2.0], mask=[0, 1]))


def test_a_case_of_axes_applies_to_values_of_its_own_type():
    axes = Axes({"x": "n k"}, {"out": "n"}, whole="n k", when={("wide", True): {"out": "n k"}})
    x = jax.ShapeDtypeStruct((2, 3), "float32")
    assert [axes.outputs({"x": x, "wide": wide})[0].shape for wide in (True, 1, False)] == [(2, 3), (2,), (2,)]
    typed = Axes({"x": "n k"}, {"out": "n"}, whole="n k", when={("dtype", jnp.dtype("int8")): {"out": "n k"}})
    assert typed.outputs({"x": x, "dtype": jnp.int8})[0].shape == (2, 3)


@pytest.mark.parametrize("multiples", [{"n": "n"}, {"n": "k", "k": "n"}])
def test_circular_multiples_are_refused(multiples):
    with pytest.raises(ValueError, match="is a multiple and has one"):
        Axes({"x": "n k"}, {"out": "n"}, whole="n k", multiples=multiples)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"when": 5}, TypeError),
        ({"milliseconds": "x"}, TypeError),
        ({"milliseconds": None}, TypeError),
        ({"milliseconds": float("nan")}, ValueError),
        ({"backends": "good"}, TypeError),
        ({"backends": (1,)}, TypeError),
        ({"software": {"jax": 1}}, TypeError),
        ({"shortfall": 1.5}, TypeError),
    ],
)
def test_a_provenance_with_invalid_fields_is_refused(fields, error):
    with pytest.raises(error):
        Provenance(**{"when": "", "device": "", "milliseconds": 1.0, "backends": ("two",), **fields})


def test_a_label_with_a_lone_surrogate_is_read_back():
    from ejkernel_core._labels import call_label
    from ejkernel_tuning import extract_labels_from_hlo_text, labels_to_configs

    Words = attrs.make_class("Words", {"text": attrs.field(type=str)}, frozen=True)
    (label,) = extract_labels_from_hlo_text(f'op_name="jit(f)/{call_label("double.xla", Words(chr(0xD800)))}/mul"')
    assert labels_to_configs([label], {"double.xla": Words})[label] == Words(chr(0xD800))


@pytest.mark.parametrize("scale", [1e-300, -1e-300, 1e300])
def test_a_scale_that_float32_cannot_hold_is_refused(scale):
    query = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="softmax_scale: takes a number that float32 holds"):
        Registry().call("flash_attention", query, query, query, softmax_scale=scale)


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        ("grouped_matmul", "xla"),
        ("moe_permute_matmul", "by_parts"),
        ("moe_permute_matmul", "xla"),
    ],
)
def test_a_kernel_names_the_operations_that_it_calls(op: str, backend: str) -> None:
    example = next(
        example for example in ejkernel_core.registry.operation(op).examples() if "float32" in example.features
    )
    explanation = ejkernel_core.explain(op, backend=backend, **example.arguments(0))
    for one in (explanation, explanation.backward):
        assert {part.op for part in one.parts} == {*one.plan.kernel.parts}
    assert explanation.backward.parts
