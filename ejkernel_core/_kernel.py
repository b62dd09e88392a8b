"""One call, a kernel that may run it, and a candidate: a kernel that can, with a configuration."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import pluggy

from ._display import html_table, one_line
from ._errors import PASSING, described
from ._keys import Key, key_of
from ._operation import Operation
from ._records import Record

#: More configurations than anybody measures: a space that goes on from here may have no end.
MANY = 10_000


@attrs.frozen(eq=False, repr=False)
class Invocation(Mapping[str, Any]):
    """One call of an operation, as its kernels see it: a mapping of the prepared arguments by name.

    Every parameter of the operation is there; an array that was not given is None. Arrays are abstract
    (``jax.ShapeDtypeStruct``) while a configuration is chosen, and JAX values while the kernel runs.
    """

    op: str
    arguments: Mapping[str, Any]
    #: JAX's word: "cpu", "gpu", "tpu".
    platform: str
    #: The device's name: "NVIDIA H200", "AMD EPYC 9654 25-17, 16 cores" (JAX calls every processor "cpu"); None where
    #: the device is not at hand (compiling for another machine).
    device_kind: str | None = None
    #: (9, 0) on a Hopper GPU; None where the device says none, or is not at hand.
    compute_capability: tuple[int, int] | None = None
    #: The arguments that are cut over several devices, and how: see ``sharding_fingerprint``.
    sharding: tuple[tuple[str, str], ...] = ()
    #: What is called.
    operation: Operation | None = attrs.field(default=None, repr=False)

    @functools.cached_property
    def key(self) -> Key:
        """What a configuration for exactly this call is remembered by."""
        return self._key("arguments", self.arguments)

    @functools.cached_property
    def tuning_keys(self) -> tuple[Key, ...]:
        """The key, and then that of all the calls that are alike as far as tuning goes."""
        if self.operation is None or self.operation.tuning_key is None:
            return (self.key,)
        return self.key, self._key("bucket", self.operation.tuning_key(self.arguments))

    def _key(self, what: str, arguments: Any) -> Key:
        problem = {
            "operation": [self.op, self.operation.version if self.operation else 1],
            "device": [self.platform, self.device_kind],
            **({"sharding": dict(self.sharding)} if self.sharding else {}),
        }
        return key_of(self.op, self.device_kind or self.platform, problem, what, arguments, self._counters)

    @functools.cached_property
    def _counters(self) -> Mapping[str, tuple[str | None, ...]]:
        axes = self.operation.axes if self.operation else None
        return {} if axes is None else axes.counted(self.arguments)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arguments)

    def __len__(self) -> int:
        return len(self.arguments)

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={text}" for name, text in _described(self.arguments))
        return f"{self.op}({arguments}) on {self._where}"

    def __repr__(self) -> str:
        return f"Invocation({one_line(self)})"

    def _repr_html_(self) -> str:
        return html_table(f"{self.op} on {self._where}", _described(self.arguments))

    @property
    def _where(self) -> str:
        return self.platform + (f" ({self.device_kind})" if self.device_kind else "")

    def with_arrays(self, arrays: Mapping[str, Any]) -> Invocation:
        """The same invocation on these arrays."""
        return attrs.evolve(self, arguments={**self.arguments, **arrays})


def _described(arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The arguments that are given, by name, as short texts."""
    return [(name, _short(value)) for name, value in arguments.items() if value is not None and value is not False]


