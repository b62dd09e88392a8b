"""The checks of axes where they are declared: a mistyped word would otherwise be an axis of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ._display import most_similar, suggestion
from ._layout import Layout

Layouts = Mapping[str, Layout]


def check_declaration(axes: Any, layouts: Sequence[Layouts]) -> None:
    """Raise for axes that contradict each other. ``layouts`` are those of all calls, and those of each condition."""
    declared_names = {*axes.independent, *axes.summed, *axes.whole}
    all_layouts = [(name, array_layout) for group in layouts for name, array_layout in group.items()]
    names_in_arrays = {n for name, array_layout in all_layouts if name in axes.arrays for n in array_layout.names}
    for name, array_layout in all_layouts:
        for word in array_layout.names - declared_names:
            _check_other_word(axes, name, word, names_in_arrays)
        _check_names(f"axes of {name}", array_layout.names, declared_names, "neither independent, summed, nor whole")
        if duplicates := {
            a.name for a in array_layout.axes if [b.name for b in array_layout.axes].count(a.name) > 1
        } & {*axes.independent, *axes.summed}:
            word = duplicates.pop()
            field = "independent" if word in axes.independent else "summed"
            raise ValueError(f"axes of {name}: {word} is {field}, and stands there twice")
    if not axes.results:
        raise ValueError("axes: takes at least one result")
    if not axes.of_gradients and (duplicates := {*axes.arrays} & {*axes.results}):
        raise ValueError(f"axes: {', '.join(sorted(duplicates))} cannot be an array and a result")
    if uncounted := [name for name in axes.rounded if name not in axes.counts]:
        raise ValueError(f"axes, rounded: takes axes that counts has; got {uncounted[0]!r}")
    for name, array_layout in all_layouts:
        if name not in axes.arrays:
            _check_names(f"axes of {name}", array_layout.names, names_in_arrays, "an axis of no array")
            if broadcast := [axis.text for axis in array_layout.axes if axis.is_broadcast]:
                raise ValueError(f"axes of {name}: a result is as long as its axes say; got {broadcast[0]!r}")
    names_by_field: dict[str, Sequence[str]] = {
        "multiples": (*axes.multiples, *axes.multiples.values()),
        "vmap": () if axes.vmap is None else (axes.vmap,),
    }
    for field in ("independent", "summed", "whole", "counts", "rounded", "positive"):
        names_by_field[field] = getattr(axes, field)
    for field, names in names_by_field.items():
        _check_names(f"axes, {field}", names, names_in_arrays, "an axis of no array")
    if conflicts := {*axes.multiples} & {*axes.multiples.values()}:
        raise ValueError(
            f"axes, multiples: {conflicts.pop()!r} is a multiple and has one; name the smallest axis alone"
        )
    for name, array_layout in all_layouts:
        for multiple, base in axes.multiples.items():
            if {multiple, base} <= array_layout.names & {*axes.independent}:
                raise ValueError(
                    f"axes of {name}: {multiple} is a multiple of {base}, so an array has one of them alone"
                )
    if axes.vmap is not None and axes.vmap not in axes.independent:
        raise ValueError(f"axes, vmap: takes an independent axis; got {axes.vmap!r}")
    for first, second in itertools.combinations(("independent", "summed", "whole"), 2):
        if duplicates := {*getattr(axes, first)} & {*getattr(axes, second)}:
            raise ValueError(f"axes: {', '.join(sorted(duplicates))} cannot be {first} and {second}")
    _check_sums(axes, all_layouts)
    for field in ("dtypes", "statistics", "residuals"):
        _check_names(f"axes, {field}", getattr(axes, field), axes.results, "not a result")
    for result, arrays in axes.residuals.items():
        _check_names(f"axes, residuals of {result}", arrays, axes.arrays, "not an array")
    for result, dtype in axes.dtypes.items():
        if isinstance(dtype, str):
            _check_dtype(result, dtype)
    for option, value in axes.when:
        if value is None or option in axes.arrays:
            raise ValueError(f"axes, when: takes options and their values; for {option!r} use present= or absent=")
    for field in ("when", "present", "absent"):
        for texts in getattr(axes, field).values():
            _check_names(f"axes, {field}", texts, {*axes.arrays, *axes.results}, "not an array or result")


def _check_sums(axes: Any, layouts: Sequence[tuple[str, Layout]]) -> None:
    """Raise where an axis is not contracted: that is in two arrays or more, and in no result."""
    for field in ("added", "nonlinear", "dtype_option"):
        if getattr(axes, field) and not axes.summed:
            raise ValueError(f"axes, {field}: is about sums over the axes in summed, and there are none")
    _check_names("axes, added", axes.added, axes.arrays, "not an array")
    for name in axes.summed:
        names = {name, axes.multiples.get(name), *(other for other, base in axes.multiples.items() if base == name)}
        users = {array for array, array_layout in layouts if array_layout.names & names}
        if results := sorted(users & {*axes.results}):
            raise ValueError(f"axes, summed: {name!r} is an axis of {results[0]}, so it is not summed")
        if len(users) == 1:
            raise ValueError(f"axes, summed: {name!r} is in {users.pop()} alone; what is contracted is in two arrays")
        if added := sorted(users & {*axes.added}):
            raise ValueError(f"axes, added: {added[0]} has the axis {name!r}, so it is not added to sums over it")
    if axes.dtype_option is not None and not axes.dtypes:
        raise ValueError("axes, dtype_option: is an option that dtypes reads, and there are none")
    if axes.dtype_option in axes.nonlinear:
        raise ValueError(f"axes, dtype_option: {axes.dtype_option!r} cannot be nonlinear too")
    if arrays := [option for option in axes.options if option in axes.arrays]:
        raise ValueError(f"axes: nonlinear and dtype_option take options; {arrays[0]!r} is an array")


def _check_dtype(result: str, name: str) -> None:
    try:
        jnp.dtype(name)
    except TypeError:
        raise ValueError(f"axes, dtypes: {result} takes the name of a dtype; got {name!r}") from None


def _check_other_word(axes: Any, array: str, word: str, names_in_arrays: Iterable[str]) -> None:
    """Raise where an undeclared word resembles one that is declared and in no array: either may be mistyped."""
    match = most_similar(word, (*axes.independent, *axes.summed, *axes.whole))
    if match is not None and match not in names_in_arrays:
        field = next(field for field in ("independent", "summed", "whole") if match in getattr(axes, field))
        raise ValueError(
            f"axes of {array}: {word!r} is neither independent, summed, nor whole, and {match!r} in {field} is an axis "
            "of no array; one of the two is mistyped"
        )


def _check_names(where: str, names: Iterable[str], valid_names: Iterable[str], otherwise: str) -> None:
    for name in names:
        if name not in valid_names:
            raise ValueError(f"{where}: {name!r} is {otherwise}{suggestion(name, valid_names)}")
