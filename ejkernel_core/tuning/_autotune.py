"""From a call to a contest, and from a contest to what is remembered."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core._devices import device_fingerprint
from ejkernel_core._errors import EjkernelError, Unsupported
from ejkernel_core._invocation import Invocation
from ejkernel_core._plan import Candidate
from ejkernel_core._records import Provenance

from ._contest import OUT_OF_TIME, Contest, Entrant, Settings, StillRunningError, in_thread
from ._result import Entry, Tuned, records_of

#: The key of the random numbers that inputs are made of.
SEED = 20
#: In these seconds inputs are there, or the device does not answer.
INPUTS_S = 120.0


@attrs.frozen
class Progress:
    """How far a contest is: for who shows it, and for who keeps what was measured."""

    inv: Invocation
    entries: tuple[Entry, ...]
    seconds: float
    budget_s: float
    finished: bool = False

    def __str__(self) -> str:
        ready = sum(entry.milliseconds is not None for entry in self.entries)
        out = sum(bool(entry.reason) for entry in self.entries)
        best = min((e.milliseconds for e in self.entries if e.milliseconds is not None), default=None)
        found = "" if best is None else f", best {best:.4g} ms"
        return (
            f"tuning {self.inv.op}: {ready} of {len(self.entries)} measured, {out} out{found}, "
            f"{self.seconds:.0f} of {self.budget_s:.0f} s"
        )


def tune(
    inv: Invocation,
    candidates: Sequence[Candidate],
    budget_s: float,
    inputs: dict[str, jax.Array] | None = None,
    configs: Iterable[Any] | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
    earlier: Sequence[Entry] = (),
    calls: tuple[int, int] = (1, 46),
) -> Tuned:
    """Measure every configuration of the candidates on these inputs, or on some that the operation makes.

    ``calls`` is how many are made of each before it is measured, and how many are measured of those that come far.

    >>> import ejkernel_core
    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> plan = ejkernel_core.plan("flash_attention", query, query, query, backend="reference")
    >>> candidate = Candidate(plan.kernel, plan.cfg)
    >>> [entry.backend for entry in tune(plan.invocation, [candidate], budget_s=30, calls=(1, 2)).entries]
    ['reference']
    """
    started = time.monotonic()
    settings = Settings.of(inv)
    # In a thread, because a trace may be going on here; on one device, wherever the caller has them.
    try:
        inputs = in_thread(
            lambda: jax.device_put(made(inv) if inputs is None else inputs, settings.device), INPUTS_S, settings
        )
    except StillRunningError:
        raise Unsupported(
            f"there were no inputs to measure with after {INPUTS_S:g} s: does the device answer?"
        ) from None
    entrants = list(_entrants(inv, candidates, configs, earlier))

    def progress(finished: bool = False) -> Progress:
        return Progress(inv, _entries(entrants, None), time.monotonic() - started, budget_s, finished)

    contest = Contest(
        inv, inputs, entrants, started + budget_s, _reference(inv, candidates), lambda: report(progress()), *calls
    )
    winner = contest.run()
    report(progress(finished=True))
    entries = _entries(entrants, winner)
    checked = [f"checked against {contest.checked_against}"] if contest.checked_against else []
    records = () if winner is None else records_of(entries, _provenance(inv, entries))
    return Tuned(inv.tuning_keys, str(inv), entries, records, time.monotonic() - started, (*checked, *contest.notes))


def made(inv: Invocation) -> dict[str, jax.Array]:
    """Inputs for an abstract invocation: the operation's own samples, else normal numbers, zeros and True."""
    key = jax.random.key(SEED)
    samples = inv.operation.samples if inv.operation else None
    full = samples(inv.arguments, key) if samples else _drawn(inv.arguments, key)
    return {name: full[name] for name, value in inv.arguments.items() if _is_array(value)}


