"""An invocation (one call), a loaded kernel, and a candidate: a kernel that can run the call, with a configuration."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import pluggy

from ._content import read_only
from ._display import brief, repr_of
from ._errors import RecordError, description, message, plugin_faults
from ._invocation import Invocation
from ._keys import Key
from ._operation import as_tuple
from ._records import Record

#: The most configurations that are read of a space, which may be infinite. It is more than any tuner measures.
MAX_CONFIGURATIONS = 10_000
#: The rank of a kernel without ``PLATFORMS``. It is high: someone installed the kernel to use it.
DEFAULT_RANK = 50


# -- a configuration is immutable --------------------------------------------------------------------------------------
#
# If a kernel could change its configuration, the value that is measured and stored would not be the one that it
# offered, and the next call of the process would run with the changed one.


#: attrs gives this method to every frozen class, and to no other.
_FROZEN = Key.__setattr__


def why_mutable_type(kind: Any) -> str | None:
    """Why values of this type are mutable, in words; None where they are immutable.

    >>> why_mutable_type(tuple), why_mutable_type(list)
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


def why_mutable(cfg: Any) -> str | None:
    """Why a value, or something in it, is mutable; None where all of it is immutable.

    >>> why_mutable((128, "fast", None)), why_mutable(((1, 2), [3]))
    (None, 'a list has no hash')
    """
    if isinstance(cfg, tuple):
        return next(filter(None, map(why_mutable, cfg)), None)
    reason = why_mutable_type(type(cfg))
    if reason is None:
        try:
            hash(cfg)
        except Exception as fault:  # a frozen value that holds a mutable one
            reason = f"a {type(cfg).__qualname__} has no hash: {message(fault)}"
    return reason


@attrs.frozen(eq=False, repr=False)
class LoadedKernel:
    """One (operation, backend) pair. It has a plugin manager of its own, so no other plugin answers its hooks."""

    op: str
    backend: str
    provider: str
    #: The platforms that it runs on, with its rank there, or a function that gives the rank for an invocation: the
    #: highest is preferred. None for all platforms.
    platforms: Mapping[str, int | Callable[[Invocation], int]] | None = attrs.field(
        converter=attrs.converters.optional(read_only)
    )
    config_type: type | None
    #: Where that type is imported from, as in ``ejkernel_xla.flash_attention.Config``.
    config_name: str | None
    #: The versions of the kernel, by its name, of JAX and of the compilers it names.
    software: Mapping[str, str] = attrs.field(repr=False, converter=read_only)
    #: The platforms on which its code is opaque to XLA: a custom call, which XLA cannot partition.
    opaque: tuple[str, ...]
    #: The operations that it calls.
    parts: tuple[str, ...]
    _hooks: pluggy.HookRelay = attrs.field(repr=False)
    name: str = attrs.field(init=False)

    @name.default
    def _name(self) -> str:
        return f"{self.op}.{self.backend}"

    def __repr__(self) -> str:
        return f"LoadedKernel({self.name}, {self.provider})"

    @contextlib.contextmanager
    def _name_in_faults(self, hook: str) -> Iterator[None]:
        """Add the kernel and its distribution, as a note, to an exception that a hook raises."""
        try:
            yield
        except BaseException as fault:
            fault.add_note(f"in {hook} of {self.name} ({self.provider})")
            raise

    def config_fault(self, cfg: Any) -> str | None:
        """Why a value is not a configuration of this kernel, in words that follow "gives"; None where it is one."""
        if self.config_type is not None and not isinstance(cfg, self.config_type):
            return f"a value of type {type(cfg).__qualname__}, not its Config"
        reason = why_mutable(cfg)
        return None if reason is None else f"what can be changed: {reason}"

    def is_opaque_on(self, platform: str) -> bool:
        """Whether XLA cannot partition its code on a platform."""
        return platform in self.opaque

    def rank_on(self, platform: str) -> int | Callable[[Invocation], int] | None:
        """What it declares as its rank on a platform; None where it does not run there."""
        return DEFAULT_RANK if self.platforms is None else self.platforms.get(platform)

    def rank(self, inv: Invocation) -> int:
        """Its rank for the invocation; 0 where it does not run."""
        rank = self.rank_on(inv.platform)
        return operator.index(rank(inv)) if callable(rank) else rank or 0

    def heuristic_cfg(self, inv: Invocation) -> Any:
        with self._name_in_faults("heuristic_cfg"):
            return self._hooks.heuristic_cfg(inv=inv)

    @property
    def _has_space(self) -> bool:
        return bool(self._hooks.config_space.get_hookimpls())

    def config_space(self, inv: Invocation) -> Iterable[Any]:
        return self._hooks.config_space(inv=inv) if self._has_space else [self.heuristic_cfg(inv)]

    def configurations(
        self, inv: Invocation, report: Callable[[str], object], at_most: int = MAX_CONFIGURATIONS
    ) -> Iterator[Any]:
        """The valid configurations in its space. ``report`` is called with a sentence for everything that is wrong."""
        try:
            for cfg in itertools.islice(self.config_space(inv), at_most):
                config_fault = self.config_fault(cfg)
                if config_fault is None:
                    yield cfg
                else:
                    report(f"config_space gives {config_fault}")
        except plugin_faults() as fault:
            report(f"config_space raised {description(fault)}")

    def offers(self, inv: Invocation, cfg: Any) -> bool:
        """Whether its ``config_space`` has this configuration for the call; True for a kernel without the hook."""
        return not self._has_space or cfg in self.configurations(inv, _ignore)

    @property
    def checks_cfg(self) -> bool:
        """Whether it has the hook ``check_cfg``."""
        return bool(self._hooks.check_cfg.get_hookimpls())

    def check_cfg(self, inv: Invocation, cfg: Any) -> None:
        with self._name_in_faults("check_cfg"):
            self._hooks.check_cfg(inv=inv, cfg=cfg)

    def run_backend(self, inv: Invocation, cfg: Any) -> tuple[Any, ...]:
        with self._name_in_faults("run_backend"):
            return as_tuple(self._hooks.run_backend(inv=inv, cfg=cfg))


