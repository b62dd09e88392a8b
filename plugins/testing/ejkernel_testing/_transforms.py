"""Every way in which JAX can transform a call: each has to equal plain calls, or a Python loop of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from ejkernel_core import Registry

from ._case import Case
from ._checks import TOLERANCE, compare
from ._outcome import REFERENCE, Arrays, Results, called, drawn, inputs, options, pulled, unit, weights
from ._processes import DEVICES, VARIABLE, has_one_cpu

DRAWS = 3


@attrs.frozen(eq=False)
class Subject:
    """A kernel on a case, to be transformed."""

    registry: Registry
    kernel: str
    case: Case
    check: str

    @property
    def backend(self) -> str:
        return self.kernel.rpartition(".")[2]

    def call(self, arrays: Arrays) -> Results:
        return called(self.registry, self.backend, self.case, arrays)

    def draws(self, mapped: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Arrays for a loop; those that are not mapped stay the same."""
        every = [inputs(self.registry, self.case, draw) for draw in range(DRAWS)]
        return [{name: (own if mapped is None or name in mapped else every[0])[name] for name in own} for own in every]

    def pulled(self, arrays: Arrays) -> Any:
        return pulled(self.call, self.case.wrt, arrays, self.weights(self.call, arrays))

    def weights(self, function: Callable[..., Results], arrays: Arrays) -> Results:
        return weights(self.case.name, function, arrays)

    def loop(self, draws: Sequence[Arrays]) -> Any:
        """Results and gradients of plain calls, stacked."""
        plain = jax.jit(self.pulled)
        return stacked([plain(arrays) for arrays in draws])

    def same(self, got: Any, wanted: Any) -> None:
        pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
        for (path, mine), theirs in pairs:
            name, allowed = jax.tree_util.keystr(path), TOLERANCE.get(self.case.dtype) or unit(self.case.dtype)
            compare(self.check, self.kernel, self.case, name, np.asarray(mine), np.asarray(theirs), allowed)


def stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def by_jit(subject: Subject) -> None:
    """Plain calls, not differentiated, in a jitted function and out of it."""
    (arrays, *_) = subject.draws()
    wanted, _ = jax.jit(subject.pulled)(arrays)
    subject.same(subject.call(arrays), wanted)
    subject.same(jax.jit(subject.call)(arrays), wanted)


def by_vmap(subject: Subject) -> None:
    """Over all arrays."""
    draws = subject.draws()
    subject.same(jax.vmap(subject.call)(stacked(draws)), subject.loop(draws)[0])


def by_vmap_with_shared(subject: Subject) -> None:
    """Over one array alone, and over all others, the rest being the same for all."""
    first = subject.case.wrt[0]
    for mapped in ([first], [name for name in subject.draws()[0] if name != first]):
        draws = subject.draws(mapped)
        axes = {name: 0 if name in mapped else None for name in draws[0]}
        arrays = {name: stacked(draws)[name] if name in mapped else draws[0][name] for name in draws[0]}
        subject.same(jax.vmap(subject.pulled, (axes,))(arrays), subject.loop(draws))


def by_vmap_of_other_axes(subject: Subject) -> None:
    """The mapped axis last, in what goes in; second, in what comes out."""
    draws = subject.draws()
    axes = {name: np.ndim(value) for name, value in draws[0].items()}
    arrays = {name: np.stack([draw[name] for draw in draws], axis) for name, axis in axes.items()}
    got = jax.vmap(subject.call, (axes,), out_axes=1)(arrays)
    subject.same(got, jax.tree.map(lambda leaf: np.moveaxis(leaf, 0, 1), subject.loop(draws)[0]))


def by_vmap_of_grad(subject: Subject) -> None:
    draws = subject.draws()
    wanted = subject.loop(draws)
    subject.same(jax.vmap(subject.pulled)(stacked(draws)), wanted)
    subject.same(jax.jit(jax.vmap(subject.pulled))(stacked(draws)), wanted)


