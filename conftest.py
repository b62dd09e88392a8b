"""Set before JAX and NumPy start: eight devices on any machine, for what is sharded; how XLA compiles; and where its
programs stay, so that the next run does not compile them again.
"""

import gc
import hashlib
import itertools
import os
import platform
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

# No test is about time, and a busy machine takes any.
settings.register_profile("ejkernel", deadline=None)
settings.load_profile("ejkernel")

# NumPy's products by one thread, because there is a process for each processor. OpenBLAS's threads wait for each other:
# on two busy processors a product of (64, 64) and (64, 256) took 30 ms instead of 0.1.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

pytest_plugins = ("tests.selection", "tests.distributions")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

JAXLIB = tuple(map(int, version("jaxlib").split(".")[:2]))

given = os.environ.get("XLA_FLAGS", "").split()
flags = ["--xla_force_host_platform_device_count=8"]
if JAXLIB < (0, 11):
    # Its fusions by YNNPACK give wrong sums in float32: the second derivative of a norm under vmap was off by 65 %.
    flags.append("--xla_cpu_experimental_ynn_fusion_type=")
if os.environ.get("EJKERNEL_TESTS") == "quick":
    # What a test compiles it runs once, and compiling takes longest: without optimisation, half as long or less. The
    # long sweep compiles XLA's own kernels as users do.
    flags.append("--xla_backend_optimization_level=0")
    # By one thread: its programs are too small to be divided, which costs more than it saves.
    flags.append("--xla_cpu_parallel_codegen_split_count=1")
    if JAXLIB < (0, 11):  # later ones know no other way
        flags.append("--xla_cpu_use_fusion_emitters=false")
# Each once: a process that a test starts, and a worker, inherit them, and JAX takes as many as there are for its keys.
os.environ["XLA_FLAGS"] = " ".join([*given, *(flag for flag in flags if flag not in given)])

#: Of compiled programs, over all versions and flags: with more, all of them go.
MOST_BYTES = 500 * 2**20


def processor() -> str:
    """What it can do. JAX's own keys lack this, and a program for another one ends in an illegal instruction."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def programs_folder(every: Path, flags: str) -> Path:
    """Of this version of XLA, its flags and this processor."""
    built = "\n".join((flags, processor()))
    return every / f"{version('jaxlib')}-{hashlib.sha256(built.encode()).hexdigest()[:12]}"


def bound(folder: Path, most: int) -> None:
    """Remove a folder that has grown beyond so many bytes."""
    with suppress(FileNotFoundError):  # another run that removes it
        if sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) > most:
            shutil.rmtree(folder, ignore_errors=True)


def keep_programs(every: Path, environment: MutableMapping[str, str]) -> None:
    """Have JAX keep all that it compiles, however small.

    A folder that the user has named is his own. CI has nothing to read back, and is to compile everything.
    """
    if "JAX_COMPILATION_CACHE_DIR" in environment or environment.get("CI") == "true":
        return
    bound(every, MOST_BYTES)
    environment["JAX_COMPILATION_CACHE_DIR"] = str(programs_folder(every, environment["XLA_FLAGS"]))
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    # The labels of calls are in a program's metadata. Without it in the key, a program would be read back with the
    # labels of another one. The lines of its sources are left out: with them, every edit would compile all anew.
    environment["JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY"] = "1"
    environment["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"


keep_programs(Path(__file__).parent / ".pytest_cache" / "jax", os.environ)


@pytest.fixture
def use_registry(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Have ``ejkernel_core`` use another registry for a test."""
    import ejkernel_core

    def use(registry: Any) -> None:
        monkeypatch.setattr(ejkernel_core, "registry", registry)
        for name in ("call", "invocation", "plan", "explain"):
            monkeypatch.setattr(ejkernel_core, name, getattr(registry, name))

    return use


#: The numbers of the tests that this process runs.
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes what its user has measured, or what another test has.

    The folder is made by the test that writes to it. ``tmp_path`` would make one for every test, and look at those of
    all tests before it.
    """
    folder = tmp_path_factory.getbasetemp() / f"ejkernel-cache-{next(NUMBERS)}"
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(folder))
    import ejkernel_cache

    ejkernel_cache.default_cache.cache_clear()
    return folder


@pytest.fixture(autouse=True)
def scope_of_the_thread() -> Iterator[None]:
    """No test leaves a scope, or its part of JAX's jit key, to those after it."""
    yield
    from ejkernel_core import _scopes

    assert (_scopes.current_scope(), _scopes.jit_key.value) == (_scopes.EMPTY, "")


