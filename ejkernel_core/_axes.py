"""The meaning of the axes of an operation's arrays, and all that is derived from it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ._content import abstract, read_only
from ._display import brief
from ._layout import (
    LEADING,
    Layout,
    fold_axis,
    layout,
    padded_shapes,
    result_shapes,
    sizes,
    sum_axis,
    unfold_axis,
)

if TYPE_CHECKING:  # imported when arrays are sharded, which most programs do not need
    from ._partitioning import PartialSums, Partitioning

Arguments = dict[str, Any]
Layouts = Mapping[str, Layout]
Texts = Mapping[str, str]
#: The option of the backward operation of one with ``summed`` axes: the names in ``wrt`` whose gradients are partial
#: sums, and have at least float32.
PARTIAL_SUMS = "partial_sums"
Folded = tuple[Arguments, Callable[[tuple[Any, ...]], tuple[Any, ...]]]


def _texts(texts: Any) -> Texts:
    if not isinstance(texts, Mapping):
        raise TypeError(f"axes: take the words of each array by its name, as {{'x': 'batch dim'}}; got {brief(texts)}")
    return read_only(texts)


def _cases(cases: Mapping[Any, Mapping[str, Any]]) -> Mapping[Any, Mapping[str, Any]]:
    return read_only({case: _texts(texts) for case, texts in cases.items()})


def _cases_of_options(cases: Mapping[Any, Mapping[str, Any]]) -> Mapping[Any, Mapping[str, Any]]:
    for case in cases:
        if not (isinstance(case, tuple) and len(case) == 2):
            raise TypeError(f"axes, when: takes pairs of an option and its value; got {brief(case)}")
    return _cases(cases)


def _names(names: str | Iterable[str]) -> tuple[str, ...]:
    if not isinstance(names, Iterable):
        raise TypeError(f"axes: take names in a text, as 'batch dim', or in a tuple; got {brief(names)}")
    return tuple(names.split()) if isinstance(names, str) else tuple(names)


def _names_by_result(names: Mapping[str, str | Iterable[str]]) -> Mapping[str, tuple[str, ...]]:
    if not isinstance(names, Mapping) or not all(isinstance(arrays, (str, Iterable)) for arrays in names.values()):
        raise TypeError(f"axes, residuals: take arrays by result, as {{'rstd': 'x weight'}}; got {brief(names)}")
    return read_only({result: _names(arrays) for result, arrays in names.items()})


@attrs.frozen(eq=False)
class Axes:
    """The meaning of each axis of each array, as words. They describe the canonical arguments that kernels see.

    Every word is an axis, and a name has one size in all arrays of a call. ``#batch`` is an axis of the batch's size or
    of 1. ``...`` is any number of leading axes, the same in all arrays. ``2*heads``, ``sequences+1`` and ``dim/128``
    (rounded up) are lengths that follow from a size, and ``1`` is a length. An array that is None in a call is left
    out.

    >>> axes = Axes({"x": "... dim", "weight": "dim"}, {"out": "... dim"}, independent="...", whole="dim")
    >>> axes.outputs({"x": jax.ShapeDtypeStruct((3, 4, 8), "float32"), "weight": None})
    (ShapeDtypeStruct(shape=(3, 4, 8), dtype=float32),)
    """

    arrays: Texts = attrs.field(converter=_texts)
    results: Texts = attrs.field(converter=_texts)
    #: The axes whose entries are computed independently, in one kernel or on several devices.
    independent: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    #: The axes that are contracted: the results are sums over them. Where one is sharded, each shard computes a partial
    #: sum, in float32 or wider, and the partial sums are added up.
    summed: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    #: All other axes.
    whole: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    #: The independent axis that an axis mapped by ``jax.vmap`` is merged into. Without it, a mapped call is a loop.
    vmap: str | None = attrs.field(default=None, kw_only=True)
    #: The axes that only count things. A record may also be used for a call in which only their sizes differ. Of the
    #: leading axes, only the product of their sizes matters then, whatever their number is.
    counts: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    #: Those of them, by default all, that tuning rounds up to the next power of two.
    rounded: tuple[str, ...] = attrs.field(converter=_names, kw_only=True)
    #: The axes whose size must be at least 1.
    positive: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    #: ``{"heads": "kv_heads"}``: the first is a multiple of the second, and they are sharded together.
    multiples: Texts = attrs.field(factory=dict, converter=read_only, kw_only=True)
    #: The results of dtype float32, or float64 where the first array of floating-point numbers has it.
    statistics: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    #: The dtypes of other results: a name, or a function of the arguments. By default that of the first array.
    dtypes: Mapping[str, Any] = attrs.field(factory=dict, converter=read_only, kw_only=True)
    #: The option that has the dtype of the results, by which partial sums are float32. None is the default.
    dtype_option: str | None = attrs.field(default=None, kw_only=True)
    #: The arrays that are added to the sums over ``summed`` axes, such as a bias. One shard adds them.
    added: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    #: The options, such as an activation, with which the results are not sums over ``summed`` axes, unless they are
    #: None or False.
    nonlinear: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    #: ``{("transpose", True): {"weight": "out_dim dim"}}``: other words for arrays where an option has this value.
    when: Mapping[tuple[str, Any], Texts] = attrs.field(factory=dict, converter=_cases_of_options, kw_only=True)
    #: ``{"slots": {"key": "tokens heads dim"}}``: other words for arrays where a call has this argument, whatever it
    #: is, and where it has not. None stands for an argument that a call does not have.
    present: Mapping[str, Texts] = attrs.field(factory=dict, converter=_cases, kw_only=True)
    absent: Mapping[str, Texts] = attrs.field(factory=dict, converter=_cases, kw_only=True)
    #: ``{"rstd": "x weight"}``: the arrays whose gradients are computed from a result. Without an entry, all are.
    residuals: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=_names_by_result, kw_only=True)
    #: True for a backward operation: its results have the axes of the arrays that ``wrt`` names.
    of_gradients: bool = attrs.field(default=False, kw_only=True)
    _layouts: Layouts = attrs.field(init=False, repr=False)
    #: Each condition, a function of the arguments, with the layouts where it holds.
    _conditional_layouts: tuple[tuple[Callable[[Mapping[str, Any]], bool], Layouts], ...] = attrs.field(
        init=False, repr=False
    )

    @rounded.default
    def _all_counts(self) -> tuple[str, ...]:
        return self.counts

    @_layouts.default
    def _read_layouts(self) -> Layouts:
        return read_only({name: layout(name, text) for name, text in {**self.arrays, **self.results}.items()})

    @_conditional_layouts.default
    def _read_conditional_layouts(self) -> tuple[tuple[Callable[[Mapping[str, Any]], bool], Layouts], ...]:
        conditions = [
            *((functools.partial(_has_value, *case), texts) for case, texts in self.when.items()),
            *((functools.partial(_is_present, name), texts) for name, texts in self.present.items()),
            *((functools.partial(_is_absent, name), texts) for name, texts in self.absent.items()),
        ]
        return tuple(
            (condition, read_only({name: layout(name, text) for name, text in texts.items()}))
            for condition, texts in conditions
        )

    def __attrs_post_init__(self) -> None:
        from ._declaration import check_declaration

        check_declaration(self, [self._layouts, *(layouts for _, layouts in self._conditional_layouts)])

    def layouts(self, arguments: Mapping[str, Any]) -> Layouts:
        """The layout of every array and result, for a call with these options."""
        layouts = dict(self._layouts)
        for holds, others in self._conditional_layouts:
            if holds(arguments):
                layouts.update(others)
        return layouts

    @property
    def options(self) -> tuple[str, ...]:
        """The options that say whether, and how, the results are sums."""
        return (*self.nonlinear, *filter(None, [self.dtype_option]))

    @property
    def conditions(self) -> tuple[str, ...]:
        """The parameters on which the words of arrays depend."""
        return (*(option for option, _ in self.when), *self.present, *self.absent)

    def arrays_of(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays that the call has, by name."""
        return {name: arguments[name] for name in self.arrays if arguments.get(name) is not None}

    # -- checks ----------------------------------------------------------------------------------------------------

    def canonical(self, arguments: Arguments) -> Arguments:
        """Check the arrays, and add the leading axes of length 1 that the caller may leave out."""
        layouts = self.layouts(arguments)
        self.sizes(arguments)
        shapes = padded_shapes(layouts, self.arrays_of(arguments))
        new_shapes = {name: shape for name, shape in shapes.items() if len(shape) != len(arguments[name].shape)}
        return {**arguments, **{name: arguments[name].reshape(shape) for name, shape in new_shapes.items()}}

    def sizes(self, arguments: Mapping[str, Any], mapped: Iterable[str] = ()) -> dict[str, Any]:
        """The size of every name. Raises where shapes are wrong. The arrays ``mapped`` have one more axis in front."""
        shapes = {
            name: tuple(a.shape[1:] if name in mapped else a.shape) for name, a in self.arrays_of(arguments).items()
        }
        return sizes(self.layouts(arguments), shapes, self.positive, self.multiples)

    # -- results ---------------------------------------------------------------------------------------------------

    def outputs(self, arguments: Mapping[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shape and dtype of each result."""
        if self.of_gradients:
            return tuple(_gradient(arguments, name) for name in arguments["wrt"])
        shapes = result_shapes(self.layouts(arguments), self.results, self.sizes(arguments))
        return tuple(
            jax.ShapeDtypeStruct(shape, self._dtype(name, arguments))
            for name, shape in zip(self.results, shapes, strict=True)
        )

    def _dtype(self, result: str, arguments: Mapping[str, Any]) -> Any:
        dtypes = [array.dtype for array in self.arrays_of(arguments).values()]
        if result in self.statistics:
            inexact = next((dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)), np.float32)
            return np.promote_types(inexact, np.float32)  # JAX's own function fails under strict promotion
        dtype = self.dtypes.get(result, dtypes[0])
        return dtype(arguments) if callable(dtype) and not isinstance(dtype, type) else dtype

    def backward(self) -> Axes:
        """The axes of the backward operation. Its arrays are those of the forward, the results and their cotangents."""
        results = self.results
        arrays: Any = {**self.arrays, **results, **{f"d_{name}": text for name, text in results.items()}}
        cases: Any = {
            field: {
                case: {**texts, **{f"d_{name}": text for name, text in texts.items() if name in results}}
                for case, texts in getattr(self, field).items()
            }
            for field in ("when", "present", "absent")
        }
        return attrs.evolve(self, arrays=arrays, of_gradients=True, **cases)

    # -- choosing, measuring ---------------------------------------------------------------------------------------

    @property
    def has_buckets(self) -> bool:
        """Whether ``bucket`` is the same for calls that differ."""
        return bool(self.rounded) or LEADING in self.counts

    def bucket(self, arguments: Mapping[str, Any]) -> Arguments:
        """The arguments as tuning distinguishes them: the sizes of ``rounded`` axes are the next powers of two, and
        leading axes that only count things are one axis.
        """
        layouts, rounded = self.layouts(arguments), {}
        for name, array in self.arrays_of(arguments).items():
            shape: list[int] = []
            for axis, length in layouts[name].lengths(array.shape):
                if axis.name == LEADING:
                    lengths = (math.prod(length),) if LEADING in self.counts else length
                else:
                    lengths = (length,)
                shape += map(_power_of_two, lengths) if axis.name in self.rounded else lengths
            rounded[name] = jax.ShapeDtypeStruct(shape, array.dtype)
        return {**arguments, **rounded}

    def counted(self, arguments: Mapping[str, Any]) -> dict[str, tuple[str | None, ...]]:
        """For every dimension of each array: the name of its axis if that only counts things, else None.

        An axis that broadcasts counts nothing, because kernels may have special code for it.
        """

        def counters(array_layout: Layout, shape: tuple[Any, ...]) -> Iterator[str | None]:
            for axis, length in array_layout.lengths(shape):
                if axis.name == LEADING:
                    names = [LEADING] if len(length) == 1 else [f"{LEADING}{place}" for place in range(len(length))]
                    yield from names if LEADING in self.counts else [None] * len(length)
                else:
                    is_counted = axis.name in self.counts and not (axis.is_broadcast and length == 1)
                    yield axis.text.removeprefix("#") if is_counted else None

        layouts = self.layouts(arguments)
        # A bucket may have something else in the place of an array.
        return {
            name: tuple(counters(layouts[name], array.shape))
            for name, array in self.arrays_of(arguments).items()
            if hasattr(array, "shape") and layouts[name].fits(len(array.shape))
        }

    def with_sizes(self, arguments: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of the bucket with these sizes of axes that only count things, by the names of ``counted``."""
        bucket = self.bucket(arguments)
        return {
            name: jax.ShapeDtypeStruct(
                [
                    length if counter is None else sizes.get(counter, length)
                    for counter, length in zip(counters, bucket[name].shape, strict=True)
                ],
                bucket[name].dtype,
            )
            for name, counters in self.counted(bucket).items()
        }

    def bytes(self, arguments: Mapping[str, Any]) -> int:
        """The least memory traffic of the call: every array and every result once."""
        from ._samples import bits

        arrays = (*self.arrays_of(arguments).values(), *self.outputs(arguments))
        return sum(math.prod(array.shape) * bits(array.dtype) // 8 for array in arrays)

    @staticmethod
    def samples(arguments: Mapping[str, Any], key: Any) -> Arguments:
        """The arguments with random values for abstract arrays: see ``random_array``."""
        from ._samples import random_array

        abstract = {name: value for name, value in arguments.items() if isinstance(value, jax.ShapeDtypeStruct)}
        draws = jax.random.split(key, max(len(abstract), 1))
        samples = {n: random_array(n, abstract[n], draw) for n, draw in zip(abstract, draws, strict=False)}
        return {**arguments, **samples}

    def partitioning(self, arguments: Mapping[str, Any], also_independent: Iterable[str] = ()) -> Partitioning:
        """The rule by which the call may be sharded over devices. In this call, the axes ``also_independent`` are
        independent too.
        """
        from ._partitioning import Factoring

        layouts = self.layouts(arguments)
        names_of_results = [
            {
                name
                for axis in layouts[result].axes
                if axis.is_divisible
                for name in (axis.name, self.multiples.get(axis.name))
            }
            for result in self.results
        ]
        names = (*self.independent, *also_independent)
        independent = frozenset(name for name in names if all(name in results for results in names_of_results))
        why_whole = self._why_whole(arguments, layouts)
        summed = () if why_whole else self.summed
        factoring = Factoring(self.sizes(arguments), self.multiples, independent.union(summed))
        arrays = {
            name: factoring.dimensions(name, layouts[name], array.shape)
            for name, array in self.arrays_of(arguments).items()
        }
        if self.of_gradients:
            results = {name: arrays[name] for name in arguments["wrt"]}
        else:
            outputs = zip(self.results, self.outputs(arguments), strict=True)
            results = {name: factoring.dimensions(name, layouts[name], out.shape) for name, out in outputs}
        rule = factoring.partitioning(arrays, results)
        partial = self._partial_sums(arguments, factoring.factors_of(summed)) if self.summed else None
        return attrs.evolve(rule, partial=partial, reasons=dict.fromkeys(self.summed, why_whole))

    def _partial_sums(self, arguments: Mapping[str, Any], factors: frozenset[str]) -> PartialSums:
        from ._partitioning import PartialSums

        names = arguments["wrt"] if self.of_gradients else self.results
        dtypes = {name: out.dtype for name, out in zip(names, self.outputs(arguments), strict=True)}
        if self.of_gradients:
            return PartialSums(factors, self.added, lambda names: {PARTIAL_SUMS: names}, dtypes)
        options = self._wide_options(arguments) or {}
        return PartialSums(factors, self.added, lambda _: options, dtypes)

    def _why_whole(self, arguments: Mapping[str, Any], layouts: Layouts) -> str:
        """Why no axis in ``summed`` may be sharded in this call; "" where they may."""
        if not self.summed:
            return ""
        for option in self.nonlinear:
            if (value := arguments.get(option)) is not None and value is not False:
                return f"the result is not linear in it with {option}={value!r}"
        for name in self.arrays_of(arguments):
            if axes := [a.text for a in layouts[name].axes if a.name in self.summed and not a.is_divisible]:
                return f"{name} has {axes[0]}, which its shards do not divide"
        if not self.of_gradients and self._wide_options(arguments) is None:
            return "partial sums would have fewer bits than float32"
        return ""

    def _wide_options(self, arguments: Mapping[str, Any]) -> Arguments | None:
        """The options with which no result has fewer bits than float32; None where there are none."""
        changes: list[Arguments] = [{}]
        if self.dtype_option is not None:
            changes += [{self.dtype_option: dtype} for dtype in (None, np.dtype(np.float32))]
        return next((c for c in changes if all(map(_is_wide, self.outputs({**arguments, **c})))), None)

    # -- vmap ------------------------------------------------------------------------------------------------------

    def fold(
        self, arguments: Mapping[str, Any], mapped: frozenset[str], size: int, sums: frozenset[str] = frozenset()
    ) -> Folded | None:
        """Merge a mapped axis into the axis ``vmap``; None where one call would not give the results of a loop. The
        gradients of the arrays ``sums``, which are not mapped, are sums over the mapped axis.
        """
        layouts, into = self.layouts(arguments), self.vmap
        names = arguments["wrt"] if self.of_gradients else self.results
        separate_results = [layouts[name] for name in names if name not in sums]
        if into is None or self._shares(into, layouts, self.arrays_of(arguments), separate_results, mapped):
            return None
        own_size = self.sizes(arguments, mapped)[into]
        folded = {
            name: fold_axis(array, layouts[name], into, name in mapped, size, own_size)
            for name, array in self.arrays_of(arguments).items()
        }

        def unfold(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                sum_axis(value, layouts[name], into, arguments[name].shape)
                if name in sums
                else unfold_axis(value, layouts[name], into, size, own_size)
                for name, value in zip(names, values, strict=True)
            )

        return {**arguments, **folded}, unfold

    def _shares(
        self, into: str, layouts: Layouts, arrays: Iterable[str], results: Sequence[Layout], mapped: Iterable[str]
    ) -> bool:
        """Whether one folded call would share what a loop does not: a mapped array without the axis ``into`` would be
        the same for all entries, a result without it would combine all entries, and so would the gradient of an array
        without it. An axis with an offset or divisor does not split into those of the separate calls either.
        """
        if any(into not in layouts[name].names for name in mapped):
            return True
        if any(
            axis.name == into and (axis.offset or axis.divisor > 1) for name in arrays for axis in layouts[name].axes
        ):
            return True
        all_results = (*results, *(layouts[name] for name in self.results))
        return any(result.is_shared(into) for result in all_results)


# -- arrays --------------------------------------------------------------------------------------------------------


def _is_present(name: str, arguments: Mapping[str, Any]) -> bool:
    return arguments.get(name) is not None


def _is_absent(name: str, arguments: Mapping[str, Any]) -> bool:
    return arguments.get(name) is None


def _has_value(option: str, value: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether the values and types are equal: 1 is not True. A dtype may be written in several ways."""
    argument = arguments.get(option)
    if isinstance(value, (np.dtype, type)):
        return not hasattr(argument, "shape") and bool(argument == value)
    return type(argument) is type(value) and bool(argument == value)


def _gradient(arguments: Mapping[str, Any], name: str) -> jax.ShapeDtypeStruct:
    """The shape and dtype of the gradient of an array. That of a shard may be a partial sum."""
    array = abstract(arguments[name])
    is_partial = name in (arguments.get(PARTIAL_SUMS) or ())
    return jax.ShapeDtypeStruct(array.shape, np.promote_types(array.dtype, np.float32)) if is_partial else array


def _is_wide(array: Any) -> bool:
    """Whether it is added up without more rounding than in float32."""
    return not jnp.issubdtype(array.dtype, jnp.inexact) or np.promote_types(array.dtype, np.float32) == array.dtype


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
