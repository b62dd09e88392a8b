"""The first call in a new process, beside that of ``jax.nn``: with empty compile caches, and with full ones.

    python benchmarks/first_call.py

On a GPU ``jax.nn`` calls cuDNN, elsewhere XLA. JAX and the core are imported, and arrays are ready, before the clock
starts; so nothing else may be imported here at the top.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import jax

import ejkernel_core

if TYPE_CHECKING:
    from ejkernel_bench.suite import Report

OURS, PEER = "ejkernel_core.call", "jax.nn"
EMPTY, FULL = "empty", "full"
#: By how many seconds our first call may take longer.
LIMITS_S = {EMPTY: 4.0, FULL: 1.0}
FOLDERS = ("JAX_COMPILATION_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "EJKERNEL_CACHE_DIR")

#: What a process has measured: the seconds, and what is wrong.
Outcome = Mapping[str, Any]


def in_this_process(contender: str, backend: str | None, shape: tuple[int, ...], dtype: str) -> Outcome:
    """The first call of attention."""

    def attention(*arrays: Any) -> Any:
        if contender == OURS:
            return ejkernel_core.call("flash_attention", *arrays, causal=True, backend=backend)
        implementation: Any = "cudnn" if jax.default_backend() == "gpu" else "xla"
        return jax.nn.dot_product_attention(*arrays, is_causal=True, implementation=implementation)

    keys = jax.random.split(jax.random.key(0), 3)
    arrays = jax.block_until_ready([jax.random.normal(key, shape).astype(dtype) for key in keys])
    start = time.perf_counter()
    out = jax.block_until_ready(jax.jit(attention)(*arrays))
    seconds = time.perf_counter() - start
    faults = ["it imports torch"] if "torch" in sys.modules else []

    from ejkernel_bench._errors import TOLERANCE, error, fault_messages

    with jax.default_matmul_precision("highest"):
        wide_arrays = [array.astype("float32") for array in arrays]
        expected: Any = jax.nn.dot_product_attention(*wide_arrays, is_causal=True, implementation="xla")
    return {"seconds": seconds, "faults": [*faults, *fault_messages({"out": error(out, expected)}, TOLERANCE[dtype])]}


def in_new_process(contender: str, words: Sequence[str], folder: Path) -> Outcome:
    """The same there, with its compile caches in this folder."""
    environment = {
        **os.environ,
        **{name: os.fspath(folder / name) for name in FOLDERS},
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    program = [sys.executable, __file__, "--contender", contender, *words]
    process = subprocess.run(program, env=environment, stdout=subprocess.PIPE, check=True)
    outcome: Outcome = json.loads(process.stdout.splitlines()[-1])
    return outcome


def compare(rounds: int, words: Sequence[str]) -> Report:
    """Both contenders in turn."""
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as full:
        for name in (OURS, PEER):
            in_new_process(name, words, Path(full, name))  # it fills the caches
        for number in range(rounds):
            for name in (OURS, PEER) if number % 2 == 0 else (PEER, OURS):
                with tempfile.TemporaryDirectory() as empty:
                    for caches, folder in ((EMPTY, Path(empty)), (FULL, Path(full, name))):
                        outcomes.setdefault((name, caches), []).append(in_new_process(name, words, folder))
    return report_of(outcomes)


def report_of(outcomes: Mapping[tuple[str, str], Sequence[Outcome]]) -> Report:
    """From the outcomes by contender and caches."""
    from ejkernel_bench._timing import COLUMNS, Times
    from ejkernel_bench.suite import Bar, Report, Table

    times = {key: Times([outcome["seconds"] for outcome in of_key]) for key, of_key in outcomes.items()}
    rows = [(*key, *of_key.scaled(1)) for key, of_key in times.items()]
    table = Table("seconds of the first call in a new process", ("", "compile caches", *COLUMNS), rows)
    differences = {caches: times[OURS, caches].median - times[PEER, caches].median for caches in LIMITS_S}
    bars = [
        Bar(f"{caches} compile caches, over {PEER}", differences[caches], LIMITS_S[caches], "s") for caches in LIMITS_S
    ]
    faults = dict.fromkeys(
        f"{name}: {fault}"
        for (name, _), of_key in outcomes.items()
        for outcome in of_key
        for fault in outcome["faults"]
    )
    return Report("first_call", [table], bars, faults)


@click.command(help=__doc__)
@click.option("--rounds", default=5)
@click.option("--backend", help="By default that which the core chooses.")
@click.option("--tokens", type=int, help="By default 2048 on a GPU, and 256 elsewhere.")
@click.option("--contender", type=click.Choice([OURS, PEER]), help="This one alone, in this process.")
def main(rounds: int, backend: str | None, tokens: int | None, contender: str | None) -> None:
    if contender is not None:
        has_gpu = jax.default_backend() == "gpu"
        shape, dtype = ((1, tokens or 2048, 16, 128), "bfloat16") if has_gpu else ((1, tokens or 256, 4, 64), "float32")
        print(json.dumps(in_this_process(contender, backend, shape, dtype)))
        return
    options = {"--backend": backend, "--tokens": tokens}
    report = compare(rounds, [f"{name}={value}" for name, value in options.items() if value is not None])
    print(report)
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
