"""Programs that call one kernel twice, each call differentiated with respect to other arrays.

JAX caches what it traces of a call. So all that a derivative depends on has to be in the program, and not in state
outside of it. These programs find such state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Example, Registry

from ._checks import TOLERANCE, compare
from ._outcome import REFERENCE, Arrays, Function, Results, example_results, inputs, machine_epsilon, weights

#: A program feeds results back into calls, or differentiates twice: its error is a few times that of one call.
ERROR_FACTOR = 5.0
Names = tuple[str, ...]
#: By name.
Gradients = Any


@attrs.frozen(eq=False)
class Program:
    """Two calls and a weighted sum of their results: a function of the arrays that the calls are differentiated with
    respect to, ``primals``.

    Every other array of a call is a constant of that call.
    """

    call: Function
    constants: tuple[Arrays, Arrays]
    weights: tuple[Results, Results]
    wrt: tuple[Names, Names]

    def arguments(self, index: int, primals: Arrays) -> dict[str, Any]:
        """The arguments of one of the calls."""
        return {**self.constants[index], **{name: primals[name] for name in self.wrt[index]}}

    def loss(self, primals: Arrays, call: Function | None = None) -> Any:
        """The weighted sum of the results of both calls."""
        return sum(self.loss_of_call(index, primals, call) for index in range(2))

    def loss_of_call(self, index: int, primals: Arrays, call: Function | None = None) -> Any:
        """The weighted sum of the results of one of the calls."""
        results = (call or self.call)(self.arguments(index, primals))
        return weighted_sum(results, self.weights[index])

    def primals(self, arrays: Arrays) -> dict[str, Any]:
        """The arrays that at least one of the calls is differentiated with respect to."""
        return {name: arrays[name] for name in arrays if name in {*self.wrt[0], *self.wrt[1]}}


def weighted_sum(results: Results, weights: Results) -> Any:
    """The sum of the finite results, times weights."""
    finite_results = (jnp.where(jnp.isfinite(r), r, 0) for r in results)
    return sum((r.astype(w.dtype) * w).sum() for r, w in zip(finite_results, weights, strict=True))


# -- one function for each transformation: the gradients of a program, by name --------------------------------------


def gradients_without_jit(program: Program, primals: Arrays) -> Gradients:
    return jax.grad(program.loss)(primals)


def gradients_by_jit(program: Program, primals: Arrays) -> Gradients:
    return jax.jit(jax.grad(program.loss))(primals)


def gradients_by_vmap(program: Program, primals: Arrays) -> Gradients:
    """Those of the first element of a batch, which is ``primals``."""
    elements = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2]), primals)
    return jax.tree.map(lambda leaf: leaf[0], jax.vmap(jax.grad(program.loss))(elements))


def gradients_of_vmap(program: Program, primals: Arrays) -> Gradients:
    """Only the weights are mapped: all elements share the primals, whose gradient is a sum over the elements."""
    weight_batch = jax.tree.map(lambda leaf: jnp.stack([leaf * 0.25, leaf * 0.75]), program.weights)

    def loss(primals: Arrays) -> Any:
        return jax.vmap(lambda weights: attrs.evolve(program, weights=weights).loss(primals))(weight_batch).sum()

    return jax.grad(loss)(primals)


def gradients_of_checkpoint(program: Program, primals: Arrays) -> Gradients:
    return jax.jit(jax.grad(jax.checkpoint(program.loss)))(primals)


def gradients_of_jitted_layer(program: Program, primals: Arrays) -> Gradients:
    """A function that the user has jitted, called twice."""
    layer = jax.jit(program.call)
    return jax.grad(partial(program.loss, call=layer))(primals)


def gradients_by_pullbacks(program: Program, primals: Arrays) -> Gradients:
    """Both pullbacks are made before they are used, in the reverse order."""
    pullbacks = [jax.vjp(partial(program.loss_of_call, index), primals)[1] for index in range(2)]
    one = jnp.ones((), program.weights[0][0].dtype)
    (second,), (first,) = pullbacks[1](one), pullbacks[0](one)
    return jax.tree.map(jnp.add, first, second)


def gradients_in_turns(program: Program, primals: Arrays) -> Gradients:
    """Each call in a program of its own: the first, the second, and the first again."""
    first, second = (jax.grad(partial(program.loss_of_call, index)) for index in range(2))
    before = first(primals)
    gradients = jax.tree.map(jnp.add, second(primals), first(primals))
    repeated_gradients = jax.tree.map(jnp.add, before, jax.jit(second)(primals))
    return jax.tree.map(lambda a, b: (a + b) / 2, gradients, repeated_gradients)


#: Transformations under which the program's gradient is the sum of the gradients of its calls.
LINEAR: dict[str, Callable[[Program, Arrays], Gradients]] = {
    "eager": gradients_without_jit,
    "jit": gradients_by_jit,
    "vmap": gradients_by_vmap,
    "grad_of_vmap": gradients_of_vmap,
    "remat": gradients_of_checkpoint,
    "jitted_layer": gradients_of_jitted_layer,
    "pullbacks": gradients_by_pullbacks,
    "turns": gradients_in_turns,
}


def gradients_of_scan(program: Program, primals: Arrays) -> Gradients:
    """The carry is a constant at first, and depends on the primals from the first step on."""
    count = sum(weights.size for weights_of_call in program.weights for weights in weights_of_call)

    def loss(primals: Arrays) -> Any:
        def step(carry: Any, _: None) -> tuple[Any, None]:
            scaled_primals = {name: array * carry.astype(array.dtype) for name, array in primals.items()}
            total = program.loss_of_call(0, primals) + program.loss_of_call(1, scaled_primals)
            # Neither the carry nor its derivative comes near 0, where only roundings would be left.
            return 1 + jnp.tanh(total / math.sqrt(count)) / 2, None

        one = jnp.ones((), program.weights[0][0].dtype)
        return jax.lax.scan(step, one, length=2)[0]

    return jax.jit(jax.grad(loss))(primals)


def second_derivatives(program: Program, primals: Arrays) -> Gradients:
    """The gradients of a function of the gradients."""

    def loss(primals: Arrays) -> Any:
        gradients = jax.grad(program.loss)(primals)
        return sum((jnp.sin(gradients[name]) * primals[name]).sum() for name in primals)

    return jax.jit(jax.grad(loss))(primals)


#: Transformations under which the calls depend on each other: compared with the same program of the reference.
NESTED: dict[str, Callable[[Program, Arrays], Gradients]] = {
    "scan": gradients_of_scan,
    "second_derivative": second_derivatives,
}
PROGRAMS = {**LINEAR, **NESTED}
#: The ordered pairs of sets that each transformation is tried with: one; a share of them, in which every set is first
#: once and second once, and which differs between transformations; or all.
PAIRS = ("one", "share", "all")


# -- the check -------------------------------------------------------------------------------------------------------


def wrt_sets(example: Example) -> tuple[Names, ...]:
    """The sets of arrays that calls are differentiated with respect to."""
    all_names, single_names = tuple(example.wrt), tuple((name,) for name in example.wrt)
    all_but_one = (tuple(other for other in all_names if other != name) for name in all_names)
    return example.wrt_sets or tuple(dict.fromkeys((*single_names, all_names, *filter(None, all_but_one))))


def wrt_pairs(example: Example, transform: str, pairs: str) -> list[tuple[Names, Names]]:
    """Ordered pairs of sets, for one of PAIRS. If it is "one", the sets are disjoint."""
    sets, index, count = wrt_sets(example), list(PROGRAMS).index(transform), len(PROGRAMS)
    if pairs == "all":
        return list(product(sets, sets))
    if pairs == "share":
        offsets = range(index, len(sets), count) or [index % len(sets)]
        return [(first, sets[(i + offset) % len(sets)]) for offset in offsets for i, first in enumerate(sets)]
    disjoint_pairs = [(first, second) for first, second in product(sets, sets) if not {*first} & {*second}]
    disjoint_pairs = disjoint_pairs or [(sets[0], sets[0])]
    return [disjoint_pairs[index * len(disjoint_pairs) // count]]


def programs(
    registry: Registry, kernel: str, example: Example, transform: str, pairs: str = "all", roundings: float = 1.0
) -> None:
    """A program of two calls, under one of PROGRAMS, has the reference's gradients, whichever arrays each call is
    differentiated with respect to.

    >>> from ejkernel_testing._double import double
    >>> registry, kernel, example = double()
    >>> programs(registry, kernel, example, "jit")
    """
    backend = kernel.rpartition(".")[2]
    # Each program is compiled for one run, and the check is of what JAX traces.
    with jax.enable_x64(example.dtype == "float64"), without_optimization():
        call, reference = (partial(example_results, registry, name, example) for name in (backend, REFERENCE))
        draws = inputs(registry, example, 0), inputs(registry, example, 1)
        first, second = (weights(f"{example.name}, {index}", reference, draw) for index, draw in enumerate(draws))
        program = Program(call, draws, (first, second), ((), ()))
        tolerance = ERROR_FACTOR * (TOLERANCE.get(example.dtype) or roundings * machine_epsilon(example.dtype))
        compare_arrays = partial(compare, f"programs: {transform}", kernel, example, tolerance=tolerance)
        check(program, reference, transform, wrt_pairs(example, transform, pairs), compare_arrays)


@contextmanager
def without_optimization() -> Iterator[None]:
    """XLA compiles twice as fast."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def check(
    program: Program,
    reference: Function,
    transform: str,
    pairs: Iterable[tuple[Names, Names]],
    compare: Callable[[str, Any, Any], None],
) -> None:
    """Compare the gradients of the program, for each pair, with those of the reference in its place."""
    failures = []
    reference_gradients = jax.jit(partial(_reference_gradients, reference), static_argnames="names")
    for pair in pairs:
        pair_program = attrs.evolve(program, wrt=pair)
        primals = pair_program.primals(program.constants[0])
        gradients = PROGRAMS[transform](pair_program, primals)
        if transform in NESTED:
            expected = NESTED[transform](attrs.evolve(pair_program, call=reference), primals)
        else:
            arguments = [pair_program.arguments(i, primals) for i in range(2)]
            calls = [reference_gradients(arguments[i], program.weights[i], names=pair[i]) for i in range(2)]
            expected = {name: sum(call.get(name, 0) for call in calls) for name in primals}
        for name in primals:
            try:
                compare(f"gradient of {name}", np.asarray(gradients[name]), np.asarray(expected[name]))
            except AssertionError as error:
                failures.append(f"{' and '.join(map('+'.join, pair))}: {error}")
                break
    assert not failures, (
        f"gradients are wrong for {len(failures)} pairs of sets of differentiated arrays:\n" + "\n".join(failures)
    )


def _reference_gradients(reference: Function, arguments: Arrays, weights: Results, names: Names) -> Gradients:
    primals = {name: arguments[name] for name in names}
    return jax.grad(lambda primals: weighted_sum(reference({**arguments, **primals}), weights))(primals)
