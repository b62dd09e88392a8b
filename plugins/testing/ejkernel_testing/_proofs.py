"""The checks as pytest tests: of one kernel, or of every kernel of a distribution."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import distribution
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax

from ejkernel_core import Example, Registry, hookimpl
from ejkernel_core import registry as default_registry
from ejkernel_core.extend import KERNELS, OPERATIONS

from . import _checks
from ._configurations import COUNTS, configuration_values, configurations
from ._in_place import in_place
from ._outcome import REFERENCE
from ._processes import DEVICES, VARIABLE, has_one_accelerator, has_one_cpu, run_on_several_devices
from ._programs import PAIRS, PROGRAMS, programs
from ._selection import Examples, Selection, in_16_bits, select
from ._summary import summary_of, warn_in_worker
from ._transforms import SEVERAL_DEVICES, TRANSFORMS, transforms

if TYPE_CHECKING:
    import pytest

Rows = Iterable[tuple[Any, ...]]

#: For each test below, the names of its arguments, and their values for the examples of a kernel.
_ARGUMENTS: dict[str, tuple[str, Callable[[Selection], Rows]]] = {
    "test_refusals": ("example", lambda examples: ((e,) for e in (*examples.refused, *examples.without_gradients))),
    "test_example": ("example", lambda examples: ((e,) for e in examples.values)),
    # A configuration space depends on few arguments: the examples of the long sweep would find nothing more.
    "test_configurations": ("example", lambda examples: ((e,) for e in examples.values if not e.long)),
    "test_configuration_values": (
        "example, count",
        lambda examples: ((e, c) for e in examples.accepted if "configurations" in e.checks for c in COUNTS),
    ),
    "test_sensitivity": ("example, variation", lambda examples: examples.variations),
    "test_transforms": (
        "example, transform",
        lambda examples: ((e, t) for e in examples.accepted for t in TRANSFORMS if t in e.checks),
    ),
    "test_programs": (
        "example, transform, pairs",
        lambda examples: (
            (e, t, p) for e in examples.accepted if "programs" in e.checks for t in PROGRAMS for p in PAIRS
        ),
    ),
    "test_accumulation": (
        "example",
        lambda examples: ((e,) for e in examples.accepted if "accumulation" in e.checks),
    ),
    "test_in_place": ("example", lambda examples: ((e,) for e in examples.accepted if "in_place" in e.checks)),
    "test_needed": ("example", lambda examples: ((e,) for e in examples.of_several_results)),
}


#: The words that an example's ``checks`` may contain.
CHECKS = ("values", "accumulation", "configurations", "sensitivity", "programs", "in_place", "needed", *TRANSFORMS)


class KernelProofs:
    """The tests of one kernel. Subclass it in a test module: ``class TestFlashAttention(KernelProofs)``.

    The kernel has to refuse, with a reason, the examples with a feature in ``refuses``, and the gradients of those with
    a feature in ``refuses_gradients``. It may refuse nothing else. If this leaves no example for a check, a test fails,
    unless the check is in ``unproved``.
    """

    kernel: str
    refuses: frozenset[str] = frozenset()
    refuses_gradients: frozenset[str] = frozenset()
    #: The checks that cannot be made, because the kernel refuses all of their examples. pytest prints them last.
    unproved: frozenset[str] = frozenset()
    #: The kernel that has to compute the gradients, such as "flash_attention_bwd.mine". None: the registry chooses.
    backward: str | None = None
    #: The only platform that the kernel runs on. The tests are skipped on others. None: it runs on all.
    platform: str | None = None
    #: The error allowed in float16 and bfloat16, relative to the error of the reference, which rounds once. It is above
    #: 1 for a kernel that also rounds the operands of matrix units.
    roundings: float = 1.0
    #: The pairs of sets of differentiated arrays that the long sweep tries under each transformation of "programs": a
    #: "share", so that each pair is tried under at least one transformation, or "all".
    pairs: str = "share"
    #: The names of examples that have found a fault. Their tests have the marker ``always``, by which a run of a part
    #: of the tests can keep them.
    always: Collection[str] = frozenset()
    #: Whether the examples named "grid..." are used: a reference, which they are compared with, needs none.
    grid: bool = True
    registry: Registry = default_registry

    def examples(self) -> Examples:
        """The examples that the kernel is proved on. By default, all of the operation's examples that have checks."""
        op, _, backend = self.kernel.rpartition(".")
        self.registry.kernel(op, backend)  # raises for an unknown name, for which no test would run
        operation = self.registry.operation(op)
        if operation.examples is None:
            raise TypeError(
                f"{op!r} has no examples to prove {self.kernel!r} on: name a kernel of its forward operation"
            )
        examples = _examples_with_checks(operation.examples)
        return tuple(example for example in examples if self.grid or not example.name.startswith("grid"))

    def setup_method(self) -> None:
        if self.platform not in (None, jax.default_backend()):
            _skip(f"{self.kernel} runs on {self.platform}")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        test = metafunc.function.__name__
        if test in _ARGUMENTS:
            metafunc.config.addinivalue_line("markers", "long: part of the long sweep")
            metafunc.config.addinivalue_line("markers", "always: has found a fault")
            summary_of(metafunc.config)  # a plugin, which drops tests without parameters
            metafunc.parametrize(_ARGUMENTS[test][0], self.parameters(test))

    @classmethod
    def parameters(cls, test: str) -> list[Any]:
        """The parameters of a test, as ``pytest.param`` returns them: the quick ones first, the others marked long."""
        rows = sorted(_ARGUMENTS[test][1](cls._selection()), key=lambda row: row[0].long)
        if test == "test_programs":
            groups = () if cls.kernel.endswith(f".{REFERENCE}") else ("one", cls.pairs)
            rows = [row for row in rows if row[-1] in groups]
        if test == "test_needed" and len(cls.registry.operation(cls.kernel.rpartition(".")[0]).results) == 1:
            rows = []
        return list(_parameter_sets(rows, cls.always))

    @classmethod
    @functools.cache  # pytest collects every test of a class from them
    def _checked_examples(cls) -> Examples:
        """The examples. Raises for an unknown word, for which no test would run."""
        examples = cls().examples()
        updated = cls.registry.operation(cls.kernel.rpartition(".")[0]).aliases.values()
        if updated and not any("in_place" in example.checks for example in examples):
            raise ValueError(
                f"{cls.kernel} updates {', '.join(updated)} in place: give an example the check 'in_place'"
            )
        for example in examples:
            arrays = cls.registry.operation(example.op).arrays
            for field, words, options in (("checks", example.checks, CHECKS), ("wrt", example.wrt, arrays)):
                prefix = f"example {example.name!r}: {field}"
                if isinstance(words, str):
                    raise TypeError(f"{prefix} takes a collection of words; got the string {words!r}")
                for word in words:
                    if word not in options:
                        raise ValueError(f"{prefix} takes {', '.join(options)}; got {word!r}")
        return examples

    @classmethod
    @functools.cache
    def _selection(cls) -> Selection:
        """The examples, by what the kernel has to do with them."""
        examples, refuses = cls._checked_examples(), frozenset(cls.refuses)
        op, _, backend = cls.kernel.rpartition(".")
        backward = cls.registry.operation(op).backward
        has_backward = backward is not None and backend in cls.registry.backends(backward)
        refuses_gradients = frozenset(cls.refuses_gradients) if has_backward else frozenset()
        return select((*examples, *in_16_bits(examples, refuses)), refuses, refuses_gradients)

    def test_checks(self, request: pytest.FixtureRequest) -> None:
        """Every check is made on some example, or declared to be impossible."""
        selection, unproved = self._selection(), frozenset(self.unproved)
        selection.check_complete(self.kernel, unproved)
        examples = self.registry.operation(self.kernel.rpartition(".")[0]).examples
        known = {word for example in (examples() if examples else ()) for word in example.checks}
        summary_of(request.config).add(self.kernel, known | unproved, selection.checks)
        warn_in_worker(request.config, self.kernel, unproved)

    def test_zeros(self) -> None:
        """The examples show that a kernel computes something: one that returns 0 would be found, for each result."""
        op = self.kernel.rpartition(".")[0]
        examples = self._selection().values
        unseen = [*self.registry.operation(op).results] if examples else []
        for example in [one for one in examples if not one.long] or examples:
            unseen = _checks.zeros(self.registry, example, unseen) if unseen else unseen
        assert not unseen, (
            f"zeros: {self.kernel}: {', '.join(unseen)} is 0 in all quick examples that it does not refuse, so that a "
            "kernel which computes nothing would pass; give an example in which it is not"
        )

    def test_refusals(self, example: Example) -> None:
        is_run = _checks.refusals(self.registry, self.kernel, example, self.refuses, self.refuses_gradients)
        assert not is_run, f"refusals: {self.kernel} on {example.name}: is not refused, as its features say"

    def test_example(self, example: Example) -> None:
        self._skip_if_refused(example)
        _checks.values(self.registry, self.kernel, example, self.roundings)
        _checks.gradients(self.registry, self.kernel, example, self.roundings, self.backward)
        _checks.rows(self.registry, self.kernel, example)

    def test_configurations(self, example: Example) -> None:
        self._skip_if_refused(example)
        configurations(self.registry, self.kernel, example)

    def test_configuration_values(self, example: Example, count: str, request: pytest.FixtureRequest) -> None:
        self._skip_if_refused(example)
        refused = configuration_values(self.registry, self.kernel, example, count, self.roundings)
        if count == "all":
            summary_of(request.config).add_refused(refused)

    def test_sensitivity(self, example: Example, variation: Example) -> None:
        self._skip_if_refused(example)
        self._skip_if_refused(variation)
        _checks.sensitivity(self.registry, self.kernel, example, variation, self.roundings)

    def test_transforms(self, example: Example, transform: str, request: pytest.FixtureRequest) -> None:
        self._skip_if_refused(example)
        if transform in ("sharding", "sharded_derivatives") and has_one_accelerator():
            _skip("there is one device, and this shards over two")
        # A number of devices that the user has set stays: the check fails, and its message says what to set.
        if transform in SEVERAL_DEVICES and has_one_cpu() and VARIABLE not in os.environ:
            output = run_on_several_devices(request)
            prefix = f"transforms: {transform}: {self.kernel} on {example.name}"
            assert not output, f"{prefix}: in a process with {DEVICES} devices:\n{output}"
        else:
            transforms(self.registry, self.kernel, example, transform, self.roundings)

    def test_programs(self, example: Example, transform: str, pairs: str) -> None:
        self._skip_if_refused(example)
        programs(self.registry, self.kernel, example, transform, pairs, self.roundings)

    def test_accumulation(self, example: Example) -> None:
        self._skip_if_refused(example)
        _checks.accumulation(self.registry, self.kernel, example, self.roundings)

    def test_in_place(self, example: Example) -> None:
        self._skip_if_refused(example)
        in_place(self.registry, self.kernel, example)

    def test_needed(self, example: Example) -> None:
        self._skip_if_refused(example)
        _checks.needed(self.registry, self.kernel, example, self.roundings)

    def _skip_if_refused(self, example: Example) -> None:
        if not _checks.refusals(self.registry, self.kernel, example, self.refuses, self.refuses_gradients):
            _skip(f"{self.kernel} refuses {example.name}, as declared")


