"""Discovery of plugins, registration at run time, selection by EJKERNEL_PLUGINS, and the listing."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import (
    Axes,
    Candidate,
    Choice,
    Invocation,
    NoKernel,
    Operation,
    PluginError,
    Record,
    Registry,
    UnknownBackend,
    UnknownOperation,
    Unsupported,
    hookimpl,
)
from ejkernel_core._policies import fault_of_choice
from tests.distributions import KERNEL, MakeDistribution

X = np.array([1.0, 2.0], np.float32)


@attrs.frozen
class Config:
    times: int = 2


def kernel(config: Config = Config(), platforms: dict[str, int] | None = None, refusal: str = "") -> object:
    class Kernel:
        PLATFORMS = platforms

        @staticmethod
        @hookimpl
        def heuristic_cfg(inv: object) -> Config:
            if refusal:
                raise Unsupported(refusal)
            return config

        @staticmethod
        @hookimpl
        def run_backend(inv: dict[str, jax.Array], cfg: Config) -> jax.Array:
            return inv["x"] * cfg.times

    Kernel.Config = Config  # type: ignore[attr-defined]
    return Kernel


@pytest.fixture
def registry() -> Registry:
    registry = Registry(plugins="")
    registry.register(
        Operation(
            name="scale",
            signature=lambda x, *, loud=False: None,
            outputs=lambda a: (jax.ShapeDtypeStruct(a["x"].shape, a["x"].dtype),),
        )
    )
    registry.register(kernel(Config(2)), "scale.two")
    return registry


def test_a_kernel_registered_at_run_time_can_be_replaced(registry: Registry) -> None:
    np.testing.assert_array_equal(registry.call("scale", X), 2 * X)
    registry.register(kernel(Config(5)), "scale.two")
    np.testing.assert_array_equal(registry.call("scale", X), 5 * X)


def test_a_registration_during_a_call_is_not_lost(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = registry.operation

    def registering_operation(name: str) -> Operation:
        scale = operation(name)
        registry.register(kernel(Config(9)), "scale.two")
        registry.register(attrs.evolve(scale, prepare=lambda a: ({**a, "x": a["x"] * 100}, lambda results: results[0])))
        return scale

    monkeypatch.setattr(registry, "operation", registering_operation)
    registry.call("scale", X)
    monkeypatch.undo()
    np.testing.assert_array_equal(registry.call("scale", X), 900 * X)


def test_the_kernel_with_the_highest_rank_on_the_platform_is_chosen(registry: Registry) -> None:
    registry.register(kernel(Config(3), {"cpu": 80}), "scale.three")
    registry.register(kernel(Config(4), {"cpu": 10, "gpu": 99}), "scale.four")
    plan = registry.plan("scale", X)
    assert [v.name for v in plan.verdicts] == ["scale.three", "scale.two", "scale.four"]
    assert [v.status for v in plan.verdicts] == ["chosen", "able", "able"]
    assert plan.origin == "heuristic"
    np.testing.assert_array_equal(registry.call("scale", X), 3 * X)


def test_equal_ranks_are_ordered_by_name(registry: Registry) -> None:
    registry.register(kernel(Config(3)), "scale.alpha")
    assert registry.plan("scale", X).kernel.name == "scale.alpha"


def test_an_explicit_backend_runs_or_is_refused(registry: Registry) -> None:
    registry.register(kernel(Config(3), {"cpu": 1}), "scale.three")
    registry.register(kernel(refusal="odd lengths only"), "scale.odd")
    np.testing.assert_array_equal(registry.call("scale", X, backend="three"), 3 * X)
    assert registry.plan("scale", X, backend="three").origin == "heuristic"
    with pytest.raises(NoKernel, match="scale.odd .*: refused, odd lengths only"):
        registry.call("scale", X, backend="odd")


def test_an_explicit_cfg_is_used_once_and_not_remembered(registry: Registry) -> None:
    np.testing.assert_array_equal(registry.call("scale", X, cfg=Config(7)), 7 * X)
    np.testing.assert_array_equal(registry.call("scale", X), 2 * X)
    plan = registry.plan("scale", X, cfg=Config(7), backend="two")
    assert (plan.cfg, plan.origin) == (Config(7), "explicit cfg")


def test_an_explicit_cfg_of_another_type_is_refused(registry: Registry) -> None:
    with pytest.raises(NoKernel, match=rf"cfg is of type int, not its Config \({__name__}\.Config\)"):
        registry.call("scale", X, cfg=3)


def test_an_explicit_cfg_of_another_type_is_refused_with_the_module_of_the_kernel(registry: Registry) -> None:
    """Not the module that defines the type, which may be a private one."""
    module = ModuleType("fast_scale")
    vars(module).update({name: getattr(kernel(), name) for name in ("heuristic_cfg", "run_backend", "Config")})
    registry.register(module, "scale.two")
    with pytest.raises(NoKernel, match=r"cfg is of type int, not its Config \(fast_scale\.Config\)"):
        registry.call("scale", X, cfg=3)


def test_an_explicit_cfg_is_refused_by_a_kernel_without_a_config(registry: Registry) -> None:
    registry.register(SimpleNamespace(run_backend=kernel().run_backend), "scale.two")
    with pytest.raises(NoKernel, match=r"scale\.two .*: left out, cfg is of type .*Config; the kernel has no Config"):
        registry.call("scale", X, cfg=Config(3))


def test_errors_for_unknown_names_suggest_a_similar_name_and_the_listing(registry: Registry) -> None:
    with pytest.raises(
        UnknownOperation, match=r"no operation 'scael' is installed; did you mean 'scale'\?.*'ejkernel list'"
    ):
        registry.call("scael", X)
    with pytest.raises(
        UnknownBackend, match=r"no backend 'tow' of 'scale' is installed; did you mean 'two'\?.*'ejkernel list'"
    ):
        registry.call("scale", X, backend="tow")


def test_errors_for_the_names_of_other_libraries_have_the_name_here() -> None:
    registry = Registry(plugins="")
    names = {"factor": "scale", "impl": "backend", "axis": "the last axis is taken: move it there"}
    operation = Operation(name="product", signature=lambda x, *, scale=1.0: None, other_names=names)
    registry.register(operation)
    start = "product: got an unexpected keyword argument"
    for name, end in {
        "factor": "'factor'; 'factor' is called 'scale' here",
        "impl": "'impl'; 'impl' is called 'backend' here",
        "axis": "'axis'; the last axis is taken: move it there",
        "bakend": "'bakend'; did you mean 'backend'?",
        "unknown": "'unknown'",
    }.items():
        for entry in (registry.call, registry.plan, registry.explain):
            with pytest.raises(TypeError) as error:
                entry("product", X, **{name: 1})
            assert str(error.value) == f"{start} {end}"


def test_too_many_arguments_by_position_are_refused_with_the_names_of_the_others(registry: Registry) -> None:
    end = "; write the others by name: loud"
    with pytest.raises(TypeError) as error:
        registry.call("scale", X, True)
    assert str(error.value) == f"scale: takes x by position; got 2 arguments{end}"
    registry.register(Operation(name="add", signature=lambda x, y: None))
    for entry in (registry.call, registry.plan, registry.explain):
        with pytest.raises(TypeError) as error:
            entry("add", X, X, X)
        assert str(error.value) == "add: takes x, y by position; got 3 arguments"


def test_other_names_are_checked() -> None:
    signature = lambda x, *, scale=1.0: None
    with pytest.raises(ValueError, match="other_names of product: 'scale' is a parameter, and no other name"):
        Operation(name="product", signature=signature, other_names={"scale": "x"})
    with pytest.raises(ValueError, match="other_names of product: 'scael' is not a parameter; did you mean 'scale'"):
        Operation(name="product", signature=signature, other_names={"factor": "scael"})


def test_unknown_and_unhashable_options_are_refused_by_name(registry: Registry) -> None:
    with pytest.raises(TypeError, match=r"scale: got an unexpected keyword argument 'lout'; did you mean 'loud'\?"):
        registry.call("scale", X, lout=True)
    with pytest.raises(TypeError, match="scale: missing a required argument: 'x'"):
        registry.call("scale")
    with pytest.raises(TypeError, match=r"missing a required argument: 'x'; 'lout' is unknown; did you mean 'loud'\?"):
        registry.call("scale", lout=True)
    with pytest.raises(TypeError, match=r"loud is a static option.*got list \[1\] \(give a tuple\)"):
        registry.call("scale", X, loud=[1])
    two = rf"\(a kernel takes its own frozen Config: 'two' takes {__name__}\.\w+\)"
    with pytest.raises(TypeError, match=rf"cfg is a static option.*got dict \{{'by': 2\}} {two}"):
        registry.call("scale", X, cfg={"by": 2})
    for value in (X, jnp.asarray(X)):
        with pytest.raises(TypeError, match=r"loud is a static option.*array of shape \(2,\)"):
            registry.call("scale", X, loud=value)
    with pytest.raises(TypeError, match="loud is a static option.*a traced array"):
        jax.jit(lambda x, loud: registry.call("scale", x, loud=loud))(X, True)


def test_an_option_whose_hash_fails_is_refused_by_name(registry: Registry) -> None:
    class Broken:
        def __hash__(self) -> int:
            raise ValueError("no hash today")

    with pytest.raises(TypeError, match="loud is a static option and takes a hashable value; got Broken") as error:
        registry.call("scale", X, loud=Broken())
    assert "no hash today" in str(error.value.__cause__)


@pytest.mark.parametrize("value", ["a", [1.0, 2.0], object()])
def test_an_argument_that_is_no_array_is_refused_by_name(registry: Registry, value: object) -> None:
    with pytest.raises(TypeError, match=f"scale: x takes an array; got {type(value).__name__}"):
        registry.call("scale", value)


@pytest.mark.parametrize("value", [{"a": X}, (X, X), [X, 2.0]], ids=["dict", "tuple", "list"])
def test_a_tree_of_arrays_is_refused_with_the_way_out(registry: Registry, value: object) -> None:
    way_out = "each argument is one array: pass those that it holds one by one, or jnp.stack them"
    for method in (registry.call, registry.plan, registry.explain):
        with pytest.raises(TypeError, match=f"scale: x takes an array; got {type(value).__name__} .*; {way_out}"):
            method("scale", value)


def test_an_operation_has_its_own_way_out_for_a_tree() -> None:
    registry = Registry(plugins="")
    registry.register(Operation(name="store", signature=lambda pages: None, pytrees={"pages": "call 'store_pair'"}))
    registry.register(SimpleNamespace(run_backend=hookimpl(lambda inv, cfg: inv["pages"])), "store.reference")
    with pytest.raises(TypeError, match=r"^store: pages takes an array; got tuple .*; call 'store_pair'$"):
        registry.call("store", (X, X))
    with pytest.raises(TypeError, match=r"; make an array of it: jnp.asarray\(pages\)$"):
        registry.call("store", (1.0, 2.0))
    with pytest.raises(ValueError, match="^pytrees of store: 'page' is not a parameter; did you mean 'pages'?"):
        Operation(name="store", signature=lambda pages: None, pytrees={"page": "call 'store_pair'"})


def test_numbers_in_lists_are_refused_with_the_way_out(registry: Registry) -> None:
    for value in ([1.0, 2.0], [[1, 2], [3, 4]], (1.0,)):
        with pytest.raises(
            TypeError, match=r"^scale: x takes an array; got .*; make an array of it: jnp.asarray\(x\)$"
        ):
            registry.call("scale", value)


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([None]), np.array(["2026-01-01"], "datetime64[D]")])
def test_an_array_of_no_numbers_is_refused(registry: Registry, value: np.ndarray) -> None:
    for method in (registry.call, registry.plan):
        with pytest.raises(
            TypeError, match=f"^scale: x takes an array; got one of {re.escape(str(value.dtype))}, which"
        ):
            method("scale", value)
    with pytest.raises(TypeError, match="^scale: x takes an array; got one of .*'a'.*, which JAX does not have"):
        registry.call("scale", np.zeros(2, [("a", "float32")]))


def test_a_call_on_a_shape_is_refused_with_the_way_out(registry: Registry) -> None:
    with pytest.raises(
        TypeError, match="^scale: x has a shape and no values: a call takes arrays; plan and explain take"
    ):
        registry.call("scale", jax.ShapeDtypeStruct((2,), "float32"))
    assert registry.plan("scale", jax.ShapeDtypeStruct((2,), "float32")).kernel.name == "scale.two"


def test_a_reference_to_an_array_is_refused_with_the_way_out(registry: Registry) -> None:
    ref = jax.new_ref(jnp.asarray(X))
    jitted = jax.jit(lambda ref: registry.call("scale", ref))
    for call in (jitted, *(functools.partial(m, "scale") for m in (registry.call, registry.plan, registry.explain))):
        with pytest.raises(TypeError, match=r"^scale: x takes an array; got a jax.Ref: pass what it refers to, x=ref"):
            call(ref)
    np.testing.assert_array_equal(jax.jit(lambda ref: registry.call("scale", ref[...]))(ref), 2 * X)


def flag_registry() -> Registry:
    """A registry with one operation, whose option ``n`` takes True or a tuple of ints."""
    registry = Registry(plugins="")

    def prepare(arguments: dict[str, object]) -> tuple[dict[str, object], object]:
        n = arguments["n"]
        if not (n is True or (isinstance(n, tuple) and all(type(side) is int for side in n))):
            raise TypeError("n: takes True or ints")
        return arguments, lambda results: results[0]

    registry.register(
        Operation(
            name="flag",
            signature=lambda x, *, n: None,
            prepare=prepare,  # type: ignore[arg-type]
            outputs=lambda a: (jax.ShapeDtypeStruct(a["x"].shape, a["x"].dtype),),
        )
    )
    registry.register(kernel(), "flag.k")
    return registry


@pytest.mark.parametrize(("valid", "invalid"), [(True, 1), ((2, 2), (2.0, 2.0)), ((1, 1), (1, True))])
def test_an_invalid_option_is_refused_after_an_equal_valid_one(valid: object, invalid: object) -> None:
    for order in ((valid, invalid), (invalid, valid)):
        registry = flag_registry()
        for n in order:
            if n is valid:
                np.testing.assert_array_equal(registry.call("flag", X, n=n), 2 * X)
            else:
                with pytest.raises(TypeError, match="n: takes True or ints"):
                    registry.call("flag", X, n=n)


def test_an_error_of_a_kernel_is_raised_unchanged(registry: Registry) -> None:
    @hookimpl
    def run_backend(inv: object, cfg: object) -> object:
        raise TypeError("forward-mode is a word of this kernel's own")

    kernel_class = kernel()
    kernel_class.run_backend = staticmethod(run_backend)  # type: ignore[attr-defined]
    registry.register(kernel_class, "scale.fails")
    with pytest.raises(TypeError, match="a word of this kernel's own") as error:
        registry.call("scale", X, backend="fails")
    assert type(error.value) is TypeError
    assert error.value.__cause__ is not error.value


def test_the_operation_has_to_be_a_name(registry: Registry) -> None:
    for value in (3, print, None):
        with pytest.raises(TypeError, match="op: takes the name of an operation, as 'flash_attention'; got"):
            registry.call(value, X)  # type: ignore[arg-type]


def test_an_int_of_more_than_32_bits_is_refused(registry: Registry) -> None:
    for number, bits in ((2**40, 41), (2**31, 32), (-(2**31) - 1, 32), (10**5000, 16610)):
        with pytest.raises(ValueError, match=f"scale: x takes an int from -2\\*\\*31 to .*; got one of {bits} bits"):
            registry.call("scale", number)
    with jax.enable_x64(True), pytest.raises(ValueError, match="scale: x takes an int from -2\\*\\*63 to"):
        registry.call("scale", 2**70)


def test_plan_and_explain_refuse_the_same_arguments_as_call(registry: Registry) -> None:
    for method in (registry.call, registry.plan, registry.explain):
        with pytest.raises(TypeError, match="scale: x takes an array; got str 'a'"):
            method("scale", "a")
        with pytest.raises(TypeError, match="scale: x takes an array; got NoneType None"):
            method("scale", None)
        with pytest.raises(TypeError, match="scale: backend takes a name; got int 3"):
            method("scale", X, backend=3)


def test_numbers_are_accepted_as_arrays(registry: Registry) -> None:
    assert registry.call("scale", 3.0) == 6.0
    with jax.disable_jit():
        assert registry.call("scale", 3.0) == 6.0
        assert registry.call("scale", np.float32(3)) == 6.0


def test_the_number_of_compiled_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ejkernel_core._call.MAX_COMPILED", 4)
    registry = flag_registry()
    for n in range(7):
        registry.call("flag", X, n=(n,))
    (form,) = registry.calls.values()
    assert len(form.functions) == 4
    np.testing.assert_array_equal(registry.call("flag", X, n=(0,)), 2 * X)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "PLATFORMS",
            ["gpu"],
            "PLATFORMS takes {platform: rank} with whole numbers, or functions that give them; got ['gpu']",
        ),
        (
            "PLATFORMS",
            {1: 2},
            "PLATFORMS takes {platform: rank} with whole numbers, or functions that give them; got {1: 2}",
        ),
        ("PLATFORMS", {"cpu": "high"}, "PLATFORMS takes {platform: rank} with whole numbers"),
        ("PLATFORMS", {"cuda": 5}, "platforms of jax.default_backend(), where cuda is 'gpu'; got {'cuda': 5}"),
        ("PARTS", "other", "PARTS takes a tuple of the names of operations; got 'other'"),
        ("Config", Config(3), "Config is the type of the configurations; got Config(times=3)"),
    ],
)
def test_the_names_in_a_kernel_module_are_checked(registry: Registry, name: str, value: object, message: str) -> None:
    kernel_class = kernel()
    setattr(kernel_class, name, value)
    with pytest.raises(PluginError) as error:
        registry.register(kernel_class, "scale.bad")
    assert message in str(error.value)


def test_register_refuses_incomplete_kernels(registry: Registry) -> None:
    with pytest.raises(TypeError, match="a kernel needs its name"):
        registry.register(kernel())
    with pytest.raises(PluginError, match="a kernel is named <operation>.<backend>"):
        registry.register(kernel(), "scale")
    with pytest.raises(PluginError, match="the hook run_backend is missing"):
        registry.register(object(), "scale.empty")
    with pytest.raises(TypeError, match="the name takes a text; got int"):
        registry.register(kernel(), 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["scale.", ".xla", "."])
def test_a_kernel_needs_operation_and_backend_in_its_name(registry: Registry, name: str) -> None:
    with pytest.raises(PluginError, match=rf"'{name}', registered .*: a kernel is named <operation>.<backend>"):
        registry.register(kernel(), name)


def test_an_empty_backend_is_refused(registry: Registry) -> None:
    for method in (registry.call, registry.plan, registry.explain):
        with pytest.raises(UnknownBackend, match=r"scale: backend='' is not a name\. Known: two\."):
            method("scale", X, backend="")


def test_an_entry_point_with_an_incomplete_name_is_broken(distribution: MakeDistribution, double: None) -> None:
    distribution("half-dist", {"half": KERNEL}, kernels={"double.": "half", ".xla": "half"})
    registry = Registry()
    np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    reasons = {entry.name: fault.reason for entry, fault in registry.inspect() if fault}
    assert reasons == {
        name: f"{name!r} of half-dist 1.0 (half): a kernel is named <operation>.<backend>, and a policy has select_config, "
        "measure or settle"
        for name in ("double.", ".xla")
    }
    with pytest.raises(UnknownBackend, match=r"double: backend='' is not a name\. Known: good\."):
        registry.call("double", X, backend="")


def test_registries_are_independent(registry: Registry) -> None:
    with pytest.raises(UnknownOperation):
        Registry(plugins="").call("scale", X)


def test_plan_and_explain_take_abstract_arrays(registry: Registry) -> None:
    abstract = jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)
    assert registry.plan("scale", abstract).kernel.name == "scale.two"
    text = str(registry.explain("scale", abstract))
    assert "scale.two with Config(times=2), by heuristic" in text
    assert "scale(x=bfloat16[3,4]) on cpu" in text
    registry.register(kernel(refusal="never"), "scale.two")
    explanation = registry.explain("scale", abstract)
    assert explanation.plan is None
    assert "scale.two (registered at run time): refused, never" in str(explanation)


SELECTIONS = {
    None: {"good-dist", "other-dist"},
    "": set(),
    " , ": set(),
    "good-dist": {"good-dist"},
    "Good_Dist, other.dist": {"good-dist", "other-dist"},
    "-other-dist": {"good-dist"},
    "good-dist,-good-dist": set(),
    "good-dist,-other-dist": {"good-dist"},
}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_selection_by_ejkernel_plugins(
    distribution: MakeDistribution, double: None, monkeypatch: pytest.MonkeyPatch, selection: str | None
) -> None:
    distribution("other-dist", {"other_kernel": KERNEL}, kernels={"double.other": "other_kernel"})
    monkeypatch.delenv("EJKERNEL_PLUGINS", raising=False)
    if selection is not None:
        monkeypatch.setenv("EJKERNEL_PLUGINS", selection)
    distributions = {entry.distribution for entry, _ in Registry().inspect()}
    assert distributions & {"good-dist", "other-dist"} == SELECTIONS[selection]


UNKNOWN_NAMES = {
    "goood-dist": "got 'goood-dist'; did you mean 'good-dist'?",
    "good-dist, -goood-dist": "got '-goood-dist'; did you mean 'good-dist'?",
    "nobodys": "got 'nobodys'",
    "good-dist,-": "got '-'",
}


@pytest.mark.parametrize("selection", UNKNOWN_NAMES)
def test_a_selected_distribution_has_to_be_installed(
    double: None, monkeypatch: pytest.MonkeyPatch, selection: str
) -> None:
    end = f": takes names of installed distributions, with or without '-' in front; {UNKNOWN_NAMES[selection]}"
    with pytest.raises(ValueError, match=f"^{re.escape('plugins' + end)}$"):
        Registry(plugins=selection)
    monkeypatch.setenv("EJKERNEL_PLUGINS", selection)
    registry = Registry()
    local_registry = Registry(policies_of=registry)
    local_registry.register(Operation(name="bare", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    local_registry.register(kernel(), "bare.good")
    uses = (
        lambda: registry.call("double", X),
        lambda: registry.explain("double", X),
        lambda: local_registry.plan("bare", X),
        registry.inspect,
    )
    for use in uses:
        with pytest.raises(ValueError, match=f"^{re.escape('EJKERNEL_PLUGINS' + end)}$"):
            use()


@pytest.mark.parametrize("plugins", [["good-dist"], b"good-dist", False])
def test_the_selected_distributions_are_a_text(plugins: object) -> None:
    message = f"^plugins: takes a text of names, with commas; got {type(plugins).__name__}$"
    with pytest.raises(TypeError, match=message):
        Registry(plugins=plugins)  # type: ignore[arg-type]


def test_a_policy_of_a_third_party_comes_before_the_heuristic(distribution: MakeDistribution, double: None) -> None:
    source = """
        from ejkernel_core import Choice, hookimpl

        @hookimpl
        def select_config(inv, candidates):
            return Choice(candidates[-1].backend, candidates[-1].cfg, "the last one, by policy-dist")
    """
    distribution("policy-dist", {"my_policy": source}, policies={"last": "my_policy"})
    distribution("other-dist", {"other_kernel": KERNEL}, kernels={"double.zzz": "other_kernel"})
    plan = Registry().plan("double", X)
    assert (plan.kernel.name, plan.origin) == ("double.zzz", "the last one, by policy-dist")


BROKEN_POLICIES = {
    "chooses nobody": ("return Choice('nobody', None, 'a guess')", "a guess chose backend 'nobody'"),
    "returns no choice": ("return 'good'", "select_config returned a str, not a Choice"),
    "raises": ("raise KeyError('boom')", "select_config raised KeyError: 'boom'"),
}


@pytest.mark.parametrize("case", BROKEN_POLICIES)
def test_a_broken_policy_is_skipped_and_reported(distribution: MakeDistribution, double: None, case: str) -> None:
    body, message = BROKEN_POLICIES[case]
    source = f"""
        from ejkernel_core import Choice, hookimpl

        @hookimpl
        def select_config(inv, candidates):
            {body}
    """
    module = "policy_that_" + case.replace(" ", "_")
    distribution("guess-dist", {module: source}, policies={"guess": module})
    registry = Registry()
    np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    plan = registry.plan("double", X)
    assert plan.origin == "heuristic"
    (verdict,) = (verdict for verdict in plan.verdicts if verdict.name == "guess")
    assert (verdict.provider, verdict.status) == ("guess-dist 1.0", "broken")
    assert message in verdict.reason


def test_a_policy_that_does_not_load_is_reported_in_the_plan(distribution: MakeDistribution, double: None) -> None:
    distribution("guess-dist", {"no_policy": "1/0"}, policies={"guess": "no_policy"})
    text = str(Registry().plan("double", X))
    assert "guess (guess-dist 1.0): broken, 'guess' of guess-dist 1.0 (no_policy) does not load: ZeroDivision" in text


def test_an_invalid_choice_of_a_policy_is_a_fault(registry: Registry) -> None:
    candidate = Candidate(registry.kernel("scale", "two"), Config(2))
    assert "chose a value of type dict for scale.two, not its Config" in str(
        fault_of_choice(Choice("two", {}, "p"), [candidate])
    )
    assert fault_of_choice(Choice("two", Config(9), "p"), [candidate]) is None
    assert "p gives a str for a record" in str(fault_of_choice(Choice("two", Config(9), "p", record="?"), [candidate]))
    wrong_fields = {"origin": 3, "backend": b"two", "key": "k", "record": Record(Config(9), "two", "?"), "measured": 1}
    for name, value in wrong_fields.items():
        fields = {"backend": "two", "cfg": Config(9), "origin": "p", name: value}
        kind = "str for a provenance" if name == "record" else f"{type(value).__name__} for a"
        assert kind in str(fault_of_choice(Choice(**fields), [candidate]))
    for distance in ("far", -1.0, float("nan")):
        assert "for a distance" in str(fault_of_choice(Choice("two", Config(9), "p", distance=distance), [candidate]))


# -- equal values of different types ------------------------------------------------------------------------------


@pytest.fixture
def type_registry() -> Registry:
    """The result of ``tell`` shows its option's type and sign: 2 for True, 3 otherwise, plus 1 or -1 for the sign."""
    registry = Registry(plugins="")
    registry.register(Operation(name="tell", signature=lambda x, *, s=0: None, outputs=lambda a: (a["x"],)))

    class Kernel:
        Config = Config

        @staticmethod
        @hookimpl
        def heuristic_cfg(inv: object) -> Config:
            return Config(1)

        @staticmethod
        @hookimpl
        def run_backend(inv: dict[str, jax.Array], cfg: Config) -> jax.Array:
            code = 2 if inv["s"] is True else 3
            return inv["x"] * 0 + (code + jnp.copysign(1.0, float(inv["s"]))) * (-1 if cfg.times is True else 1)

    registry.register(Kernel, "tell.it")
    return registry


