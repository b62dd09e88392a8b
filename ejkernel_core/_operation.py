"""What is computed: the value a plugin provides for each operation."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import numpy as np

from ._axes import Axes
from ._display import brief

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]

#: What every call takes beside the operation's parameters.
CALL_OPTIONS = ("backend", "cfg", "validate")
#: What is an array of no axes.
NUMBERS = (bool, int, float, complex, np.generic)


def _signature(value: inspect.Signature | Callable[..., Any]) -> inspect.Signature:
    return value if isinstance(value, inspect.Signature) else inspect.signature(value)


def _unprepared(arguments: Arguments) -> tuple[Arguments, Restore]:
    return arguments, lambda results: results[0] if len(results) == 1 else results


@attrs.frozen(eq=False, kw_only=True)
class Operation:
    """An operation, said once for all its kernels.

    A call binds to ``signature``; ``prepare`` checks the arguments and brings them into the one form that kernels see;
    every kernel returns ``results`` of the shapes that ``outputs`` gives; what ``prepare`` returned beside the
    arguments turns them into what the caller gets.

    Only ``name`` and ``signature`` are required. The signature's positional parameters are arrays and its keyword-only
    parameters static options, unless ``axes`` or ``arrays`` say otherwise. What ``axes`` says has not to be said again:
    ``results``, ``outputs``, ``fold``, ``tuning_key``, ``samples`` and ``cost`` follow from it, and are given where an
    operation needs more.
    """

    name: str
    signature: inspect.Signature = attrs.field(converter=_signature)
    #: Raised when results change for equal arguments: part of every stored configuration's key.
    version: int = 1
    #: What the axes of the canonical arguments mean: every call is checked against it.
    axes: Axes | None = None
    #: The parameters that are arrays. Everything else is a static option, hashable and known while tracing.
    arrays: tuple[str, ...] = attrs.field(converter=tuple[str, ...])
    #: The arrays a gradient may be asked for.
    differentiable: tuple[str, ...] = attrs.field(converter=tuple[str, ...])
    #: The names of what a kernel returns, in order.
    results: tuple[str, ...] = attrs.field(converter=tuple[str, ...])
    #: Arguments to (checked, canonical arguments; a function from the results to what the caller gets).
    prepare: Callable[[Arguments], tuple[Arguments, Restore]] = _unprepared
    #: For ``validate=True``: raises a ValueError for the first value of an array that results are not defined for, with
    #: its place. It gets the arguments as ``prepare`` does, once that has found nothing, with values.
    validate: Callable[[Mapping[str, Any]], None] | None = None
    #: Prepared arguments to one ``jax.ShapeDtypeStruct`` a result, with a sharding where the arguments' tells it. By
    #: default the reference is asked.
    outputs: Callable[[Mapping[str, Any]], tuple[Any, ...]] | None = attrs.field()
    #: The operation that computes the gradients, see ``gradient_signature``; else the reference is differentiated.
    backward: str | None = None
    #: Prepared arguments to what of them matters to tuning. Calls that agree in it share configurations, where none was
    #: measured for exactly the call.
    tuning_key: Callable[[Mapping[str, Any]], Any] | None = attrs.field()
    #: The backend that is plain JAX: what JAX may differentiate, in any order.
    reference: str = "reference"
    #: (prepared arguments, names of those with a leading mapped axis, its size) to (arguments without that axis, a
    #: function that gives the results their leading axis back), or None where ``jax.vmap`` has to loop. The call that
    #: it gives is like any other: its gradient is that of all the elements together.
    fold: Callable[[Mapping[str, Any], frozenset[str], int], tuple[Arguments, Restore] | None] | None = attrs.field()
    #: Abstract arguments to concrete ones that mean something, for measuring: (arguments, a random key).
    samples: Callable[[Mapping[str, Any], Any], Arguments] | None = attrs.field()
    #: Prepared arguments to a ``Cost``.
    cost: Callable[[Mapping[str, Any]], Cost] | None = attrs.field()
    #: The cases every kernel is proved on: see ``ejkernel_testing``.
    cases: Callable[[], Iterable[Any]] | None = None

    @arrays.default
    def _arrays(self) -> tuple[str, ...]:
        parameters = self.signature.parameters.values()
        if self.axes is not None:
            return tuple(p.name for p in parameters if p.name in self.axes.arrays)
        return tuple(p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY)

    @differentiable.default
    def _every_array(self) -> tuple[str, ...]:
        return self.arrays

    @results.default
    def _results(self) -> tuple[str, ...]:
        return ("out",) if self.axes is None or self.axes.of_gradients else tuple(self.axes.results)

    @outputs.default
    def _outputs(self) -> Callable[[Mapping[str, Any]], tuple[Any, ...]] | None:
        return self.axes.outputs if self.axes is not None else None

    @tuning_key.default
    def _tuning_key(self) -> Callable[[Mapping[str, Any]], Any] | None:
        return self.axes.bucket if self.axes is not None and self.axes.rounded else None

    @fold.default
    def _fold(self) -> Callable[[Mapping[str, Any], frozenset[str], int], tuple[Arguments, Restore] | None] | None:
        return self.axes.fold if self.axes is not None else None

    @samples.default
    def _samples(self) -> Callable[[Mapping[str, Any], Any], Arguments] | None:
        return self.axes.samples if self.axes is not None else None

    @cost.default
    def _cost(self) -> Callable[[Mapping[str, Any]], Cost] | None:
        axes = self.axes
        return None if axes is None else lambda arguments: Cost(0.0, axes.bytes(arguments))

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name.splitlines() != [self.name]:
            raise ValueError(f"Operation: takes a name, in one line; got {self.name!r}")
        if type(self.version) is not int:
            raise ValueError(f"{self.name}: version takes a whole number; got {self.version!r}")
        for parameter in self.signature.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ValueError(f"{self.name}: a signature names every parameter; got {parameter}")
        if self.backward == self.name:
            raise ValueError(f"{self.name}: backward names another operation, see gradient_signature")
        if taken := [name for name in CALL_OPTIONS if name in self.signature.parameters]:
            raise ValueError(f"{self.name}: {taken[0]!r} is an option of every call, and no parameter of an operation")
        if self.axes is not None:
            self._check_parameters([*self.axes.arrays, *(option for option, _ in self.axes.when)])

    def _check_parameters(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.signature.parameters:
                raise ValueError(f"axes of {self.name}: {name!r} is no parameter{self._nearest([name])}")

    def prepared(self, arguments: Arguments) -> tuple[Arguments, Restore]:
        """Checked, canonical arguments; and what turns the results into what the caller gets."""
        canonical, restore = self.prepare(arguments)
        return (canonical if self.axes is None else self.axes.canonical(canonical)), restore

    def gradients(self, **fields: Any) -> Operation:
        """The backward operation, as far as it follows from this one's axes."""
        if self.axes is None or self.backward is None:
            raise ValueError(
                f"{self.name}: gradients follow from 'axes', and 'backward' names their operation; give both"
            )
        axes = self.axes.backward()
        derived = {
            "name": self.backward,
            "version": self.version,
            "signature": gradient_signature(self.signature, self.results),
            "axes": axes,
            "differentiable": (*self.differentiable, *(name for name in axes.arrays if name not in self.axes.arrays)),
            "prepare": self.prepare_gradients,
            "validate": self.validate,
        }
        return Operation(**{**derived, **fields})

    def prepare_gradients(self, arguments: Arguments) -> tuple[Arguments, Restore]:
        """The forward's checks; gradients in the shapes of what they belong to, as the caller has them."""
        canonical, _ = self.prepared(arguments)
        shapes = [arguments[name].shape for name in self._checked_wrt(arguments)]
        assert self.outputs is not None
        for name, promised in zip(self.results, self.outputs(canonical), strict=True):
            for saved in (name, f"d_{name}"):
                _check_saved(saved, canonical[saved], promised)
        return canonical, lambda gradients: tuple(g.reshape(s) for g, s in zip(gradients, shapes, strict=True))

    def _checked_wrt(self, arguments: Arguments) -> tuple[str, ...]:
        wrt = arguments["wrt"]
        if not isinstance(wrt, tuple) or not set(wrt) <= set(self.differentiable):
            raise ValueError(f"wrt: takes a tuple of names among {self.differentiable}; got {wrt!r}")
        twice = [name for name in dict.fromkeys(wrt) if wrt.count(name) > 1]
        if twice:
            raise ValueError(f"wrt: takes each name once; got {', '.join(twice)} more often")
        absent = [name for name in wrt if arguments[name] is None]
        if absent:
            raise ValueError(f"wrt: names {', '.join(absent)}, which the call does not have")
        return wrt

    def check_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Raise where one of these is no array; None is, where it is the parameter's default."""
        for name, value in arrays.items():
            is_left_out = value is None and self.signature.parameters[name].default is None
            is_array = hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.ma.MaskedArray)
            if not (is_left_out or is_array or isinstance(value, NUMBERS)):
                raise TypeError(f"{self.name}: {name} takes an array; got {type(value).__name__} {brief(value)}")

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """The given arguments by name, without the defaults."""
        try:
            return dict(self.signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}{self._nearest(kwargs)}") from None

    def complete(self, given: Mapping[str, Any]) -> Arguments:
        """Every parameter by name, with the defaults."""
        return {name: given.get(name, p.default) for name, p in self.signature.parameters.items()}

    def _nearest(self, kwargs: Iterable[str]) -> str:
        unknown = [name for name in kwargs if name not in self.signature.parameters]
        near = [match for name in unknown for match in difflib.get_close_matches(name, self.signature.parameters, 1)]
        return f"; did you mean {near[0]!r}?" if near else ""


