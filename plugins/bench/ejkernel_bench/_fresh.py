"""Measurements in a new process, where nothing has been imported or allocated yet."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def in_new_process(program: str, *arguments: str) -> Any:
    """Run a program with this interpreter, and return the JSON in the last line that it prints."""
    process = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"a measurement in a new process failed:\n{process.stderr.strip()}")
    return json.loads(process.stdout.strip().splitlines()[-1])
