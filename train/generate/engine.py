"""The generation engine: each step computes pieces of prompts, or the next token of each running sequence.

Prompts are computed in chunks, so that a long prompt does not delay the other sequences for long (Agrawal et al. 2023,
arXiv 2308.16369). Sequences join and leave between steps (Yu et al. 2022, Orca). `Pages` assigns the pages of the KV
cache. If no page is free, the newest sequence gives its pages back and is recomputed later; its tokens do not change.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bytescope.model.paged.page_pool import NOBODY, PAGE, View
from bytescope.train.generate.request import Request, Running
from bytescope.train.generate.steps import Draws, EngineSizes, Steps
from bytescope.train.user_errors import UserError

# Maximum number of prompt steps in a row while running sequences wait. With fewer, steps have few rows; with more,
# running sequences stall.
PATIENCE = 4


class Pages:
    """Assigns the pages of a KV cache to sequences. A page stores the keys and values of PAGE tokens.

    The pages have the numbers 1 to count - 1. Page 0 (NOBODY) is the scratch page, which no sequence gets.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(NOBODY + 1, count))

    @property
    def free(self) -> int:
        """Number of pages of the KV cache that no sequence uses now. The scratch page is not counted."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of pages of the KV cache that a sequence uses now. The scratch page is not counted."""
        return self.count - 1 - self.free

    def give(self, pages: list[int], length: int) -> bool:
        """Appends free pages to the list `pages` of a sequence until they have room for `length` positions.

        Returns False if not enough pages are free; then no page is appended.
        """
        missing = -(-length // PAGE) - len(pages)
        if missing > self.free:
            return False
        for _ in range(missing):
            pages.append(self._free.pop())
        return True

    def take(self, pages: list[int]) -> None:
        """Removes all pages from the list `pages` of a sequence and frees them."""
        self._free += pages
        pages.clear()


class Engine:
    """Generates tokens for many requests at the same time. Call `submit` for each request, then `step` until no
    request is left; or iterate over `answers`.

    Args:
      steps: the compiled programs.
      params: the parameters, with the shapes and shardings of `steps.model.shapes`.
      sizes: the static shapes of the programs.

    Attributes:
      pages: allocator of the KV cache pages.
      running: the requests that are being answered.
      preempted: number of times that a running request lost its pages to another one.
    """

    def __init__(self, steps: Steps, params: Any, sizes: EngineSizes):
        self.sizes, self.pages = sizes, Pages(sizes.pages)
        self.preempted = 0
        self._steps, self._params, self._pools = steps, params, steps.make_pools(sizes.pages)
        self._waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self._waited = 0  # prompt steps in a row while running sequences waited
        self._submitted = 0

    # ---- requests ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Running:
        """Adds a request to the queue and returns its state.

        Raises:
          UserError: the prompt is empty, or the request can never fit in the KV cache.
        """
        length = len(request.tokens) + request.most
        if not request.tokens:
            raise UserError("the prompt is empty: give at least one token")
        if length > self.sizes.length:
            raise UserError(
                f"{len(request.tokens)} prompt tokens and {request.most} new tokens exceed the maximum of "
                f"{self.sizes.length} positions per sequence: shorten the prompt or generate fewer tokens"
            )
        if -(-length // PAGE) > self.sizes.pages - 1:
            raise UserError(
                f"{length} positions need {-(-length // PAGE)} pages of {PAGE} positions, but the KV cache has "
                f"only {self.sizes.pages - 1}: shorten the request, or give the KV cache more memory"
            )
        one = Running(self._submitted, request, list(request.tokens))
        self._submitted += 1
        self._waiting.append(one)
        return one

    @property
    def busy(self) -> bool:
        """True if any request is waiting or running."""
        return bool(self._waiting or self.running)

    def answers(self, requests: Iterable[Request]) -> Iterator[Running]:
        """Submits the requests and yields each one when its answer is finished."""
        for request in requests:
            self.submit(request)
        while self.busy:
            yield from (one for one in self.step() if one.ended)

    def preempt(self, one: Running) -> None:
        """Takes the KV cache pages from a running request. The request returns to the front of the queue and is
        computed again later.
        """
        self.running.remove(one)
        self.pages.take(one.pages)
        one.computed = 0
        self._waiting.appendleft(one)
        self.preempted += 1

    # ---- one step ---------------------------------------------------------------------------------------------

    def step(self) -> list[Running]:
        """Runs one step. It computes either parts of prompts, or one token of each running sequence. Returns the
        requests that got a token.

        A running sequence waits for at most PATIENCE prompt steps in a row.
        """
        self._admit()
        behind = [one for one in self.running if one.missing > 1]
        ready = [one for one in self.running if one.missing == 1]
        if not behind or (ready and self._waited >= PATIENCE):
            self._waited = 0
            self._give_pages({one.number: len(one.tokens) for one in ready})
            return self._run_model([(one, one.computed) for one in ready if one in self.running], 1)
        self._waited = self._waited + 1 if ready else 0
        # The row width that fits the oldest prompt; shorter rows let a step compute more prompts at once.
        width = next((width for width in self.sizes.widths if width >= behind[0].missing), self.sizes.chunk)
        wanted, left = {}, self.sizes.chunk // width
        for one in behind:
            taken = min(-(-one.missing // width), left)
            left -= taken
            wanted[one.number] = min(len(one.tokens), one.computed + taken * width)
        self._give_pages(wanted)
        pieces = []
        for one in behind:
            if one in self.running:  # was not preempted by _give_pages
                pieces += [(one, start) for start in range(one.computed, wanted[one.number], width)]
        return self._run_model(pieces, width)

    def _admit(self) -> None:
        while self._waiting and len(self.running) < self.sizes.sequences:
            one = self._waiting[0]
            if -(-len(one.tokens) // PAGE) > self.pages.free:
                return
            self.running.append(self._waiting.popleft())

    def _give_pages(self, wanted: Mapping[int, int]) -> None:
        for one in list(self.running):
            while one.number in wanted and one in self.running:  # an earlier sequence may have preempted it
                if self.pages.give(one.pages, wanted[one.number]):
                    break
                self.preempt(self.running[-1])  # the newest request

    def _run_model(self, pieces: Sequence[tuple[Running, int]], width: int) -> list[Running]:
        """Runs the model once. For each (request, start index) in `pieces`, computes up to `width` tokens of the
        request from this index on. A request whose tokens are then all computed gets its next token. Returns the
        requests that got a token.
        """
        if not pieces:
            return []
        rows = self.sizes.rows(len(pieces), width)
        tokens, positions = np.zeros((rows, width), np.int32), np.full((rows, width), -1, np.int32)
        table, last = np.full((rows, self.sizes.table), NOBODY, np.int32), np.zeros(rows, np.int32)
        for row, (one, start) in enumerate(pieces):
            count = min(len(one.tokens) - start, width)
            tokens[row, :count] = one.tokens[start : start + count]
            positions[row, :count] = np.arange(start, start + count)
            table[row, : len(one.pages)], last[row] = one.pages, count - 1
            one.computed = start + count
        drawing = any(one.request.temperature > 0 for one, _ in pieces)
        draws = _sampling_settings([one for one, _ in pieces], rows)
        program = self._steps.compilation(self.sizes, rows, width, drawing).executable
        chosen, self._pools = program(self._params, self._pools, tokens, View(positions, table), last, draws)
        # The row of a request with its last token; earlier rows have earlier pieces of its prompt.
        complete = [row for row, (one, start) in enumerate(pieces) if start + last[row] + 1 == len(one.tokens)]
        next_tokens = np.asarray(chosen)
        for row in complete:
            one = pieces[row][0]
            one.take(int(next_tokens[row]))
            if one.ended:
                self.running.remove(one)
                self.pages.take(one.pages)
        return [pieces[row][0] for row in complete]


def _sampling_settings(some: Sequence[Running], rows: int) -> Draws:
    # Unused rows have temperature 0.
    def column(field: str, dtype: Any) -> np.ndarray:
        out = np.zeros(rows, dtype)
        out[: len(some)] = [getattr(one.request, field) for one in some]
        return out

    return Draws(
        column("temperature", np.float32),
        column("top_k", np.int32),
        column("top_p", np.float32),
        column("seed", np.uint32),
    )
