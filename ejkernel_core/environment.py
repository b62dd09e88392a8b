"""The environment variables of the project, and those in the process that look like one and are read by nothing.

This module imports nothing of the core, so that the command ``ejkernel`` can read it where JAX cannot be imported.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping

import attrs

PREFIX = "EJKERNEL_"
#: jaxlib before 0.11 has wrong sums in float32 on CPUs, unless XLA_FLAGS has this flag with nothing after its last "=".
FUSION_FLAG = "--xla_cpu_experimental_ynn_fusion_type="


@attrs.frozen
class Variable:
    """One environment variable: the distribution that reads it, what it takes, and what it does."""

    name: str
    distribution: str
    values: str
    default: str
    meaning: str


#: All variables of the distributions of this project.
VARIABLES = (
    Variable(
        "EJKERNEL_PLUGINS",
        "ejkernel-core",
        "names of distributions with commas; `-name` leaves one out",
        "all that are installed",
        "the distributions whose plugins are used; read once, when `ejkernel_core` is imported",
    ),
    Variable(
        "EJKERNEL_AUTOTUNE",
        "ejkernel-core",
        "`off`, `on_miss`, `error_on_miss`",
        "`off`",
        "what a call does that no store has a record of; read once, when `ejkernel_core` is imported",
    ),
    Variable(
        "EJKERNEL_CACHE_DIR",
        "ejkernel-cache",
        "a folder",
        "`ejkernel/configs` in the user's cache folder",
        "where measured configurations are stored; read when a call first needs it",
    ),
    Variable(
        "EJKERNEL_CACHE_STRICT",
        "ejkernel-cache",
        "`1`",
        "not set",
        "a folder of measured configurations that others can write to is an error, in place of one warning",
    ),
    Variable(
        "EJKERNEL_AGREE_WAIT_S",
        "ejkernel-agree",
        "seconds",
        "60",
        "how long a process of a program waits for the choice of another one",
    ),
    Variable(
        "EJKERNEL_TRITON_SMEM_LIMIT",
        "ejkernel-ops",
        "bytes; empty for no limit of its own",
        "what the device has",
        "the shared memory that kernels in Triton may use",
    ),
    Variable(
        "EJKERNEL_TESTS",
        "the tests of this project",
        "`quick`",
        "not set",
        "XLA compiles without optimisation, because most of the time of a test is compiling",
    ),
)


def unread_variables(environment: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """The variables with the prefix of the project that no distribution of it reads, with the most similar known name.

    >>> unread_variables({"EJKERNEL_AUTOTNUE": "on_miss", "EJKERNEL_PLUGINS": "", "HOME": "/"})
    {'EJKERNEL_AUTOTNUE': 'EJKERNEL_AUTOTUNE'}
    """
    names = [variable.name for variable in VARIABLES]
    unread = [name for name in (os.environ if environment is None else environment) if name.startswith(PREFIX)]
    return {name: _most_similar(name, names) for name in sorted(unread) if name not in names}


def _most_similar(name: str, names: list[str]) -> str | None:
    # Without the prefix, which all names share and which would make them similar.
    rests = [other.removeprefix(PREFIX) for other in names]
    match = next(iter(difflib.get_close_matches(name.removeprefix(PREFIX), rests, 1)), None)
    return match and PREFIX + match


def lacks_fusion_flag(environment: Mapping[str, str], jaxlib: str | None) -> bool:
    """Whether this version of jaxlib needs the flag on a CPU, and XLA_FLAGS does not have it."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", jaxlib or "99")[:2])
    return numbers < (0, 11) and FUSION_FLAG not in environment.get("XLA_FLAGS", "").split()


def remarks(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """One sentence for each variable that nothing reads.

    >>> remarks({"EJKERNEL_CACHEDIR": "/tmp"})
    ('EJKERNEL_CACHEDIR is set, and nothing reads it; did you mean EJKERNEL_CACHE_DIR?',)
    """
    return tuple(
        f"{name} is set, and nothing reads it" + (f"; did you mean {similar}?" if similar else "")
        for name, similar in unread_variables(environment).items()
    )