def kernel_proofs(
    name: str,
    *,
    registry: Callable[[Mapping[str, Any]], Registry] | None = None,
    elsewhere: Collection[str] = (),
    **fields: Any,
) -> dict[str, type[KernelProofs]]:
    """A test class for every kernel of the distribution ``name``, so that every kernel is proved.

    This is all that the test module of a plugin needs. A kernel that the distribution adds later is proved too::

        globals().update(kernel_proofs("my-attention"))

    The kernels are those of its entry points whose operations have examples. A backward kernel is proved with the
    forward kernel of its backend; where the distribution has none, after a forward by the reference. A kernel module
    declares in ``REFUSES`` and ``REFUSES_GRADIENTS`` the features of
    examples that it refuses, and in ``UNPROVED`` the checks for which this leaves no example. ``fields`` are fields of
    ``KernelProofs``, for all kernels. ``elsewhere`` has the backends that other tests prove. ``registry`` makes a
    registry from the kernel modules, by name, to run them in an interpreter, say.

    >>> sorted(kernel_proofs("ejkernel-xla"))[0]
    'TestFlashAttentionXla'
    """
    entry_points = [point for point in distribution(name).entry_points if point.group == KERNELS]
    kernels = {point.name: point.load() for point in entry_points if point.name.rpartition(".")[2] not in elsewhere}
    common = {"registry": default_registry if registry is None else registry(kernels), **fields}
    classes = dict(_forward_classes(kernels, common))
    # Another registry, in which forwards for the proofs alone are registered.
    common["registry"] = Registry() if registry is None else registry(kernels)
    classes |= dict(_backward_classes(kernels, common))
    if not classes:
        raise ValueError(f"{name}: no entry point of the group {KERNELS!r} is a kernel to prove")
    return classes


