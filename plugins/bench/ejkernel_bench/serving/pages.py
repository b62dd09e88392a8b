"""The pages of a cache: which are in use, by how many sequences, and what the others still hold."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import numpy as np


class PagePool:
    """Pages that sequences take and give back. What a page holds is found again until it is taken for something else.

    A page in which all tokens are known has a digest of these and all tokens before them. Two prompts that begin alike
    have the same digests, and share the pages.
    """

    def __init__(self, count: int, page_size: int) -> None:
        self.page_size = page_size
        self._users = [0] * count
        #: The pages that nobody uses, in the order in which they are taken.
        self._free = OrderedDict.fromkeys(range(count))
        self._digests: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The page that has been free for longest. What it held is forgotten."""
        page, _ = self._free.popitem(last=False)
        digest = self._digests.pop(page, None)
        if digest is not None:
            del self._pages[digest]
        self._users[page] = 1
        return page

    def share(self, page: int) -> None:
        """Use a page that others use, or that was free."""
        self._free.pop(page, None)
        self._users[page] += 1

    def give_back(self, page: int) -> None:
        if not self._users[page]:
            raise RuntimeError(f"page {page} is given back, and nobody uses it")
        self._users[page] -= 1
        if not self._users[page]:
            self._free[page] = None

    def is_shared(self, page: int) -> bool:
        return self._users[page] > 1

    def publish(self, page: int, digest: bytes) -> None:
        """Let others find a page, unless there is one that holds the same."""
        if digest not in self._pages:
            self._pages[digest], self._digests[page] = page, digest

    def find(self, digest: bytes) -> int | None:
        return self._pages.get(digest)

    def extend(self, digests: list[bytes], tokens: list[int]) -> None:
        """Append the digests of the pages that the tokens fill, behind those of the first pages."""
        for end in range((len(digests) + 1) * self.page_size, len(tokens) + 1, self.page_size):
            page = np.array(tokens[end - self.page_size : end], np.int32).tobytes()
            digests.append(blake2b((digests[-1] if digests else b"") + page, digest_size=16).digest())