def test_options_that_are_equal_but_of_different_types_are_distinguished(type_registry: Registry) -> None:
    eager_results = [float(type_registry.call("tell", X, s=s)[0]) for s in (1, True, 0.0, -0.0)]
    assert eager_results == [4.0, 3.0, 4.0, 2.0]
    jitted_results = jax.jit(lambda x: [type_registry.call("tell", x, s=s) for s in (1, True, 0.0, -0.0)])(X)
    assert [float(result[0]) for result in jitted_results] == eager_results


def test_configurations_that_are_equal_but_of_different_types_are_distinguished(type_registry: Registry) -> None:
    assert [float(type_registry.call("tell", X, cfg=Config(c))[0]) for c in (1, True)] == [4.0, -4.0]
    jitted_results = jax.jit(lambda x: [type_registry.call("tell", x, cfg=Config(c)) for c in (1, True)])(X)
    assert [float(result[0]) for result in jitted_results] == [4.0, -4.0]


def test_a_kernel_whose_heuristic_has_another_type_is_broken(registry: Registry) -> None:
    kernel_class = kernel(Config(3))
    kernel_class.Config = int  # type: ignore[attr-defined]
    registry.register(kernel_class, "scale.wrong")
    np.testing.assert_array_equal(registry.call("scale", X), 2 * X)
    (verdict,) = (v for v in registry.plan("scale", X).verdicts if v.name == "scale.wrong")
    assert (verdict.status, verdict.reason) == ("broken", "heuristic_cfg gives a value of type Config, not its Config")