def _forward_classes(kernels: Mapping[str, Any], common: Mapping[str, Any]) -> Iterator[tuple[str, type[KernelProofs]]]:
    for kernel, module in kernels.items():
        op, _, backend = kernel.rpartition(".")
        operation = common["registry"].operation(op)
        if operation.examples is not None:
            # JAX differentiates a reference, without its backward operation.
            backward = None if backend == operation.reference else f"{operation.backward}.{backend}"
            own = {field: _declared(field, module, common) for field in ("refuses", "refuses_gradients", "unproved")}
            title = _title(kernel)
            declared = {"kernel": kernel, "backward": backward if backward in kernels else None, **own}
            yield title, type(title, (KernelProofs,), {**common, **declared})


class _BackwardProofs(KernelProofs):
    """The tests of a backward kernel after a forward that has its name, and computes as the reference does."""

    def examples(self) -> Examples:
        return tuple(example for example in super().examples() if example.wrt)


def _backward_classes(
    kernels: Mapping[str, Any], common: Mapping[str, Any]
) -> Iterator[tuple[str, type[KernelProofs]]]:
    """Those of the backward kernels whose backend is not that of a forward kernel."""
    registry: Registry = common["registry"]
    forward_ops = {registry.operation(op).backward: op for op in registry.names(OPERATIONS)}
    for backward, module in kernels.items():
        backward_op, _, backend = backward.rpartition(".")
        op = forward_ops.get(backward_op)
        if op is None or f"{op}.{backend}" in kernels or registry.operation(op).examples is None:
            continue
        registry.register(_by_reference(registry.kernel(op, REFERENCE)), f"{op}.{backend}")
        refused = {_declared(field, module, common) for field in ("refuses", "refuses_gradients")}
        declared = {
            "kernel": f"{op}.{backend}",
            "backward": backward,
            "refuses": frozenset(),
            "refuses_gradients": frozenset().union(*refused),
            "unproved": _declared("unproved", module, common),
        }
        title = _title(backward)
        yield title, type(title, (_BackwardProofs,), {**common, **declared})


