"""The owners of the pages of a pool: pages are given, shared by sequences with the same beginning, and taken back."""

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
        """Number of unused pages."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of used pages."""
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
        """Takes for a new sequence the known pages that hold its first tokens, and returns them. At least one token is
        left to compute, since the next token follows from it."""
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
        """Records what the full pages of a sequence hold. tokens: the computed ones."""
        for page, name in zip(pages, names(tokens)):
            if page not in self._name and name not in self._known:
                self._known[name], self._name[page] = page, name

    def forget(self) -> None:
        """Forgets what unused pages hold, so that no later sequence shares them."""
        for page in self._free:
            if name := self._name.pop(page, None):
                del self._known[name]

    def take(self, pages: list[int]) -> None:
        """Takes the pages of a sequence back, the last first, so that beginnings stay known the longest."""
        while pages:
            page = pages.pop()
            self._users[page] -= 1
            if not self._users[page]:
                self._free[page] = None


def names(tokens: Sequence[int]) -> list[bytes]:
    """Returns for each full page of a sequence a digest of all tokens up to the end of the page."""
    digest, found = blake2b(digest_size=16), []
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        digest.update(np.asarray(tokens[start : start + PAGE], np.int32).tobytes())
        found.append(digest.digest())
    return found