def by_grad_of_vmap(subject: Subject) -> None:
    """The first array mapped, the others shared: their gradients are sums."""
    first, *shared = subject.case.wrt
    draws = subject.draws([first])
    axes = {name: 0 if name == first else None for name in draws[0]}
    arrays = {**draws[0], first: np.stack([draw[first] for draw in draws])}
    one = subject.weights(subject.call, draws[0])
    every = tuple(np.broadcast_to(weight, (DRAWS, *weight.shape)) for weight in one)
    results, gradients = pulled(jax.vmap(subject.call, (axes,)), subject.case.wrt, arrays, every)
    wanted, own = subject.loop(draws)
    subject.same((results, gradients), (wanted, {**{name: own[name].sum(0) for name in shared}, first: own[first]}))


def by_checkpoint(subject: Subject) -> None:
    (arrays, *_) = subject.draws()
    wanted = jax.jit(subject.pulled)(arrays)
    kept = jax.checkpoint(subject.call)
    subject.same(
        jax.jit(partial(pulled, kept, subject.case.wrt))(arrays, subject.weights(subject.call, arrays)), wanted
    )


def by_scan(subject: Subject) -> None:
    """Layers, each fed by the one before, against the same layers written out; with gradients."""
    draws = subject.draws()
    first = subject.case.wrt[0]

    def layer(carry: Any, arrays: Arrays) -> tuple[Any, Any]:
        out = subject.call({**arrays, first: arrays[first] + carry.astype(arrays[first].dtype)})[0]
        return jnp.tanh(jnp.sum(out)).astype(carry.dtype), out

    def scanned(arrays: Arrays) -> Results:
        return jax.lax.scan(layer, jnp.float32(0), arrays)

    def unrolled(arrays: Arrays) -> Results:
        carry, outs = jnp.float32(0), []
        for place in range(DRAWS):
            carry, out = layer(carry, {name: array[place] for name, array in arrays.items()})
            outs.append(out)
        return carry, jnp.stack(outs)

    arrays = stacked(draws)
    ct = subject.weights(scanned, arrays)
    got, wanted = (jax.jit(partial(pulled, f, subject.case.wrt))(arrays, ct) for f in (scanned, unrolled))
    subject.same(got, wanted)


def batched_by_axes(subject: Subject, arrays: Arrays) -> tuple[str, ...]:
    """The arrays whose first axis always is the one that a mapped axis would go into."""
    axes = subject.registry.operation(subject.case.op).axes
    if axes is None or axes.vmap is None:
        return ()
    layouts = axes.layouts(options(subject.registry, subject.case))
    return tuple(n for n in arrays if layouts[n].place(axes.vmap, 1) == 0 and not layouts[n].is_shared(axes.vmap))


