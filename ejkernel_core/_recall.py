"""How a store answers for a call: by the record for it, for its bucket, or for the nearest call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from ._cache import ConfigCache
from ._errors import RecordError, Unsupported, message
from ._hooks import hookimpl
from ._invocation import Invocation
from ._kernel import Candidate, find_record, version_changes
from ._keys import Key
from ._layout import LEADING
from ._plan import Choice
from ._records import Record, successor
from ._scopes import Scope


def refuse_to_differ(*arguments: Any) -> None:
    raise Unsupported("its answers may differ between the processes of the program")


Find = Callable[[Key, Candidate], Record | None]


#: The largest distance, as the product of the ratios of sizes, at which the record of a similar call is used.
MAX_RATIO = 256


def recall(
    inv: Invocation,
    candidates: Sequence[Candidate],
    origin: str,
    find: Find,
    by_hand: bool = False,
    near: Callable[[Key], Iterable[Key]] | None = None,
    other_versions: bool = False,
) -> Choice | None:
    """The answer of a store: the fastest candidate that it has a record of, for the call or for its bucket.

    ``find`` returns the record of one candidate or None, or raises ``RecordError`` for a record that cannot be read.
    Where no record is found, ``Unsupported`` has these reasons. ``near`` returns the keys of the same ``kind`` in the
    store: the nearest one answers where there is no record for the call itself. With ``by_hand``, a record counts
    whichever kernels and versions it was measured with; with ``other_versions``, whichever versions.

    >>> import jax, ejkernel_core
    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> plan = ejkernel_core.plan("flash_attention", query, query, query, backend="reference")
    >>> candidate, store = Candidate(plan.kernel, plan.cfg), ejkernel_core.ConfigCache()
    >>> store.put(plan.invocation.key, plan.cfg)
    >>> recall(plan.invocation, [candidate], "my store", store.find).origin
    'my store'
    """
    try:
        keys = inv.tuning_keys
    except TypeError as fault:  # an option without content, so there is no key
        raise Unsupported(message(fault)) from fault
    reasons: list[str] = []
    for key in keys:
        matches = _matching_records(key, candidates, find, by_hand, by_hand or other_versions, reasons)
        if matches:
            candidate, best = min(matches, key=lambda item: _milliseconds(item[1]))
            changed = version_changes(best, candidate)
            note = f"measured with other versions: {changed}" if changed else ""
            return Choice(candidate.backend, best.cfg, origin, key, best, note=note)
    choice = _nearest(inv, candidates, origin, find, near, other_versions) if near and keys[-1].sizes else None
    if choice is None and reasons:
        raise Unsupported("; ".join(dict.fromkeys(reasons)))
    return choice and attrs.evolve(choice, note="; ".join([choice.note, *dict.fromkeys(reasons)]))


def _matching_records(
    key: Key, candidates: Sequence[Candidate], find: Find, by_hand: bool, other_versions: bool, reasons: list[str]
) -> list[tuple[Candidate, Record]]:
    """The candidates with a record, and the records. Reasons why others have none are added to ``reasons``."""
    backends, matches = {candidate.backend for candidate in candidates}, []
    for candidate in candidates:
        try:
            record = find(key, candidate)
        except RecordError as fault:
            reasons.append(message(fault))
            continue
        # A measurement says nothing about kernels that were not measured.
        if record is None or not (by_hand or record.provenance is None or backends <= {*record.provenance.backends}):
            continue
        changed = version_changes(record, candidate)
        if changed and not other_versions:
            reasons.append(f"there is a record of other versions ({changed}): tune again, or set other_versions=True")
        else:
            matches.append((candidate, record))
    return matches


def _nearest(
    inv: Invocation,
    candidates: Sequence[Candidate],
    origin: str,
    find: Find,
    near: Callable[[Key], Iterable[Key]],
    other_versions: bool,
) -> Choice | None:
    """The answer for the nearest call that differs only in the sizes of axes that count things."""
    keys_of_call = inv.tuning_keys
    key_of_call = keys_of_call[-1]
    distances = {
        key: _distance(key_of_call.sizes, key.sizes)
        for key in near(key_of_call)
        if key.sizes.keys() == key_of_call.sizes.keys()
    }
    for key in sorted(distances, key=lambda key: (distances[key], key.digest)):
        if not 0 < distances[key] <= math.log2(MAX_RATIO):
            continue
        if not _is_same_order(inv, candidates, key.sizes):
            continue
        matches = _matching_records(key, candidates, find, False, other_versions, [])
        # The fastest configuration of that call has to be possible for this one.
        matches = [(candidate, record) for candidate, record in matches if candidate.kernel.offers(inv, record.cfg)]
        if not matches:
            continue
        candidate, best = min(matches, key=lambda item: _milliseconds(item[1]))
        # A reference wins small calls, which take as long as a launch whatever runs. It says nothing about larger ones.
        if len(candidates) > 1 and inv.operation is not None and candidate.backend == inv.operation.reference:
            continue
        others = ", ".join(
            f"{_axis_in_words(name)} {key.sizes[name]} for {key_of_call.sizes[name]}"
            for name in key_of_call.sizes
            if key.sizes[name] != key_of_call.sizes[name]
        )
        # The sizes are those of buckets, where calls have them: neither those of the call nor those of the record.
        noun = "call" if len(keys_of_call) == 1 else "bucket"
        note = f"the nearest {noun} that is remembered: {others}"
        return Choice(candidate.backend, best.cfg, origin, key, best, distance=distances[key], note=note)
    return None


def _is_same_order(inv: Invocation, candidates: Sequence[Candidate], sizes: Mapping[str, int]) -> bool:
    """Whether the candidates, whose order is that of their ranks, have the same order for a call of these sizes.

    If not, a kernel knows that one of the two calls is not for it.
    """
    if not any(callable(candidate.kernel.rank_on(inv.platform)) for candidate in candidates):
        return True
    other = inv.with_sizes(sizes)
    ranks = [candidate.kernel.rank(other) for candidate in candidates]
    return ranks == sorted(ranks, reverse=True)


def _axis_in_words(name: str) -> str:
    if name == LEADING:
        return "leading axes:"
    return f"leading axis {name.removeprefix(LEADING)}:" if name.startswith(LEADING) else name


def _distance(sizes: Mapping[str, int], others: Mapping[str, int]) -> float:
    return sum(abs(math.log2(max(others[name], 1) / max(size, 1))) for name, size in sizes.items())


def _milliseconds(record: Record) -> float:
    """The time of a record; 0 for one that was put there by hand, which goes before all measured ones."""
    return record.provenance.milliseconds if record.provenance else 0.0


class StorePolicy:
    """A policy that answers from a store, a ``ConfigCache`` or any object with its methods, and stores in it.

    Where several processes have to choose alike, it answers only with what the program has put into memory by hand.
    """

    IS_SAME_EVERYWHERE = True

    def __init__(self, store: Any, origin: str) -> None:
        self.store, self.origin = store, origin

    @hookimpl(tryfirst=True)
    def select_config(self, inv: Invocation, candidates: Sequence[Candidate], scope: Scope) -> Choice | None:
        if type(self.store) is ConfigCache and not self.store.generation:  # it has always been empty
            return None
        near, others = getattr(self.store, "near", None), scope.policy.other_versions
        find = self._find_by_hand if inv.has_several_processes else self.store.find
        return recall(inv, candidates, self.origin, find, near=near, other_versions=others)

    def _find_by_hand(self, key: Key, candidate: Candidate) -> Record | None:
        if type(self.store) is not ConfigCache:
            refuse_to_differ()
        return find_record((r for r in self.store.records(key) if r.provenance is None), candidate)

    @hookimpl
    def config_selected(self, inv: Invocation, choice: Choice) -> None:
        assert choice.record is not None  # a measured choice has one
        for key in inv.tuning_keys:
            same = (r for r in self.store.records(key) if r.backend == choice.backend)
            self.store.put(key, successor(next(same, None), choice.record))
