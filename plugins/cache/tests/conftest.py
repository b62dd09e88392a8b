"""A small operation whose results show the configuration that it ran with, and a cache folder for each test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_cache import PersistentCache, default_cache, policy
from ejkernel_core import Candidate, Choice, Key, Operation, Provenance, Record, Registry, hookimpl
from tests.distributions import write_distribution

#: A test with a watchdog that takes longer than so many seconds hangs.
WATCHDOG_S = 600


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the default cache, so that no test uses the user's cache."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    default_cache.cache_clear()
    yield tmp_path / "cache"
    default_cache.cache_clear()


class Hang(BaseException):
    """The time of the watchdog is over. Nothing that catches exceptions catches this one."""


@pytest.fixture
def watchdog() -> Iterator[None]:
    """End a test that hangs. The time says nothing about the test, which takes a small part of it."""

    def bark(number: int, frame: Any) -> None:
        raise Hang("the test hangs")

    earlier = signal.signal(signal.SIGALRM, bark)
    signal.alarm(WATCHDOG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, earlier)


# -- the operation ---------------------------------------------------------------------------------------------------


@attrs.frozen
class Config:
    factor: int = 2


def scale(x): ...


def _bucket(arguments: Any) -> Any:
    return {"halves": (arguments["x"].shape[0] + 1) // 2}


def _kernel(heuristic: Any) -> SimpleNamespace:
    @hookimpl
    def heuristic_cfg(inv):
        return heuristic

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * cfg.factor

    return SimpleNamespace(Config=type(heuristic), heuristic_cfg=heuristic_cfg, run_backend=run_backend)


class Scale:
    """``scale`` by the factor of the configuration, in a registry with only the policy ``cache``."""

    Config = Config

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Empty the memory, as in a new process."""
        default_cache.cache_clear()
        self.registry = Registry(plugins="ejkernel-tuning")
        operation = Operation(name="scale", signature=scale, outputs=lambda a: (a["x"],), tuning_key=_bucket)
        self.registry.register(operation)
        self.use(Config())
        self.registry.register(policy, "cache")

    def use(
        self,
        heuristic: Any,
        config_space: Callable[[Any], Any] | None = None,
        backend: str = "two",
        **hooks: Any,
    ) -> None:
        """Register a kernel with this heuristic, its type as Config, this ``config_space``, and other hooks."""
        kernel = _kernel(heuristic)
        vars(kernel).update(hooks)
        if config_space is not None:
            kernel.config_space = hookimpl(config_space)
        self.registry.register(kernel, f"scale.{backend}")

    def keys(self, length: int = 5) -> tuple[Key, ...]:
        return self.registry.invocation("scale", jnp.ones(length)).tuning_keys

    def candidate(self) -> Candidate:
        plan = self.registry.plan("scale", jnp.ones(5))
        return Candidate(plan.kernel, plan.cfg)

    def used_factor(self, length: int = 5, **options: Any) -> int:
        """The factor that a call was computed with."""
        x = jnp.arange(1.0, length + 1)
        result = self.registry.call("scale", x, **options)
        factor = round(float(result[0]))
        np.testing.assert_allclose(result, x * factor)
        return factor

    def origin(self, length: int = 5) -> str:
        return self.registry.plan("scale", jnp.ones(length)).origin

    def reason(self, policy: str = "cache") -> str:
        """The policy's reason for having no answer, from an explanation."""
        plan = self.registry.explain("scale", jnp.ones(5)).plan
        assert plan is not None
        assert (plan.origin, plan.cfg.factor) == ("heuristic", 2)
        verdicts = [v for v in plan.verdicts if v.name == policy]
        assert [v.status for v in verdicts] in ([], ["no answer"])
        return verdicts[0].reason if verdicts else ""

    def record(self, factor: int, milliseconds: float = 1.0) -> Record:
        """A record with a provenance."""
        provenance = Provenance(
            when="2026-11-20T12:00:00+00:00", device="cpu", milliseconds=milliseconds, backends=("two",)
        )
        return Record(Config(factor), "two", provenance)

    def tuner(self, factor: int, milliseconds: float = 1.0) -> None:
        """Register a policy of low rank that returns a measured choice."""

        @hookimpl
        def select_config(inv, candidates):
            return Choice("two", Config(factor), "the tuner", record=self.record(factor, milliseconds), measured=True)

        self.registry.register(SimpleNamespace(RANK=20, select_config=select_config), "tuner")

    def on_disk(self, length: int = 5) -> Path:
        """Put a valid record under the call's exact key, and return its file."""
        cache = PersistentCache()
        cache.put(self.keys(length)[0], self.record(7))
        file = cache.file(self.keys(length)[0], "two")
        assert file.is_file()
        return file


@pytest.fixture
def scale_op() -> Scale:
    return Scale()


# -- distributions and processes -------------------------------------------------------------------------------------


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``distribution(name, files, version, policies=..., ...)`` makes one for other processes, and returns its folder."""
    count = 0

    def make(name: str, files: Mapping[str, str], version: str = "1.0", **groups: Mapping[str, str]) -> Path:
        nonlocal count
        count += 1
        site = tmp_path / f"site{count}"
        write_distribution(site, name, files, version, **groups)
        return site

    return make


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """``run_python(program, *sites, NAME=value)``: the output of a program in a new process."""

    def run(program: str, *sites: Path, **environment: str) -> str:
        path = os.pathsep.join([*map(str, sites), os.environ.get("PYTHONPATH", "")])
        process = subprocess.run(
            [sys.executable, "-B", "-W", "error::RuntimeWarning", "-c", textwrap.dedent(program)],
            env={**os.environ, "PYTHONPATH": path, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout.strip()

    return run