def by_shard_map(subject: Subject) -> None:
    """The batch over up to 8 devices; what has no batch is on all of them, and its gradient is the sum of theirs."""
    assert not has_one_cpu(), (
        f"{subject.check}: {subject.kernel} on {subject.case.name}: there is one device, and nothing to cut: "
        f"set {VARIABLE}={DEVICES} before JAX starts"
    )
    (arrays, *_) = subject.draws()
    count = 1 << min(3, len(jax.devices()).bit_length() - 1)
    mesh = jax.make_mesh((count,), ("batch",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    cut, whole = PartitionSpec("batch"), PartitionSpec()
    ct = subject.weights(subject.call, arrays)
    batched = subject.case.batched or batched_by_axes(subject, arrays)
    for name in batched:
        assert not arrays[name].shape[0] % count, (
            f"{subject.check}: {subject.case.name}: {name} has {arrays[name].shape[0]} along its first axis, which "
            f"{count} devices cannot share: take a multiple of {count}, or leave the check out of the case"
        )
    specs = {name: cut if name in batched else whole for name in arrays}
    outer = jax.shard_map(subject.call, mesh=mesh, in_specs=(specs,), out_specs=cut)
    inner = jax.shard_map(
        partial(pulled, subject.call, subject.case.wrt),
        mesh=mesh,
        in_specs=(specs, cut),
        out_specs=(cut, {name: specs[name] for name in subject.case.wrt}),
    )
    wanted = jax.jit(subject.pulled)(arrays)
    subject.same(jax.jit(partial(pulled, outer, subject.case.wrt))(arrays, ct), wanted)
    subject.same(jax.jit(inner)(arrays, ct), wanted)


def by_second_reverse(subject: Subject) -> None:
    """jacrev(jacrev) of all results, by value: against the reference in float64."""
    got = _second(subject, jax.jacrev, subject.backend, precise=False)
    subject.same(got, _second(subject, jax.jacrev, REFERENCE, precise=True))


def by_forward_mode(subject: Subject) -> None:
    """jacfwd(jacrev) of all results, and the derivative along a direction."""
    wanted = _second(subject, jax.jacrev, REFERENCE, precise=True)
    subject.same(_second(subject, jax.jacfwd, subject.backend, precise=False), wanted)
    _forward_is_backward(subject)


def _forward_is_backward(subject: Subject) -> None:
    """The derivative along a direction, weighted, is the gradient of the weighted sum along it."""
    arrays, moving = _moving(subject, precise=False)
    along = {name: drawn(subject.case.name, "along", name, shape=array.shape) for name, array in moving.items()}
    along = {name: along[name].astype(array.dtype) for name, array in moving.items()}
    results, tangents = jax.jvp(lambda m: subject.call({**arrays, **m}), (moving,), (along,))
    _, gradients = subject.pulled(arrays)
    ahead = _terms(zip(subject.weights(subject.call, arrays), tangents, strict=True))
    back = _terms((gradients[name], along[name]) for name in moving)
    # A sum whose terms cancel has no size that its error could be relative to: that of the terms is beside it.
    size = np.linalg.norm(back)
    subject.same((results, np.array([ahead.sum(), size])), (subject.call(arrays), np.array([back.sum(), size])))


def _terms(pairs: Iterable[tuple[Any, Any]]) -> np.ndarray:
    """The products of two times as many numbers, in float64."""
    return np.concatenate([(np.asarray(a, np.float64) * np.asarray(b, np.float64)).ravel() for a, b in pairs])


def _second(subject: Subject, derivative: Callable[..., Any], backend: str, precise: bool) -> Any:
    with jax.enable_x64(precise):
        arrays, moving = _moving(subject, precise)

        def call(m: Mapping[str, Any]) -> Results:
            return called(subject.registry, backend, subject.case, {**arrays, **m})

        return jax.tree.map(np.asarray, jax.jit(derivative(jax.jacrev(call)))(moving))


def _moving(subject: Subject, precise: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = inputs(subject.registry, subject.case, precise=precise)
    return arrays, {name: arrays[name] for name in subject.case.wrt}


TRANSFORMS: dict[str, Callable[[Subject], None]] = {
    "jit": by_jit,
    "vmap": by_vmap,
    "vmap_with_shared": by_vmap_with_shared,
    "vmap_of_other_axes": by_vmap_of_other_axes,
    "vmap_of_grad": by_vmap_of_grad,
    "grad_of_vmap": by_grad_of_vmap,
    "checkpoint": by_checkpoint,
    "scan": by_scan,
    "shard_map": by_shard_map,
    "jacrev_of_jacrev": by_second_reverse,
    "forward_mode": by_forward_mode,
}


def transforms(registry: Registry, kernel: str, case: Case, name: str) -> None:
    """The call under one of TRANSFORMS equals plain calls.

    >>> from ejkernel_testing._example import double
    >>> registry, kernel, case = double()
    >>> transforms(registry, kernel, case, "jit")
    """
    with jax.enable_x64(case.dtype == "float64"):
        TRANSFORMS[name](Subject(registry, kernel, case, f"transforms: {name}"))
