"""The installed kernels that the compiler for TPUs checks, and the calls that it checks them on.

The calls are the examples of the operation whose ``uses`` have "vmem" or "estimate"; a backward kernel is checked on
the gradients of them. A module of a kernel for TPUs has, beside its hooks:

``vmem(inv, cfg)``
    at most how many bytes of vector memory the kernel takes, or a mapping of this from the names of its ``pallas_call``
    if it has several. The compiler's own figure is compared with it, for every configuration of ``config_space(inv)``.
    A kernel without it is not checked.
``compute(inv, cfg, interpret)``
    what ``run_backend`` does, ``interpret`` being that of ``pallas_call``. The interpreted registry needs it, and so
    does the estimate of a time.
``peers(example)``, optional
    the ``Peer``s that its estimated time is compared with.
``examples()``, optional
    further ``Example``s of its operations, for what takes this kernel more memory than another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

import attrs
import jax

import ejkernel_core
from ejkernel_core import Example, Invocation, Registry


@attrs.frozen(eq=False)
class Call:
    """A call of an operation, with the shape and dtype of each array in its place."""

    name: str
    op: str
    arguments: Mapping[str, Any]

    @property
    def arrays(self) -> dict[str, Any]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, jax.ShapeDtypeStruct)}

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in self.arguments.items() if name not in self.arrays}


@attrs.frozen(eq=False)
class Kernel:
    """A kernel by its name, ``<operation>.<backend>``, its module, and the registry that has both."""

    name: str
    module: Any
    registry: Registry

    @property
    def op(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def backend(self) -> str:
        return self.name.rpartition(".")[2]

    def examples(self, use: str) -> list[Example]:
        """The examples of its operation, and those of its module for it, that have a use."""
        further: Iterable[Example] = getattr(self.module, "examples", tuple)()
        return _examples(self.registry, self.op, use) + [
            example for example in further if use in example.uses and example.op == self.op
        ]

    def calls(self, use: str) -> Iterator[Call]:
        """The calls that have a use: the examples of its operation, or the gradients of those of another one."""
        for example in self.examples(use):
            yield Call(example.name, self.op, example.abstract())
        for forward in self.registry.names("ejkernel.operations"):
            if self.registry.operation(forward).backward == self.op:
                for example in _examples(self.registry, forward, use):
                    yield from self._gradients(example, forward)

    def _gradients(self, example: Example, forward: str) -> Iterator[Call]:
        """The call for the arrays that the example names, and the call for all arrays."""
        explanation = self.registry.explain(forward, **example.abstract())
        assert explanation.backward is not None
        assert explanation.backward.plan is not None
        inv = explanation.backward.plan.invocation
        arrays = self.registry.operation(self.op).arrays
        arguments = {name: value for name, value in inv.items() if value is not None or name not in arrays}
        for wrt in dict.fromkeys((example.wrt, inv["wrt"])):
            if wrt:
                yield Call(f"{example.name}, gradients of {', '.join(wrt)}", self.op, {**arguments, "wrt": wrt})

    def invocation(self, call: Call, device_kind: str) -> Invocation:
        """What the kernel gets for a call on a TPU."""
        inv = self.registry.invocation(self.op, **call.arguments)
        return attrs.evolve(inv, platform="tpu", device_kind=device_kind, compute_capability=None)

    def run(self, call: Call, cfg: Any, arrays: Mapping[str, Any]) -> Any:
        """The results of a call with these arrays, in a configuration."""
        return self.registry.call(self.op, **arrays, **call.options, backend=self.backend, cfg=cfg)


def _examples(registry: Registry, op: str, use: str) -> list[Example]:
    operation = registry.operation(op)
    return [example for example in (operation.examples or tuple)() if use in example.uses]


def installed_kernels() -> list[Kernel]:
    """The kernels whose modules have ``vmem``, in the order of their names."""
    points = sorted(entry_points(group="ejkernel.kernels"), key=lambda point: point.name)
    kernels = [Kernel(point.name, point.load(), ejkernel_core.registry) for point in points]
    return [kernel for kernel in kernels if hasattr(kernel.module, "vmem")]
