"""A small set of combinations in which any two choices meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
Allowed = Callable[[Mapping[str, Any]], bool]
#: Two factors, each with the place of its level.
Pair = tuple[tuple[str, int], tuple[str, int]]


def pairwise(factors: Mapping[str, Sequence[Any]], allowed: Allowed = lambda row: True) -> list[Row]:
    """Rows with one level a factor, in which every two levels of every two factors occur together: always the same.

    ``allowed`` says no to combinations that cannot be; it is asked about unfinished rows too, in which factors are
    missing. A pair that no allowed row can hold is left out.

    >>> rows = pairwise({"causal": [False, True], "dtype": ["float32", "bfloat16"], "window": [None, 4]})
    >>> len(rows), len({(row["dtype"], row["window"]) for row in rows})
    (4, 4)
    """
    missing = dict.fromkeys(
        ((a, i), (b, j))
        for a, b in combinations(factors, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    )
    rows = []
    while missing:
        pair = next(iter(missing))
        chosen = _completed(dict(pair), factors, allowed, missing)
        del missing[pair]
        if chosen is not None:
            rows.append(_levels(chosen, factors))
            for met in _pairs(chosen, factors):
                missing.pop(met, None)
    return rows


def _completed(
    chosen: dict[str, int], factors: Mapping[str, Sequence[Any]], allowed: Allowed, missing: Mapping[Pair, None]
) -> dict[str, int] | None:
    """The choice with the other factors filled in, each by what meets the most missing pairs; goes back where stuck."""
    if not allowed(_levels(chosen, factors)):
        return None
    factor = next((name for name in factors if name not in chosen), None)
    if factor is None:
        return chosen

    def gain(level: int) -> int:
        return sum(pair in missing for pair in _pairs({**chosen, factor: level}, factors) if (factor, level) in pair)

    for level in sorted(range(len(factors[factor])), key=gain, reverse=True):
        complete = _completed({**chosen, factor: level}, factors, allowed, missing)
        if complete is not None:
            return complete
    return None


def _pairs(chosen: Mapping[str, int], factors: Mapping[str, Sequence[Any]]) -> list[Pair]:
    return list(combinations([(name, chosen[name]) for name in factors if name in chosen], 2))


def _levels(chosen: Mapping[str, int], factors: Mapping[str, Sequence[Any]]) -> Row:
    return {name: levels[chosen[name]] for name, levels in factors.items() if name in chosen}
