"""An operation: what is computed, whichever kernel computes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ._axes import PARTIAL_SUMS, Axes
from ._content import read_only
from ._display import brief, suggestion
from ._errors import PluginError, name_operation
from ._example import Example

if TYPE_CHECKING:  # imported when arrays are sharded, which most programs do not need
    from ._partitioning import Partitioning

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]
Fold = Callable[[Mapping[str, Any], frozenset[str], int, frozenset[str]], tuple[Arguments, Restore] | None]

#: The options of every call, beside the operation's parameters.
CALL_OPTIONS = ("backend", "cfg", "validate", "donate")
#: The types of Python and NumPy that count as arrays without axes.
NUMBERS = (bool, int, float, complex, np.generic)
#: What has a shape and a dtype, and is not an array that a kernel could read.
NOT_ARRAYS = (np.ma.MaskedArray, jax.Ref)


def _signature(value: inspect.Signature | Callable[..., Any]) -> inspect.Signature:
    return value if isinstance(value, inspect.Signature) else inspect.signature(value)


def _aliases(aliases: Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(aliases, Mapping):
        raise TypeError(f"aliases: take an array by result, as {{'new_pages': 'pages'}}; got {brief(aliases)}")
    return read_only(aliases)


def _unprepared(arguments: Arguments) -> tuple[Arguments, Restore]:
    return arguments, lambda results: results[0] if len(results) == 1 else results


@attrs.frozen(eq=False, kw_only=True)
class Operation:
    """An operation, described once for all its kernels.

    A call binds to ``signature``. ``prepare`` checks the arguments and brings them into the canonical form that kernels
    see. Every kernel returns ``results`` in the shapes that ``outputs`` gives. The function that ``prepare`` returned
    beside the arguments turns these results into what the caller gets.

    Only ``name`` and ``signature`` are required. The signature's positional parameters are arrays and its keyword-only
    parameters static options, unless ``axes`` or ``arrays`` say otherwise. ``results``, ``outputs``, ``fold``,
    ``tuning_key``, ``samples`` and ``cost`` follow from ``axes``; an operation that needs more gives its own.
    """

    name: str
    signature: inspect.Signature = attrs.field(converter=_signature)
    #: Increase it when results change for equal arguments. It is a part of the key of every stored configuration.
    version: int = 1
    #: The meaning of the axes of the canonical arguments. Every call is checked against it.
    axes: Axes | None = None
    #: ``{"new_pages": "pages"}``: the results that are an argument, updated. Both have the same axes and dtype, and no
    #: gradient. XLA copies the argument if it is used elsewhere; ``donate=True`` takes it away from the caller.
    aliases: Mapping[str, str] = attrs.field(factory=dict, converter=_aliases)
    #: The parameters that are arrays. All others are static options, hashable and known while tracing.
    arrays: tuple[str, ...] = attrs.field(converter=tuple[str, ...])
    #: The arrays that have gradients.
    differentiable: tuple[str, ...] = attrs.field(converter=tuple[str, ...])
    #: The names of what a kernel returns, in order.
    results: tuple[str, ...] = attrs.field(converter=tuple[str, ...])
    #: From arguments to a pair: the checked canonical arguments, and a function from the results to what callers get.
    #: That function always gets a tuple, also of one result.
    prepare: Callable[[Arguments], tuple[Arguments, Restore]] = _unprepared
    #: For ``validate=True``: raises a ValueError, with the place, for the first value of an array for which the results
    #: are undefined. It takes the arguments of ``prepare``, after ``prepare`` has checked them, and all have values.
    validate: Callable[[Mapping[str, Any]], None] | None = None
    #: From prepared arguments to one ``jax.ShapeDtypeStruct`` for each result. By default the shapes are those of the
    #: reference.
    outputs: Callable[[Mapping[str, Any]], tuple[Any, ...]] | None = attrs.field()
    #: The operation that computes the gradients, see ``gradient_signature``. Without it, JAX differentiates the
    #: reference.
    backward: str | None = None
    #: From prepared arguments to the part of them that matters to tuning. Calls with equal parts share configurations,
    #: unless there is one for exactly the call.
    tuning_key: Callable[[Mapping[str, Any]], Any] | None = attrs.field()
    #: The backend in plain JAX, which JAX can differentiate to any order.
    reference: str = "reference"
    #: How ``jax.vmap`` becomes one call. From (prepared arguments, names of those with a leading mapped axis, its size,
    #: names of arrays whose gradients are to be summed over it) to (arguments without that axis, a function that gives
    #: the other results their leading axis back); None where ``jax.vmap`` has to loop.
    fold: Fold | None = attrs.field()
    #: From prepared arguments to the rule by which the call may be sharded over devices. ``raise Unsupported("why")``
    #: where no axis may be. Without it, sharded arrays are gathered.
    partitioning: Callable[[Mapping[str, Any]], Partitioning] | None = attrs.field()
    #: From (abstract arguments, a random key) to concrete arguments with meaningful values, for measurements.
    samples: Callable[[Mapping[str, Any], Any], Arguments] | None = attrs.field()
    #: From prepared arguments to a ``Cost``.
    cost: Callable[[Mapping[str, Any]], Cost] | None = attrs.field()
    #: The calls that kernels are tested, measured and compiled with.
    examples: Callable[[], Iterable[Example]] | None = None
    #: By the names that other libraries use: the name of the parameter here, or a sentence that says what to do. The
    #: error for an unknown argument has them.
    other_names: Mapping[str, str] = attrs.field(factory=dict, converter=read_only)
    #: By array: a sentence that says what to do with a pytree of arrays in its place. The error for one has it.
    pytrees: Mapping[str, str] = attrs.field(factory=dict, converter=read_only)
    #: From the shape of the first array, and sizes by name, to other arrays: a shape and a dtype for each, or None for
    #: that of the call. A command line gives these sizes in place of the arrays.
    sizes: Callable[..., Mapping[str, tuple[tuple[int, ...], str | None]]] | None = None

    @arrays.default
    def _arrays(self) -> tuple[str, ...]:
        parameters = self.signature.parameters.values()
        if self.axes is not None:
            return tuple(p.name for p in parameters if p.name in self.axes.arrays)
        return tuple(p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY)

    @differentiable.default
    def _all_arrays(self) -> tuple[str, ...]:
        return () if self.aliases else self.arrays

    @results.default
    def _results(self) -> tuple[str, ...]:
        return ("out",) if self.axes is None or self.axes.of_gradients else tuple(self.axes.results)

    @outputs.default
    def _outputs(self) -> Callable[[Mapping[str, Any]], tuple[Any, ...]] | None:
        if self.axes is None or not self.aliases:
            return None if self.axes is None else self.axes.outputs
        return partial(_outputs_in_place, self.axes, self.aliases)

    @tuning_key.default
    def _tuning_key(self) -> Callable[[Mapping[str, Any]], Any] | None:
        return self.axes.bucket if self.axes is not None and self.axes.has_buckets else None

    @fold.default
    def _fold(self) -> Fold | None:
        return self.axes.fold if self.axes is not None else None

    @partitioning.default
    def _partitioning(self) -> Callable[[Mapping[str, Any]], Partitioning] | None:
        return self.axes.partitioning if self.axes is not None else None

    @samples.default
    def _samples(self) -> Callable[[Mapping[str, Any], Any], Arguments] | None:
        return self.axes.samples if self.axes is not None else None

    @cost.default
    def _cost(self) -> Callable[[Mapping[str, Any]], Cost] | None:
        axes = self.axes
        return None if axes is None else lambda arguments: Cost(0.0, axes.bytes(arguments))

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name.splitlines() != [self.name]:
            raise ValueError(f"Operation: takes a name, in one line; got {brief(self.name)}")
        if type(self.version) is not int:
            raise ValueError(f"{self.name}: version takes a whole number; got {brief(self.version)}")
        for parameter in self.signature.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ValueError(f"{self.name}: a signature names every parameter; got {parameter}")
        if self.backward == self.name:
            raise ValueError(f"{self.name}: backward names another operation, see gradient_signature")
        if reserved := [name for name in CALL_OPTIONS if name in self.signature.parameters]:
            raise ValueError(
                f"{self.name}: {reserved[0]!r} is an option of every call, so it cannot be a parameter of an operation"
            )
        self._check_other_names()
        self._check_aliases()
        self._check_parameters("pytrees", self.pytrees)
        if self.axes is not None:
            self._check_parameters("axes", [*self.axes.arrays, *self.axes.conditions, *self.axes.options])

    def _check_parameters(self, field: str, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.signature.parameters:
                hint = suggestion(name, self.signature.parameters)
                raise ValueError(f"{field} of {self.name}: {name!r} is not a parameter{hint}")

    def _check_other_names(self) -> None:
        names = (*self.signature.parameters, *CALL_OPTIONS)
        for other, name in self.other_names.items():
            if other in names:
                raise ValueError(f"other_names of {self.name}: {other!r} is a parameter, and no other name")
            if name.isidentifier() and name not in names:
                raise ValueError(f"other_names of {self.name}: {name!r} is not a parameter{suggestion(name, names)}")

    def _check_aliases(self) -> None:
        prefix = f"aliases of {self.name}"
        for result, array in self.aliases.items():
            for name, known, kind in ((result, self.results, "a result"), (array, self.arrays, "an array")):
                if name not in known:
                    raise ValueError(f"{prefix}: {name!r} is not {kind}{suggestion(name, known)}")
            axes = self.axes and (self.axes.results[result], self.axes.arrays[array])
            if axes and axes[0] != axes[1]:
                raise ValueError(f"{prefix}: {result} has the axes {axes[0]!r}, and {array} {axes[1]!r}")
        updated = list(self.aliases.values())
        if repeated := next((array for array in updated if updated.count(array) > 1), None):
            raise ValueError(f"{prefix}: {repeated} cannot be two results")
        if self.aliases and (self.backward or self.differentiable):
            reason = "what is updated in place has no gradient"
            raise ValueError(f"{prefix}: {reason}, so give neither backward nor differentiable")

    def residuals(self, wrt: Iterable[str]) -> tuple[str, ...]:
        """The results that these gradients are computed from: none where JAX differentiates the reference."""
        if self.backward is None:
            return ()
        read_for = {} if self.axes is None else self.axes.residuals
        return tuple(name for name in self.results if {*read_for.get(name, self.arrays)} & {*wrt})

    def prepared(self, arguments: Arguments) -> tuple[Arguments, Restore]:
        """The checked canonical arguments, and the function that turns the results into what the caller gets."""
        try:
            return self._prepared(arguments)
        except Exception as fault:
            name_operation(fault, self.name)
            raise

    def _prepared(self, arguments: Arguments) -> tuple[Arguments, Restore]:
        canonical, restore = self.prepare(arguments)
        return (canonical if self.axes is None else self.axes.canonical(canonical)), restore

    def gradients(self, **fields: Any) -> Operation:
        """The backward operation that follows from this operation's axes. ``fields`` replace what is derived."""
        if self.axes is None or self.backward is None:
            raise ValueError(
                f"{self.name}: gradients follow from 'axes', and 'backward' names their operation; give both"
            )
        axes = self.axes.backward()
        derived = {
            "name": self.backward,
            "version": self.version,
            "signature": self._signature_of_gradients(),
            "axes": axes,
            "differentiable": (*self.differentiable, *(name for name in axes.arrays if name not in self.axes.arrays)),
            "prepare": self.prepare_gradients,
            "validate": self.validate,
            "other_names": self.other_names,
        }
        return Operation(**{**derived, **fields})

    def _signature_of_gradients(self) -> inspect.Signature:
        signature = gradient_signature(self.signature, self.results)
        if self.axes is None or not self.axes.summed:
            return signature
        partial_sums = inspect.Parameter(PARTIAL_SUMS, inspect.Parameter.KEYWORD_ONLY, default=None)
        return signature.replace(parameters=[*signature.parameters.values(), partial_sums])

    def prepare_gradients(self, arguments: Arguments) -> tuple[Arguments, Restore]:
        """Check the arguments of the backward operation; its gradients have the shapes of the caller's arrays."""
        canonical, _ = self._prepared(arguments)
        shapes = [arguments[name].shape for name in self._checked_wrt(arguments)]
        partial_sums = arguments.get(PARTIAL_SUMS) or ()
        if not isinstance(partial_sums, tuple) or not {*partial_sums} <= {*arguments["wrt"]}:
            raise ValueError(f"{PARTIAL_SUMS}: takes a tuple of names in wrt; got {brief(partial_sums)}")
        assert self.outputs is not None
        for name, declared in zip(self.results, self.outputs(canonical), strict=True):
            for array_name in (name, f"d_{name}"):
                _check_against_forward(array_name, canonical[array_name], declared)
        return canonical, lambda gradients: tuple(g.reshape(s) for g, s in zip(gradients, shapes, strict=True))

    def gradients_by_jax(self, forward: Callable[[Mapping[str, Any]], Any], arguments: Mapping[str, Any]) -> Any:
        """The gradients of ``forward`` by JAX, for the arguments of the backward operation. ``forward`` computes this
        operation's results in plain JAX: an array if there is one, else a tuple. References of backward operations use
        it.
        """
        partial_sums = arguments.get(PARTIAL_SUMS) or ()
        primals = {n: as_wide(arguments[n]) if n in partial_sums else arguments[n] for n in arguments["wrt"]}
        results, vjp = jax.vjp(lambda arrays: self._checked_results(forward({**arguments, **arrays})), primals)
        cotangents = (arguments[f"d_{name}"] for name in self.results)
        full_cotangents = [
            zero_cotangent(result) if ct is None else ct.astype(result.dtype)
            for result, ct in zip(results, cotangents, strict=True)
        ]
        (gradients,) = vjp(tuple(full_cotangents))
        return tuple(gradients[name] for name in arguments["wrt"])

    def _checked_results(self, returned: Any) -> tuple[Any, ...]:
        results = as_tuple(returned)
        if len(results) != len(self.results):
            types = ", ".join(str(jax.typeof(r)) if isinstance(r, jax.Array) else type(r).__name__ for r in results)
            raise PluginError(
                f"{self.name}: gradients_by_jax takes a function that returns ({', '.join(self.results)}); "
                f"it returned ({types})"
            )
        return results

    def _checked_wrt(self, arguments: Arguments) -> tuple[str, ...]:
        wrt = arguments["wrt"]
        if not isinstance(wrt, tuple) or not set(wrt) <= set(self.differentiable):
            raise ValueError(f"wrt: takes a tuple of names among {self.differentiable}; got {brief(wrt)}")
        repeated = [name for name in dict.fromkeys(wrt) if wrt.count(name) > 1]
        if repeated:
            raise ValueError(f"wrt: takes each name once; got {', '.join(repeated)} more often")
        absent = [name for name in wrt if arguments[name] is None]
        if absent:
            raise ValueError(f"wrt: names {', '.join(absent)}, which the call does not have")
        return wrt

    def check_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Raise where one of these is not an array. None is allowed where it is the parameter's default."""
        for name, value in arrays.items():
            is_left_out = value is None and self.signature.parameters[name].default is None
            is_array = hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, NOT_ARRAYS)
            is_array = is_array and not (isinstance(value, np.ndarray) and _has_no_numbers(value.dtype))
            if not (is_left_out or is_array or isinstance(value, NUMBERS)):
                raise TypeError(f"{self.name}: {name} takes an array; got {self._not_an_array(name, value)}")

    def _not_an_array(self, name: str, value: Any) -> str:
        """What stands in the place of an array, and how to pass what it holds."""
        if isinstance(value, jax.Ref):
            return f"a jax.Ref: pass what it refers to, {name}=ref[...]"
        if isinstance(value, np.ndarray) and _has_no_numbers(value.dtype):
            return f"one of {value.dtype}, which JAX does not have"
        text = f"{type(value).__name__} {brief(value)}"
        return f"{text}; {self._way_out(name, value)}" if isinstance(value, (tuple, list, Mapping)) else text

    def _way_out(self, name: str, pytree: Any) -> str:
        leaves = jax.tree.leaves(pytree)
        if leaves and all(isinstance(leaf, NUMBERS) for leaf in leaves):
            return f"make an array of it: jnp.asarray({name})"
        one_by_one = "each argument is one array: pass those that it holds one by one, or jnp.stack them"
        return self.pytrees.get(name, one_by_one)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """The arguments of a call by name, without defaults."""
        positional = [p.name for p in self.signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
        if len(args) > len(positional):
            raise TypeError(self._too_many(len(args), positional))
        try:
            return dict(self.signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}{self._nearest(kwargs, str(error))}") from None

    def _too_many(self, count: int, positional: Sequence[str]) -> str:
        by_name = [name for name in self.signature.parameters if name not in positional]
        others = f"; write the others by name: {', '.join(by_name)}" if by_name else ""
        return f"{self.name}: takes {', '.join(positional)} by position; got {count} arguments{others}"

    def complete(self, arguments: Mapping[str, Any]) -> Arguments:
        """The arguments with the defaults of all other parameters."""
        return {name: arguments.get(name, p.default) for name, p in self.signature.parameters.items()}

    def _nearest(self, kwargs: Iterable[str], error: str) -> str:
        """The end of this error about the first unknown name for which there is one here; "" where there is none."""
        unknown = (name for name in kwargs if name not in self.signature.parameters)
        return next(filter(None, (self._name_here(name, error) for name in unknown)), "")

    def _name_here(self, name: str, error: str) -> str:
        here = self.other_names.get(name)
        if here is None:
            hint = suggestion(name, (*self.signature.parameters, *CALL_OPTIONS))
            return hint if repr(name) in error or not hint else f"; {name!r} is unknown{hint}"
        return f"; {name!r} is called {here!r} here" if here.isidentifier() else f"; {here}"


def _outputs_in_place(
    axes: Axes, aliases: Mapping[str, str], arguments: Mapping[str, Any]
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The results that follow from the axes; each that is an argument has its dtype."""
    outputs = zip(axes.results, axes.outputs(arguments), strict=True)
    dtypes = {result: arguments[array].dtype for result, array in aliases.items()}
    return tuple(jax.ShapeDtypeStruct(out.shape, dtypes.get(name, out.dtype)) for name, out in outputs)


def as_wide(array: Any) -> Any:
    """The array, converted to float32 if it has fewer bits."""
    return array.astype(np.promote_types(array.dtype, np.float32))


def zero_cotangent(result: Any) -> Any:
    """The cotangent of a result on which nothing depends."""
    if jnp.issubdtype(result.dtype, jnp.inexact):
        return jnp.zeros_like(result)
    return np.zeros(result.shape, jax.dtypes.float0)


def as_tuple(results: Any) -> tuple[Any, ...]:
    """What a kernel returned as a tuple: an operation with one result may return the array alone."""
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


@attrs.frozen
class Cost:
    """The least work of an invocation: arithmetic operations, and bytes with each array read or written once."""

    flops: float
    bytes: float


def _has_no_numbers(dtype: np.dtype[Any]) -> bool:
    """Whether it is of texts, objects, times or fields."""
    return dtype.kind in "OSUMm" or dtype.names is not None


def _check_against_forward(name: str, value: Any, declared: Any) -> None:
    if value is None:
        return
    if value.shape != declared.shape:
        raise ValueError(f"{name}: takes the forward's shape {declared.shape}; got {value.shape}")
    if value.dtype != declared.dtype:
        raise TypeError(f"{name}: takes the forward's dtype {declared.dtype}; got {value.dtype}")


def gradient_signature(operation: inspect.Signature, results: Iterable[str]) -> inspect.Signature:
    """The signature of a backward operation: the forward's parameters, its results, their cotangents, and ``wrt``.

    A cotangent ``d_<result>`` is None where nothing depends on that result. ``wrt`` names arrays of the forward; the
    results of the backward operation are their gradients, in that order.

    >>> print(gradient_signature(inspect.signature(lambda x, scale=1.0: None), ["out"]))
    (*, x, scale=1.0, out, d_out=None, wrt)
    """
    keyword = inspect.Parameter.KEYWORD_ONLY
    forward = [p.replace(kind=keyword) for p in operation.parameters.values()]
    residuals = [inspect.Parameter(name, keyword) for name in results]
    cotangents = [inspect.Parameter(f"d_{name}", keyword, default=None) for name in results]
    return inspect.Signature([*forward, *residuals, *cotangents, inspect.Parameter("wrt", keyword)])
