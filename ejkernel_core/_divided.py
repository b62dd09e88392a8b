"""A function in plain JAX on arrays with explicit mesh axes, outside of ``shard_map``: each device computes its shard.

It is a primitive, and so are its derivatives and what ``jax.vmap`` makes of it. Each becomes a ``shard_map`` where it
is lowered. JAX cannot map a ``shard_map`` over an axis that is sharded over the same mesh axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from ._devices import explicit_mesh
from ._jax_versions import Primitive, avals_like, reshard_like
from ._partitioning import Factors, Partitioning
from ._request import Numerics
from ._sharding import by_shard_map, partition_spec, shards_of_types

Results = tuple[Any, ...]
Dimensions = Mapping[str, tuple[Factors, ...]]

divided_call = Primitive("ejkernel_divided")
divided_call.multiple_results = True


@attrs.frozen(eq=False)
class Divided:
    """A function of arrays, and the rule by which it is divided over devices."""

    function: Callable[..., Results] = attrs.field(repr=False)
    rule: Partitioning = attrs.field(repr=False)
    #: The shapes and dtypes of the results for the whole arrays.
    outputs: tuple[Any, ...] = attrs.field(repr=False)
    #: Those in effect where it is traced: its function is traced again where it is lowered.
    settings: Numerics

    def __call__(self, *arrays: Any) -> Results:
        return tuple(divided_call.bind(*arrays, divided=self))

    def mapped(self, axes: Sequence[int | None], size: int) -> Divided:
        """The function that ``jax.vmap`` makes of it: the arrays with 0 in ``axes``, and all results, have one more
        axis in front.
        """
        names = [name for name, axis in zip(self.rule.arrays, axes, strict=True) if axis is not None]
        return attrs.evolve(
            self,
            function=jax.vmap(self.function, tuple(axes)),
            rule=self.rule.with_mapped_axis(f"vmap {len(self.rule.sizes)}", size, names),
            outputs=tuple(jax.ShapeDtypeStruct((size, *out.shape), out.dtype) for out in self.outputs),
        )

    def tangents(self, wrt: Sequence[int]) -> Divided:
        """The function of the arrays, and of the tangents of those at the places ``wrt``, to the tangents of the
        results that have one.
        """
        count, (results, outputs) = len(self.rule.arrays), self._differentiable_results

        def function(*operands: Any) -> Results:
            run, primals = self._differentiable(operands[:count], wrt)
            return tuple(jax.jvp(run, primals, operands[count:])[1])

        return self._with_arrays(function, self._arrays_at(wrt), results, outputs)

    def gradients(self, wrt: Sequence[int], avals: Sequence[Any]) -> Divided:
        """The function of the arrays, and of the cotangents of the results that have one, to the gradients of the
        arrays at the places ``wrt``, which are like ``avals``.
        """
        count, (results, _) = len(self.rule.arrays), self._differentiable_results

        def function(*operands: Any) -> Results:
            run, primals = self._differentiable(operands[:count], wrt)
            results, vjp = jax.vjp(run, *primals)
            return tuple(vjp(tuple(ct.astype(r.dtype) for ct, r in zip(operands[count:], results, strict=True))))

        outputs = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)
        return self._with_arrays(function, results, self._arrays_at(wrt), outputs)

    @property
    def _differentiable_results(self) -> tuple[Dimensions, tuple[Any, ...]]:
        items = [*zip(self.rule.results.items(), self.outputs, strict=True)]
        return dict(item for item, out in items if _is_inexact(out)), tuple(o for _, o in items if _is_inexact(o))

    def _arrays_at(self, places: Sequence[int]) -> Dimensions:
        items = [*self.rule.arrays.items()]
        return dict(items[place] for place in places)

    def _differentiable(self, arrays: Sequence[Any], wrt: Sequence[int]) -> tuple[Callable[..., Results], Results]:
        """The results that have tangents, as a function of the arrays at the places ``wrt``, and these arrays."""

        def run(*primals: Any) -> Results:
            by_place = dict(zip(wrt, primals, strict=True))
            results = self.function(*(by_place.get(place, array) for place, array in enumerate(arrays)))
            return tuple(result for result in results if _is_inexact(result))

        return run, tuple(arrays[place] for place in wrt)

    def _with_arrays(
        self, function: Callable[..., Results], more: Dimensions, results: Dimensions, outputs: tuple[Any, ...]
    ) -> Divided:
        arrays = {**self.rule.arrays, **{f"{name}.{len(self.rule.arrays)}": dims for name, dims in more.items()}}
        return attrs.evolve(
            self, function=function, rule=attrs.evolve(self.rule, arrays=arrays, results=results), outputs=outputs
        )


def _is_inexact(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


# -- the primitive -----------------------------------------------------------------------------------------------------


def _types(*avals: Any, divided: Divided) -> list[Any]:
    shards = shards_of_types(divided.rule, avals, explicit_mesh(avals))
    return avals_like(avals, divided.outputs, [*map(partition_spec, shards.specs_of_results)])


def _run(*arrays: Any, divided: Divided) -> Results:
    avals = [*map(jax.typeof, arrays)]
    mesh = explicit_mesh(avals)
    in_effect = divided.settings.in_effect
    with in_effect():
        shards = shards_of_types(divided.rule, avals, mesh)
        run = lambda operands, _: divided.function(*operands)
        return tuple(by_shard_map(shards, mesh, mesh.explicit_axes, run, in_effect)(*arrays))


def _batch(arrays: Sequence[Any], axes: Sequence[int | None], *, divided: Divided) -> Any:
    leading = [a if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in zip(arrays, axes, strict=True)]
    size = next(array.shape[0] for array, axis in zip(leading, axes, strict=True) if axis is not None)
    results = divided.mapped([None if axis is None else 0 for axis in axes], size)(*leading)
    return results, [0] * len(results)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, divided: Divided) -> Any:
    results = divided(*primals)
    wrt = [place for place, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    nonzero = iter(divided.tangents(wrt)(*primals, *(tangents[place] for place in wrt)))
    return results, [next(nonzero) if _is_inexact(r) else ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results]


def _transpose(cotangents: Sequence[Any], *operands: Any, divided: Divided) -> list[Any]:
    wrt = [place for place, operand in enumerate(operands) if ad.is_undefined_primal(operand)]
    # Where a function is linear in an array, its derivative does not depend on it: any of this type will do.
    arrays = [
        ad.instantiate_zeros(ad.Zero(operand.aval)) if ad.is_undefined_primal(operand) else operand
        for operand in operands
    ]
    cts = [ad.instantiate_zeros(ct) for ct, out in zip(cotangents, divided.outputs, strict=True) if _is_inexact(out)]
    gradients = divided.gradients(wrt, [operands[place].aval for place in wrt])(*arrays, *cts)
    by_place = {place: reshard_like(g, arrays[place]) for place, g in zip(wrt, gradients, strict=True)}
    return [by_place.get(place) for place in range(len(operands))]


def _lower(ctx: Any, *operands: Any, divided: Divided) -> Any:
    # The function computes on its shard, so the types of its arrays do not say over which mesh axes they vary.
    avals = [ShapedArray(aval.shape, aval.dtype, sharding=aval.sharding) for aval in ctx.avals_in]
    run = partial(_run, divided=divided)
    return mlir.lower_fun(run, multiple_results=True)(ctx.replace(avals_in=avals), *operands)


divided_call.def_impl(_run)
divided_call.def_abstract_eval(_types)
batching.primitive_batchers[divided_call] = _batch
ad.primitive_jvps[divided_call] = _jvp
ad.primitive_transposes[divided_call] = _transpose
mlir.register_lowering(divided_call, _lower)
