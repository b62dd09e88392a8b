"""``python .ci/first_hour.py``: do what docs/first-hour.md says, in a fresh clone, and compare the output.

The commands of all shell blocks run in one shell, one block after the other. A text block has the output of the shell
block before it: line breaks do not matter, and "..." stands for any text. A Python block is the file that the text
before it names.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = "docs/first-hour.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
END = "-- end of the block, exit code"


class Shell:
    """One bash for the whole page, so that an activated environment stays so."""

    def __init__(self, folder: Path) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("EJKERNEL_", "PYTHON"))
        }
        environment |= {"EJKERNEL_CACHE_DIR": str(folder / "cache"), "JAX_PLATFORMS": "cpu", "NO_COLOR": "1"}
        environment |= {
            "PATH": f"{Path(sys.base_prefix, 'bin')}:{environment['PATH']}",
            "PIP_ROOT_USER_ACTION": "ignore",
        }
        environment.pop("VIRTUAL_ENV", None)
        self._bash = subprocess.Popen(
            ["bash"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder / "clone",
            env=environment,
            text=True,
        )

    def run(self, commands: str) -> tuple[str, int]:
        """The output of the commands, and the exit code of the first that failed."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        lines = [line for line in commands.splitlines() if line]
        joined = " && ".join(f"{{ {line}; }}" for line in lines)
        self._bash.stdin.write(f'{joined} </dev/null; echo "{END} $?"\n')
        self._bash.stdin.flush()
        output = []
        for line in self._bash.stdout:
            if line.startswith(END):
                return "".join(output), int(line.removeprefix(END))
            output.append(line)
        raise EOFError(f"the shell has ended in {commands!r}")


def main() -> int:
    """The exit code: 1 at the first command that fails or prints something else."""
    with tempfile.TemporaryDirectory(prefix="first-hour-") as temporary:
        folder = Path(temporary)
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "clone")], check=True)
        return replay((ROOT / PAGE).read_text(), folder)


def replay(page: str, folder: Path) -> int:
    shell, output, failed = Shell(folder), "", False
    for match in FENCE.finditer(page):
        language, content = match[1], match[2]
        if language == "python":
            current = Path(shell.run("pwd")[0].strip())
            (current / re.findall(r"`(\w+\.py)`", page[: match.start()])[-1]).write_text(content)
        elif language == "shell":
            print(content, end="", flush=True)
            start = time.monotonic()
            output, code = shell.run(content)
            print(f"  {time.monotonic() - start:.0f} s", flush=True)
            failed = code != 0
        elif language == "text":
            # What pip says about an index or a new version of itself is not part of the page.
            output = re.sub(r"^(WARNING: |\[notice\]).*\n", "", output, flags=re.MULTILINE)
            failed = failed or not doctest.OutputChecker().check_output(content, output, OPTIONS)
            if failed:
                print(f"{PAGE} shows\n{content}\nbut this is printed\n{output}")
                return 1
        if failed:
            print(output)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
