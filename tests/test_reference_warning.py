"""A call that runs by the reference, because there is no other kernel, warns once, with what to do about it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from ejkernel_core import Operation, Registry, _fallback
from tests.distributions import KERNEL, OPERATION, MakeDistribution
from tests.test_plugin_traps import HOOKS

X = np.array([1.0, 2.0], np.float32)

REFUSING = KERNEL.replace("return None", "raise Unsupported('needs a length below 2')")
RAISING = KERNEL.replace("return None", "raise ZeroDivisionError('blocks of 0')")
REFERENCE = KERNEL + "\n    PLATFORMS = {'cpu': 0, 'gpu': 0, 'tpu': 0}\n"


@pytest.fixture(autouse=True)
def no_earlier_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fallback, "_warned_operations", {})
    requires = ['ejkernel-ops; extra == "cpu"', 'ejkernel-sun; extra == "cpu"']
    monkeypatch.setattr(metadata, "requires", lambda name: requires)


@pytest.fixture
def reference(distribution: MakeDistribution) -> None:
    """The operation ``double`` with its reference, from the distribution ``meaning-dist``."""
    modules = {"meaning_operation": OPERATION, "meaning_reference": REFERENCE}
    distribution(
        "meaning-dist",
        modules,
        operations={"double": "meaning_operation:operation"},
        kernels={"double.reference": "meaning_reference"},
    )


def warnings_of(registry: Registry, *functions: Callable[[], Any], **options: Any) -> list[str]:
    """The warnings of these functions, or else of calls, whose results are checked."""
    with warnings.catch_warnings(record=True) as warning_records:
        warnings.simplefilter("always")
        # Of JAX, where threads that compile the same program write and read one file of its cache.
        warnings.filterwarnings("ignore", "Error (writing|reading) persistent compilation cache entry")
        if functions:
            for function in functions:
                function()
        else:
            for x in (X, X[:1], X):
                np.testing.assert_array_equal(registry.call("double", x, **options), 2 * x)
            np.testing.assert_array_equal(jax.jit(lambda x: registry.call("double", x, **options))(X), 2 * X)
    assert {warning.category for warning in warning_records} <= {RuntimeWarning}
    return [str(warning.message) for warning in warning_records]


START = "double runs by its reference, double.reference (meaning-dist 1.0), which is slow: "


def test_a_reference_without_other_kernels_warns_once(reference: None) -> None:
    registry = Registry(plugins="meaning-dist")
    (warning,) = warnings_of(registry)
    assert warning == (
        START + "no other kernel of it is installed, and its distribution, meaning-dist 1.0, provides none. "
        "'ejkernel list' lists what is installed (this registry has plugins='meaning-dist'). Or pass "
        "backend='reference', and nothing is said"
    )
    assert warnings_of(registry) == warnings_of(Registry(plugins="meaning-dist")) == []


def test_an_operation_registered_at_run_time_has_no_distribution(reference: None) -> None:
    registry = Registry(plugins="meaning-dist")
    registry.register(Operation(name="double", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    (warning,) = warnings_of(registry)
    assert warning.startswith(START + "no other kernel of it is installed. 'ejkernel list' lists")


def test_the_standard_plugins_are_suggested_for_a_standard_operation() -> None:
    registry = Registry(plugins="ejkernel-ops")
    query = np.ones((1, 4, 2, 8), np.float32)
    (warning,) = warnings_of(registry, lambda: registry.call("flash_attention", query, query, query))
    assert (
        "no other kernel of it is installed. 'pip install \"ejkernel-core[cpu]\"' brings the standard ones; "
        "'ejkernel list' lists what is installed (this registry has plugins='ejkernel-ops'). Or pass "
        "backend='reference', and nothing is said"
    ) in warning


def test_plan_and_explain_do_not_warn(reference: None) -> None:
    registry = Registry(plugins="meaning-dist")
    functions = [lambda: registry.plan("double", X), lambda: registry.explain("double", X), registry.inspect]
    assert warnings_of(registry, *functions) == []
    assert len(warnings_of(registry)) == 1


def test_an_explicit_reference_does_not_warn(reference: None) -> None:
    assert warnings_of(Registry(plugins="meaning-dist"), backend="reference") == []


def test_a_derivative_through_the_reference_does_not_warn(reference: None) -> None:
    registry = Registry(plugins="meaning-dist")
    warnings_of(registry)
    gradient = jax.grad(lambda x: registry.call("double", x).sum())
    assert warnings_of(registry, lambda: np.testing.assert_array_equal(gradient(X), [2, 2])) == []


@pytest.mark.parametrize(
    ("source", "has_warning"), [(KERNEL, False), (REFUSING, False), (RAISING, True), ("1/0", True)]
)
def test_a_broken_kernel_causes_a_warning_and_a_refusing_one_does_not(
    reference: None, distribution: MakeDistribution, source: str, has_warning: bool
) -> None:
    module = f"other_{abs(hash(source))}"
    distribution("other-dist", {module: source}, kernels={"double.other": module})
    messages = warnings_of(Registry(plugins="meaning-dist, other-dist"))
    assert len(messages) == has_warning
    if has_warning:
        assert messages[0].startswith(START + "another kernel is broken: double.other (other-dist 1.0): broken, ")
        assert "ZeroDivisionError" in messages[0]
        assert "Mend it, or uninstall; EJKERNEL_PLUGINS=-<distribution> leaves one out. Or pass" in messages[0]


def test_the_warning_names_both_distributions_of_an_ambiguous_kernel(
    reference: None, distribution: MakeDistribution
) -> None:
    for name in ("first", "second"):
        distribution(f"{name}-dist", {f"{name}_twin": KERNEL}, kernels={"double.twin": f"{name}_twin"})
    (warning,) = warnings_of(Registry(plugins="meaning-dist, first-dist, second-dist"))
    assert "'double.twin' is claimed by first-dist 1.0 (first_twin) and second-dist 1.0 (second_twin)" in warning or (
        "'double.twin' is claimed by second-dist 1.0 (second_twin) and first-dist 1.0 (first_twin)" in warning
    )
    assert "uninstall one, or leave one out: EJKERNEL_PLUGINS=-<distribution>" in warning
    assert warnings_of(Registry(plugins="meaning-dist, first-dist")) == []


def test_a_kernel_ranked_below_the_reference_causes_no_warning(reference: None, distribution: MakeDistribution) -> None:
    distribution("low-dist", {"low": KERNEL + "\n    PLATFORMS = {'cpu': -1}\n"}, kernels={"double.low": "low"})
    distribution("bad-dist", {"bad_one": "1/0"}, kernels={"double.bad": "bad_one"})
    registry = Registry(plugins="meaning-dist, low-dist, bad-dist")
    assert registry.plan("double", X).kernel.backend == "reference"
    assert warnings_of(registry) == []


def test_eight_threads_get_one_warning(reference: None) -> None:
    registry, start = Registry(plugins="meaning-dist"), threading.Barrier(8)

    def call() -> None:
        start.wait()
        registry.call("double", X)

    def call_in_threads() -> None:
        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(warnings_of(registry, call_in_threads)) == 1


def test_each_operation_of_this_repository_warns_once() -> None:
    registry = Registry(plugins="ejkernel-ops")
    query = np.ones((1, 4, 2, 8), np.float32)
    gradient = jax.grad(lambda q: registry.call("flash_attention", q, query, query).sum())
    messages = warnings_of(registry, lambda: gradient(query), lambda: gradient(query))
    assert [warning.partition(" ")[0] for warning in messages] == ["flash_attention", "flash_attention_bwd"]
    _fallback._warned_operations.clear()
    registry_with_xla = Registry(plugins="ejkernel-ops, ejkernel-xla")
    assert warnings_of(registry_with_xla, lambda: registry_with_xla.call("flash_attention", query, query, query)) == []


KERNEL_CLASS = """
    from ejkernel_classes import Kernel

    class Doubled(Kernel[None, object]):
        name = "double"

        def run(self, x, *, cfg):
            return x * 2

        def heuristic_cfg(self, inv):
            return None

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return (cotangents[0] * 2,)

    kernel = Doubled()
"""


def test_a_kernel_object_does_not_warn(distribution: MakeDistribution) -> None:
    distribution(
        "object-dist",
        {"published_double": KERNEL_CLASS},
        operations={
            "double": "published_double:kernel.plugin.operation",
            "double_bwd": "published_double:kernel.plugin.backward_operation",
        },
        kernels={
            "double.run": "published_double:kernel.plugin.run",
            "double_bwd.backward": "published_double:kernel.plugin.backward",
        },
    )
    registry = Registry(plugins="object-dist")
    gradient = jax.grad(lambda x: registry.call("double", x).sum())
    assert (
        warnings_of(registry) == warnings_of(registry, lambda: np.testing.assert_array_equal(gradient(X), [2, 2])) == []
    )
    kernel = import_module("published_double").kernel
    assert warnings_of(registry, lambda: kernel(X), lambda: jax.grad(lambda x: kernel(x).sum())(X)) == []


def test_a_reference_registered_at_run_time_does_not_warn() -> None:
    registry = Registry(plugins="")
    registry.register(Operation(name="double", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    registry.register(SimpleNamespace(**HOOKS), "double.reference")
    assert warnings_of(registry) == []
