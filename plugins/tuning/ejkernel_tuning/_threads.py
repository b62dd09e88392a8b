"""Work in threads that are waited for no longer than there is time."""

from __future__ import annotations

import atexit
import contextlib
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

from ejkernel_core import _lowering
from ejkernel_core._kernel import Invocation


class StillRunningError(Exception):
    """What cannot be interrupted was left behind, in this thread."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__(thread)
        self.thread = thread


@attrs.frozen
class Settings:
    """JAX's settings that are a thread's own, and the device to run on."""

    numerics: _lowering.Settings
    device: Any

    @classmethod
    def of(cls, inv: Invocation) -> Settings:
        """As they are, on the device that the invocation is for."""
        return attrs.evolve(cls.here(), device=jax.local_devices(backend=inv.platform)[0])

    @classmethod
    def here(cls) -> Settings:
        """As they are, without a device of its own."""
        config: Any = jax.config
        return cls(_lowering.Settings.here(), config.jax_default_device)

    @contextlib.contextmanager
    def in_effect(self) -> Iterator[None]:
        with self.numerics.in_effect(), jax.default_device(self.device):
            yield


def in_thread(work: Callable[[], Any], seconds: float | None, settings: Settings) -> Any:
    """What ``work`` returns, from a thread of its own, where no tracer is near; ``StillRunningError`` if it is late."""
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            with settings.in_effect():
                answers.put((True, work()))
        except BaseException as fault:  # handed over to who waits
            answers.put((False, fault))

    thread = started(run)
    try:
        good, answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise StillRunningError(thread) from None
    if not good:
        raise answer
    return answer


# -- the end of the process ------------------------------------------------------------------------------------------

#: Threads that may be in XLA. One that comes back from there while Python ends takes the process down, so the end waits
#: for them: for a while, because what hangs for ever does not come back.
_running: set[threading.Thread] = set()
LAST_WAIT_S = 10.0
#: And so long where somebody pressed Ctrl-C, and waits.
INTERRUPTED_WAIT_S = 2.0


def started(work: Callable[[], None]) -> threading.Thread:
    """A thread at work, which the end of the process waits for."""

    def run() -> None:
        try:
            work()
        finally:
            _running.discard(thread)

    thread = threading.Thread(target=run, daemon=True)
    _running.add(thread)  # before it starts: Ctrl-C comes at any moment
    thread.start()
    return thread


@atexit.register
def _wait_for_threads() -> None:
    is_interrupted = _is_interrupted()
    until = time.monotonic() + (INTERRUPTED_WAIT_S if is_interrupted else LAST_WAIT_S)
    try:
        for thread in list(_running):
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))
    except KeyboardInterrupt:
        is_interrupted = True
    if is_interrupted and any(thread.is_alive() for thread in _running):
        _end_as_interrupted()


def _is_interrupted() -> bool:
    """Whether Python ends because of a Ctrl-C that nobody caught. At a prompt, it goes on after one."""
    return getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1")


def _end_as_interrupted() -> None:
    """End as Python does after its traceback, by the signal, while the threads that hang cannot do any harm yet."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
