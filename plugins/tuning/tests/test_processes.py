"""``autotune`` in a program of several processes: each measures alone, on samples where it has only a part of an array,
and says what becomes of it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from ejkernel_tuning import autotune

NOTE = (
    "measured by process {} of 2, alone: their common programs take what the first process has stored, if "
    "ejkernel-agree is installed, and else no measurement"
)

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from ejkernel_tuning import autotune

jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", num_processes=2, process_id=int(sys.argv[1]))
mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.make_array_from_callback((6, 32), NamedSharding(mesh, P("rows")), lambda index: np.arange(96, dtype=np.float32).reshape(3, 32))
assert not x.is_fully_addressable
(tuned,) = autotune("rms_norm", x, budget_s=60, num_iters=2).tuned
print(json.dumps([tuned.description, tuned.best is not None, tuned.notes[-1]]))
"""


def test_one_process_says_nothing() -> None:
    (tuned,) = autotune("rms_norm", jnp.arange(192.0).reshape(6, 32), num_iters=2, remember=False).tuned
    assert tuned.notes == ("checked against rms_norm.reference",)


def test_one_of_several_processes_says_what_becomes_of_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    (tuned,) = autotune("rms_norm", jnp.arange(192.0).reshape(6, 32), num_iters=2, remember=False).tuned
    assert tuned.best is not None
    assert tuned.notes[-1] == NOTE.format(1)
    assert NOTE.format(1) in str(tuned)


@pytest.mark.long
def test_a_process_without_the_whole_array_measures_on_samples(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), port],
            env={**os.environ, **flags, "EJKERNEL_CACHE_DIR": str(tmp_path / str(rank))},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(processes):
            text, _ = process.communicate(timeout=120)
            description, has_best, note = json.loads(text.splitlines()[-1])
            assert description.startswith("rms_norm(x=float32[6,32]")
            assert (has_best, note) == (True, NOTE.format(rank))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
