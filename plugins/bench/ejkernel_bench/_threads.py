"""Work in threads: most of a benchmark is compiling, much of it in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

WORKERS = 16


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The results in order, when all are there. The threads have the caller's context, with the policy of the core.

    One that fails, or an interruption, does not wait for those that have not begun.
    """
    pool = ThreadPoolExecutor(WORKERS)
    try:
        futures = [pool.submit(copy_context().run, function, item) for item in items]
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
