"""The examples of docs/triton.md, as a program: Triton reads a kernel's source, so they have to be a file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/triton.md"

ENDING = """
from ejkernel_triton.interpreter import kernels_in

(found,) = kernels_in(lowered)
assert (found.name, found.spilled) == ("attend", 0), found
assert TestFlashAttention().examples()
"""


def test_the_examples_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    program = tmp_path / "page.py"
    program.write_text("\n".join([*blocks, ENDING]))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
