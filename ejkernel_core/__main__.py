"""``python -m ejkernel_core`` lists the plugins, the distribution of each, and why some are broken."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import registry
from ._discovery import KERNELS, OPERATIONS, POLICIES
from ._policies import BUILT_IN_NAMES

HEADINGS = {OPERATIONS: "operations", KERNELS: "kernels", POLICIES: "policies"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        "python -m ejkernel_core", description="List the plugins, the distribution of each, and why some are broken."
    )
    parser.parse_args(arguments)
    if registry.selection_fault:
        sys.exit(registry.selection_fault)
    print(listing())
    return 0


def listing() -> str:
    """Return the list as text."""
    rows = registry.inspect()
    lines = [] if registry.plugins is None else [f"EJKERNEL_PLUGINS={registry.plugins!r}"]
    for group, heading in HEADINGS.items():
        lines.append(heading)
        rows_of_group = [(entry, broken) for entry, broken in rows if entry.group == group]
        if group == POLICIES:
            lines += [f"  {name:<32} built in" for name in BUILT_IN_NAMES]
        elif not rows_of_group:
            lines.append("; ".join(filter(None, ("  none", registry.install_hint()))))
        for entry, broken in rows_of_group:
            lines.append(f"  {entry.name:<32} {entry.provider}")
            if broken:
                lines.append(f"    broken: {broken.reason}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