#: How much memory a process may take, beyond what was left when it last dropped the programs of JAX.
MOST_GROWTH = 2 * 2**30
LEFT_BYTES = [0]


@pytest.fixture(autouse=True)
def programs_fit_into_memory() -> Iterator[None]:
    """JAX keeps the programs of all tests, several gigabytes in a long sweep. Drop them when they are many."""
    yield
    with suppress(OSError):  # other systems than Linux do not say it there
        resident = resident_bytes()
        if resident > LEFT_BYTES[0] + MOST_GROWTH:
            sys.modules["jax"].clear_caches()
            gc.collect()
            LEFT_BYTES[0] = resident_bytes()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def all_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compilers with which the records of the tuned packages were measured, whatever is installed here."""
    from ejkernel_cudnn.flash_attention import library
    from ejkernel_triton.launch import _jax_triton

    monkeypatch.setattr(_jax_triton, "version", lambda: (0, 4, 1))
    monkeypatch.setattr(_jax_triton, "no_descriptors_reason", lambda: None)
    monkeypatch.setattr(library, "_library", lambda: (None, None))
    monkeypatch.setattr(library, "_too_wide", lambda *arguments: None)


class Output(NamedTuple):
    """What a command has printed, and its exit code."""

    code: int
    text: str
    errors: str


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Output]:
    """``run_command("cache", "ls")``: the exit code and the output of ``ejkernel cache ls``, run in this process."""
    import ejkernel_cli

    def run(*words: object) -> Output:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end, warnings.catch_warnings():
            ejkernel_cli.main([*map(str, words)])
        return Output(int(end.value.code or 0), *capsys.readouterr())

    return run


#: How long after a text its answer is typed.
ANSWER_S = 0.4
#: Makes the terminal that it gets the one of its session, so that Ctrl-C reaches it, and becomes the command.
IN_TERMINAL = """
import os, sys
terminal, *words = sys.argv[1:]
descriptor = os.open(terminal, os.O_RDWR)
for number in range(3):
    os.dup2(descriptor, number)
os.execv(sys.executable, [sys.executable, "-m", "ejkernel_cli", *words])
"""


@pytest.fixture
def run_in_terminal() -> Callable[..., tuple[int, str]]:
    """``run_in_terminal("cache", "clear", answers={"[y/N]": "y"})``: the exit code of ``ejkernel cache clear`` in a
    terminal, and all that it has shown. What is typed follows its text, once each; chr(3) is Ctrl-C.
    """

    def run(
        *words: str, answers: Mapping[str, str] = MappingProxyType({}), columns: int = 80, timeout_s: float = 60.0
    ) -> tuple[int, str]:
        keyboard, terminal = pty.openpty()
        termios.tcsetwinsize(keyboard, (24, columns))
        process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, os.ttyname(terminal), *words],
            # pytest-xdist has its own number of columns there.
            env={"TERM": "xterm", **{name: value for name, value in os.environ.items() if name != "COLUMNS"}},
            start_new_session=True,
        )
        shown, waiting, until = b"", dict(answers), time.monotonic() + timeout_s
        times: dict[str, float] = {}
        try:
            while True:
                is_over = process.poll() is not None
                if select.select([keyboard], [], [], 0.05)[0]:
                    shown += os.read(keyboard, 1 << 16)
                elif is_over:
                    return process.returncode, shown.decode()
                for text in [text for text in waiting if text.encode() in shown]:
                    # Not at once: a program that is about to read does not notice Ctrl-C before it has read.
                    if time.monotonic() - times.setdefault(text, time.monotonic()) > ANSWER_S:
                        os.write(keyboard, waiting.pop(text).encode())
                assert time.monotonic() < until, shown.decode()
        finally:
            process.kill()
            process.wait()
            os.close(terminal)
            os.close(keyboard)

    return run


def pytest_collection_finish() -> None:
    """Have the garbage collector pass over all that is there before the tests, and run less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or JAX reports leaks at the end
