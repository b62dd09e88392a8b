"""How much of the time of transfers between devices is inside the span of an attention kernel, by the profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from ._profile import kernels_of, profile_of

#: Start and end, in nanoseconds.
Span = tuple[float, float]
#: What the names of kernels that transfer contain, in lower case.
TRANSFERS = ("nccl", "p2p")
#: A kernel counts as attention if it takes this share of the longest. All others are much shorter.
LONG_SHARE = 0.2


def hidden_share(run: Callable[[], Any], calls: int = 3) -> float | None:
    """The share, over all devices and some calls; None where the profile has no transfers of a GPU."""
    jax.block_until_ready(run())
    profile = profile_of(run, calls)
    return None if profile is None else share_in_profile(profile)


def share_in_profile(profile: Any) -> float | None:
    """The share, from a profile."""
    hidden, total = 0.0, 0.0
    for plane in profile.planes:
        if plane.name.startswith("/device:GPU"):
            transfers, kernels = _spans(plane)
            hidden += sum(_within(span, kernels) for span in transfers)
            total += sum(end - start for start, end in transfers)
    return hidden / total if total else None


def _spans(plane: Any) -> tuple[list[Span], list[Span]]:
    """Those of transfers, and those of attention, which do not overlap one another."""
    events = kernels_of(plane)
    transfers = [event for event in events if any(word in event.name.lower() for word in TRANSFERS)]
    others = [event for event in events if event not in transfers]
    longest = max((event.duration_ns for event in others), default=0)
    kernels = [event for event in others if event.duration_ns >= LONG_SHARE * longest]
    return [*map(_span, transfers)], [*_united(map(_span, kernels))]


def _span(event: Any) -> Span:
    return event.start_ns, event.start_ns + event.duration_ns


def _united(spans: Iterable[Span]) -> Iterator[Span]:
    """The same time in spans that do not overlap."""
    current: Span | None = None
    for start, end in sorted(spans):
        if current is not None and start <= current[1]:
            current = current[0], max(current[1], end)
            continue
        if current is not None:
            yield current
        current = start, end
    if current is not None:
        yield current


def _within(span: Span, others: Iterable[Span]) -> float:
    """How much of a span is inside others, which do not overlap one another."""
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)
