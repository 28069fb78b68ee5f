"""Assigns the pages of the KV cache: pages are given to sequences, shared by sequences with the same beginning, and
freed.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from bytescope.model.paged.page_pool import NOBODY, PAGE


class Pages:
    """Allocates the pages of a KV cache to sequences. A page stores the keys and values of a fixed number of tokens.

    The pages have the numbers 1 to count - 1. Page 0 (NOBODY) is the scratch page, which no sequence gets.

    A full page is identified by its tokens and all tokens before it. A later sequence that begins with the same tokens
    shares the page instead of computing it again. A page keeps its content after its sequence has ended, until another
    sequence needs the page; the least recently used page is reused first.

    Attributes:
        reused: number of token positions that sequences shared instead of computing them.
    """

    def __init__(self, count: int):
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NOBODY + 1, count))
        self._users = [0] * count
        self._known: dict[bytes, int] = {}  # digest of the tokens up to the end of a page -> the page
        self._name: dict[int, bytes] = {}
        self.count, self.reused = count, 0

    @property
    def free(self) -> int:
        """Number of pages of the KV cache that no sequence uses now. The scratch page is not counted."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of pages of the KV cache that one or more sequences use now. The scratch page is not counted."""
        return self.count - 1 - self.free

    def give(self, pages: list[int], length: int) -> bool:
        """Appends free pages to the list `pages` of a sequence until they have room for `length` positions.

        Returns False if not enough pages are free; then no page is appended.
        """
        missing = -(-length // PAGE) - len(pages)
        if missing > self.free:
            return False
        for _ in range(missing):
            page, _ = self._free.popitem(last=False)
            if name := self._name.pop(page, None):
                del self._known[name]
            self._users[page] = 1
            pages.append(page)
        return True

    def begin(self, tokens: Sequence[int]) -> list[int]:
        """Returns the pages that already contain the first tokens of a new sequence, and shares them with it.

        At least the last token is not shared, since it must be computed to predict the next token.
        """
        shared: list[int] = []
        for name in names(tokens[:-1]):
            page = self._known.get(name)
            if page is None:
                break
            if not self._users[page]:
                del self._free[page]
            self._users[page] += 1
            shared.append(page)
        self.reused += len(shared) * PAGE
        return shared

    def computed(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Records which tokens the full pages of a sequence contain, so that later sequences can share these pages.

        `tokens`: the tokens of the sequence whose keys and values are in the KV cache.
        """
        for page, name in zip(pages, names(tokens)):
            if page not in self._name and name not in self._known:
                self._known[name], self._name[page] = page, name

    def take(self, pages: list[int]) -> None:
        """Removes all pages from the list `pages` of a sequence and frees them. The last page is freed first, so that
        the pages of the beginning are reused last.
        """
        while pages:
            page = pages.pop()
            self._users[page] -= 1
            if not self._users[page]:
                self._free[page] = None


def names(tokens: Sequence[int]) -> list[bytes]:
    """Returns, for each full page of a sequence, a hash of all tokens from the beginning to the end of the page."""
    digest, digests = blake2b(digest_size=16), []
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        digest.update(np.asarray(tokens[start : start + PAGE], np.int32).tobytes())
        digests.append(digest.digest())
    return digests
