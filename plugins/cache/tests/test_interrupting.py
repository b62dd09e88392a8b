"""Ctrl-C at any moment of a measurement ends the process as usual, and leaves no lock."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

#: A program that measures for some seconds, and prints when it begins and ends.
MODULE = """
    import os, sys, time
    from pathlib import Path
    from types import SimpleNamespace

    import attrs
    import jax, jax.numpy as jnp
    import ejkernel_cache
    from ejkernel_cache import policy
    from ejkernel_core import Operation, Registry, hookimpl, policy_override

    @attrs.frozen
    class Config:
        steps: int = 30

    @hookimpl
    def heuristic_cfg(inv):
        return Config()

    @hookimpl
    def config_space(inv):
        return [Config(steps) for steps in range(31, 39)]

    @hookimpl
    def run_backend(inv, cfg):
        x = inv["x"]
        if cfg.steps == int(os.environ.get("HANGS", 0)):
            print("hanging", flush=True)
            time.sleep(600)
        large = jnp.full((100_000,), x[0])
        return x * 3 + 0 * jax.lax.fori_loop(0, cfg.steps, lambda _, v: jnp.sin(v) * 0.5, large).sum()

    registry = Registry(plugins="ejkernel-tuning")
    registry.register(policy, "cache")
    registry.register(Operation(name="triple", signature=lambda x: None, outputs=lambda a: (a["x"],), reference="kinds"))
    registry.register(
        SimpleNamespace(Config=Config, heuristic_cfg=heuristic_cfg, config_space=config_space, run_backend=run_backend),
        "triple.kinds",
    )
    x = jnp.arange(8.0)
    print("measuring", flush=True)
    with policy_override(autotune=True, budget_s=30):
        registry.call("triple", x)
    print("done", flush=True)
"""


def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    (folder / "interrupted.py").write_text(textwrap.dedent(MODULE))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(folder / "interrupted.py")],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The parent of the tests may ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def interrupt(process: subprocess.Popen[str], delay: float, after: str = "measuring") -> tuple[int, str, str]:
    """Interrupt ``delay`` seconds after this line of output: the exit code, and the rest of stdout and stderr.

    An interrupt during JAX's imports is not tested.
    """
    assert process.stdout is not None
    try:
        while process.stdout.readline().strip() not in (after, ""):
            pass
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err
    finally:
        process.kill()
        process.wait()


def check_end(code: int, out: str, err: str, folder: Path) -> None:
    assert code in (0, -signal.SIGINT), err
    # After the last line Python exits, and restores the default handler, which prints nothing.
    if code and not (out.endswith("done\n") and not err):
        assert err.rstrip().endswith("KeyboardInterrupt"), err
    assert "Exception in thread" not in err
    assert "terminate called" not in err
    assert "Fatal Python error" not in err
    for lock in (folder / ".tuning").glob("*"):
        assert lock.suffix == ".json", f"{lock} is left"  # entries of the interrupted measurement


def check_moments(tmp_path: Path, folder: Path, moments: int) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    while process.stdout.readline().strip() != "measuring":
        assert process.poll() is None
    start_time = time.monotonic()
    out, err = process.communicate(timeout=120)
    assert out.endswith("done\n"), err
    seconds = time.monotonic() - start_time
    generator = random.Random(moments)
    codes = []
    for number in range(moments):
        for file in folder.rglob("*.json"):
            file.unlink()
        delay = seconds * (number + generator.random()) / moments
        code, out, err = interrupt(start(tmp_path), delay)
        check_end(code, out, err, folder)
        codes.append(code)
    assert -signal.SIGINT in codes


@pytest.mark.long
def test_an_interrupt_at_three_moments(tmp_path: Path, folder: Path) -> None:
    check_moments(tmp_path, folder, 3)


@pytest.mark.long
def test_an_interrupt_at_ten_moments(tmp_path: Path, folder: Path) -> None:
    check_moments(tmp_path, folder, 10)


@pytest.mark.long
def test_a_hanging_configuration_does_not_keep_the_process_alive(tmp_path: Path, folder: Path) -> None:
    code, out, err = interrupt(start(tmp_path, HANGS="35"), 0.5, after="hanging")
    assert code == -signal.SIGINT, err
    check_end(code, out, err, folder)
    process = start(tmp_path)
    out, err = process.communicate(timeout=120)
    assert out.endswith("done\n"), err
    assert len(list(folder.rglob("kinds/*.json"))) == 1
    assert list((folder / ".tuning").iterdir()) == []
