"""Programs on several devices: compiled, counted, checked against one device, and timed in turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel_tuning import find_labels_in_lowered

from ._errors import TOLERANCE, error
from ._timing import Times, interleaved

#: The mesh axis of all benchmarks here.
AXIS = "cards"
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
#: Without the first, which is off by default, XLA waits for a transfer before it starts what could run meanwhile.
#: Without the second, one transfer waits for the other: keys and values travel apart.
OVERLAP = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}


@attrs.frozen(eq=False)
class Program:
    """A compiled function and its arguments."""

    compiled: Any
    arguments: tuple[Any, ...]
    #: The names of our kernels in it.
    kernels: str

    def __call__(self) -> Any:
        return self.compiled(*self.arguments)

    def collectives(self) -> dict[str, int]:
        """How many of each kind its text has."""
        text = self.compiled.as_text()
        counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in COLLECTIVES}
        return {kind: count for kind, count in counts.items() if count}


def compiled(
    function: Callable[..., Any], arguments: Sequence[Any], mesh: Any = None, has_overlap: bool = True
) -> Program:
    """The function, compiled for these arguments. With a ``mesh``, it is traced under ``jax.set_mesh``."""
    options: Any = OVERLAP if has_overlap and jax.default_backend() == "gpu" else None
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        lowered = jax.jit(function, compiler_options=options).lower(*arguments)
        labels = find_labels_in_lowered(lowered)
        names = sorted({f"{label.name}.{label.backend}" for label in labels if label.backend is not None})
        return Program(lowered.compile(), tuple(arguments), " and ".join(names))


def with_gradients(call: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """The result of a call, and the gradients of all its arrays. The last argument is the cotangent."""
    *arrays, cotangent = arguments
    out, pull_back = jax.vjp(call, *arrays)
    return (out, *pull_back(cotangent))


def forward(call: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """The result alone, for the same arguments."""
    return (call(*arguments[:-1]),)


#: By pass.
FUNCTIONS: Mapping[str, Callable[..., tuple[Any, ...]]] = {"forward": forward, "forward+backward": with_gradients}


def draw(shapes: Iterable[tuple[int, ...]], dtype: str) -> list[Any]:
    """Normal numbers on the first device of this process: the same in every process."""
    with jax.default_device(jax.local_devices()[0]):
        keys = enumerate(shapes)
        return [jax.random.normal(jax.random.key(i), shape, jnp.float32).astype(dtype) for i, shape in keys]


def placed(array: Any, mesh: Any, spec: PartitionSpec) -> Any:
    """An array, sharded over the mesh. Each process gives its devices their part."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def faults(label: str, results: Iterable[Any], expected: Iterable[Any], dtype: str) -> list[str]:
    """What is wrong with the shards of this process."""
    messages = []
    for number, (result, whole) in enumerate(zip(results, expected, strict=True)):
        name = "the result" if number == 0 else f"gradient {number}"
        for shard in result.addressable_shards:
            distance = error(shard.data, jax.device_put(whole[shard.index], shard.device))
            if not distance.is_within(TOLERANCE[dtype]):
                messages.append(
                    f"{label}: {name} on {shard.device} is off by {distance.norm:.1e} (norm), {distance.worst:.1e} "
                    f"(worst); {TOLERANCE[dtype]:.1e} is allowed"
                )
    return messages


def timed(programs: Mapping[str, Program], rounds: int, calls: int) -> dict[str, Times]:
    """Seconds of a call, in turn; a round is some calls. The number is fixed: all processes make equally many."""
    runs = {name: partial(_repeated, program, calls) for name, program in programs.items()}
    return {
        name: Times([seconds / calls for seconds in times.seconds]) for name, times in interleaved(runs, rounds).items()
    }


def _repeated(program: Program, calls: int) -> Any:
    """The results of the last call. A device runs them in order, so that those of the others are there too."""
    for _ in range(calls - 1):
        results = program()
        if jax.default_backend() == "cpu":  # of devices that share threads, some would wait for others for ever
            jax.block_until_ready(results)
    return program()
