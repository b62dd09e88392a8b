"""Start the processes of ``program.py`` and collect their results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("program.py")


class Hung(Exception):
    """A process did not end in time."""


def run(scenario: str, count: int = 3, seconds: float = 100.0, wait_s: float = 60.0) -> list[Any]:
    """The results of each process, by its number. ``wait_s`` is how long a process waits for another one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "EJKERNEL_AGREE_WAIT_S": str(wait_s),
        "EJKERNEL_AUTOTUNE": "off",
    }
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), scenario, str(rank), str(count), port],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(count)
    ]
    try:
        return [_result(process, seconds) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _result(process: subprocess.Popen[str], seconds: float) -> Any:
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as fault:
        raise Hung(f"{process.args} did not end within {seconds} s") from fault
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert process.returncode == 0, f"{process.args} ended with {process.returncode}:\n{out}\n{err}"
    return json.loads(lines[-1])
