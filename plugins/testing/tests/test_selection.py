"""Which examples a kernel is proved on: no check is left out in silence."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from ejkernel_core import Example, Operation, Registry, Unsupported, hookimpl
from ejkernel_testing import KernelProofs
from ejkernel_testing._selection import in_16_bits, select
from ejkernel_testing._summary import PLUGIN, Summary, warn_in_worker


def example(name: str, *features: str, checks: Sequence[str] = ("values",), **fields: Any) -> Example:
    def arguments(draw: int) -> dict[str, Any]:
        return {"x": np.random.default_rng(draw).standard_normal(4), "bias": 1.0 if "bias" in features else None}

    return Example(
        name, "scale", arguments, wrt=("x",), features=frozenset(features), checks=frozenset(checks), **fields
    )


PLAIN = example("plain", "float32", checks=("values", "jit"))
WITH_BIAS = example("with-bias", "float32", "bias", checks=("values", "jit", "programs"))
SENSITIVE = example("varied", "float32", checks=("values", "sensitivity"), variations=(WITH_BIAS,))
BIAS, NONE = frozenset({"bias"}), frozenset[str]()


def names(examples: Any) -> list[str]:
    return [example.name for example in examples]


def test_a_refused_example_is_proved_to_be_refused_and_nothing_else() -> None:
    selection = select([PLAIN, WITH_BIAS], BIAS, NONE)
    assert (names(selection.accepted), names(selection.refused)) == (["plain"], ["with-bias"])
    assert selection.checks == {"values", "jit"}
    assert selection.unproved == {"programs": ["bias"]}


def test_values_are_compared_where_gradients_alone_are_refused() -> None:
    selection = select([PLAIN, WITH_BIAS], NONE, BIAS)
    assert names(selection.without_gradients) == ["with-bias"]
    assert {example.name: example.wrt for example in selection.values} == {"plain": ("x",), "with-bias": ()}
    assert selection.unproved == {"programs": ["bias"]}


def test_a_refused_variation_is_left_out() -> None:
    assert [(a.name, b.name) for a, b in select([SENSITIVE], NONE, NONE).variations] == [("varied", "with-bias")]
    assert select([SENSITIVE], BIAS, NONE).unproved == {"sensitivity": ["bias"]}


def test_a_check_without_an_example_is_an_error_unless_declared() -> None:
    selection = select([PLAIN, WITH_BIAS], BIAS, NONE)
    with pytest.raises(AssertionError) as error:
        selection.check_complete("scale.mine", NONE)
    assert str(error.value) == (
        "checks: scale.mine: no example is left for 1 checks:\n"
        "  programs: its examples are refused, by bias\n"
        "Return examples that the kernel takes from `examples` of its proofs. If there can be none, "
        "declare UNPROVED = {'programs'} in the kernel's module"
    )
    selection.check_complete("scale.mine", frozenset({"programs"}))
    with pytest.raises(AssertionError, match="UNPROVED has jit, for which there are examples"):
        selection.check_complete("scale.mine", frozenset({"programs", "jit"}))


def test_a_kernel_that_refuses_float32_is_transformed_in_16_bits() -> None:
    only_values = example("only-values", "float32")
    (narrow,) = in_16_bits([PLAIN, only_values], frozenset({"float32", "bfloat16"}))
    assert (narrow.name, narrow.dtype, narrow.features) == ("plain-float16", "float16", {"float16"})
    assert not [*in_16_bits([PLAIN], NONE)]
    (varied,) = in_16_bits([SENSITIVE], frozenset({"float32"}))
    assert [variation.dtype for variation in varied.variations] == ["bfloat16"]


# -- the proofs --------------------------------------------------------------------------------------------------------


def kernel(refuses: str | None = None) -> Any:
    @hookimpl
    def heuristic_cfg(inv: Any) -> None:
        if refuses is not None and inv[refuses] is not None:
            raise Unsupported(f"no {refuses} here")

    @hookimpl
    def run_backend(inv: Any, cfg: None) -> Any:
        return 2 * inv["x"]

    return SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend, PLATFORMS={"cpu": 60})


def proofs(*examples: Example, **fields: Any) -> type[KernelProofs]:
    registry = Registry(plugins="")
    registry.register(
        Operation(name="scale", signature=lambda x, bias=None: None, arrays=("x",), examples=lambda: examples)
    )
    registry.register(kernel(), "scale.reference")
    registry.register(kernel("bias"), "scale.mine")
    return type("Proofs", (KernelProofs,), {"kernel": "scale.mine", "registry": registry, "refuses": BIAS, **fields})


def request(worker: bool = False) -> Any:
    """A pytest request, whose plugins are kept."""
    plugins: dict[str, Any] = {}
    manager = SimpleNamespace(get_plugin=plugins.get, register=lambda plugin, name: plugins.update({name: plugin}))
    return SimpleNamespace(config=SimpleNamespace(pluginmanager=manager, **({"workerinput": {}} if worker else {})))


def test_the_proofs_fail_where_no_example_is_left() -> None:
    cases = proofs(PLAIN, WITH_BIAS)
    with pytest.raises(AssertionError, match="scale.mine: no example is left for 1 checks:\n  programs"):
        cases().test_checks(request())
    (refused,) = (parameters.values for parameters in cases.parameters("test_refusals"))
    cases().test_refusals(*refused)
    assert [parameters.id for parameters in cases.parameters("test_transforms")] == ["plain-jit"]
    with pytest.raises(AssertionError, match="is not refused, but the kernel is declared to refuse bias"):
        cases().test_refusals(attrs.evolve(PLAIN, features=BIAS))


def test_what_is_declared_is_named_once_for_each_kernel() -> None:
    ours = request()
    proofs(PLAIN, WITH_BIAS, unproved=frozenset({"programs"}))().test_checks(ours)
    summary = ours.config.pluginmanager.get_plugin(PLUGIN)
    assert summary.lines() == ["scale.mine: never checked: programs"]
    proofs(PLAIN, example("two", checks=("programs",)))().test_checks(ours)  # another class makes the check
    assert summary.lines() == []


def test_checks_that_a_class_leaves_out_are_named_too() -> None:
    ours = request()
    proofs(PLAIN, SENSITIVE, examples=lambda self: [PLAIN])().test_checks(ours)
    assert ours.config.pluginmanager.get_plugin(PLUGIN).lines() == ["scale.mine: never checked: sensitivity"]


def test_configurations_that_no_example_ran_are_named() -> None:
    summary = Summary()
    summary.add_refused({"scale.mine": [64, 128, 256]})
    summary.add_refused({"scale.mine": [256, 128]})
    assert summary.lines() == ["scale.mine: never run: 2 configurations, such as 128"]
    summary.add_refused({"scale.mine": []})
    assert summary.lines() == []


def test_a_worker_of_xdist_warns() -> None:
    with pytest.warns(UserWarning, match="scale.mine: never checked: jit, programs"):
        warn_in_worker(request(worker=True).config, "scale.mine", {"programs", "jit"})


def test_the_summary_is_printed_last() -> None:
    lines: list[str] = []
    reporter: Any = SimpleNamespace(
        section=lambda title, **style: lines.append(title), write_line=lines.append, stats={}
    )
    summary = Summary()
    summary.pytest_terminal_summary(reporter)
    assert lines == []
    summary.add("scale.mine", {"jit", "vmap"}, {"jit"})
    summary.pytest_terminal_summary(reporter)
    assert lines == ["what was not proved", "scale.mine: never checked: vmap"]
