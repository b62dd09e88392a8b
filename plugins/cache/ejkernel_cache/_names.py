"""Any text as one safe component of a path: different texts give different ones, and none leads anywhere else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from ejkernel_core import Key
from ejkernel_core._keys import short_hash

#: Device, operation, backend, file.
Place = tuple[str, str, str, str]

#: File systems take 255 bytes.
LONGEST = 120
#: An escape is "%" and two digits. What stands for no text at all is "%" and something else.
ANY, EMPTY, CUT = "%any", "%empty", "%-"


def component(name: str | None) -> str:
    """The name with everything but ``A-Za-z0-9._-`` written as %XX, and no dot in front; None is any name at all.

    >>> component("NVIDIA H200"), component("../x"), component(None)
    ('NVIDIA%20H200', '%2E.%2Fx', '%any')
    """
    if name is None:
        return ANY
    safe = quote(name, safe="", errors="surrogatepass").replace("~", "%7E") or EMPTY
    if safe.startswith("."):
        safe = f"%2E{safe[1:]}"
    if len(safe) <= LONGEST:
        return safe
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{safe[:80]}{CUT}{digest[:32]}"


def written_out(part: str) -> str | None:
    """The name of a component; None where it was cut, or where ``component`` has not written it."""
    if CUT in part:
        return None
    try:
        return "" if part == EMPTY else unquote_to_bytes(part).decode(errors="surrogatepass")
    except UnicodeError:
        return None


def place_of(key: Key, backend: str | None, software: Mapping[str, str] | None = None) -> Place:
    """Where the record that was put last lies, below the cache's folder; or the one that these versions measured, where
    it is not that one.
    """
    end = "" if software is None else f"-{short_hash(dict(software), 8)}"
    return component(key.device), component(key.op), component(backend), f"{stem(key)}{end}.json"


def stem(key: Key) -> str:
    """What the names of a key's files begin with: first what they have in common with all keys of its kind."""
    return f"{key.kind}-{key.digest}"


def stem_of(name: str) -> str:
    """The stem in the name of a file."""
    return "-".join(name.removesuffix(".json").split("-")[:2])


def below(root: Path, place: Place) -> Path:
    """The path of a place."""
    return root.joinpath(*place)
