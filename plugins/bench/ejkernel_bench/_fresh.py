"""Measuring in a process of its own, where nothing has been imported or allocated yet."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def in_fresh_process(program: str, *arguments: str) -> Any:
    """Run a program with this interpreter and read the JSON that it prints as its last line."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a measurement in a fresh process failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout.strip().splitlines()[-1])
