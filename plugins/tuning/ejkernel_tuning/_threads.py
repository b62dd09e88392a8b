"""Run work in threads, with limits on how long to wait for them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import jax

from ejkernel_core import Invocation
from ejkernel_core.extend import Numerics


class StillRunningError(Exception):
    """The work is not done in time. It cannot be interrupted, so it is left behind in this thread."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__(thread)
        self.thread = thread


@attrs.frozen
class Settings:
    """The settings of JAX that belong to a thread, and the device to run on."""

    numerics: Numerics
    device: Any

    @classmethod
    def of(cls, inv: Invocation) -> Settings:
        """The current settings, with the device of the invocation."""
        return attrs.evolve(cls.current(), device=jax.local_devices(backend=inv.platform)[0])

    @classmethod
    def current(cls) -> Settings:
        """The current settings, with the current device."""
        config: Any = jax.config
        return cls(Numerics.current(), config.jax_default_device)

    @contextlib.contextmanager
    def in_effect(self) -> Iterator[None]:
        with self.numerics.in_effect(), jax.default_device(self.device):
            yield


def run_in_thread(work: Callable[[], Any], seconds: float | None, settings: Settings) -> Any:
    """Run ``work`` in a new thread, outside of any trace. Return its result, or raise ``StillRunningError`` if late."""
    outcomes: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            with settings.in_effect():
                outcomes.put((True, work()))
        except BaseException as fault:  # raised again by the thread that waits
            outcomes.put((False, fault))

    thread = start_thread(run)
    try:
        is_result, outcome = outcomes.get(timeout=seconds)
    except queue.Empty:
        raise StillRunningError(thread) from None
    if is_result:
        return outcome
    try:
        raise outcome
    finally:
        del outcome  # its traceback refers to this frame, and to the arrays of the work


# -- the end of the process ------------------------------------------------------------------------------------------

#: Threads that may be running XLA. One that returns from there while Python ends can crash the process, so its end
#: waits for them. The wait is limited, because one may hang forever.
_running: set[threading.Thread] = set()
LAST_WAIT_S = 10.0
#: The limit after Ctrl-C, when a user waits.
INTERRUPTED_WAIT_S = 2.0


def start_thread(work: Callable[[], None]) -> threading.Thread:
    """Start a thread that the end of the process waits for."""

    def run() -> None:
        try:
            work()
        finally:
            _running.discard(thread)

    thread = threading.Thread(target=run, daemon=True)
    _running.add(thread)  # before it starts, because Ctrl-C may come at any moment
    thread.start()
    return thread


@atexit.register
def _wait_for_threads() -> None:
    is_interrupted = _is_interrupted()
    is_any_running = True
    try:
        wait_s = INTERRUPTED_WAIT_S if is_interrupted else LAST_WAIT_S
        is_any_running = _is_any_running_until(time.monotonic() + wait_s)
    except KeyboardInterrupt:
        is_interrupted = True
    if is_interrupted and is_any_running:
        _end_as_interrupted()
    elif is_any_running:
        _park_threads_in_cpp()


def end_after_interrupt(code: int) -> None:
    """End the process with this exit code after Ctrl-C, if a thread still runs XLA; return where none does."""
    try:
        is_any_running = _is_any_running_until(time.monotonic() + INTERRUPTED_WAIT_S)
    except KeyboardInterrupt:
        is_any_running = True
    if is_any_running:
        _flush()
        os._exit(code)


def _is_any_running_until(until: float) -> bool:
    """Wait for all threads, but not longer. Whether one still runs."""
    threads = list(_running)
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, until - time.monotonic()))
    return any(thread.is_alive() for thread in threads)


def _is_interrupted() -> bool:
    """Whether Python ends because of an uncaught Ctrl-C. An interactive Python goes on after one."""
    return getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1")


def _end_as_interrupted() -> None:
    """End the process by the signal, as Python does after its traceback, before threads that hang can crash it."""
    _flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _park_threads_in_cpp() -> None:
    """Have a thread that Python ends inside of C++ code sleep until the process ends, instead of aborting it.

    Before version 3.14, Python ends other threads when they take the GIL during its own end, by unwinding their stacks.
    A thread that waits in JAX for results takes it now and then, in a C++ function that must not be unwound: glibc's
    C++ then calls the handler of fatal errors, which aborts the process, and its exit code is lost. The code is unknown
    until the very end, so the process cannot be ended here with it.
    """
    if sys.platform != "linux":  # elsewhere, ending a thread does not unwind C++
        return
    with contextlib.suppress(OSError, AttributeError):  # another C++ library, which has no such handler
        set_terminate: Any = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
        set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
