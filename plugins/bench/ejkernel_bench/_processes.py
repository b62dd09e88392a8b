"""A benchmark of several processes: each starts the same command, with its own number in the environment."""

from __future__ import annotations

import os

import jax

#: The address of the first process, the number of processes, and which one this is.
ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def join_processes() -> None:
    """Connect to the other processes if the environment says that there are any. Before JAX looks for devices."""
    if ADDRESS not in os.environ or jax.distributed.is_initialized():
        return
    missing = [name for name in (COUNT, NUMBER) if name not in os.environ]
    if missing:
        raise ValueError(f"{ADDRESS} is set, and {', '.join(missing)} is not")
    jax.distributed.initialize(os.environ[ADDRESS], int(os.environ[COUNT]), int(os.environ[NUMBER]))
