"""The kernels that a GPU ran, by the profiler, and to which part of a program each belongs.

A part is what is traced inside of ``part(name)``. XLA keeps its name in the text of a compiled program.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

#: What the scopes of parts begin with, so that no name of JAX is one.
PREFIX = "part_"
#: Of kernels that belong to no part.
OTHERS = "others"
#: When a kernel runs: in the forward, in what is rematerialised, and in the backward.
FORWARD, AGAIN, BACKWARD = "forward", "again", "backward"

_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*\bop_name="([^"]*)"', re.MULTILINE)
_PART = re.compile(rf"\b{PREFIX}([a-z_]+)")


def part(name: str) -> AbstractContextManager[Any]:
    """What is traced in this context is the part of this name."""
    return jax.named_scope(PREFIX + name)


def profile_of(run: Callable[[], Any], calls: int) -> Any | None:
    """The profile of some calls, which have been compiled; None where there is none."""
    with tempfile.TemporaryDirectory(prefix="ejkernel-profile-") as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 0
        options.enable_hlo_proto = False
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            for _ in range(calls):
                jax.block_until_ready(run())
        finally:
            jax.profiler.stop_trace()
        files = list(Path(folder).rglob("*.xplane.pb"))
        return jax.profiler.ProfileData.from_file(str(files[0])) if files else None


def kernels_of(plane: Any) -> list[Any]:
    """The events of all streams of a device."""
    return [event for line in plane.lines if line.name.startswith("Stream") for event in line.events]


def labels_in(text: str) -> dict[str, tuple[str, str]]:
    """The part and the time of each instruction of a compiled program that belongs to a part.

    >>> labels_in('%dot.1 = f32[] dot(...), metadata={op_name="jit(f)/transpose(jvp(part_head))/dot"}')
    {'dot.1': ('head', 'backward')}
    """
    labels: dict[str, tuple[str, str]] = {}
    for name, op_name in _INSTRUCTION.findall(text):
        if parts := _PART.findall(op_name):
            labels[name] = parts[-1], _when(op_name)
    return labels


def _when(op_name: str) -> str:
    if "rematted_computation" in op_name:
        return AGAIN
    return BACKWARD if "transpose(" in op_name else FORWARD


def seconds_by_part(profile: Any, text: str, calls: int) -> tuple[dict[tuple[str, str], float], list[str]]:
    """The seconds of each part and time in one call, and the names of the longest kernels of no part.

    Empty where the profile has no kernels of a GPU.
    """
    # The profiler has the name of the instruction, or the name of the kernel, in which dots are underscores.
    labels = labels_in(text)
    labels |= {name.replace(".", "_").replace("-", "_"): label for name, label in labels.items()}
    seconds: Counter[tuple[str, str]] = Counter()
    unknown: Counter[str] = Counter()
    for event in _kernels(profile):
        label = next((labels[name] for name in _names(event) if name in labels), (OTHERS, FORWARD))
        seconds[label] += event.duration_ns * 1e-9 / calls
        if label[0] == OTHERS:
            unknown[event.name] += event.duration_ns
    return dict(seconds), [name for name, _ in unknown.most_common(5)]


def _kernels(profile: Any) -> Iterator[Any]:
    for plane in profile.planes:
        if plane.name.startswith("/device:GPU"):
            yield from kernels_of(plane)


def _names(event: Any) -> Iterator[str]:
    """The instruction by the statistics of the event, and its own name."""
    for name, value in event.stats:
        if name == "hlo_op":
            yield str(value)
    yield event.name
