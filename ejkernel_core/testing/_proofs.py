"""The checks as pytest tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ejkernel_core import registry as installed
from ejkernel_core._registry import Registry

from . import _checks
from ._case import Case
from ._transforms import TRANSFORMS, transforms

if TYPE_CHECKING:
    import pytest

#: Every test below: the names of its arguments, and what they are, from the cases.
_ARGUMENTS: dict[str, tuple[str, Callable[[Sequence[Case]], Iterable[tuple[Any, ...]]]]] = {
    "test_case": ("case", lambda cases: ((c,) for c in cases if "values" in c.checks)),
    "test_sensitivity": ("case, variation", lambda cases: ((c, v) for c in cases for v in c.variations)),
    "test_transforms": ("case, transform", lambda cases: ((c, t) for c in cases for t in TRANSFORMS if t in c.checks)),
    "test_accumulation": ("case", lambda cases: ((c,) for c in cases if "accumulation" in c.checks)),
}


class KernelProofs:
    """Subclass it in a test module, as ``class TestFlashAttention(KernelProofs)``, and name the kernel.

    ``refuses`` has the features of cases that the kernel is declared not to do, ``refuses_gradients`` those it does not
    differentiate: these have to be refused, with a reason, and nothing else may be.
    """

    kernel: str
    refuses: frozenset[str] = frozenset()
    refuses_gradients: frozenset[str] = frozenset()
    #: Where the kernel runs, if not everywhere: its tests are skipped elsewhere.
    platform: str | None = None
    #: How many times the error of the reference, which rounds once, is allowed in float16 and bfloat16: above 1 for a
    #: kernel that rounds weights too, to multiply them on matrix units.
    roundings: float = 1.0
    registry: Registry = installed

    def cases(self) -> Sequence[Case]:
        """What is proved: by default all that the operation has."""
        op, _, backend = self.kernel.rpartition(".")
        self.registry.kernel(op, backend)  # a name that nobody has would prove nothing, and pass
        operation = self.registry.operation(op)
        if operation.cases is None:
            raise TypeError(f"{op!r} has no cases to prove {self.kernel!r} on: name a kernel of its forward operation")
        return tuple(operation.cases())

    def setup_method(self) -> None:
        if self.platform not in (None, jax.default_backend()):
            _skip(f"{self.kernel} runs on {self.platform}")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if metafunc.function.__name__ in _ARGUMENTS:
            names, arguments = _ARGUMENTS[metafunc.function.__name__]
            rows = sorted(arguments(self.cases()), key=lambda row: row[0].long)
            metafunc.parametrize(names, [_parameters(row) for row in rows])

    def test_case(self, case: Case) -> None:
        self._able(case)
        _checks.values(self.registry, self.kernel, case, self.roundings)
        _checks.gradients(self.registry, self.kernel, case, self.roundings)
        _checks.rows(self.registry, self.kernel, case)

    def test_sensitivity(self, case: Case, variation: Case) -> None:
        self._able(case)
        self._able(variation)
        _checks.sensitivity(self.registry, self.kernel, case, variation)

    def test_transforms(self, case: Case, transform: str) -> None:
        self._able(case)
        transforms(self.registry, self.kernel, case, transform)

    def test_accumulation(self, case: Case) -> None:
        self._able(case)
        _checks.accumulation(self.registry, self.kernel, case, self.roundings)

    def _able(self, case: Case) -> None:
        if not _checks.refusals(self.registry, self.kernel, case, self.refuses, self.refuses_gradients):
            _skip(f"{self.kernel} refuses {case.name}, as declared")


def _parameters(row: tuple[Any, ...]) -> Any:
    import pytest

    marks = [pytest.mark.long] if row[0].long else []
    return pytest.param(*row, id="-".join(getattr(part, "name", part) for part in row), marks=marks)


def _skip(reason: str) -> None:
    import pytest

    pytest.skip(reason)
