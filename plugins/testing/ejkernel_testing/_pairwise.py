"""A small set of combinations that has every pair of levels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
#: A row, with the index of each level in place of the level.
Indices = Mapping[str, int]
Predicate = Callable[[Mapping[str, Any]], bool]
#: Two factors, each with the index of its level.
Pair = tuple[tuple[str, int], tuple[str, int]]


def pairwise(factors: Mapping[str, Sequence[Any]], allowed: Predicate = lambda row: True) -> list[Row]:
    """Rows with one level of each factor, in which every two levels of every two factors occur together. The same
    factors give the same rows.

    ``allowed`` returns False for combinations that are invalid. It is also called with incomplete rows, which lack some
    factors. A pair that no valid row can have is left out.

    >>> rows = pairwise({"causal": [False, True], "dtype": ["float32", "bfloat16"], "window": [None, 4]})
    >>> len(rows), len({(row["dtype"], row["window"]) for row in rows})
    (4, 4)
    """
    remaining_pairs = dict.fromkeys(
        ((a, i), (b, j))
        for a, b in combinations(factors, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    )
    rows = []
    while remaining_pairs:
        pair = next(iter(remaining_pairs))
        indices = _complete(dict(pair), factors, allowed, remaining_pairs)
        del remaining_pairs[pair]
        if indices is not None:
            rows.append(_levels(indices, factors))
            for covered_pair in _pairs(indices, factors):
                remaining_pairs.pop(covered_pair, None)
    return rows


def _complete(
    indices: Indices, factors: Mapping[str, Sequence[Any]], allowed: Predicate, remaining_pairs: Mapping[Pair, None]
) -> Indices | None:
    """The row completed: each further factor gets the level with the most remaining pairs. Backtracks; None if no
    valid row has these levels.
    """
    if not allowed(_levels(indices, factors)):
        return None
    factor = next((name for name in factors if name not in indices), None)
    if factor is None:
        return indices

    def gain(level: int) -> int:
        pairs = _pairs({**indices, factor: level}, factors)
        return sum(pair in remaining_pairs for pair in pairs if (factor, level) in pair)

    for level in sorted(range(len(factors[factor])), key=gain, reverse=True):
        row = _complete({**indices, factor: level}, factors, allowed, remaining_pairs)
        if row is not None:
            return row
    return None


def _pairs(indices: Indices, factors: Mapping[str, Sequence[Any]]) -> list[Pair]:
    return list(combinations([(name, indices[name]) for name in factors if name in indices], 2))


def _levels(indices: Indices, factors: Mapping[str, Sequence[Any]]) -> Row:
    return {name: levels[indices[name]] for name, levels in factors.items() if name in indices}
