"""The lock file: the resources of every launch that is checked, with the hash of all that decides them.

What has the same hash need not be compiled again. The file has a row a line, so that changes can be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from ._resources import Case, Program, Resources, programs

#: Card, kernel, example, configuration, and the name of the Triton function.
Key = tuple[str, ...]


@attrs.frozen
class Lock:
    """The rows of a lock file: hashes and resources."""

    rows: dict[Key, tuple[str, Resources]] = attrs.field(factory=dict)
    _by_digest: dict[str, Resources] = attrs.field(
        init=False, default=attrs.Factory(lambda self: dict(self.rows.values()), takes_self=True)
    )

    @classmethod
    def read(cls, path: Path) -> Lock:
        """The lock in a file, which is empty if there is no file."""
        rows: list[Any] = json.loads(path.read_text()) if path.exists() else []
        return cls({tuple(key): (digest, Resources(*resources)) for key, digest, resources in rows})

    def write(self, path: Path) -> None:
        """Write all rows."""
        rows = ([key, digest, attrs.astuple(resources)] for key, (digest, resources) in sorted(self.rows.items()))
        path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")

    def get(self, program: Program) -> Resources | None:
        """The recorded resources of a program; None if anything that decides them has changed."""
        return self._by_digest.get(program.digest)

    def record(self, checked: Iterable[Case]) -> Iterator[tuple[Case, Program, Resources]]:
        """The resources of these cases, compiled if they have changed, which become rows of the lock."""
        for case, program in programs(checked):
            resources = self.get(program) or program.compile()
            self._by_digest[program.digest] = resources
            self.rows[key(case, program)] = program.digest, resources
            yield case, program, resources

    def remove(self, keys: Iterable[Key]) -> None:
        """Remove rows."""
        for row in keys:
            del self.rows[row]


def key(case: Case, program: Program) -> Key:
    return case.card, case.kernel, case.example, case.configuration, program.name
