"""The checks as pytest tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ejkernel_core import Registry
from ejkernel_core import registry as installed

from . import _checks
from ._case import Case
from ._outcome import REFERENCE
from ._processes import DEVICES, VARIABLE, has_one_cpu, run_on_several_devices
from ._programs import PAIRS, PROGRAMS, programs
from ._transforms import TRANSFORMS, transforms

if TYPE_CHECKING:
    import pytest

#: Every test below: the names of its arguments, and what they are, from the cases.
_ARGUMENTS: dict[str, tuple[str, Callable[[Sequence[Case]], Iterable[tuple[Any, ...]]]]] = {
    "test_case": ("case", lambda cases: ((c,) for c in cases if "values" in c.checks)),
    # What a kernel offers depends on few things: the cases of the long sweep would show nothing more.
    "test_configurations": ("case", lambda cases: ((c,) for c in cases if "values" in c.checks and not c.long)),
    "test_sensitivity": ("case, variation", lambda cases: ((c, v) for c in cases for v in c.variations)),
    "test_transforms": ("case, transform", lambda cases: ((c, t) for c in cases for t in TRANSFORMS if t in c.checks)),
    "test_programs": (
        "case, transform, pairs",
        lambda cases: ((c, t, p) for c in cases if "programs" in c.checks for t in PROGRAMS for p in PAIRS),
    ),
    "test_accumulation": ("case", lambda cases: ((c,) for c in cases if "accumulation" in c.checks)),
}


#: What a case's ``checks`` may have.
CHECKS = ("values", "accumulation", "sensitivity", "programs", *TRANSFORMS)


class KernelProofs:
    """Subclass it in a test module, as ``class TestFlashAttention(KernelProofs)``, and name the kernel.

    ``refuses`` has the features of cases that the kernel is declared not to do, ``refuses_gradients`` those it does not
    differentiate: these have to be refused, with a reason, and nothing else may be.
    """

    kernel: str
    refuses: frozenset[str] = frozenset()
    refuses_gradients: frozenset[str] = frozenset()
    #: The kernel that its gradients are to come from, "flash_attention_bwd.mine": another's in its stead are a failure
    #: then. None: those of whichever the registry takes, which failures name.
    backward: str | None = None
    #: Where the kernel runs, if not everywhere: its tests are skipped elsewhere.
    platform: str | None = None
    #: How many times the error of the reference, which rounds once, is allowed in float16 and bfloat16: above 1 for a
    #: kernel that rounds weights too, to multiply them on matrix units.
    roundings: float = 1.0
    #: Which pairs of sets of differentiated arrays the long sweep tries with each transformation in "programs": a
    #: "share" of them, so that all are tried with one of them at least; or "all".
    pairs: str = "share"
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
            rows = sorted(arguments(self._sound_cases()), key=lambda row: row[0].long)
            metafunc.config.addinivalue_line("markers", "long: part of the long sweep")
            if metafunc.function.__name__ == "test_programs":
                wanted = () if self.kernel.endswith(f".{REFERENCE}") else ("one", self.pairs)
                rows = [row for row in rows if row[-1] in wanted]
            metafunc.parametrize(names, [_parameters(row) for row in rows])

    def _sound_cases(self) -> Sequence[Case]:
        """A misspelt word would prove nothing, and pass."""
        cases = self.cases()
        for case in cases:
            arrays = self.registry.operation(case.op).arrays
            for field, words, known in (("checks", case.checks, CHECKS), ("wrt", case.wrt, arrays)):
                if isinstance(words, str):
                    raise TypeError(f"case {case.name!r}: {field} takes several words; got the text {words!r}")
                for word in words:
                    if word not in known:
                        raise ValueError(f"case {case.name!r}: {field} has no {word!r}; it has {', '.join(known)}")
        return cases

    def test_case(self, case: Case) -> None:
        self._able(case)
        _checks.values(self.registry, self.kernel, case, self.roundings)
        _checks.gradients(self.registry, self.kernel, case, self.roundings, self.backward)
        _checks.rows(self.registry, self.kernel, case)

    def test_configurations(self, case: Case) -> None:
        self._able(case)
        _checks.configurations(self.registry, self.kernel, case)

    def test_sensitivity(self, case: Case, variation: Case) -> None:
        self._able(case)
        self._able(variation)
        _checks.sensitivity(self.registry, self.kernel, case, variation)

    def test_transforms(self, case: Case, transform: str, request: pytest.FixtureRequest) -> None:
        self._able(case)
        # Who has set the number of devices is not overruled, but told.
        if transform == "shard_map" and has_one_cpu() and VARIABLE not in os.environ:
            printed = run_on_several_devices(request)
            assert not printed, (
                f"transforms: shard_map: {self.kernel} on {case.name}: in a process with {DEVICES} devices:\n{printed}"
            )
        else:
            transforms(self.registry, self.kernel, case, transform)

    def test_programs(self, case: Case, transform: str, pairs: str) -> None:
        self._able(case)
        programs(self.registry, self.kernel, case, transform, pairs, self.roundings)

    def test_accumulation(self, case: Case) -> None:
        self._able(case)
        _checks.accumulation(self.registry, self.kernel, case, self.roundings)

    def _able(self, case: Case) -> None:
        if not _checks.refusals(self.registry, self.kernel, case, self.refuses, self.refuses_gradients):
            _skip(f"{self.kernel} refuses {case.name}, as declared")


def _parameters(row: tuple[Any, ...]) -> Any:
    import pytest

    marks = [pytest.mark.long] if row[0].long or row[-1] in PAIRS[1:] else []
    return pytest.param(*row, id="-".join(getattr(part, "name", part) for part in row), marks=marks)


def _skip(reason: str) -> None:
    import pytest

    pytest.skip(reason)
