"""Which sequences take part in a step, and with how many tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Tokens
from typing import Any

import attrs

from .pages import PagePool


def _prompt(tokens: Any) -> tuple[int, ...]:
    return _tokens("prompt", tokens)


def _stop_tokens(tokens: Any) -> tuple[int, ...]:
    return _tokens("stop_tokens", tokens)


def _tokens(name: str, tokens: Any) -> tuple[int, ...]:
    """A copy, which stays as it is whatever becomes of a list."""
    try:
        return tuple(tokens.tolist() if hasattr(tokens, "tolist") else tokens)  # an array, of NumPy or JAX
    except TypeError:
        raise TypeError(f"{name}: takes several tokens; got {tokens!r}") from None


@attrs.frozen
class Request:
    """A prompt, and how to continue it."""

    prompt: Tokens[int] = attrs.field(converter=_prompt)
    max_tokens: int = 16
    #: Generation ends at these, which are not part of the result.
    stop_tokens: Collection[int] = attrs.field(default=(), converter=_stop_tokens)
    #: Of `sample_tokens`. The best token is taken by default.
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    #: Two requests with one seed draw the same tokens, whatever runs beside them.
    seed: int = 0


@attrs.define(eq=False)
class Sequence:
    """A request that is being answered."""

    number: int
    request: Request
    #: The prompt and what was generated.
    tokens: list[int]
    #: Of its tokens, in their order.
    pages: list[int] = attrs.field(factory=list)
    #: How many tokens have keys and values in the pages.
    computed: int = 0
    #: Of the pages that its tokens fill; and how many of the pages others may find.
    digests: list[bytes] = attrs.field(factory=list)
    published: int = 0

    @property
    def left(self) -> int:
        """How many tokens have to be computed before the next one is drawn."""
        return len(self.tokens) - self.computed


class Scheduler:
    """Sequences that wait, and those that run, of which each holds the pages of its tokens.

    A sequence is admitted when there are pages for all of its tokens. If one that runs needs a page and there is none,
    the one that was admitted last gives all of its pages back, and waits; its tokens are computed again later.
    """

    def __init__(self, pool: PagePool, most_sequences: int, most_tokens: int) -> None:
        self.pool, self.most_sequences, self.most_tokens = pool, most_sequences, most_tokens
        self.waiting: deque[Sequence] = deque()
        #: In the order in which they were admitted.
        self.running: list[Sequence] = []
        self.preemptions = 0

    def step(self) -> tuple[list[tuple[Sequence, int]], list[tuple[int, int]]]:
        """The sequences of the next step with their numbers of tokens, and pages to copy before it: from, to."""
        shares: list[tuple[Sequence, int]] = []
        copies: list[tuple[int, int]] = []
        budget = self.most_tokens
        for sequence in [s for s in self.running if s.left == 1]:
            if sequence in self.running and self._has_room(sequence):  # none before it has taken its pages
                shares.append((sequence, 1))
        budget -= len(shares)
        for sequence in [s for s in self.running if s.left > 1]:
            budget = _add(shares, sequence, budget)
        while self.waiting and budget and len(self.running) < self.most_sequences:
            if not self._admit(self.waiting[0], copies):
                break
            self.running.append(self.waiting.popleft())
            budget = _add(shares, self.running[-1], budget)
        return shares, copies

    def _has_room(self, sequence: Sequence) -> bool:
        """Take a page for the next token of a sequence, if it needs one. False if it gave its pages back instead."""
        while len(sequence.pages) * self.pool.page_size < len(sequence.tokens):
            if self.pool.free:
                sequence.pages.append(self.pool.take())
                continue
            last = self.running[-1]
            self.remove(last)
            self.waiting.appendleft(last)
            self.preemptions += 1
            if last is sequence:
                return False
        return True

    def _admit(self, sequence: Sequence, copies: list[tuple[int, int]]) -> bool:
        """Take the pages of all tokens, of which those that hold the same tokens are shared."""
        size, tokens = self.pool.page_size, sequence.tokens
        shared: list[int] = []
        self.pool.extend(sequence.digests, tokens)
        for digest in sequence.digests:
            page = self.pool.find(digest)
            if page is None:
                break
            self.pool.share(page)
            shared.append(page)
        # The last token is always computed, for its logits. A page that others read is not written, but copied.
        is_whole = len(shared) * size == len(tokens)
        is_copied = is_whole and self.pool.is_shared(shared[-1])
        missing = -(-len(tokens) // size) - len(shared) + is_copied
        if missing > self.pool.free:
            for page in reversed(shared):
                self.pool.give_back(page)
            return False
        if is_copied:
            copies.append((shared.pop(), self.pool.take()))
            shared.append(copies[-1][1])
            missing -= 1
        sequence.published = len(shared)
        sequence.pages = shared + [self.pool.take() for _ in range(missing)]
        sequence.computed = min(len(shared) * size, len(tokens) - 1)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Let others find the pages that are full."""
        self.pool.extend(sequence.digests, sequence.tokens)
        for place in range(sequence.published, sequence.computed // self.pool.page_size):
            self.pool.publish(sequence.pages[place], sequence.digests[place])
            sequence.published = place + 1

    def remove(self, sequence: Sequence) -> None:
        """Give the pages back, of which the first are found by others for longest."""
        self.running.remove(sequence)
        for page in reversed(sequence.pages):
            self.pool.give_back(page)
        sequence.pages, sequence.computed, sequence.published = [], 0, 0


def _add(shares: list[tuple[Sequence, int]], sequence: Sequence, budget: int) -> int:
    """Let a sequence compute as many of its tokens as there is room for in the step; what room is left."""
    count = min(budget, sequence.left)
    if count:
        shares.append((sequence, count))
    return budget - count
