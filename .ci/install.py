"""``python .ci/install.py REQUIREMENT...``: pip install, in a few lines that say what it is doing.

Left alone, pip prints hundreds of lines, or with -q nothing for a minute. All that it prints is in ``pip.log`` in the
environment, and its end is shown where it fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
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


def main(requirements: list[str]) -> int:
    """The exit code of pip."""
    start = last = time.monotonic()
    tail: deque[str] = deque(maxlen=TAIL)
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", *requirements]
    log = Path(sys.prefix, "pip.log")
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            file.write(line)
            tail.append(line)
            text, now = step(line), time.monotonic()
            if text is not None and (now - last >= INTERVAL_S or text.startswith("installing")):
                print(f"  {now - start:3.0f} s  {text}", flush=True)
                last = now
    seconds = time.monotonic() - start
    if pip.returncode:
        print("".join(tail), end="", file=sys.stderr)
        print(f"pip failed after {seconds:.0f} s; all that it said is in {log}", file=sys.stderr)
    else:
        print(f"  {seconds:3.0f} s  installed; what pip said is in {log}")
    return pip.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
