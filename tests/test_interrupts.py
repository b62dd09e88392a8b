"""Tests that interrupt processes pass in a shell's background job too, which ignores Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest


def test_ctrl_c_interrupts_where_it_was_ignored(pytestconfig: pytest.Config) -> None:
    source = "import signal, conftest; print(conftest, signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    process = subprocess.run(
        [sys.executable, "-c", source],
        cwd=pytestconfig.rootpath,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.endswith("True\n"), process.stdout