def test_a_refusing_reference_that_determines_the_results_is_reported() -> None:
    registry = Registry(plugins="")
    registry.register(Operation(name="odd", signature=lambda x: None))
    registry.register(kernel(refusal="odd lengths only"), "odd.reference")
    with pytest.raises(NoKernel, match="odd.reference, which says what 'odd' returns, refuses: odd lengths only"):
        registry.call("odd", X)


def test_an_operation_without_arrays() -> None:
    registry = Registry(plugins="")
    shape = lambda a: (jax.ShapeDtypeStruct((a["n"],), "float32"),)
    registry.register(Operation(name="ramp", signature=lambda *, n: None, outputs=shape))

    class Kernel:
        @staticmethod
        @hookimpl
        def heuristic_cfg(inv: object) -> None:
            return None

        @staticmethod
        @hookimpl
        def run_backend(inv: dict[str, int]) -> jax.Array:
            return jnp.arange(inv["n"], dtype=jnp.float32)

    registry.register(Kernel, "ramp.it")
    np.testing.assert_array_equal(registry.call("ramp", n=4), [0, 1, 2, 3])
    np.testing.assert_array_equal(jax.jit(lambda x: x + registry.call("ramp", n=2))(X), X + np.array([0, 1]))


def test_a_kernel_that_calls_an_operation_uses_the_registry_that_chose_it(registry: Registry) -> None:
    """Else its parts would be those of the installed plugins, whatever the registry has."""

    class Twice:
        @staticmethod
        @hookimpl
        def run_backend(inv: Invocation, cfg: None) -> jax.Array:
            return inv.call("scale", inv.call("scale", inv["x"]), backend="own")

    registry.register(
        Operation(name="scale_twice", signature=lambda x: None, outputs=lambda a: (a["x"],)), "scale_twice"
    )
    registry.register(Twice, "scale_twice.kernel")
    registry.register(kernel(Config(3)), "scale.own")
    np.testing.assert_array_equal(registry.call("scale_twice", X), 9 * X)
    np.testing.assert_array_equal(jax.jit(lambda x: registry.call("scale_twice", x))(X), 9 * X)
    with pytest.raises(UnknownOperation):
        registry.invocation("scale_twice", X).call("scale_thrice", X)


