"""Computes the size of the KV cache: the memory that the weights and the largest compiled step leave free.

    pages = floor((limit - weights - largest step) / bytes of a page)

The bytes of weights, steps and pages come from the compiler, not from estimates. Runtime overheads are counted in the
steps. `budget_view` shows them on the terminal.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human, plural
from bytescope.memory.view.text_layout import Prose
from bytescope.memory.view.text_table import FigureTable, figure, label, words
from bytescope.train.user_errors import DoesNotFit

# Fraction of the limit that the first guess reserves for the steps. A guess that wastes less than this is accepted.
SLACK = 0.0075
BAR = 40  # columns of the longest bar


@dataclasses.dataclass(frozen=True)
class GenerationMemory:
    """The memory of generation on one device, and the number of KV cache pages and sequences that fit.

    Fields:
      limit: bytes that programs may use.
      weights: bytes of the parameters.
      steps: name of each compiled step -> bytes that it needs in addition to weights and KV cache, with runtime
        overheads.
      page_bytes: bytes of a KV cache page, summed over the layers.
      page: token positions per page.
      pages: number of pages of the KV cache, including the scratch page, which no sequence uses.
      sequences: maximum number of concurrent sequences.
      length: maximum number of token positions per sequence.
    """

    COMPUTED_KEYS: ClassVar[tuple[str, ...]] = (
        "pool_bytes",
        "peak_bytes",
        "token_bytes",
        "positions",
        "sequences_of_length",
    )

    limit: int
    weights: int
    steps: Mapping[str, int]
    page_bytes: int
    page: int
    pages: int
    sequences: int
    length: int

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pages of the KV cache on one device, the scratch page included."""
        return self.pages * self.page_bytes

    @property
    def step(self) -> int:
        """Bytes of the step that needs the most, in addition to weights and KV cache."""
        return max(self.steps.values())

    @property
    def peak_bytes(self) -> int:
        """Bytes of the weights, the KV cache and the largest step."""
        return self.weights + self.pool_bytes + self.step

    @property
    def positions(self) -> int:
        """Number of token positions that the KV cache can hold."""
        return (self.pages - 1) * self.page

    @property
    def token_bytes(self) -> int:
        """Bytes of the KV cache per token position, summed over the layers."""
        return self.page_bytes // self.page

    def at_once(self, length: int) -> int:
        """Returns the number of sequences of `length` token positions that fit in the KV cache. The maximum number of
        concurrent sequences, `sequences`, is not taken into account.
        """
        return (self.pages - 1) // -(-length // self.page)

    @property
    def left(self) -> int:
        """Bytes of the limit that weights, KV cache and the largest step leave unused."""
        return self.limit - self.peak_bytes

    @property
    def sequences_of_length(self) -> dict[int, int]:
        """Positions per sequence -> number of such sequences that fit in the KV cache, for several lengths."""
        return {length: self.at_once(length) for length in lengths_of(self.length)}


@dataclasses.dataclass(frozen=True)
class GenerationReport(GenerationMemory):
    """The result of bytescope report --generate.

    Fields, in addition to those of `GenerationMemory`:
      config: title of the config.
      reports: step -> its memory report.
    """

    config: str = ""
    reports: Mapping[str, ReportRecord] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class GenerationPlan:
    """The memory that generation with a config's model needs on a target.

    Fields:
      title: title of the config.
      facts: lines that describe how the model is computed.
      budget: the memory on one device.
      reports: step -> its memory report.
    """

    title: str
    facts: Sequence[str]
    budget: GenerationMemory
    reports: Mapping[str, ReportRecord]


def lengths_of(longest: int, shortest: int = 256) -> list[int]:
    """Returns the sequence lengths to show: `shortest`, doubled while it is below `longest`, and `longest` itself."""
    lengths, length = [], shortest
    while length < longest:
        lengths.append(length)
        length *= 2
    return [*lengths, longest]


def settle(
    limit: int, weights: int, page_bytes: int, most: int, measure: Callable[[int], Mapping[str, int]]
) -> tuple[int, Mapping[str, int]]:
    """Finds the largest KV cache that fits. Returns its number of pages, and the bytes of each step by name.

    Args:
      limit: bytes that programs may use.
      weights: bytes of the parameters.
      page_bytes: bytes of a page, summed over the layers.
      most: maximum number of pages that can be used.
      measure: function that compiles the steps for a number of pages and returns step -> bytes in addition to weights
        and KV cache.

    Raises:
      DoesNotFit: not even one page fits.
    """
    slack = int(SLACK * limit)
    pages, step = min((limit - weights - slack) // page_bytes, most), slack
    while True:
        if pages < 2:
            raise DoesNotFit(
                f"the KV cache does not fit: of {human(limit)}, the weights take {human(weights)} and the "
                f"largest step takes {human(step)}, which leaves too little for a page of keys and values "
                f"({human(page_bytes)}): give more devices (--tensor=N or --fsdp=N) or fewer --sequences"
            )
        steps = measure(pages)
        step = max(steps.values())
        exact = min((limit - weights - step) // page_bytes, most)
        if pages <= exact and (exact - pages) * page_bytes <= slack:
            return pages, steps
        # The bytes of a step hardly depend on the number of pages. If a step grows with it, more is reserved.
        slack, pages = 2 * slack, exact


def budget_view(plan: GenerationPlan) -> RenderableType:
    """Returns the memory of generation as a table for the terminal: bytes by part, and how many sequences fit."""
    budget = plan.budget
    parts = FigureTable(label(), figure(), words())
    parts.add("weights", human(budget.weights), "")
    pages = f"{plural(budget.pages, 'page')} of {budget.page} positions, {human(budget.token_bytes)} a position"
    parts.add("pool", human(budget.pool_bytes), pages)
    steps = "; ".join(f"{name} {human(size)}" for name, size in budget.steps.items())
    parts.add("largest step", human(budget.step), steps)
    parts.add("left", human(budget.left), "")
    parts.add("limit", human(budget.limit), "")
    counts = FigureTable(figure("positions"), figure("sequences"), label())
    most = max(budget.sequences_of_length.values()) or 1
    for length, count in budget.sequences_of_length.items():
        counts.add(f"{length:,}", f"{count:,}", "█" * max(round(BAR * count / most), 1 if count else 0))
    return Group(
        Text(f"generation from {plan.title}", style="bold"),
        *map(Prose, plan.facts),
        Text(),
        parts,
        Text(),
        Prose("sequences that fit the pool, by positions per sequence"),
        counts,
        Prose(f"at most {plural(budget.sequences, 'sequence')} run at the same time (--sequences); others wait", "dim"),
    )
