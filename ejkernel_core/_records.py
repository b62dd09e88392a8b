"""Records of configurations, and how they were measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import attrs
from attrs.validators import deep_iterable, deep_mapping, instance_of, optional

from ._content import read_only
from ._display import brief, repr_of
from ._errors import printable


class Reason(StrEnum):
    """How the reason begins for which a configuration has no time, or none that counts."""

    #: It ended its process, or ran without end: explanations show these with the record.
    CRASHED = "the process crashed"
    HUNG = "hung"
    #: Its results differ from those of the reference.
    WRONG = "wrong"
    #: It says nothing about the configuration itself.
    OUT_OF_TIME = "out of time"
    #: It is only about its time.
    SLOWER = "slower"


def _check_duration(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: takes a number; got {brief(value)}")
    if not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name}: takes a finite number of at least 0; got {brief(value)}")


def _is_duration(instance: Any, field: Any, value: Any) -> None:
    _check_duration(field.name, value)


def _are_outcomes(provenance: Any, field: Any, value: Any) -> None:
    for index, (text, outcome) in enumerate(value):
        if not isinstance(text, str):
            raise TypeError(f"{field.name}[{index}]: takes the text of a configuration; got {brief(text)}")
        if not isinstance(outcome, str):
            _check_duration(f"{field.name}[{index}]", outcome)


@attrs.frozen
class Shortfall:
    """A budget that was too short to measure every configuration."""

    #: The number of configurations for which no time was left. Those that hung are not among them.
    unreached: int
    budget_s: float = attrs.field(validator=_is_duration)

    def __str__(self) -> str:
        count = f"{self.unreached} configuration{'s were' if self.unreached > 1 else ' was'}"
        return f"{count} not measured in {self.budget_s:g} s, and a larger budget goes on there"


@attrs.frozen(kw_only=True)
class Provenance:
    """How a configuration was measured to be the best."""

    #: The time of the measurement in UTC, in the format of ISO 8601.
    when: str = attrs.field(validator=instance_of(str))
    #: The device: see ``device_fingerprint``.
    device: str = attrs.field(validator=instance_of(str))
    #: The time of one call.
    milliseconds: float = attrs.field(validator=_is_duration)
    #: The backends that were measured. The record says nothing about others.
    backends: tuple[str, ...] = attrs.field(validator=deep_iterable(instance_of(str), instance_of(tuple)))
    #: The versions of these backends' kernels ("flash_attention.xla"), of JAX and of the compilers.
    software: Mapping[str, str] = attrs.field(
        factory=dict,
        converter=read_only,
        validator=deep_mapping(instance_of(str), instance_of(str)),
        repr=lambda software: repr({**software}),
    )
    #: The text of every configuration that was tried, with its milliseconds or the reason for having none.
    tried: tuple[tuple[str, float | str], ...] = attrs.field(default=(), validator=_are_outcomes)
    #: None where everything was measured. None is not written, so records older than this field are still read.
    shortfall: Shortfall | None = attrs.field(default=None, validator=optional(instance_of(Shortfall)))

    @property
    def crashes(self) -> list[str]:
        """The configurations that ended their processes or hung, each with its reason."""
        reasons = [(text, reason) for text, reason in self.tried if isinstance(reason, str)]
        return [
            printable(f"{text}: {reason}")
            for text, reason in reasons
            if reason.startswith((Reason.CRASHED, Reason.HUNG))
        ]

    def why_not(self, backend: str) -> str:
        """Why the measurement did not select a backend."""
        if backend not in self.backends:
            return "it was not measured"
        outcomes = [outcome for text, outcome in self.tried if text.partition(" ")[0] == backend]
        reasons = [outcome for outcome in outcomes if isinstance(outcome, str)]
        wrong = [reason for reason in reasons if reason.startswith(Reason.WRONG)]
        if outcomes and len(reasons) == len(outcomes):
            return f"excluded when it was measured, {(wrong or reasons)[0]}"
        count = f"; {len(wrong)} of its {len(outcomes)} configurations {'was' if len(wrong) == 1 else 'were'} "
        return "slower when it was measured" + (count + wrong[0] if wrong else "")

    def changes(self, software: Mapping[str, str]) -> str:
        """The versions in ``software`` that differ from those of the measurement, as text; "" for none."""
        old = self.software
        names = (name for name in sorted(software) if name in old and old[name] != software[name])
        return printable(", ".join(f"{name} was {old[name]}, is {software[name]}" for name in names))

    def __str__(self) -> str:
        rest = f"; {self.shortfall}" if self.shortfall else ""
        text = f"measured {_ago(self.when)} on {self.device}: {self.milliseconds:.3g} ms{rest}"
        return " ".join(printable(text).splitlines())


@attrs.frozen
class Record:
    """One configuration to store. A record without a provenance was put there by hand."""

    cfg: Any = attrs.field(repr=repr_of)
    #: The backend that it is for; None for the first kernel that takes configurations of its type.
    backend: str | None = None
    provenance: Provenance | None = None


def as_record(value: Any) -> Record:
    """A record as it is; any other value as the configuration of a record put there by hand.

    >>> record = as_record(128)
    >>> record, as_record(record) is record
    (Record(cfg=128, backend=None, provenance=None), True)
    """
    return value if isinstance(value, Record) else Record(value)


def successor(old: Record | None, new: Record) -> Record:
    """The record to keep where a new one is stored for the same backend.

    The new one replaces the old one, with one exception: where it was measured against fewer backends, a slower one is
    dropped, and a faster one takes over the backends of the old one.

    >>> def record(cfg, milliseconds, *backends):
    ...     return Record(cfg, "xla", Provenance(when="", device="", milliseconds=milliseconds, backends=backends))
    >>> successor(record(64, 2.0, "xla", "triton"), record(128, 3.0, "xla")).cfg
    64
    >>> successor(record(64, 2.0, "xla", "triton"), record(128, 1.0, "xla")).provenance.backends
    ('xla', 'triton')
    """
    if old is None or old.provenance is None or new.provenance is None:
        return new
    if not {*old.provenance.backends} > {*new.provenance.backends}:
        return new
    if new.provenance.milliseconds > old.provenance.milliseconds:
        return old
    return attrs.evolve(new, provenance=attrs.evolve(new.provenance, backends=old.provenance.backends))


def _ago(when: str) -> str:
    """The time since then in words, in days, hours or minutes."""
    try:
        seconds = (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds()
    except (ValueError, TypeError):
        return f"at {when}"
    counts = [(int(seconds // size), unit) for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60))]
    return next((f"{count} {unit}{'s' * (count > 1)} ago" for count, unit in counts if count > 0), "just now")
