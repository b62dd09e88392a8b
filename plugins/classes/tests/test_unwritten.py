"""A class without a ``run`` method cannot be instantiated, and the error says what to write."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ejkernel_classes import Kernel


class PlusOne(Kernel[Any, jax.Array]):
    def run_xla(self, x: Any, *, cfg: Any) -> Any:
        return x + 1

    def heuristic_cfg(self, inv: Any) -> Any:
        return None


@pytest.mark.parametrize("keywords", [{}, {"name": "mine"}, {"op_id": "mine"}])
def test_the_error_of_the_base_class_says_how_to_subclass_it(keywords: Any) -> None:
    message = (
        r"Kernel is to be subclassed: write class MyKernel\(Kernel\[Config, jax.Array\]\): def run\(self, x, \*, cfg\): "
        r"..., or one of run_xla, run_pallas, run_triton; then call MyKernel\(\)\(x\)\. "
        r"Its name is that of the class, or name= in super\(\)\.__init__\(name=...\)"
    )
    with pytest.raises(TypeError, match=message):
        Kernel(**keywords)


def test_the_error_of_a_class_without_run_says_what_to_write() -> None:
    class Empty(Kernel[Any, Any]):
        def heuristic_cfg(self, inv: Any) -> Any:
            return None

    with pytest.raises(TypeError, match=r"Empty: write run\(self, ..., \*, cfg\), or one of run_xla, run_pallas"):
        Empty()


def test_one_method_is_enough_and_may_be_inherited() -> None:
    class Inherits(PlusOne):
        def __init__(self, by: int) -> None:
            super().__init__(name="inherits")
            self.by = by

    assert Inherits(3).name == "inherits"
    assert Inherits(by=3)(jnp.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda kernel: pickle.loads(pickle.dumps(kernel))])
def test_copies_of_a_kernel_work(duplicate: Any) -> None:
    assert duplicate(PlusOne())(jnp.ones(2)).tolist() == [2, 2]


def test_the_error_of_a_class_without_configurations_says_what_to_write() -> None:
    class Unsaid(Kernel):  # type: ignore[type-arg]
        def run(self, x: Any, *, cfg: Any) -> Any:
            return x

    with pytest.raises(TypeError, match=r"Unsaid: write heuristic_cfg\(self, inv\), or subclass Kernel\[Config, Out\]"):
        Unsaid()


def test_a_configuration_without_all_defaults_takes_a_heuristic() -> None:
    @dataclasses.dataclass(frozen=True)
    class Blocks:
        rows: int

    class Blocked(Kernel[Blocks, jax.Array]):
        def run(self, x: Any, *, cfg: Blocks) -> Any:
            return x * cfg.rows

    class WithHeuristic(Blocked):
        def heuristic_cfg(self, inv: Any) -> Blocks:
            return Blocks(3)

    with pytest.raises(TypeError, match=r"Blocked: write heuristic_cfg\(self, inv\), because .* argument: 'rows'"):
        Blocked()
    assert WithHeuristic()(jnp.ones(2)).tolist() == [3, 3]


def test_a_class_without_any_run_method_is_refused_before_its_configurations_are_asked_for() -> None:
    class Nothing(Kernel):  # type: ignore[type-arg]
        pass

    with pytest.raises(TypeError, match=r"Nothing: write run\(self, ..., \*, cfg\)"):
        Nothing()


@pytest.mark.parametrize("method", ["run", "run_xla", "run_pallas", "run_triton"])
def test_each_run_method_is_enough_to_construct(method: str) -> None:
    class Single(Kernel[int, jax.Array]):
        pass

    setattr(Single, method, lambda self, x, *, cfg: x)
    assert [*Single().methods()] == [method.removeprefix("run_")]
