"""Programs of two calls of one kind, each differentiated in arrays of its own.

Calls of one kind share what JAX has traced of them. What a derivative depends on therefore has to be in the program,
and not in something that is kept beside it: this is where it shows.
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

from ejkernel_core import Registry

from ._case import Case
from ._checks import TOLERANCE, compare
from ._outcome import REFERENCE, Arrays, Function, Results, called, inputs, unit, weights

#: A program feeds results back into calls, or differentiates twice: its error is a few times that of one call.
ERROR_FACTOR = 5.0
Names = tuple[str, ...]
#: By name.
Gradients = Any


@attrs.frozen(eq=False)
class Program:
    """Two calls and a weighted sum of their results: a function of ``moving``, the arrays it is differentiated in.

    An array that a call is not differentiated in is a constant of that call's own.
    """

    call: Function
    constants: tuple[Arrays, Arrays]
    weights: tuple[Results, Results]
    wrt: tuple[Names, Names]

    def arguments(self, place: int, moving: Arrays) -> dict[str, Any]:
        """The arguments of one of the calls."""
        return {**self.constants[place], **{name: moving[name] for name in self.wrt[place]}}

    def loss(self, moving: Arrays, call: Function | None = None) -> Any:
        """The sum of both."""
        calls = (self.part(place, moving, call) for place in range(2))
        return sum(calls)

    def part(self, place: int, moving: Arrays, call: Function | None = None) -> Any:
        """What one of the calls contributes to it."""
        results = (call or self.call)(self.arguments(place, moving))
        return weighted(results, self.weights[place])

    def moving(self, arrays: Arrays) -> dict[str, Any]:
        """Those of the arrays that at least one of the calls is differentiated in."""
        return {name: arrays[name] for name in arrays if name in {*self.wrt[0], *self.wrt[1]}}


def weighted(results: Results, weights: Results) -> Any:
    """The sum of the finite results, times weights."""
    finite = (jnp.where(jnp.isfinite(r), r, 0) for r in results)
    return sum((r.astype(w.dtype) * w).sum() for r, w in zip(finite, weights, strict=True))


# -- one function a transformation: the gradients of a program, by name ---------------------------------------------


def by_eager(program: Program, moving: Arrays) -> Gradients:
    return jax.grad(program.loss)(moving)


def by_jit(program: Program, moving: Arrays) -> Gradients:
    return jax.jit(jax.grad(program.loss))(moving)


def by_vmap(program: Program, moving: Arrays) -> Gradients:
    """Of each element alone: the first is ``moving``."""
    elements = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2]), moving)
    return jax.tree.map(lambda leaf: leaf[0], jax.vmap(jax.grad(program.loss))(elements))


def by_grad_of_vmap(program: Program, moving: Arrays) -> Gradients:
    """Over the weights alone: what is differentiated is shared by all elements, and its gradient is their sum."""
    halves = jax.tree.map(lambda leaf: jnp.stack([leaf * 0.25, leaf * 0.75]), program.weights)

    def loss(moving: Arrays) -> Any:
        return jax.vmap(lambda weights: attrs.evolve(program, weights=weights).loss(moving))(halves).sum()

    return jax.grad(loss)(moving)


def by_remat(program: Program, moving: Arrays) -> Gradients:
    return jax.jit(jax.grad(jax.checkpoint(program.loss)))(moving)


def by_jitted_layer(program: Program, moving: Arrays) -> Gradients:
    """One function that the user has jitted, called twice."""
    layer = jax.jit(program.call)
    return jax.grad(partial(program.loss, call=layer))(moving)


def by_pullbacks(program: Program, moving: Arrays) -> Gradients:
    """Both made before either is used, and used in the other order."""
    pullbacks = [jax.vjp(partial(program.part, place), moving)[1] for place in range(2)]
    one = jnp.ones((), program.weights[0][0].dtype)
    (second,), (first,) = pullbacks[1](one), pullbacks[0](one)
    return jax.tree.map(jnp.add, first, second)


def by_turns(program: Program, moving: Arrays) -> Gradients:
    """Whole programs, one after the other and the first once more."""
    one, other = (jax.grad(partial(program.part, place)) for place in range(2))
    before = one(moving)
    gradients = jax.tree.map(jnp.add, other(moving), one(moving))
    again = jax.tree.map(jnp.add, before, jax.jit(other)(moving))
    return jax.tree.map(lambda a, b: (a + b) / 2, gradients, again)


#: The program's gradient is the sum of those of its calls.
LINEAR: dict[str, Callable[[Program, Arrays], Gradients]] = {
    "eager": by_eager,
    "jit": by_jit,
    "vmap": by_vmap,
    "grad_of_vmap": by_grad_of_vmap,
    "remat": by_remat,
    "jitted_layer": by_jitted_layer,
    "pullbacks": by_pullbacks,
    "turns": by_turns,
}


def by_scan(program: Program, moving: Arrays) -> Gradients:
    """A carry that is a constant at first, and depends on what is differentiated from the first step on."""
    count = sum(weights.size for part in program.weights for weights in part)

    def loss(moving: Arrays) -> Any:
        def step(carry: Any, _: None) -> tuple[Any, None]:
            carried = {name: array * carry.astype(array.dtype) for name, array in moving.items()}
            total = program.part(0, moving) + program.part(1, carried)
            # Neither it nor its derivative comes near 0, where a rounding would be all that is left.
            return 1 + jnp.tanh(total / math.sqrt(count)) / 2, None

        one = jnp.ones((), program.weights[0][0].dtype)
        return jax.lax.scan(step, one, length=2)[0]

    return jax.jit(jax.grad(loss))(moving)


def by_second_derivative(program: Program, moving: Arrays) -> Gradients:
    """Of a function of the gradient."""

    def along(moving: Arrays) -> Any:
        gradients = jax.grad(program.loss)(moving)
        return sum((jnp.sin(gradients[name]) * moving[name]).sum() for name in moving)

    return jax.jit(jax.grad(along))(moving)


#: The calls act on one another: compared with the same program of the reference.
NESTED: dict[str, Callable[[Program, Arrays], Gradients]] = {
    "scan": by_scan,
    "second_derivative": by_second_derivative,
}
PROGRAMS = {**LINEAR, **NESTED}
#: Which of the ordered pairs of sets each transformation is tried with: one; a share of them, in which every set comes
#: first once and second once, and which is another one for each transformation; or all.
PAIRS = ("one", "share", "all")


# -- the check -------------------------------------------------------------------------------------------------------


def subsets(case: Case) -> tuple[Names, ...]:
    """The sets of arrays that calls are differentiated in."""
    alone, every = tuple((name,) for name in case.wrt), tuple(case.wrt)
    but_one = (tuple(name for name in every if name != left) for left in every)
    return case.wrt_sets or tuple(dict.fromkeys((*alone, every, *(names for names in but_one if names))))


def chosen_pairs(case: Case, transform: str, pairs: str) -> list[tuple[Names, Names]]:
    """The ordered pairs of sets; one alone is of sets that have nothing in common."""
    sets, place, count = subsets(case), list(PROGRAMS).index(transform), len(PROGRAMS)
    if pairs == "all":
        return list(product(sets, sets))
    if pairs == "share":
        distances = range(place, len(sets), count) or [place % len(sets)]
        return [(one, sets[(i + distance) % len(sets)]) for distance in distances for i, one in enumerate(sets)]
    disjoint = [(one, other) for one, other in product(sets, sets) if not {*one} & {*other}] or [(sets[0], sets[0])]
    return [disjoint[place * len(disjoint) // count]]


def programs(
    registry: Registry, kernel: str, case: Case, transform: str, pairs: str = "all", roundings: float = 1.0
) -> None:
    """Two calls in one program, under one of PROGRAMS, have the gradients that the reference has, whatever each call is
    differentiated in.

    >>> from ejkernel_testing._example import double
    >>> registry, kernel, case = double()
    >>> programs(registry, kernel, case, "jit")
    """
    backend = kernel.rpartition(".")[2]
    # Each program is compiled for one run, and what is looked at is what JAX traces.
    with jax.enable_x64(case.dtype == "float64"), without_optimization():
        call, plain = (partial(called, registry, name, case) for name in (backend, REFERENCE))
        draws = inputs(registry, case, 0), inputs(registry, case, 1)
        first, second = (weights(f"{case.name}, {place}", plain, draw) for place, draw in enumerate(draws))
        made = Program(call, draws, (first, second), ((), ()))
        allowed = ERROR_FACTOR * (TOLERANCE.get(case.dtype) or roundings * unit(case.dtype))
        differ = partial(compare, f"programs: {transform}", kernel, case, allowed=allowed)
        check(made, plain, transform, chosen_pairs(case, transform, pairs), differ)


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
    plain: Function,
    transform: str,
    pairs: Iterable[tuple[Names, Names]],
    compare: Callable[[str, Any, Any], None],
) -> None:
    """Compare the gradients of the program for each pair with those of ``plain`` in its place."""
    wrong = []
    exact = jax.jit(partial(_exact, plain), static_argnames="names")
    for pair in pairs:
        one = attrs.evolve(program, wrt=pair)
        moving = one.moving(program.constants[0])
        gradients = PROGRAMS[transform](one, moving)
        if transform in NESTED:
            wanted = NESTED[transform](attrs.evolve(one, call=plain), moving)
        else:
            calls = [exact(one.arguments(i, moving), one.weights[i], names=pair[i]) for i in range(2)]
            wanted = {name: sum(call.get(name, 0) for call in calls) for name in moving}
        for name in moving:
            try:
                compare(f"gradient of {name}", np.asarray(gradients[name]), np.asarray(wanted[name]))
            except AssertionError as fault:
                wrong.append(f"{' and '.join(map('+'.join, pair))}: {fault}")
                break
    assert not wrong, f"{len(wrong)} pairs of sets of differentiated arrays are wrong:\n" + "\n".join(wrong)


def _exact(plain: Function, arguments: Arrays, weights: Results, names: Names) -> Gradients:
    moving = {name: arguments[name] for name in names}
    return jax.grad(lambda moving: weighted(plain({**arguments, **moving}), weights))(moving)
