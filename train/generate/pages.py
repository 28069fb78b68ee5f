"""Whose each page of the pool is: pages are given, shared by sequences that begin alike, and taken back."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from bytescope.model.paged.page_pool import NOBODY, PAGE


class NoPages(Exception):
    """No page is free."""


class Pages:
    """The pages 1 to count - 1 of a pool; NOBODY is never given.

    A full page whose tokens are computed is known by what it and all before it hold, so that a sequence that begins
    with the same tokens takes it in the place of computing them. Such a page is forgotten only when it is given to
    somebody else, the one that was longest unused first.

    Attributes:
        reused: positions that were taken over from earlier sequences, so far.
    """

    def __init__(self, count: int):
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NOBODY + 1, count))
        self._users = [0] * count
        self._known: dict[bytes, int] = {}  # what a page holds -> the page
        self._name: dict[int, bytes] = {}
        self.count, self.reused = count, 0

    @property
    def free(self) -> int:
        """Pages that nobody uses."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that somebody uses."""
        return self.count - 1 - self.free

    def give(self, pages: list[int], length: int) -> None:
        """Adds pages to a sequence's, until they hold `length` positions.

        Raises:
          NoPages: there are too few; none is added.
        """
        missing = -(-length // PAGE) - len(pages)
        if missing > self.free:
            raise NoPages(f"{missing} pages are missing, {self.free} are free")
        pages += [self._give() for _ in range(missing)]

    def _give(self) -> int:
        page, _ = self._free.popitem(last=False)
        if name := self._name.pop(page, None):
            del self._known[name]
        self._users[page] = 1
        return page

    def begin(self, tokens: Sequence[int]) -> list[int]:
        """The known pages that hold the first of these tokens, taken for a sequence; at least one token is left to be
        computed, of which the next one follows."""
        found: list[int] = []
        for name in names(tokens[:-1]):
            page = self._known.get(name)
            if page is None:
                break
            if not self._users[page]:
                del self._free[page]
            self._users[page] += 1
            found.append(page)
        self.reused += len(found) * PAGE
        return found

    def computed(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Tells what the full pages of a sequence hold; `tokens`: those that are computed."""
        for page, name in zip(pages, names(tokens)):
            if page not in self._name and name not in self._known:
                self._known[name], self._name[page] = page, name

    def forget(self) -> None:
        """Forgets what free pages hold, so that it is computed again."""
        for page in self._free:
            if name := self._name.pop(page, None):
                del self._known[name]

    def take(self, pages: list[int]) -> None:
        """Takes a sequence's pages back; the last first, so that beginnings stay known the longest."""
        while pages:
            page = pages.pop()
            self._users[page] -= 1
            if not self._users[page]:
                self._free[page] = None


def names(tokens: Sequence[int]) -> list[bytes]:
    """For each full page of a sequence a digest of all tokens up to its end."""
    digest, found = blake2b(digest_size=16), []
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        digest.update(np.asarray(tokens[start : start + PAGE], np.int32).tobytes())
        found.append(digest.digest())
    return found
