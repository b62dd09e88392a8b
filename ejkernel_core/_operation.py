"""What is computed: the value a plugin provides for each operation."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]


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
    parameters static options, unless ``arrays`` says otherwise.
    """

    name: str
    signature: inspect.Signature = attrs.field(converter=_signature)
    #: Raised when results change for equal arguments: part of every stored configuration's key.
    version: int = 1
    #: The parameters that are arrays. Everything else is a static option, hashable and known while tracing.
    arrays: tuple[str, ...] = attrs.field(converter=tuple[str, ...])
    #: The arrays a gradient may be asked for.
    differentiable: tuple[str, ...] = attrs.field(converter=tuple[str, ...])
    #: The names of what a kernel returns, in order.
    results: tuple[str, ...] = attrs.field(default=("out",), converter=tuple[str, ...])
    #: Arguments to (checked, canonical arguments; a function from the results to what the caller gets).
    prepare: Callable[[Arguments], tuple[Arguments, Restore]] = _unprepared
    #: Prepared arguments to one ``jax.ShapeDtypeStruct`` a result, with a sharding where the arguments' tells it. By
    #: default the reference is asked.
    outputs: Callable[[Mapping[str, Any]], tuple[Any, ...]] | None = None
    #: The operation that computes the gradients, see ``gradient_signature``; else the reference is differentiated.
    backward: str | None = None
    #: Prepared arguments to what of them matters to tuning. Calls that agree in it share configurations, where none was
    #: measured for exactly the call.
    tuning_key: Callable[[Mapping[str, Any]], Any] | None = None
    #: The backend that is plain JAX: what JAX may differentiate, in any order.
    reference: str = "reference"
    #: (prepared arguments, names of those with a leading mapped axis, its size) to (arguments without that axis, a
    #: function that gives the results their leading axis back), or None where ``jax.vmap`` has to loop.
    fold: Callable[[Mapping[str, Any], frozenset[str], int], tuple[Arguments, Restore] | None] | None = None
    #: Abstract arguments to concrete ones that mean something, for measuring: (arguments, a random key).
    samples: Callable[[Mapping[str, Any], Any], Arguments] | None = None
    #: Prepared arguments to a ``Cost``.
    cost: Callable[[Mapping[str, Any]], Cost] | None = None
    #: The cases every kernel is proved on: see ``ejkernel_core.testing``.
    cases: Callable[[], Iterable[Any]] | None = None

    @arrays.default
    def _positional(self) -> tuple[str, ...]:
        parameters = self.signature.parameters.values()
        return tuple(p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY)

    @differentiable.default
    def _every_array(self) -> tuple[str, ...]:
        return self.arrays

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """The given arguments by name, without the defaults."""
        try:
            return dict(self.signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}{self._nearest(kwargs)}") from None

    def complete(self, given: Mapping[str, Any]) -> Arguments:
        """Every parameter by name, with the defaults."""
        return {name: given.get(name, p.default) for name, p in self.signature.parameters.items()}

    def _nearest(self, kwargs: Mapping[str, Any]) -> str:
        unknown = [name for name in kwargs if name not in self.signature.parameters]
        near = [match for name in unknown for match in difflib.get_close_matches(name, self.signature.parameters, 1)]
        return f"; did you mean {near[0]!r}?" if near else ""


@attrs.frozen
class Cost:
    """What an invocation takes at least: arithmetic operations, and bytes each read or written once."""

    flops: float
    bytes: float


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
