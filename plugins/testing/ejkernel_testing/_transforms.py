"""All ways in which JAX transforms a call. The results equal those of plain calls, or of a Python loop of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel_core import Example, Registry

from ._checks import TOLERANCE, compare
from ._outcome import (
    REFERENCE,
    Arrays,
    Results,
    example_results,
    inputs,
    machine_epsilon,
    options,
    random_array,
    results_and_gradients,
    weights,
)
from ._processes import DEVICES, VARIABLE, has_one_cpu
from ._programs import weighted_sum, without_optimization

DRAWS = 3


@attrs.frozen(eq=False)
class Subject:
    """A kernel and an example to transform, the name of the check, and how many roundings to 16 bits a second
    derivative may have.
    """

    registry: Registry
    kernel: str
    example: Example
    check: str
    roundings: float = 1.0

    @property
    def backend(self) -> str:
        return self.kernel.rpartition(".")[2]

    def call(self, arrays: Arrays) -> Results:
        return example_results(self.registry, self.backend, self.example, arrays)

    def draws(self, mapped_names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The arrays of several draws. Those that are not mapped are the same in all."""
        draws = [inputs(self.registry, self.example, draw) for draw in range(DRAWS)]
        if mapped_names is None:
            return draws
        return [{name: (draw if name in mapped_names else draws[0])[name] for name in draw} for draw in draws]

    def results_and_gradients(self, arrays: Arrays) -> Any:
        return results_and_gradients(self.call, self.example.wrt, arrays, self.weights(self.call, arrays))

    def weights(self, function: Callable[..., Results], arrays: Arrays) -> Results:
        return weights(self.example.name, function, arrays)

    def loop(self, draws: Sequence[Arrays]) -> Any:
        """Results and gradients of plain calls, stacked."""
        jitted = jax.jit(self.results_and_gradients)
        return stack([jitted(arrays) for arrays in draws])

    def division(self, arrays: Arrays) -> str | None:
        """The axes that a call on these arrays divides over devices, as a text; None if each computes all of it."""
        arguments = {**arrays, **options(self.registry, self.example)}
        division = self.registry.explain(self.example.op, **arguments, backend=self.backend).division
        if division is None or division.shards is None or division.shards.is_whole:
            return None
        return str(division.shards)

    def check_equal(self, actual: Any, expected: Any, prefix: str = "", roundings: float = 1.0) -> None:
        dtype = self.example.dtype
        tolerance = TOLERANCE.get(dtype) or roundings * machine_epsilon(dtype)
        for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
            name = prefix + jax.tree_util.keystr(path)
            compare(self.check, self.kernel, self.example, name, np.asarray(a), np.asarray(e), tolerance)


def stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def check_jit(subject: Subject) -> None:
    """Plain calls, not differentiated, inside and outside of a jitted function."""
    (arrays, *_) = subject.draws()
    expected, _ = jax.jit(subject.results_and_gradients)(arrays)
    subject.check_equal(subject.call(arrays), expected)
    subject.check_equal(jax.jit(subject.call)(arrays), expected)


def check_vmap(subject: Subject) -> None:
    """Over all arrays."""
    draws = subject.draws()
    subject.check_equal(jax.vmap(subject.call)(stack(draws)), subject.loop(draws)[0])


def check_vmap_with_shared(subject: Subject) -> None:
    """Over the first array only, and over all but the first. The elements share the other arrays."""
    first = subject.example.wrt[0]
    for mapped_names in ([first], [name for name in subject.draws()[0] if name != first]):
        draws = subject.draws(mapped_names)
        axes = {name: 0 if name in mapped_names else None for name in draws[0]}
        arrays = {name: stack(draws)[name] if name in mapped_names else draws[0][name] for name in draws[0]}
        subject.check_equal(jax.vmap(subject.results_and_gradients, (axes,))(arrays), subject.loop(draws))


def check_vmap_of_other_axes(subject: Subject) -> None:
    """The mapped axis is the last of the arrays, and the second of the results."""
    draws = subject.draws()
    axes = {name: np.ndim(value) for name, value in draws[0].items()}
    arrays = {name: np.stack([draw[name] for draw in draws], axis) for name, axis in axes.items()}
    actual = jax.vmap(subject.call, (axes,), out_axes=1)(arrays)
    subject.check_equal(actual, jax.tree.map(lambda leaf: np.moveaxis(leaf, 0, 1), subject.loop(draws)[0]))


