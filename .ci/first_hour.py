"""``python .ci/first_hour.py [PYTHON...]``: do what the README, the site's first page and docs/first-hour.md say, in
fresh clones, with each of these interpreters, and compare the output. By default with those of ``VERSIONS`` that are
installed here.

The commands of all shell blocks of a page run in one shell, one block after the other. A text block has the output of
the block before it: line breaks do not matter, and "..." stands for any text. A Python block is the file that the text
before it names, where a later command runs that. The others are one program, which runs as far as a text block has the
output of its last block, or at the end.
"""

from __future__ import annotations

import concurrent.futures
import doctest
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
#: Of Python: each has other versions of JAX.
VERSIONS = ("3.11", "3.12")
END = "-- end of the block, exit code"
BLOCK = "-- next block of Python"
#: These take minutes, and .ci/run runs them in a fresh clone as well; with wheels there is nothing to install from.
ELSEWHERE = re.compile(r"make (run|test|wheels)|pip install --find-links build/wheels")
#: Modules that the next version does not have.
GONE = {"ejkernel_core.gone": "ejkernel_core/gone.py", "ejkernel_xla.gone": "plugins/xla/ejkernel_xla/gone.py"}


class Fault(Exception):
    """A command that fails, or prints something else than its page says."""


class Shell:
    """One bash for a whole page, so that an activated environment stays so."""

    def __init__(self, folder: Path, python: Path) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("EJKERNEL_", "PYTHON"))
        }
        environment |= {"EJKERNEL_CACHE_DIR": str(folder / "cache"), "JAX_PLATFORMS": "cpu", "NO_COLOR": "1"}
        environment |= {"PATH": f"{python}:{environment['PATH']}", "PIP_ROOT_USER_ACTION": "ignore"}
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

    def run(self, commands: Sequence[str]) -> str:
        """The output of the commands, of which none may fail."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        joined = " && ".join(["true", *(f"{{ {command}\n}}" for command in commands)])
        self._bash.stdin.write(f'{{ {joined}; }} </dev/null; echo "{END} $?"\n')
        self._bash.stdin.flush()
        output = []
        for line in self._bash.stdout:
            if not line.startswith(END):
                output.append(line)
            elif line.removeprefix(END).strip() == "0":
                return "".join(output)
            else:
                break
        raise Fault("\n".join([*commands, f"failed:\n{''.join(output)}"]))


def replay(page: str, shell: Shell, title: str) -> None:
    text, output, script = (ROOT / page).read_text(), "", ""
    for match in FENCE.finditer(text):
        language, content = match[1], match[2]
        if language == "python" and (name := file_of(text, match)):
            Path(shell.run(["pwd"]).strip(), name).write_text(content)
        elif language == "python":
            script += f"\nprint({BLOCK!r})\n{content}"
        elif language == "shell":
            output = run_shell(content, shell, f"{title}, {page}")
        elif language == "text":
            if script:
                output, script = run_python(script, shell), ""
            # What pip says about an index or a new version of itself is not part of the page.
            output = re.sub(r"^(WARNING: |\[notice\]).*\n", "", output, flags=re.MULTILINE)
            if not doctest.OutputChecker().check_output(content, output, OPTIONS):
                raise Fault(f"{page} shows\n{content}\nbut this is printed\n{output}")
    if script:
        run_python(script, shell)


def run_shell(commands: str, shell: Shell, title: str) -> str:
    lines = [line for line in commands.splitlines() if line and not ELSEWHERE.match(line)]
    if not lines:
        return ""
    start = time.monotonic()
    output = shell.run(lines)
    print("\n  ".join([f"{title}, {time.monotonic() - start:.0f} s", *lines]), flush=True)
    return output


def file_of(page: str, block: re.Match[str]) -> str | None:
    """The file that a Python block is, where a later command runs it."""
    names = re.findall(r"`(\w+\.py)`", page[: block.start()])
    return names[-1] if names and f"python {names[-1]}" in page[block.end() :] else None


def run_python(script: str, shell: Shell) -> str:
    """What the last block of the program prints."""
    Path(shell.run(["pwd"]).strip(), "blocks.py").write_text(script)
    return shell.run(["python blocks.py"]).rpartition(f"{BLOCK}\n")[2]


def interpreters() -> list[str]:
    """The first interpreter of each version, on the path or of pyenv."""
    candidates = [
        [f"python{v}", *map(str, sorted(Path.home().glob(f".pyenv/versions/{v}.*/bin/python")))] for v in VERSIONS
    ]
    return [next(filter(is_there, names)) for names in candidates if any(map(is_there, names))]


def is_there(python: str) -> bool:
    # A shim of pyenv may be there for a version that is not active.
    return bool(shutil.which(python)) and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


def clone(folder: Path) -> None:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "clone")], check=True)


def replay_all(python: str) -> None:
    """All pages with an interpreter: the first two in one clone and environment, as after a pull."""
    code = "import platform, sys; print(platform.python_version(), sys.base_prefix)"
    version, prefix = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    title, programs = f"Python {version}", Path(prefix, "bin")
    with tempfile.TemporaryDirectory(prefix="first-hour-") as temporary:
        folder = Path(temporary)
        clone(folder)
        for file in GONE.values():
            (folder / "clone" / file).touch()
        shell = Shell(folder, programs)
        replay("README.md", shell, title)
        shell.run(["cd ..", *(f"python -c 'import {module}'" for module in GONE)])
        for file in GONE.values():
            (folder / "clone" / file).unlink()
        shell = Shell(folder, programs)
        replay("docs/index.md", shell, title)
        shell.run(["cd ..", *(f"! python -c 'import {module}'" for module in GONE)])
    with tempfile.TemporaryDirectory(prefix="first-hour-") as temporary:
        clone(Path(temporary))
        replay("docs/first-hour.md", Shell(Path(temporary), programs), title)


def main(pythons: list[str]) -> int:
    """The exit code: 1 after a command that fails or prints something else."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        replays = [pool.submit(replay_all, python) for python in pythons or interpreters()]
    faults = [replay.exception() for replay in replays]
    for fault in filter(None, faults):
        print(fault)
    return 1 if any(faults) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
