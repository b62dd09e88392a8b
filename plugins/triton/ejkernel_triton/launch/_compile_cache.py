"""Compiled kernels on disk, beside those that Triton keeps itself: jax-triton keeps them in memory alone, so that every
process would compile them anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.runtime.cache import get_cache_key, get_cache_manager

from ejkernel_triton.launch import _jax_triton

FILE = "jax_triton.json"
#: What is looked at, and not launched: it is many times as large as the rest.
LOOKED_AT = {"ttgir": "", "llir": ""}
_LOCK = threading.Lock()


def compiled(library: Any, compile_in_place: Any, module: Any, backend: Any, options: Any, *target: Any) -> Any:
    """What jax-triton's own function gives, from the folder where it is there, and into it where not."""
    kept = None if knobs.compilation.always_compile else _folder(module, backend, options)
    if kept is not None and (found := _read(library.CompilationResult, kept)) is not None:
        return found
    result = compile_in_place(module, backend, options, *target)
    if kept is not None:
        with contextlib.suppress(OSError):  # the next process compiles again
            kept.put(json.dumps({**dataclasses.asdict(result), **LOOKED_AT}), FILE, binary=False)
    return result


def _folder(module: Any, backend: Any, options: Any) -> Any:
    """Triton's own, by its own key, of itself, the kernel before it is compiled, the card and the options; and by the
    version of jax-triton, whose results they are.
    """
    text = str(module)
    source = SimpleNamespace(hash=lambda: hashlib.sha256(text.encode()).hexdigest())
    try:
        with _LOCK:  # it looks through Triton's modules, once
            key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
        return get_cache_manager(hashlib.sha256(f"jax-triton {_jax_triton.version()} {key}".encode()).hexdigest())
    except Exception:  # no folder, or no ptxas, of whose version the key tells: neither is needed to compile
        return None


def _read(result_type: Any, kept: Any) -> Any:
    path = kept.get_file(FILE)
    try:
        return None if path is None else result_type(**json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError):
        return None  # of another version of jax-triton, or damaged
