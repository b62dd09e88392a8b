"""What pytest prints last about the proofs: the checks that were made for no example of a kernel."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from ejkernel_core.environment import FUSION_FLAG, lacks_fusion_flag
from ejkernel_core.extend import version_of

if TYPE_CHECKING:
    import pytest

PLUGIN = "ejkernel_testing"


class Summary:
    """The checks of each kernel whose proofs ran, over all of its test classes."""

    def __init__(self) -> None:
        #: By kernel: the checks that its operation has examples of, and those that were not left out.
        self.known_checks: dict[str, set[str]] = {}
        self.made_checks: dict[str, set[str]] = {}
        #: By kernel: the configurations that were refused for every example on which all are run.
        self.refused: dict[str, list[Any]] = {}

    def add(self, kernel: str, known: Iterable[str], made: Iterable[str]) -> None:
        """The checks of one test class of the kernel."""
        self.known_checks.setdefault(kernel, set()).update(known)
        self.made_checks.setdefault(kernel, set()).update(made)

    def add_refused(self, refused: Mapping[str, list[Any]]) -> None:
        """The configurations that each kernel refuses for one example."""
        for name, configs in refused.items():
            self.refused[name] = [cfg for cfg in self.refused.get(name, configs) if cfg in configs]

    def lines(self) -> list[str]:
        """One for each kernel with a check that was never made, or with configurations that were never run."""
        missing = {kernel: sorted(known - self.made_checks[kernel]) for kernel, known in self.known_checks.items()}
        checks = [line(kernel, words) for kernel, words in sorted(missing.items()) if words]
        never_run = [
            f"{kernel}: never run: {len(configs)} configurations, such as {configs[0]}"
            for kernel, configs in sorted(self.refused.items())
            if configs
        ]
        return checks + never_run

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop the tests of the proofs for which a kernel has no example, which pytest would skip."""
        items[:] = [item for item in items if not (hasattr(item, "callspec") and _is_empty(item))]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = self.lines()
        if lines:
            terminalreporter.section("what was not proved", yellow=True)
        for text in lines:
            terminalreporter.write_line(text)
        has_failed = bool(terminalreporter.stats.get("failed"))
        if has_failed and jax.default_backend() == "cpu" and lacks_fusion_flag(os.environ, version_of("jaxlib")):
            terminalreporter.section("a fault of jaxlib", yellow=True)
            terminalreporter.write_line(
                "This jaxlib can give wrong sums in float32 on a CPU, also in what fails here. Set this, and run the "
                f'tests again: export XLA_FLAGS="{FUSION_FLAG} $XLA_FLAGS"'
            )


def _is_empty(item: pytest.Item) -> bool:
    """Whether it stands for an empty list of parameters, in one of our classes."""
    return item.name.partition("[")[2].startswith("NOTSET") and hasattr(getattr(item, "cls", None), "parameters")


def line(kernel: str, checks: Iterable[str]) -> str:
    return f"{kernel}: never checked: {', '.join(checks)}"


def summary_of(config: pytest.Config) -> Summary:
    """The summary of this run of pytest."""
    plugin: Summary | None = config.pluginmanager.get_plugin(PLUGIN)
    if plugin is None:
        plugin = Summary()
        config.pluginmanager.register(plugin, PLUGIN)
    return plugin


def warn_in_worker(config: pytest.Config, kernel: str, unproved: Iterable[str]) -> None:
    """Say it by a warning too where pytest-xdist runs the test: its workers print no summary."""
    checks = sorted(unproved)
    if checks and hasattr(config, "workerinput"):
        warnings.warn(line(kernel, checks), stacklevel=2)