def check_vmap_of_grad(subject: Subject) -> None:
    draws = subject.draws()
    expected = subject.loop(draws)
    subject.check_equal(jax.vmap(subject.results_and_gradients)(stack(draws)), expected)
    subject.check_equal(jax.jit(jax.vmap(subject.results_and_gradients))(stack(draws)), expected)


def check_grad_of_vmap(subject: Subject) -> None:
    """The first array is mapped. The others are shared, and their gradients are sums."""
    first, *shared_names = subject.example.wrt
    draws = subject.draws([first])
    axes = {name: 0 if name == first else None for name in draws[0]}
    arrays = {**draws[0], first: np.stack([draw[first] for draw in draws])}
    ct = tuple(np.broadcast_to(weight, (DRAWS, *weight.shape)) for weight in subject.weights(subject.call, draws[0]))
    actual = results_and_gradients(jax.vmap(subject.call, (axes,)), subject.example.wrt, arrays, ct)
    results, gradients = subject.loop(draws)
    sums = {name: gradients[name].sum(0) for name in shared_names}
    subject.check_equal(actual, (results, {**sums, first: gradients[first]}))


def check_checkpoint(subject: Subject) -> None:
    (arrays, *_) = subject.draws()
    expected = jax.jit(subject.results_and_gradients)(arrays)
    function = partial(results_and_gradients, jax.checkpoint(subject.call), subject.example.wrt)
    subject.check_equal(jax.jit(function)(arrays, subject.weights(subject.call, arrays)), expected)


def check_scan(subject: Subject) -> None:
    """Layers, each of which gets the result of the one before, with gradients. Compared with a Python loop of them."""
    draws = subject.draws()
    first = subject.example.wrt[0]

    def layer(carry: Any, arrays: Arrays) -> tuple[Any, Any]:
        out = subject.call({**arrays, first: arrays[first] + carry.astype(arrays[first].dtype)})[0]
        return jnp.tanh(jnp.sum(out)).astype(carry.dtype), out

    def scan(arrays: Arrays) -> Results:
        return jax.lax.scan(layer, jnp.float32(0), arrays)

    def loop(arrays: Arrays) -> Results:
        carry, outs = jnp.float32(0), []
        for index in range(DRAWS):
            carry, out = layer(carry, {name: array[index] for name, array in arrays.items()})
            outs.append(out)
        return carry, jnp.stack(outs)

    arrays = stack(draws)
    ct = subject.weights(scan, arrays)
    actual, expected = (
        jax.jit(partial(results_and_gradients, function, subject.example.wrt))(arrays, ct) for function in (scan, loop)
    )
    subject.check_equal(actual, expected)


def batched_by_axes(subject: Subject, arrays: Arrays) -> tuple[str, ...]:
    """The arrays whose first axis is the one that ``vmap`` folds a mapped axis into."""
    axes = subject.registry.operation(subject.example.op).axes
    if axes is None or axes.vmap is None:
        return ()
    layouts = axes.layouts(options(subject.registry, subject.example))
    return tuple(n for n in arrays if layouts[n].dimension(axes.vmap, 1) == 0 and not layouts[n].is_shared(axes.vmap))


