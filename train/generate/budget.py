"""The size of the pool of keys and values: the memory that weights and the largest compiled step leave free.

    pages = floor((limit - weights - largest step) / bytes of a page)

Weights, step and page are compiled bytes, not estimates; what the runtime takes is in the steps. Pure arithmetic.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human
from bytescope.train.user_errors import DoesNotFit

# A first guess leaves this share of the limit to the steps; a guess that wastes less than it is kept.
SLACK = 0.0075


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bytes on one device, and the pages and sequences that fit.

    Fields:
      limit: available to programs. weights: of the model. steps: name of each compiled step -> what it takes beyond
      weights and pool, the runtime's part included. page_bytes: of a page in all layers. page: positions of a page.
      pages: of the pool, one of which is nobody's. sequences: rows of the step, that is at once at most. length:
      positions of a sequence at most.
    """

    limit: int
    weights: int
    steps: Mapping[str, int]
    page_bytes: int
    page: int
    pages: int
    sequences: int
    length: int

    @property
    def pool(self) -> int:
        """Bytes of the pool."""
        return self.pages * self.page_bytes

    @property
    def step(self) -> int:
        """Bytes of the largest step."""
        return max(self.steps.values())

    @property
    def peak(self) -> int:
        """Bytes of weights, pool and largest step."""
        return self.weights + self.pool + self.step

    @property
    def positions(self) -> int:
        """Positions that the pool holds."""
        return (self.pages - 1) * self.page

    @property
    def token_bytes(self) -> int:
        """Bytes of one position."""
        return self.page_bytes // self.page

    def at_once(self, length: int) -> int:
        """Returns how many sequences of `length` positions the pool holds; more than `sequences` of them wait for a
        row."""
        return (self.pages - 1) // -(-length // self.page)

    @property
    def left(self) -> int:
        """Bytes of the limit that stay free."""
        return self.limit - self.peak

    def to_json(self) -> dict[str, object]:
        """Returns the fields of --json."""
        lengths = {str(length): self.at_once(length) for length in lengths_of(self.length)}
        return {
            **dataclasses.asdict(self),
            "pool_bytes": self.pool,
            "peak_bytes": self.peak,
            "token_bytes": self.token_bytes,
            "positions": self.positions,
            "sequences_of_length": lengths,
        }


@dataclasses.dataclass(frozen=True)
class GenerationPlan:
    """The memory of generating from a config's model on a target.

    Fields:
      title: of the config. facts: how it is computed, a line each. budget: bytes on one device. reports: step -> its
      memory report.
    """

    title: str
    facts: Sequence[str]
    budget: Budget
    reports: Mapping[str, ReportRecord]


def lengths_of(longest: int, shortest: int = 256) -> list[int]:
    """Returns the lengths to show: powers of two times `shortest`, and `longest` at the end."""
    found, length = [], shortest
    while length < longest:
        found.append(length)
        length *= 2
    return [*found, longest]


def settle(
    limit: int, weights: int, page_bytes: int, most: int, measure: Callable[[int], Mapping[str, int]]
) -> tuple[int, Mapping[str, int]]:
    """Returns (the number of pages that fits the limit, step -> its bytes with this number of pages).

    Args:
      most: pages that are of any use. measure: compiles the steps with a number of pages, and gives what each takes
      beyond weights and pool.

    Raises:
      DoesNotFit: no page is left.
    """
    slack = int(SLACK * limit)
    pages, step = min((limit - weights - slack) // page_bytes, most), slack
    while True:
        if pages < 2:
            raise DoesNotFit(
                f"the weights take {human(weights)} and the largest step {human(step)} of {human(limit)}: no "
                f"page of {human(page_bytes)} is left; give more devices (--tensor=N or --fsdp=N), fewer "
                "--sequences or a smaller --chunk"
            )
        steps = measure(pages)
        step = max(steps.values())
        exact = min((limit - weights - step) // page_bytes, most)
        if pages <= exact and (exact - pages) * page_bytes <= slack:
            return pages, steps
        # Steps hardly depend on the pool; where one grows with it, less than what is left is taken.
        slack, pages = 2 * slack, exact