def _ignore(fault: str) -> None:
    """Drop a fault of a configuration space: explanations look at the space by themselves, and report it."""


@attrs.frozen(eq=False)
class Candidate:
    """A kernel that can run the invocation, with its heuristic configuration or the caller's explicit one."""

    kernel: LoadedKernel
    cfg: Any = attrs.field(repr=repr_of)
    explicit: bool = False
    #: The versions on which the best candidate and its best configuration may depend.
    software: Mapping[str, str] = attrs.field(factory=dict, repr=False, converter=read_only)
    #: The kernel's backend.
    backend: str = attrs.field(init=False, repr=False)
    #: The type of its configurations: the kernel's ``Config``, or else the type of ``cfg``.
    config_type: type | None = attrs.field(init=False, repr=False)

    @backend.default
    def _backend(self) -> str:
        return self.kernel.backend

    @config_type.default
    def _config_type(self) -> type | None:
        return self.kernel.config_type or (None if self.cfg is None else type(self.cfg))


def matching_record(records: Iterable[Record], candidate: Candidate) -> Record | None:
    """The first record for the candidate's kernel. A record without a backend is for every kernel of its type.

    Records that were measured with other versions come last.

    >>> from types import SimpleNamespace
    >>> candidate = SimpleNamespace(backend="xla", config_type=int, software={})  # what this function reads of one
    >>> matching_record([Record(64, "triton"), Record("no int"), Record(128)], candidate)
    Record(cfg=128, backend=None, provenance=None)
    """
    kind = candidate.config_type or type(None)
    matching = [r for r in records if r.backend in (None, candidate.backend) and isinstance(r.cfg, kind)]
    return min(matching, key=lambda record: bool(version_changes(record, candidate)), default=None)


def find_record(records: Iterable[Record], candidate: Candidate) -> Record | None:
    """The matching record, or None. Raises ``RecordError`` where one that was put there for the kernel, or for every
    kernel, has no configuration of its type.
    """
    records = tuple(records)
    record = matching_record(records, candidate)
    for other in records if record is None else ():
        if other.backend in (None, candidate.backend):
            raise RecordError(
                f"it has {brief(other.cfg, 80)} for the call, not a configuration of {candidate.kernel.name}"
            )
    return record


def version_changes(record: Record, candidate: Candidate) -> str:
    """The versions that have changed since the record was measured, as text; "" for none."""
    return record.provenance.changes(candidate.software) if record.provenance else ""


def with_versions(record: Record, candidates: Iterable[Candidate]) -> Record:
    """Add the versions of the candidates to a record that was measured just now."""
    if record.provenance is None:
        return record
    software = {name: version for candidate in candidates for name, version in candidate.software.items()}
    return attrs.evolve(
        record, provenance=attrs.evolve(record.provenance, software={**software, **record.provenance.software})
    )