def check_shard_map(subject: Subject) -> None:
    """The batch is sharded over up to 8 devices. Arrays without a batch are replicated, and their gradients are sums
    over the devices.
    """
    prefix = f"{subject.check}: {subject.kernel} on {subject.example.name}"
    assert not has_one_cpu(), (
        f"{prefix}: there is one device, so nothing can be sharded: set {VARIABLE}={DEVICES} before JAX starts"
    )
    (arrays, *_) = subject.draws()
    count = 1 << min(3, len(jax.devices()).bit_length() - 1)
    mesh = jax.make_mesh((count,), ("batch",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    ct = subject.weights(subject.call, arrays)
    batched_names = subject.example.batched or batched_by_axes(subject, arrays)
    for name in batched_names:
        assert not arrays[name].shape[0] % count, (
            f"{prefix}: the first axis of {name} has size {arrays[name].shape[0]}, which {count} devices cannot share: "
            f"use a multiple of {count}, or leave the check out of the example"
        )
    specs = {name: PartitionSpec("batch") if name in batched_names else PartitionSpec() for name in arrays}
    call = jax.shard_map(subject.call, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec("batch"))
    gradients_of_shards = jax.shard_map(
        partial(results_and_gradients, subject.call, subject.example.wrt),
        mesh=mesh,
        in_specs=(specs, PartitionSpec("batch")),
        out_specs=(PartitionSpec("batch"), {name: specs[name] for name in subject.example.wrt}),
    )
    expected = jax.jit(subject.results_and_gradients)(arrays)
    subject.check_equal(jax.jit(partial(results_and_gradients, call, subject.example.wrt))(arrays, ct), expected)
    subject.check_equal(jax.jit(gradients_of_shards)(arrays, ct), expected)


def check_sharding(subject: Subject) -> None:
    """Every axis of every array that the operation divides over devices is sharded over two of them, one at a time."""
    prefix = f"{subject.check}: {subject.kernel} on {subject.example.name}"
    assert not has_one_cpu(), (
        f"{prefix}: there is one device, so nothing can be sharded: set {VARIABLE}={DEVICES} before JAX starts"
    )
    (arrays, *_) = subject.draws()
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    replicated = {name: jax.device_put(array, NamedSharding(mesh, PartitionSpec())) for name, array in arrays.items()}
    run = jax.jit(partial(results_and_gradients, subject.call, subject.example.wrt))
    ct = subject.weights(subject.call, arrays)
    expected = jax.jit(subject.results_and_gradients)(arrays)
    divisions = set()
    for name, array in replicated.items():
        for axis in (axis for axis, size in enumerate(array.shape) if size % 2 == 0):
            spec = PartitionSpec(*(None,) * axis, "devices")
            sharded = {**replicated, name: jax.device_put(array, NamedSharding(mesh, spec))}
            division = subject.division(sharded)
            if division is None or division in divisions:  # gathered, or the same shards as those of another array
                continue
            divisions.add(division)
            subject.check_equal(run(sharded, ct), expected, f"axis {axis} of {name} sharded: ")


def check_sharded_derivatives(subject: Subject) -> None:
    """Second derivatives and tangents, where all arrays are sharded along two axes: along their first and second one,
    along their third and fourth one, and so on. Some of these every device needs whole.
    """
    prefix = f"{subject.check}: {subject.kernel} on {subject.example.name}"
    assert not has_one_cpu(), (
        f"{prefix}: there is one device, so nothing can be sharded: set {VARIABLE}={DEVICES} before JAX starts"
    )
    (arrays, *_) = subject.draws()
    shape = (2, 2 if len(jax.devices()) > 3 else 1)
    devices = jax.devices()[: math.prod(shape)]
    mesh = jax.make_mesh(shape, ("rows", "columns"), axis_types=(AxisType.Explicit,) * 2, devices=devices)
    run = jax.jit(partial(_sharded_derivatives, subject, subject.weights(subject.call, arrays)))
    with without_optimization():  # each program runs once
        expected = run(arrays)
        for axis in range(0, max(map(np.ndim, arrays.values())), 2):
            sharded = {name: _sharded(array, axis, mesh) for name, array in arrays.items()}
            subject.check_equal(run(sharded), expected, f"axes {axis} and {axis + 1} of all arrays sharded: ")


def _sharded(array: Any, axis: int, mesh: Any) -> Any:
    """The array, sharded along this axis and the next one, where two devices can share it."""
    sizes = zip(mesh.axis_names, np.shape(array)[axis:], strict=False)
    names = [name if size % 2 == 0 else None for name, size in sizes]
    spec = PartitionSpec(*(None,) * axis, *names) if names else PartitionSpec()
    return jax.device_put(array, NamedSharding(mesh, spec))


def _sharded_derivatives(subject: Subject, weights: Results, arrays: Arrays) -> Any:
    primals = {name: arrays[name] for name in subject.example.wrt}
    direction = jax.tree.map(jnp.cos, primals)

    def call(primals: Arrays) -> Results:
        return tuple(r for r in subject.call({**arrays, **primals}) if jnp.issubdtype(r.dtype, jnp.inexact))

    def gradients(primals: Arrays) -> Any:
        return jax.grad(lambda primals: weighted_sum(subject.call({**arrays, **primals}), weights))(primals)

    def along(primals: Arrays) -> Any:
        return sum((gradient * direction[name]).sum() for name, gradient in gradients(primals).items())

    return {
        "second reverse": jax.grad(along)(primals),
        "forward of reverse": jax.jvp(gradients, (primals,), (direction,))[1],
        "tangents": jax.jvp(call, (primals,), (direction,))[1],
    }


def check_second_reverse(subject: Subject) -> None:
    """jacrev(jacrev) of all results equals the reference's in float64."""
    actual = _second_derivatives(subject, jax.jacrev, subject.backend, is_float64=False)
    expected = _second_derivatives(subject, jax.jacrev, REFERENCE, is_float64=True)
    subject.check_equal(actual, expected, roundings=subject.roundings)


def check_forward_mode(subject: Subject) -> None:
    """jacfwd(jacrev) of all results, and the derivative along a direction."""
    expected = _second_derivatives(subject, jax.jacrev, REFERENCE, is_float64=True)
    subject.check_equal(_second_derivatives(subject, jax.jacfwd, subject.backend, is_float64=False), expected)
    _check_jvp(subject)


def _check_jvp(subject: Subject) -> None:
    """The weighted sum of the derivative along a direction is the gradient of the weighted sum along that direction."""
    arrays, primals = _arrays_and_primals(subject, is_float64=False)
    direction = {
        name: random_array(subject.example.name, "along", name, shape=array.shape).astype(array.dtype)
        for name, array in primals.items()
    }
    results, tangents = jax.jvp(lambda primals: subject.call({**arrays, **primals}), (primals,), (direction,))
    _, gradients = jax.jit(subject.results_and_gradients)(arrays)
    weights = subject.weights(subject.call, arrays)
    forward = _products((w, t) for w, t in zip(weights, tangents, strict=True) if t.dtype != jax.dtypes.float0)
    reverse = _products((gradients[name], direction[name]) for name in primals)
    # The error of a sum is relative to the size of its terms, as they may cancel: so their norm is beside the sum.
    norm = np.linalg.norm(reverse)
    actual, expected = (np.array([terms.sum(), norm]) for terms in (forward, reverse))
    subject.check_equal((results, actual), (subject.call(arrays), expected))


def _products(pairs: Iterable[tuple[Any, Any]]) -> np.ndarray:
    """The products of the entries of each pair of arrays, in float64."""
    return np.concatenate([(np.asarray(a, np.float64) * np.asarray(b, np.float64)).ravel() for a, b in pairs])


def _second_derivatives(subject: Subject, derivative: Callable[..., Any], backend: str, is_float64: bool) -> Any:
    with jax.enable_x64(is_float64):
        arrays, primals = _arrays_and_primals(subject, is_float64)

        def call(primals: Mapping[str, Any]) -> Results:
            results = example_results(subject.registry, backend, subject.example, {**arrays, **primals})
            return tuple(result for result in results if jnp.issubdtype(result.dtype, jnp.inexact))

        return jax.tree.map(np.asarray, jax.jit(derivative(jax.jacrev(call)))(primals))


def _arrays_and_primals(subject: Subject, is_float64: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = inputs(subject.registry, subject.example, is_float64=is_float64)
    return arrays, {name: arrays[name] for name in subject.example.wrt}


TRANSFORMS: dict[str, Callable[[Subject], None]] = {
    "jit": check_jit,
    "vmap": check_vmap,
    "vmap_with_shared": check_vmap_with_shared,
    "vmap_of_other_axes": check_vmap_of_other_axes,
    "vmap_of_grad": check_vmap_of_grad,
    "grad_of_vmap": check_grad_of_vmap,
    "checkpoint": check_checkpoint,
    "scan": check_scan,
    "shard_map": check_shard_map,
    "sharding": check_sharding,
    "sharded_derivatives": check_sharded_derivatives,
    "jacrev_of_jacrev": check_second_reverse,
    "forward_mode": check_forward_mode,
}

#: Those that need several devices.
SEVERAL_DEVICES = ("shard_map", "sharding", "sharded_derivatives")


def transforms(registry: Registry, kernel: str, example: Example, name: str, roundings: float = 1.0) -> None:
    """The call under one of TRANSFORMS equals plain calls.

    ``roundings``: how many times the error of rounding to 16 bits is allowed in a second derivative.

    >>> from ejkernel_testing._double import double
    >>> registry, kernel, example = double()
    >>> transforms(registry, kernel, example, "jit")
    """
    with jax.enable_x64(example.dtype == "float64"):
        TRANSFORMS[name](Subject(registry, kernel, example, f"transforms: {name}", roundings))
