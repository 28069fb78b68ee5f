"""The limits of a search over compiled programs, and the exception that ends a search early."""

from __future__ import annotations

import dataclasses
import math
import time

# The value of `stopped` after Ctrl-C.
CTRL_C = "Ctrl-C"


class Stopped(Exception):
    """Raised to end a search early. The results so far are kept. The argument is the reason: Ctrl-C, the time limit, or
    the maximum number of compiles."""


@dataclasses.dataclass
class Limits:
    """The limits of a search.

    Attributes:
        max_compiles: maximum number of compiles, not counting results from the cache.
        max_seconds: seconds after which no compile starts, except the first.
        compiles: number of compiles so far.
    """

    max_compiles: float = math.inf
    max_seconds: float = math.inf
    compiles: int = 0

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    def check(self) -> None:
        """Raises Stopped if no further program may be compiled."""
        if self.compiles >= self.max_compiles:
            raise self.too_many()
        if self.compiles and time.monotonic() - self._began > self.max_seconds:
            raise Stopped(f"the time limit ({self.max_seconds:g} s) was reached")

    def too_many(self) -> Stopped:
        """Returns the exception for a search that needs more compiles than the limit."""
        return Stopped(f"the limit on compiles ({self.compiles}) was reached")