def _short(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return repr(value)


# -- what a configuration may be: a value that cannot be changed ------------------------------------------------------
#
# A kernel that changes the one it is given would have another value measured and stored than it ever offered, and the
# next call of the same process would run with it.


#: What attrs gives to every frozen class, and to no other.
_FROZEN = Key.__setattr__


def changeable_type(kind: Any) -> str | None:
    """Why values of this type can be changed, in words; None where they cannot.

    >>> changeable_type(tuple), changeable_type(list)
    (None, 'a list has no hash')
    """
    name = f"a {kind.__qualname__}"
    if attrs.has(kind):
        return None if kind.__setattr__ is _FROZEN else f"{name} is not frozen: use attrs.frozen"
    if hasattr(kind, "__dataclass_params__"):
        return None if kind.__dataclass_params__.frozen else f"{name} is not frozen: use dataclass(frozen=True)"
    if kind.__hash__ is None:
        return f"{name} has no hash"
    is_plain = kind.__hash__ is object.__hash__ and kind.__setattr__ is object.__setattr__
    return f"{name} takes any attribute: use attrs.frozen" if is_plain and kind.__dictoffset__ else None


def changeable(cfg: Any) -> str | None:
    """The same of one value, with all that is in it.

    >>> changeable((128, "fast", None)), changeable(((1, 2), [3]))
    (None, 'a list has no hash')
    """
    if isinstance(cfg, tuple):
        return next(filter(None, map(changeable, cfg)), None)
    reason = changeable_type(type(cfg))
    if reason is None:
        try:
            hash(cfg)
        except Exception as fault:  # a frozen one that holds what is not
            reason = f"a {type(cfg).__qualname__} has no hash: {fault}"
    return reason


@attrs.frozen(eq=False, repr=False)
class LoadedKernel:
    """One (operation, backend) pair. It has a plugin manager of its own, so no other plugin can answer for it."""

    op: str
    backend: str
    provider: str
    #: Platform to rank: where it runs, and how strongly it is preferred there. None: everywhere.
    platforms: Mapping[str, int] | None
    config_type: type | None
    #: The versions of the kernel, by its name, of JAX and of the compilers it names.
    software: Mapping[str, str] = attrs.field(repr=False)
    _hooks: pluggy.HookRelay = attrs.field(repr=False)
    name: str = attrs.field(init=False)

    @name.default
    def _name(self) -> str:
        return f"{self.op}.{self.backend}"

    def __repr__(self) -> str:
        return f"LoadedKernel({self.name}, {self.provider})"

    @contextlib.contextmanager
    def _noted(self, hook: str) -> Iterator[None]:
        """What is raised here is the asker's to see, as it is; a note has room for whose it is."""
        try:
            yield
        except BaseException as fault:
            fault.add_note(f"in {hook} of {self.name} ({self.provider})")
            raise

    def unfit(self, cfg: Any) -> str | None:
        """Why this value is no configuration of its own, in words that follow "gives"; None where it is one."""
        if self.config_type is not None and not isinstance(cfg, self.config_type):
            return f"a value of type {type(cfg).__qualname__}, not its Config"
        reason = changeable(cfg)
        return None if reason is None else f"what can be changed: {reason}"

    def heuristic_cfg(self, inv: Invocation) -> Any:
        with self._noted("heuristic_cfg"):
            return self._hooks.heuristic_cfg(inv=inv)

    @property
    def _has_space(self) -> bool:
        return bool(self._hooks.config_space.get_hookimpls())

    def config_space(self, inv: Invocation) -> Iterable[Any]:
        return self._hooks.config_space(inv=inv) if self._has_space else [self.heuristic_cfg(inv)]

    def configurations(self, inv: Invocation, report: Callable[[str], object], at_most: int = MANY) -> Iterator[Any]:
        """The configurations among what its space gives, which may be anything: ``report`` hears what is wrong."""
        try:
            for cfg in itertools.islice(self.config_space(inv), at_most):
                unfit = self.unfit(cfg)
                if unfit is None:
                    yield cfg
                else:
                    report(f"config_space gives {unfit}")
        except PASSING:
            raise
        except BaseException as fault:
            report(f"config_space raised {described(fault)}")

    def offers(self, inv: Invocation, cfg: Any) -> bool:
        """Whether its ``config_space`` has it here and now; without one there is no telling, and it may."""
        return not self._has_space or cfg in self.configurations(inv, _unheard)

    @property
    def checks_cfg(self) -> bool:
        """Whether it says itself which configurations of a caller's it takes."""
        return bool(self._hooks.check_cfg.get_hookimpls())

    def check_cfg(self, inv: Invocation, cfg: Any) -> None:
        with self._noted("check_cfg"):
            self._hooks.check_cfg(inv=inv, cfg=cfg)

    def run_backend(self, inv: Invocation, cfg: Any) -> tuple[Any, ...]:
        with self._noted("run_backend"):
            results = self._hooks.run_backend(inv=inv, cfg=cfg)
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _unheard(fault: str) -> None:
    """Explanations tell it."""


@attrs.frozen(eq=False)
class Candidate:
    """A kernel that can do the invocation, with its heuristic configuration, or the one that the caller gave."""

    kernel: LoadedKernel
    cfg: Any
    explicit: bool = False
    #: The versions of all that could change which candidate is best, and with which configuration.
    software: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    #: That of the kernel.
    backend: str = attrs.field(init=False, repr=False)
    #: The type of its configurations: as the kernel says, or as its heuristic does.
    config_type: type | None = attrs.field(init=False, repr=False)

    @backend.default
    def _backend(self) -> str:
        return self.kernel.backend

    @config_type.default
    def _config_type(self) -> type | None:
        return self.kernel.config_type or (None if self.cfg is None else type(self.cfg))


def fitting(records: Iterable[Record], candidate: Candidate) -> Record | None:
    """The first that is for the candidate's kernel; one without a backend is for every kernel that takes its type.

    What was measured with other versions comes after all that was not.

    >>> from types import SimpleNamespace
    >>> candidate = SimpleNamespace(backend="xla", config_type=int, software={})  # as far as is looked at here
    >>> fitting([Record(64, "triton"), Record("no int"), Record(128)], candidate)
    Record(cfg=128, backend=None, provenance=None)
    """
    kind = candidate.config_type or type(None)
    ours = [r for r in records if r.backend in (None, candidate.backend) and isinstance(r.cfg, kind)]
    return min(ours, key=lambda record: bool(changes(record, candidate)), default=None)


def changes(record: Record, candidate: Candidate) -> str:
    """Which versions are others than those that the record was measured with; "" for none."""
    return record.provenance.changes(candidate.software) if record.provenance else ""


def of_here(record: Record, candidates: Iterable[Candidate]) -> Record:
    """The record of what was measured just now, with the versions that are here."""
    if record.provenance is None:
        return record
    here = {name: version for candidate in candidates for name, version in candidate.software.items()}
    return attrs.evolve(
        record, provenance=attrs.evolve(record.provenance, software={**here, **record.provenance.software})
    )
