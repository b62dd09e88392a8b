"""``python .ci/install.py REQUIREMENT...``: pip install, in a few lines that say what it is doing.

Left alone, pip prints hundreds of lines, or with -q nothing for a minute. All that it prints is in ``pip.log`` in the
environment, and its end is shown where it fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

#: The least seconds between two lines, except for those that are rare.
INTERVAL_S = 4.0
#: The lines of pip that say what it is doing, and what stands for them.
STEPS = (
    (re.compile(r"Obtaining file://(\S+)"), "reading {}"),
    (re.compile(r"Collecting ([\w.-]+)"), "looking for {}"),
    (re.compile(r"Downloading (\S+ \([\d.]+ [kM]?B\))"), "downloading {}"),
    (re.compile(r"Building editable for ([\w.-]+)"), "building {}"),
    (re.compile(r"Installing collected packages: (.*)"), "installing {}"),
)
#: After how many seconds without a line the last step is shown again.
PATIENCE_S = 10.0
#: How many of the last lines are shown where pip fails.
TAIL = 30


def step(line: str) -> str | None:
    """What pip is doing, in a few words; None for a line that does not say."""
    for pattern, text in STEPS:
        if match := pattern.search(line):
            what = match[1]
            if text.startswith("installing"):
                what = f"{what.count(',') + 1} packages"
            elif text.startswith("reading"):
                what = Path(what).name
            return text.format(what)
    return None


class Progress:
    """Prints what pip is doing, not too often, and never nothing for long."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._step = "reading the requirements"
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def show(self, text: str) -> None:
        with self._lock:
            is_rare = text.startswith("installing")
            if is_rare or time.monotonic() - self._last >= INTERVAL_S:
                self._print(text)
            self._step = text

    def repeat(self, is_done: threading.Event) -> None:
        """Until pip is done, show the last step where nothing else is shown."""
        while not is_done.wait(1.0):
            with self._lock:
                if time.monotonic() - self._last >= PATIENCE_S:
                    self._print(f"still {self._step}")

    def _print(self, text: str) -> None:
        self._last = time.monotonic()
        print(f"  {self.seconds:3.0f} s  {text}", flush=True)


def main(requirements: list[str]) -> int:
    """The exit code of pip."""
    progress, is_done = Progress(), threading.Event()
    tail: deque[str] = deque(maxlen=TAIL)
    # Python compiles what it imports; compiling all of every package would take as long as downloading them.
    command = [sys.executable, "-m", "pip", "install", "--no-compile", "--progress-bar", "off", *requirements]
    log = Path(os.environ.get("EJKERNEL_PIP_LOG") or Path(sys.prefix, "pip.log"))
    threading.Thread(target=progress.repeat, args=(is_done,), daemon=True).start()
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            file.write(line)
            tail.append(line)
            if text := step(line):
                progress.show(text)
    is_done.set()
    if pip.returncode:
        print("".join(tail), end="", file=sys.stderr)
        print(f"pip failed after {progress.seconds:.0f} s; all that it said is in {log}", file=sys.stderr)
    else:
        print(f"  {progress.seconds:3.0f} s  installed; what pip said is in {log}")
    return pip.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
