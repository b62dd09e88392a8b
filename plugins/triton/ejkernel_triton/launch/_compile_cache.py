"""The compile cache on disk, with which a new process neither compiles a kernel again nor imports a compiler.

The files are in Triton's own folder. A key contains everything that the result depends on. It is made without Triton,
whose own key takes 0.3 s because it reads the whole compiler.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import sys
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = "ejkernel_triton"
#: The variables that Triton 3.6 to 3.9, its passes and LLVM read begin so.
_PREFIXES = (
    *("TRITON_", "JAX_TRITON_", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_", "AMDGCN_"),
    *("DISABLE_", "ENABLE_", "ALLOW_", "USE_IR_", "STORE_"),
)
#: Those that do not change the compiled code.
_FOLDER_VARIABLES = ("TRITON_CACHE_DIR", "TRITON_HOME")
_FALSE = ("", "0", "false", "off", "no", "n")
_DIGEST_SIZE = 32


def is_disabled() -> bool:
    """Whether the user wants every kernel compiled, or the files that only a compilation writes."""
    knobs = getattr(sys.modules.get("triton.knobs"), "compilation", None)
    always = os.environ.get("TRITON_ALWAYS_COMPILE", "").lower() not in _FALSE
    return bool(getattr(knobs, "always_compile", always)) or bool(os.environ.get("JAX_TRITON_DUMP_DIR"))


def key(*parts: object) -> str:
    """The key of the result of compiling these parts with the installed compilers in this environment.

    The ``repr`` of the parts has to be the same in every process.
    """
    return hashlib.sha256(repr((compilers(), environment(), parts)).encode()).hexdigest()


def read(name: str) -> bytes | None:
    """The content that is stored under a key; None if there is none, or if the file is damaged."""
    try:
        stored = (_folder() / name).read_bytes()
    except OSError:
        return None
    digest, content = stored[:_DIGEST_SIZE], stored[_DIGEST_SIZE:]
    return content if hashlib.sha256(content).digest() == digest else None


def write(name: str, content: bytes) -> None:
    """Store the content if the folder can be written. A reader gets all of it or nothing."""
    path = _folder() / name
    temporary = path.with_name(f".{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(content).digest() + content)
        os.replace(temporary, path)
    except OSError:  # the next process compiles again
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@functools.cache
def compilers() -> tuple[Any, ...]:
    """The installed compilers: the names, sizes and modification times of their files, and the version of jaxlib."""
    files = tuple((name, *file) for name in ("triton", "jax_triton") for file in _files(name))
    return (*files, metadata.version("jaxlib"), sys.version_info[:3])


def environment() -> tuple[Any, ...]:
    """The variables that a compilation may depend on, and the state of the files that they name."""
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES) and name not in _FOLDER_VARIABLES)
    return tuple((name, os.environ[name], _file_state(os.environ[name])) for name in names)


def sources(package: str) -> str:
    """A hash of the current source files of an installed package."""
    content = hashlib.sha256()
    for folder in _folders(package):
        for path in sorted(Path(folder).rglob("*.py")):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            content.update(f"{path.relative_to(folder).as_posix()} {digest} ".encode())
    return content.hexdigest()


def _folder() -> Path:
    """As Triton finds its own, by its settings if it is imported already."""
    knobs = getattr(sys.modules.get("triton.knobs"), "cache", None)
    folder = getattr(knobs, "dir", None) or os.environ.get("TRITON_CACHE_DIR")
    if not folder:
        folder = Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
    return Path(folder) / FOLDER


def _folders(package: str) -> list[str]:
    specification = importlib.util.find_spec(package)  # imports nothing
    return sorted(specification.submodule_search_locations or ()) if specification else []


def _files(package: str) -> Iterator[tuple[str, int, int]]:
    for folder in _folders(package):
        yield from sorted(_files_in(folder, ""))


def _files_in(folder: str, prefix: str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == "__pycache__":
                continue
            if entry.is_dir():
                yield from _files_in(entry.path, f"{prefix}{entry.name}/")
            else:
                state = entry.stat()
                yield f"{prefix}{entry.name}", state.st_size, state.st_mtime_ns


def _file_state(path: str) -> tuple[int, int] | None:
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return None
    return (state.st_size, state.st_mtime_ns)
