"""The first call in a new process, against that of ``jax.nn``: with empty compile caches, and with full ones.

On a GPU ``jax.nn`` calls cuDNN, elsewhere XLA. Modules are imported and arrays are ready before the clock starts.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import jax

from ejkernel_core import Example
from ejkernel_ops.flash_attention.sizes import self_attention

from ._calls import describe, options_of, tolerance_of
from ._fresh import in_new_process
from ._peers import is_installed
from ._report import Bar, Report, Table
from ._rows import announce, announced_table
from ._timing import Times

ROUNDS = 5
ON_GPU = self_attention(1, 2048, 16, 128, "bfloat16")
ON_CPU = self_attention(1, 256, 4, 64)
OURS, PEER = "ejkernel_core.call", "jax.nn"
EMPTY, FULL = "empty", "full"
#: By how many seconds our first call may take longer.
LIMITS_S = {EMPTY: 4.0, FULL: 1.0}

_FIRST_CALL = """
import json, os, sys, time
name, backend, shape, dtype, options, environment = json.loads(sys.argv[1])
os.environ.update(environment)
import jax, jax.numpy as jnp
if name == "ejkernel_core.call":
    import ejkernel_core

def attention(query, key, value):
    if name == "ejkernel_core.call":
        return ejkernel_core.call("flash_attention", query, key, value, backend=backend, **options)
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)

keys = jax.random.split(jax.random.key(0), 3)
arrays = jax.block_until_ready([jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in keys])
start = time.perf_counter()
out = jax.block_until_ready(jax.jit(attention)(*arrays))
seconds = time.perf_counter() - start
has_torch = "torch" in sys.modules

import numpy as np
query, key, value = (np.asarray(array, np.float32)[0].swapaxes(0, 1) for array in arrays)
logits = np.where(np.tri(shape[1], dtype=bool), query @ key.swapaxes(1, 2) / shape[3] ** 0.5, -np.inf)
weights = np.exp(logits - logits.max(2, keepdims=True))
expected = (weights / weights.sum(2, keepdims=True) @ value).swapaxes(0, 1)
error = np.linalg.norm(np.asarray(out, np.float32)[0] - expected) / np.linalg.norm(expected)
kernel = "cuDNN" if jax.default_backend() == "gpu" else "XLA"
if name == "ejkernel_core.call":
    kernel = ejkernel_core.plan("flash_attention", *arrays, backend=backend, **options).kernel.name
print(json.dumps([seconds, float(error), has_torch, kernel]))
"""


@attrs.frozen
class FirstCall:
    """What a new process has measured."""

    seconds: float
    #: Relative to NumPy's float32.
    error: float
    has_torch: bool
    kernel: str


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """Both contenders in turn, with empty compile caches and then with full ones."""
    example = ON_GPU if jax.default_backend() == "gpu" else ON_CPU
    calls: dict[tuple[str, str], list[FirstCall]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (OURS, PEER):
            first_call(name, example, backend, Path(folder, name))  # it fills the caches
        for number in range(rounds):
            for name in (OURS, PEER) if number % 2 == 0 else (PEER, OURS):
                announce(f"{name}: round {number + 1} of {rounds}, with empty compile caches and with full ones")
                with tempfile.TemporaryDirectory() as empty_folder:
                    calls.setdefault((name, EMPTY), []).append(first_call(name, example, backend, Path(empty_folder)))
                calls.setdefault((name, FULL), []).append(first_call(name, example, backend, Path(folder, name)))
    faults = [fault for (name, _), row in calls.items() for fault in _faults(name, row, tolerance_of(example))]
    return Report("first_call", [_table(example, rounds, calls)], list(_bars(calls)), list(dict.fromkeys(faults)))


def first_call(name: str, example: Example, backend: str | None, folder: Path) -> FirstCall:
    """In a new process, whose compile caches are in this folder."""
    query = describe(example)["query"]
    arguments = name, backend, query.shape, example.dtype, options_of(example), _environment(folder)
    return FirstCall(*in_new_process(_FIRST_CALL, json.dumps(arguments)))


def _environment(folder: Path) -> dict[str, str]:
    folders = ("JAX_COMPILATION_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "EJKERNEL_CACHE_DIR")
    return {
        **{name: os.fspath(folder / name) for name in folders},
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # This process may have most of the GPU's memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def _faults(name: str, calls: Sequence[FirstCall], tolerance: float) -> Iterator[str]:
    for call in calls:
        if not call.error <= tolerance:
            yield f"{name}: the relative error is {call.error:.1e}, over {tolerance:.1e}"
        if call.has_torch:
            yield f"{name} has imported torch"


def _table(example: Example, rounds: int, calls: dict[tuple[str, str], list[FirstCall]]) -> Table:
    state = "installed" if is_installed("torch") else "not installed"
    title = f"{example.name}: the first call in a new process, seconds, {rounds} processes each in turn; torch {state}"
    columns = ("", "kernel", "compile caches", "median", "least", "greatest", "torch imported")
    return announced_table(title, columns, [_row(name, caches, row) for (name, caches), row in calls.items()])


def _row(name: str, caches: str, calls: Sequence[FirstCall]) -> tuple[Any, ...]:
    seconds = [call.seconds for call in calls]
    is_imported = any(call.has_torch for call in calls)
    return name, calls[0].kernel, caches, _median(calls), min(seconds), max(seconds), "yes" if is_imported else "no"


def _bars(calls: dict[tuple[str, str], list[FirstCall]]) -> Iterator[Bar]:
    for caches, limit in LIMITS_S.items():
        difference = _median(calls[OURS, caches]) - _median(calls[PEER, caches])
        yield Bar(f"the first call with {caches} compile caches, over that of {PEER}", difference, limit, "s")


def _median(calls: Sequence[FirstCall]) -> float:
    return Times([call.seconds for call in calls]).median
