"""Names of files: any text becomes one safe component of a path, and different texts become different components."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from ejkernel_core import Key
from ejkernel_core.extend import short_hash

#: The place of a record below the cache's folder: device, operation, backend, file.
Place = tuple[str, str, str, str]

#: File systems take 255 bytes.
MAX_LENGTH = 120
#: An escape is "%" and two digits. These are "%" and something else, so that no text has them.
ANY, EMPTY, TRUNCATED = "%any", "%empty", "%-"


def component(name: str | None) -> str:
    """The name with everything but ``A-Za-z0-9._-`` written as %XX, and no dot in front. None stands for any name.

    >>> component("NVIDIA H200"), component("../x"), component(None)
    ('NVIDIA%20H200', '%2E.%2Fx', '%any')
    """
    if name is None:
        return ANY
    safe = quote(name, safe="", errors="surrogatepass").replace("~", "%7E") or EMPTY
    if safe.startswith("."):
        safe = f"%2E{safe[1:]}"
    if len(safe) <= MAX_LENGTH:
        return safe
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{safe[:80]}{TRUNCATED}{digest[:32]}"


def decode_component(part: str) -> str | None:
    """The name for a component; None where it is truncated, or is not one that ``component`` makes."""
    if TRUNCATED in part:
        return None
    try:
        return "" if part == EMPTY else unquote_to_bytes(part).decode(errors="surrogatepass")
    except UnicodeError:
        return None


def place_of(key: Key, backend: str | None, software: Mapping[str, str] | None = None) -> Place:
    """The place of the latest record; with ``software``, the place of an older record that these versions measured."""
    suffix = "" if software is None else f"-{short_hash(dict(software), 8)}"
    return component(key.device), component(key.op), component(backend), f"{stem(key)}{suffix}.json"


def stem(key: Key) -> str:
    """The beginning of the names of a key's files. It begins with the kind, which other keys share."""
    return f"{key.kind}-{key.digest}"


def stem_of(name: str) -> str:
    """The stem in the name of a file."""
    return "-".join(name.removesuffix(".json").split("-")[:2])


def below(root: Path, place: Place) -> Path:
    """The path of a place."""
    return root.joinpath(*place)
