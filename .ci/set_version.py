"""Sets the version of every distribution: ``set_version.py 0.2.0``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r'^version = ".*"$', re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    version = parser.parse_args().version
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        parser.error(f"a version is like 0.2.0 or 0.2.0rc1; got {version!r}")
    for project in sorted([ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]):
        text, count = VERSION.subn(f'version = "{version}"', project.read_text())
        if count != 1:
            raise SystemExit(f"{project} has {count} lines with a version; it takes one")
        project.write_text(text)


if __name__ == "__main__":
    main()
