"""What the axes of an operation's arrays mean, said once; and what follows from it."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ._layout import LEADING, Axis, Layout, dimensions, layout, merged, padded_shapes, parted, result_shapes, sizes

if TYPE_CHECKING:  # most programs cut nothing: what does is loaded by those that do
    from ._partitioning import Partitioning, Shardings

Arguments = dict[str, Any]
Layouts = dict[str, Layout]
Texts = Mapping[str, str]
Folded = tuple[Arguments, Callable[[tuple[Any, ...]], tuple[Any, ...]]]


def _names(given: str | Iterable[str]) -> tuple[str, ...]:
    return tuple(given.split()) if isinstance(given, str) else tuple(given)


@attrs.frozen(eq=False)
class Axes:
    """What each axis of each array means, by name: of the canonical arguments, those that kernels see.

    A word is an axis; a name has one size in all the arrays of a call. ``#batch`` is the batch or 1, ``...`` are
    leading axes of any number, and the same for all. ``2*heads``, ``sequences+1`` and ``dim/128`` (rounded up) are as
    long as they say; ``1`` is. An array that is None in a call is left out.

    >>> axes = Axes({"x": "... dim", "weight": "dim"}, {"out": "... dim"}, independent="...", whole="dim")
    >>> axes.outputs({"x": jax.ShapeDtypeStruct((3, 4, 8), "float32"), "weight": None})
    (ShapeDtypeStruct(shape=(3, 4, 8), dtype=float32),)
    """

    arrays: Texts = attrs.field(converter=dict)
    results: Texts = attrs.field(converter=dict)
    #: The axes whose parts are computed apart from one another, by one kernel or on several devices...
    independent: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    #: ...and all others.
    whole: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    #: The independent axis that takes in another one, mapped by ``jax.vmap``; without it, a mapped call is a loop.
    vmap: str | None = attrs.field(default=None, kw_only=True)
    #: The axes that only count things. What was measured is of use where they differ...
    counts: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    #: ...and of these, by default all, the ones where sizes up to the same power of two are not told apart at all.
    rounded: tuple[str, ...] = attrs.field(converter=_names, kw_only=True)
    #: The axes that are at least 1.
    positive: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    #: ``{"heads": "kv_heads"}``: the first is a multiple of the second, and these are independent together.
    multiples: Mapping[str, str] = attrs.field(factory=dict, converter=dict, kw_only=True)
    #: The results that are float32, and float64 where the first array is.
    statistics: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    #: The dtypes of others: a name, or a function of the arguments; by default that of the first array.
    dtypes: Mapping[str, Any] = attrs.field(factory=dict, converter=dict, kw_only=True)
    #: ``{("transpose", True): {"weight": "out_dim dim"}}``: what is said otherwise, where an option has a value.
    when: Mapping[tuple[str, Any], Texts] = attrs.field(factory=dict, converter=dict, kw_only=True)
    #: These are the axes of the gradients: the results are like the arrays that ``wrt`` names.
    of_gradients: bool = attrs.field(default=False, kw_only=True)
    _usual: Layouts = attrs.field(init=False, repr=False)
    _others: Mapping[tuple[str, Any], Layouts] = attrs.field(init=False, repr=False)

    @rounded.default
    def _all_counts(self) -> tuple[str, ...]:
        return self.counts

    @_usual.default
    def _read(self) -> Layouts:
        return {name: layout(name, text) for name, text in {**self.arrays, **self.results}.items()}

    @_others.default
    def _read_others(self) -> Mapping[tuple[str, Any], Layouts]:
        return {case: {name: layout(name, text) for name, text in texts.items()} for case, texts in self.when.items()}

    def __attrs_post_init__(self) -> None:
        _check_declaration(self, [self._usual, *self._others.values()])

    def layouts(self, arguments: Mapping[str, Any]) -> Layouts:
        """The axes of every array and result, for a call with these options."""
        chosen = dict(self._usual)
        for (option, value), others in self._others.items():
            if _is_same_option(arguments.get(option), value):
                chosen.update(others)
        return chosen

    def given(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays that the call has."""
        return {name: arguments[name] for name in self.arrays if arguments.get(name) is not None}

    # -- checks ----------------------------------------------------------------------------------------------------

    def canonical(self, arguments: Arguments) -> Arguments:
        """The arguments, checked; where leading axes of an array may be 1, those that were left out are there."""
        layouts = self.layouts(arguments)
        self.sizes(arguments)
        shapes = padded_shapes(layouts, self.given(arguments))
        lower = {name: shape for name, shape in shapes.items() if len(shape) != len(arguments[name].shape)}
        return {**arguments, **{name: arguments[name].reshape(shape) for name, shape in lower.items()}}

    def sizes(self, arguments: Mapping[str, Any], mapped: Iterable[str] = ()) -> dict[str, Any]:
        """The size of every name; or what is wrong with the arrays' shapes. Those ``mapped`` have an axis in front."""
        shapes = {name: tuple(a.shape[1:] if name in mapped else a.shape) for name, a in self.given(arguments).items()}
        return sizes(self.layouts(arguments), shapes, self.positive, self.multiples)

    # -- results ---------------------------------------------------------------------------------------------------

    def outputs(self, arguments: Mapping[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each result, and how it is cut where shardings are a part of types."""
        if self.of_gradients:
            return tuple(_like(arguments[name]) for name in arguments["wrt"])
        layouts, known = self.layouts(arguments), self.sizes(arguments)
        shapes = result_shapes(layouts, self.results, known)
        cut = self._shardings(self.given(arguments), layouts)
        return tuple(
            jax.ShapeDtypeStruct(
                shape, self._dtype(name, arguments), sharding=cut and cut.sharding(layouts[name], known)
            )
            for name, shape in zip(self.results, shapes, strict=True)
        )

    def _shardings(self, given: Mapping[str, Any], layouts: Layouts) -> Shardings | None:
        if not any(map(_is_on_a_mesh, given.values())):
            return None
        from ._partitioning import Shardings

        return Shardings.of(given, layouts, self.independent)

    def _dtype(self, result: str, arguments: Mapping[str, Any]) -> Any:
        first = next(iter(self.given(arguments).values())).dtype
        if result in self.statistics:
            return np.promote_types(first, np.float32)  # JAX's own refuses where the user wants strict promotion
        dtype = self.dtypes.get(result, first)
        return dtype(arguments) if inspect.isfunction(dtype) else dtype

    def backward(self) -> Axes:
        """The axes of the backward operation: its arrays are the forward's, its results, and their cotangents."""
        results = self.results
        arrays: Any = {**self.arrays, **results, **{f"d_{name}": text for name, text in results.items()}}
        when = {
            case: {**texts, **{f"d_{name}": text for name, text in texts.items() if name in results}}
            for case, texts in self.when.items()
        }
        return attrs.evolve(self, arrays=arrays, when=when, of_gradients=True)

    # -- choosing, measuring ---------------------------------------------------------------------------------------

    def bucket(self, arguments: Mapping[str, Any]) -> Arguments:
        """The arguments as far as they matter to tuning: sizes that only count are rounded up to a power of two."""
        rounded = {}
        for name, pairs in dimensions(self.layouts(arguments), self.given(arguments)).items():
            shape = [_power_of_two(size) if axis.name in self.rounded else size for axis, size in pairs]
            rounded[name] = jax.ShapeDtypeStruct(shape, arguments[name].dtype)
        return {**arguments, **rounded}

    def counted(self, arguments: Mapping[str, Any]) -> dict[str, tuple[str | None, ...]]:
        """For every dimension of each array, the axis that it is where that only counts things, else None.

        A broadcast axis of 1 counts nothing: a kernel may treat it apart.
        """

        def counter(place: int, axis: Axis, size: Any) -> str | None:
            if axis.name not in self.counts or (axis.is_broadcast and size == 1):
                return None
            return f"{LEADING}{place}" if axis.name == LEADING else axis.text.removeprefix("#")

        every = dimensions(self.layouts(arguments), self.given(arguments))
        return {name: tuple(counter(place, *pair) for place, pair in enumerate(pairs)) for name, pairs in every.items()}

    def bytes(self, arguments: Mapping[str, Any]) -> int:
        """What the call moves at least: every array and every result once."""
        arrays = (*self.given(arguments).values(), *self.outputs(arguments))
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)

    @staticmethod
    def samples(arguments: Mapping[str, Any], key: Any) -> Arguments:
        """The arguments with every abstract array replaced: normal numbers, integers 0, and True nine times in ten."""
        abstract = {name: value for name, value in arguments.items() if isinstance(value, jax.ShapeDtypeStruct)}
        draws = jax.random.split(key, max(len(abstract), 1))
        return {**arguments, **{n: _sample(abstract[n], draw) for n, draw in zip(abstract, draws, strict=False)}}

    def partitioning(self, arguments: Mapping[str, Any]) -> Partitioning:
        """The rule by which the call may be cut over devices."""
        from ._partitioning import Factoring

        layouts = self.layouts(arguments)
        results = [
            {
                name
                for axis in layouts[name].axes
                if axis.is_plain
                for name in (axis.name, self.multiples.get(axis.name))
            }
            for name in self.results
        ]
        independent = frozenset(name for name in self.independent if all(name in names for names in results))
        factoring = Factoring(self.sizes(arguments), self.multiples, independent)
        arrays = {
            name: factoring.dimensions(name, layouts[name], array.shape)
            for name, array in self.given(arguments).items()
        }
        if self.of_gradients:
            return factoring.partitioning(arrays, {name: arrays[name] for name in arguments["wrt"]})
        promised = zip(self.results, self.outputs(arguments), strict=True)
        own = {name: factoring.dimensions(name, layouts[name], like.shape) for name, like in promised}
        return factoring.partitioning(arrays, own)

    # -- vmap ------------------------------------------------------------------------------------------------------

    def fold(self, arguments: Mapping[str, Any], mapped: frozenset[str], size: int) -> Folded | None:
        """Take a mapped axis into the axis ``vmap``; None where the one call would not be what a loop of calls is."""
        layouts, into = self.layouts(arguments), self.vmap
        results = [layouts[name] for name in (arguments["wrt"] if self.of_gradients else self.results)]
        if into is None or self._shares(into, layouts, self.given(arguments), results, mapped):
            return None
        own = self.sizes(arguments, mapped)[into]
        folded = {
            name: merged(array, layouts[name], into, name in mapped, size, own)
            for name, array in self.given(arguments).items()
        }

        def unfold(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                parted(value, own_axes, into, size, own) for value, own_axes in zip(values, results, strict=True)
            )

        return {**arguments, **folded}, unfold

    def _shares(
        self, into: str, layouts: Layouts, arrays: Iterable[str], results: Sequence[Layout], mapped: Iterable[str]
    ) -> bool:
        """Whether something would be shared that is not: an array without the axis serves all of a call, a result
        without it tells of all of a call, and the gradient of what a call shares is summed over it. Nor are the
        boundaries of a longer batch those of its parts.
        """
        if any(into not in layouts[name].names for name in mapped):
            return True
        if any(
            axis.name == into and (axis.offset or axis.divisor > 1) for name in arrays for axis in layouts[name].axes
        ):
            return True
        return any(each.is_shared(into) for each in (*results, *(layouts[name] for name in self.results)))


# -- declarations --------------------------------------------------------------------------------------------------


def _check_declaration(axes: Axes, layouts: Sequence[Layouts]) -> None:
    known = {*axes.independent, *axes.whole}
    everywhere = [(name, each) for group in layouts for name, each in group.items()]
    for name, each in everywhere:
        _check_names(f"axes of {name}", each.names, known, "neither independent nor whole")
        if twice := {a.name for a in each.axes if [b.name for b in each.axes].count(a.name) > 1} & {*axes.independent}:
            raise ValueError(f"axes of {name}: {twice.pop()} is independent, and stands there twice")
    if not axes.results:
        raise ValueError("axes: takes at least one result")
    if not axes.of_gradients and (twice := {*axes.arrays} & {*axes.results}):
        raise ValueError(f"axes: {', '.join(sorted(twice))} cannot be an array and a result")
    if rest := [name for name in axes.rounded if name not in axes.counts]:
        raise ValueError(f"axes, rounded: takes axes that counts has; got {rest[0]!r}")
    in_arrays = {n for name, each in everywhere if name in axes.arrays for n in each.names}
    for name, each in everywhere:
        if name not in axes.arrays:
            _check_names(f"axes of {name}", each.names, in_arrays, "an axis of no array")
            if broadcast := [axis.text for axis in each.axes if axis.is_broadcast]:
                raise ValueError(f"axes of {name}: a result is as long as its axes say; got {broadcast[0]!r}")
    beside: dict[str, Sequence[str]] = {
        "multiples": (*axes.multiples, *axes.multiples.values()),
        "vmap": () if axes.vmap is None else (axes.vmap,),
    }
    for field in ("independent", "whole", "counts", "rounded", "positive"):
        beside[field] = getattr(axes, field)
    for field, names in beside.items():
        _check_names(f"axes, {field}", names, in_arrays, "an axis of no array")
    if both := {*axes.multiples} & {*axes.multiples.values()}:
        raise ValueError(f"axes, multiples: {both.pop()!r} is a multiple and has one; name the smallest axis alone")
    if axes.vmap is not None and axes.vmap not in axes.independent:
        raise ValueError(f"axes, vmap: takes an independent axis; got {axes.vmap!r}")
    if twice := {*axes.independent} & {*axes.whole}:
        raise ValueError(f"axes: {', '.join(sorted(twice))} cannot be independent and whole")
    for field, names in {"dtypes": [*axes.dtypes], "statistics": axes.statistics}.items():
        _check_names(f"axes, {field}", names, axes.results, "no result")
    for texts in axes.when.values():
        _check_names("axes, when", texts, {*axes.arrays, *axes.results}, "no array or result")


def _check_names(where: str, names: Iterable[str], known: Iterable[str], otherwise: str) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ValueError(f"{where}: {name!r} is {otherwise}" + (f"; did you mean {near[0]!r}?" if near else ""))


# -- arrays --------------------------------------------------------------------------------------------------------


def _is_same_option(given: Any, value: Any) -> bool:
    """By type too, as calls are told apart: 1 is not True. A dtype may be written in several ways."""
    same = given == value
    return bool(same) and (isinstance(value, (np.dtype, type)) or type(given) is type(value))


def _is_on_a_mesh(array: Any) -> bool:
    sharding = getattr(array, "sharding", None)
    return isinstance(sharding, NamedSharding) and not sharding.mesh.empty


def _like(array: Any) -> jax.ShapeDtypeStruct:
    if not _is_on_a_mesh(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype)
    from ._partitioning import spec_of

    spec = PartitionSpec(*spec_of(array))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding.update(spec=spec))


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _sample(like: jax.ShapeDtypeStruct, key: Any) -> jax.Array:
    if jnp.issubdtype(like.dtype, jnp.bool_):
        return jax.random.bernoulli(key, 0.9, like.shape)
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, like.shape)
    if jnp.issubdtype(like.dtype, jnp.integer):
        return jnp.zeros(like.shape, like.dtype)
    return jax.random.normal(key, like.shape, jnp.float32).astype(like.dtype)