def test_results_that_are_integers_have_no_part_in_a_gradient() -> None:
    """A result of a backward operation's forward, or of a reference, may be an index."""
    registry = Registry(plugins="")

    def largest(inv: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
        place = jnp.argmax(inv["x"])
        return jnp.sin(inv["x"][place]), place.astype(jnp.int32)

    class Kernel:
        @staticmethod
        @hookimpl
        def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, jax.Array]:
            return largest(inv)

    class Backward:
        @staticmethod
        @hookimpl
        def run_backend(inv: Invocation, cfg: None) -> Any:
            return operation.gradients_by_jax(largest, inv)

    axes = Axes({"x": "n"}, {"value": "", "place": ""}, whole="n", dtypes={"place": jnp.int32})
    x = jnp.array([0.5, 2.0, 1.0])
    expected = np.array([0.0, np.cos(2.0), 0.0], np.float32)
    for backward in (None, "largest_bwd"):
        operation = Operation(name="largest", signature=lambda x: None, axes=axes, backward=backward)
        registry = Registry(plugins="")
        registry.register(operation, "largest")
        registry.register(Kernel, "largest.reference")
        if backward:
            registry.register(operation.gradients(), backward)
            registry.register(Backward, f"{backward}.reference")
        gradient = jax.grad(lambda x, registry=registry: registry.call("largest", x, backend="reference")[0])(x)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)
        _, tangent = jax.jvp(
            lambda x, registry=registry: registry.call("largest", x, backend="reference")[0], (x,), (jnp.ones(3),)
        )
        np.testing.assert_allclose(tangent, np.cos(2.0), rtol=1e-6)
