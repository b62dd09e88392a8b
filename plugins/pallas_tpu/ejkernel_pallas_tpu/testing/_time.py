"""The estimated times of our kernels and of their peers, by the same compiler, with operands in the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Example, Registry, Unsupported

from ._compiler import Compiler, Program, base_name, in_main_memory
from ._kernels import Call, Kernel
from ._peers import Peer
from ._prefetch import Words, prefetched_scalars
from ._registry import interpreted_registry
from ._schedule import Estimate, estimate

FORWARD, WITH_GRADIENTS = "forward", "forward + backward"
Function = Callable[[Mapping[str, Any]], Any]
#: From a registry to a function of the arrays. Peers use no registry.
Implementation = Callable[[Registry], Function]


@attrs.frozen
class Row:
    """One implementation of one call: its quickest variant.

    Times are sums over its Pallas kernels; over all operations of an implementation in plain JAX.
    """

    name: str
    variant: str
    microseconds: float
    bundles: int
    spills: int
    vmem: int
    bytes: int
    #: The least speed of ours, relative to this implementation; None in our own row.
    minimum_ratio: float | None


@attrs.frozen
class Comparison:
    """Our kernels and their peers, for one call in one direction."""

    call: str
    direction: str
    ours: Row
    peers: tuple[Row, ...]

    def is_too_slow(self, peer: Row) -> bool:
        return self.ours.microseconds * (peer.minimum_ratio or 0.0) > peer.microseconds


def comparisons(compiler: Compiler, generation: str, kernels: Iterable[Kernel], text: str = "") -> Iterator[Comparison]:
    """One for each direction of each example to be estimated that has this text in its name."""
    kernels = tuple(kernels)
    for kernel in kernels:
        for example in kernel.examples("estimate"):
            if text in example.name and not _is_refused(kernel, example, compiler.device_kind(generation)):
                yield from _Estimator(compiler, generation, kernels, kernel, example).comparisons()


def _is_refused(kernel: Kernel, example: Example, device_kind: str) -> bool:
    inv = kernel.invocation(Call(example.name, kernel.op, example.abstract()), device_kind)
    try:
        kernel.module.heuristic_cfg(inv)
    except Unsupported:
        return True
    return False


@attrs.frozen(eq=False)
class _Estimator:
    """All that the rows of one example share."""

    compiler: Compiler
    generation: str
    kernels: tuple[Kernel, ...]
    kernel: Kernel
    example: Example

    def comparisons(self) -> Iterator[Comparison]:
        peers = tuple(getattr(self.kernel.module, "peers", lambda example: ())(self.example))
        backward = self.kernel.registry.operation(self.kernel.op).backward
        has_backward = bool(self.example.wrt) and any(kernel.op == backward for kernel in self.kernels)
        for wrt in ((), self.example.wrt) if has_backward else ((),):
            ours = self._row("", self._ours, wrt, None)
            rows = [self._peer_row(peer, wrt) for peer in peers]
            direction = WITH_GRADIENTS if wrt else FORWARD
            yield Comparison(self.example.name, direction, ours, tuple(row for row in rows if row is not None))

    def _ours(self, registry: Registry) -> Function:
        options = {name: value for name, value in self.example.abstract().items() if not _is_array(value)}
        return lambda arrays: registry.call(self.kernel.op, **arrays, **options, backend=self.kernel.backend)

    def _peer_row(self, peer: Peer, wrt: tuple[str, ...]) -> Row | None:
        """The row of the quickest variant, None if the peer does not compile."""
        ratio = peer.minimum_ratio_with_gradients if wrt else peer.minimum_ratio
        rows = []
        for variant, function in peer.variants.items():
            if wrt or variant not in peer.only_with_gradients:
                try:
                    rows.append(self._row(variant, _without_registry(function), wrt, ratio, peer.name))
                except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError):
                    continue  # its blocks do not fit, or it does not support the head dim
        return min(rows, key=lambda row: row.microseconds, default=None)

    def _row(
        self,
        variant: str,
        implementation: Implementation,
        wrt: tuple[str, ...],
        ratio: float | None,
        name: str = "ours",
    ) -> Row:
        mesh = self.compiler.mesh(self.generation)
        arrays = {name: value for name, value in self.example.abstract().items() if _is_array(value)}
        lowered = self.compiler.lower(_with_gradients(implementation(self.kernel.registry), wrt), arrays, mesh=mesh)
        program = self.compiler.compile(lowered, in_main_memory(self.generation))
        parts = self._estimates(program, implementation, wrt, arrays)
        return Row(
            name=name,
            variant=variant,
            microseconds=sum(part.microseconds for part in parts),
            bundles=sum(part.bundles for part in parts),
            spills=sum(part.spills for part in parts),
            vmem=max((program.vmem(kernel) for kernel in program.kernels), default=0),
            bytes=sum(part.bytes for part in parts),
            minimum_ratio=ratio,
        )

    def _estimates(
        self, program: Program, implementation: Implementation, wrt: tuple[str, ...], arrays: Mapping[str, Any]
    ) -> list[Estimate]:
        """Those of the Pallas kernels of a program; of all operations if it is plain JAX."""
        if not program.kernels:
            return [estimate(program.folder, name, [], self.generation) for name in program.operations]
        modules = {kernel.name: kernel.module for kernel in self.kernels}
        interpreted = interpreted_registry(modules, device_kind=self.compiler.device_kind(self.generation))
        known = {**arrays, **self._integers()}
        scalars = prefetched_scalars(_with_gradients(implementation(interpreted), wrt), known)
        return [
            estimate(program.folder, kernel, _scalars_of(kernel, scalars), self.generation)
            for kernel in program.kernels
        ]

    def _integers(self) -> dict[str, Any]:
        """The arrays of integers of the example, such as the sizes of groups: which blocks there are depends on them.

        Compiled, so that other arrays, which may be large, are not made.
        """

        def arrays() -> dict[str, Any]:
            values = {name: value for name, value in self.example.arguments(0).items() if hasattr(value, "dtype")}
            return {name: value for name, value in values.items() if jnp.issubdtype(value.dtype, jnp.integer)}

        return dict(jax.jit(arrays)())


def _scalars_of(kernel: str, scalars: Mapping[str, Words]) -> Words:
    """Those of this name; a single ``pallas_call`` may have none."""
    return scalars.get(base_name(kernel)) or (scalars.get("None") if len(scalars) == 1 else None) or []


def _without_registry(function: Function) -> Implementation:
    return lambda registry: function


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _with_gradients(function: Function, wrt: tuple[str, ...]) -> Function:
    """The function's result, and the gradients of its sum if ``wrt`` has arrays."""
    if not wrt:
        return function

    def both(arrays: Mapping[str, Any]) -> Any:
        out, pull = jax.vjp(lambda part: function({**arrays, **part}), {name: arrays[name] for name in wrt})
        return out, pull(jax.tree.map(jnp.ones_like, out))

    return both