def _by_reference(reference: Any) -> Any:
    """The hooks of a forward kernel that computes as the reference does. JAX does not differentiate it."""

    @hookimpl
    def heuristic_cfg(inv: Any) -> Any:
        return reference.heuristic_cfg(inv)

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        return reference.run_backend(inv, cfg)

    return SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend)


def _title(kernel: str) -> str:
    return "".join(word.title() for word in f"Test_{kernel.replace('.', '_')}".split("_"))


def _declared(field: str, module: Any, common: Mapping[str, Any]) -> frozenset[str]:
    """The words of a kernel module, such as its ``REFUSES``, and those for all kernels."""
    words = getattr(module, field.upper(), ())
    if isinstance(words, str):
        raise TypeError(
            f"{module.__name__}: {field.upper()} takes a tuple of words; got the string {words!r}, as in ({words!r},)"
        )
    return frozenset({*common.get(field, ()), *words})


@functools.cache  # every kernel of the operation is proved on them
def _examples_with_checks(examples: Callable[[], Iterable[Example]]) -> Examples:
    return tuple(example for example in examples() if example.checks)


def _parameter_sets(rows: Sequence[tuple[Any, ...]], always: Collection[str]) -> Iterator[Any]:
    """The rows as parameters of a test. Long examples and further pairs of sets have the marker of the long sweep."""
    import pytest

    for row in rows:
        is_long = row[0].long or row[-1] in PAIRS[1:]
        marks = [*([pytest.mark.long] if is_long else []), *([pytest.mark.always] if row[0].name in always else [])]
        yield pytest.param(*row, id="-".join(getattr(part, "name", part) for part in row), marks=marks)


def _skip(reason: str) -> None:
    import pytest

    pytest.skip(reason)