def _drawn(arguments: Any, key: Any) -> dict[str, Any]:
    def draw(number: int, like: Any) -> Any:
        if jnp.issubdtype(like.dtype, jnp.floating):
            return jax.random.normal(jax.random.fold_in(key, number), like.shape, jnp.float32).astype(like.dtype)
        # Integers may be places or lengths: 0 is right more often than any other.
        return jnp.full(like.shape, like.dtype == jnp.bool_, like.dtype)

    return {name: draw(n, v) for n, (name, v) in enumerate(arguments.items()) if _is_array(v)}


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _entrants(
    inv: Invocation, candidates: Sequence[Candidate], configs: Iterable[Any] | None, earlier: Sequence[Entry]
) -> Iterable[Entrant]:
    """The heuristics first, then the rest: what time there is goes to them in this order."""
    given = None if configs is None else list(configs)
    for candidate in candidates:
        if given is None or candidate.cfg in given:
            usual = candidate is candidates[0]
            yield _known(Entrant(candidate.kernel, candidate.cfg, usual), earlier)
    for candidate in candidates:
        for cfg in _space(inv, candidate, given):
            yield _known(Entrant(candidate.kernel, cfg), earlier)


def _space(inv: Invocation, candidate: Candidate, given: list[Any] | None) -> list[Any]:
    """The configurations of one kernel beside its heuristic's."""
    kind = candidate.config_type
    try:
        space = candidate.kernel.config_space(inv) if given is None else given
        found = [cfg for cfg in space if kind is None or isinstance(cfg, kind)]
    except Exception:  # a plugin's fault costs it its space: its heuristic still takes part
        found = []
    unique: list[Any] = []
    for cfg in found:
        if cfg != candidate.cfg and cfg not in unique:
            unique.append(cfg)
    return unique


def _known(entrant: Entrant, earlier: Sequence[Entry]) -> Entrant:
    """With what an interrupted contest found out about it: what was out is out, and what was measured need not race."""
    for entry in earlier:
        is_it = (entry.backend, entry.cfg) == (entrant.backend, entrant.cfg)
        if is_it and not entry.reason.startswith(OUT_OF_TIME):
            entrant.reason = entry.reason or None
            if entry.milliseconds is not None:
                entrant.samples, entrant.is_settled = [entry.milliseconds], True
    return entrant


def _reference(inv: Invocation, candidates: Sequence[Candidate]) -> Any:
    """The kernel that says what is right."""
    assert inv.operation is not None
    assert inv.registry is not None
    name = inv.operation.reference
    mine = next((candidate.kernel for candidate in candidates if candidate.backend == name), None)
    if mine is not None or name not in inv.registry.backends(inv.op):
        return mine
    try:
        return inv.registry.kernel(inv.op, name)
    except EjkernelError:  # broken: it is told in every explanation
        return None


def _entries(entrants: Sequence[Entrant], winner: Entrant | None) -> tuple[Entry, ...]:
    ordered = sorted(entrants, key=lambda e: (e is not winner, e.reason is not None, e.milliseconds))
    return tuple(
        Entry(
            e.backend,
            e.cfg,
            e.milliseconds if e.samples else None,
            e.spread if e.samples else None,
            e.reason or "",
            e.is_usual,
        )
        for e in ordered
    )


def _provenance(inv: Invocation, entries: Sequence[Entry]) -> Callable[[Entry], Provenance]:
    assert inv.registry is not None
    software = inv.registry.software(inv.op)
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    device = device_fingerprint(jax.local_devices(backend=inv.platform)[0])
    tried = tuple((f"{e.backend} {e.cfg}", e.reason if e.milliseconds is None else e.milliseconds) for e in entries)

    def provenance(entry: Entry) -> Provenance:
        assert entry.milliseconds is not None
        return Provenance(
            when=when,
            device=device,
            milliseconds=entry.milliseconds,
            backends=tuple(dict.fromkeys(entry.backend for entry in entries)),
            software=dict(software),
            tried=tried,
        )

    return provenance


def check_tunable(inv: Invocation) -> None:
    """Whether measuring here would say anything about the call: ``Unsupported`` if not."""
    if inv.device_kind is None:
        raise Unsupported(f"there is no {inv.platform} here to measure on")
    if inv.sharding:
        raise Unsupported(
            "its arrays are cut over several devices: call it inside shard_map, and the shards are measured"
        )