@attrs.frozen
class Cost:
    """What an invocation takes at least: arithmetic operations, and bytes each read or written once."""

    flops: float
    bytes: float


def _check_saved(name: str, value: Any, promised: Any) -> None:
    if value is None:
        return
    if value.shape != promised.shape:
        raise ValueError(f"{name}: takes the forward's shape {promised.shape}; got {value.shape}")
    if value.dtype != promised.dtype:
        raise TypeError(f"{name}: takes the forward's dtype {promised.dtype}; got {value.dtype}")


def gradient_signature(operation: inspect.Signature, results: Iterable[str]) -> inspect.Signature:
    """The signature a backward operation has: the forward's parameters, its results, their cotangents, and ``wrt``.

    A cotangent ``d_<result>`` is None where nothing depends on that result. ``wrt`` names the arrays whose gradients
    are wanted: the operation's results are these, in that order.

    >>> print(gradient_signature(inspect.signature(lambda x, scale=1.0: None), ["out"]))
    (*, x, scale=1.0, out, d_out=None, wrt)
    """
    keyword = inspect.Parameter.KEYWORD_ONLY
    forward = [p.replace(kind=keyword) for p in operation.parameters.values()]
    saved = [inspect.Parameter(name, keyword) for name in results]
    cotangents = [inspect.Parameter(f"d_{name}", keyword, default=None) for name in results]
    return inspect.Signature([*forward, *saved, *cotangents, inspect.Parameter("wrt", keyword)])
