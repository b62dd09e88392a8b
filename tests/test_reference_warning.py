"""Who gets the reference for want of anything better is told so, once, with what to install or to remove."""

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
from ejkernel_core.__main__ import listing
from tests.conftest import KERNEL, OPERATION, MakeDistribution
from tests.test_plugin_traps import HOOKS

X = np.array([1.0, 2.0], np.float32)

REFUSING = KERNEL.replace("return None", "raise Unsupported('needs a length below 2')")
RAISING = KERNEL.replace("return None", "raise ZeroDivisionError('blocks of 0')")
REFERENCE = KERNEL + "\n    PLATFORMS = {'cpu': 0, 'gpu': 0, 'tpu': 0}\n"


@pytest.fixture(autouse=True)
def nobody_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fallback, "_warned_operations", {})
    monkeypatch.setattr(metadata, "requires", lambda name: ['ejkernel-sun; extra == "cpu"'])


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


def told(registry: Registry, *questions: Callable[[], Any], **options: Any) -> list[str]:
    """What calls, or these questions, warn of; the calls' results are right."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if questions:
            for question in questions:
                question()
        else:
            for x in (X, X[:1], X):
                np.testing.assert_array_equal(registry.call("double", x, **options), 2 * x)
            np.testing.assert_array_equal(jax.jit(lambda x: registry.call("double", x, **options))(X), 2 * X)
    assert {warning.category for warning in caught} <= {RuntimeWarning}
    return [str(warning.message) for warning in caught]


START = "double runs by its reference, double.reference (meaning-dist 1.0), which is slow: "


def test_the_reference_alone_is_told_of_once(reference: None) -> None:
    registry = Registry(plugins="meaning-dist")
    (warning,) = told(registry)
    assert warning == (
        START + "no other kernel of it is installed. 'pip install \"ejkernel-core[cpu]\"' brings the standard ones; "
        "'python -m ejkernel_core' lists what is installed (this registry has plugins='meaning-dist'). Or pass "
        "backend='reference', and nothing is said"
    )
    assert told(registry) == told(Registry(plugins="meaning-dist")) == []


def test_who_only_asks_is_not_told(reference: None, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(plugins="meaning-dist")
    monkeypatch.setattr("ejkernel_core.__main__.registry", registry)
    questions = [lambda: registry.plan("double", X), lambda: registry.explain("double", X), listing]
    assert told(registry, *questions) == []
    assert len(told(registry)) == 1


def test_who_wants_the_reference_is_not_told(reference: None) -> None:
    assert told(Registry(plugins="meaning-dist"), backend="reference") == []


def test_the_derivative_by_the_reference_is_nobodys_want(reference: None) -> None:
    registry = Registry(plugins="meaning-dist")
    told(registry)
    gradient = jax.grad(lambda x: registry.call("double", x).sum())
    assert told(registry, lambda: np.testing.assert_array_equal(gradient(X), [2, 2])) == []


@pytest.mark.parametrize(("source", "warned"), [(KERNEL, False), (REFUSING, False), (RAISING, True), ("1/0", True)])
def test_another_kernel_that_refuses_is_no_reason_and_one_that_is_broken_is(
    reference: None, distribution: MakeDistribution, source: str, warned: bool
) -> None:
    module = f"other_{abs(hash(source))}"
    distribution("other-dist", {module: source}, kernels={"double.other": module})
    warning = told(Registry(plugins="meaning-dist, other-dist"))
    assert len(warning) == warned
    if warned:
        assert warning[0].startswith(START + "another kernel is broken: double.other (other-dist 1.0): broken, ")
        assert "ZeroDivisionError" in warning[0]
        assert "Mend it, or uninstall; EJKERNEL_PLUGINS=-<distribution> leaves one out. Or pass" in warning[0]


def test_two_that_claim_one_kernel_are_both_named(reference: None, distribution: MakeDistribution) -> None:
    for name in ("first", "second"):
        distribution(f"{name}-dist", {f"{name}_twin": KERNEL}, kernels={"double.twin": f"{name}_twin"})
    (warning,) = told(Registry(plugins="meaning-dist, first-dist, second-dist"))
    assert "'double.twin' is claimed by first-dist 1.0 (first_twin) and second-dist 1.0 (second_twin)" in warning or (
        "'double.twin' is claimed by second-dist 1.0 (second_twin) and first-dist 1.0 (first_twin)" in warning
    )
    assert "uninstall one, or leave one out: EJKERNEL_PLUGINS=-<distribution>" in warning
    assert told(Registry(plugins="meaning-dist, first-dist")) == []


def test_one_that_is_able_and_slower_is_no_reason(reference: None, distribution: MakeDistribution) -> None:
    distribution("low-dist", {"low": KERNEL + "\n    PLATFORMS = {'cpu': -1}\n"}, kernels={"double.low": "low"})
    distribution("bad-dist", {"bad_one": "1/0"}, kernels={"double.bad": "bad_one"})
    registry = Registry(plugins="meaning-dist, low-dist, bad-dist")
    assert registry.plan("double", X).kernel.backend == "reference"
    assert told(registry) == []


def test_eight_threads_are_told_once(reference: None) -> None:
    registry, start = Registry(plugins="meaning-dist"), threading.Barrier(8)

    def ask() -> None:
        start.wait()
        registry.call("double", X)

    def together() -> None:
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(told(registry, together)) == 1


def test_the_operations_of_this_repository_are_each_told_of_once() -> None:
    registry = Registry(plugins="ejkernel-ops")
    query = np.ones((1, 4, 2, 8), np.float32)
    gradient = jax.grad(lambda q: registry.call("flash_attention", q, query, query).sum())
    warned = told(registry, lambda: gradient(query), lambda: gradient(query))
    assert [warning.partition(" ")[0] for warning in warned] == ["flash_attention", "flash_attention_bwd"]
    _fallback._warned_operations.clear()
    both = Registry(plugins="ejkernel-ops, ejkernel-xla")
    assert told(both, lambda: both.call("flash_attention", query, query, query)) == []


PUBLISHED = """
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


def test_a_kernel_object_is_what_it_means_to_be(distribution: MakeDistribution) -> None:
    distribution(
        "object-dist",
        {"published_double": PUBLISHED},
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
    assert told(registry) == told(registry, lambda: np.testing.assert_array_equal(gradient(X), [2, 2])) == []
    kernel = import_module("published_double").kernel
    assert told(registry, lambda: kernel(X), lambda: jax.grad(lambda x: kernel(x).sum())(X)) == []


def test_what_is_written_in_a_notebook_is_what_is_meant() -> None:
    registry = Registry(plugins="")
    registry.register(Operation(name="double", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    registry.register(SimpleNamespace(**HOOKS), "double.reference")
    assert told(registry) == []
