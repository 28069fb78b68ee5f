"""The engine: each step computes pieces of prompts, or the next token of each running sequence.

Prompts go through in chunks, so that a long one does not hold up the others for long (Agrawal et al. 2023, arXiv
2308.16369). Sequences join and leave between steps (Yu et al. 2022, Orca). Where pages run out, the sequence that came
last gives its own back and is computed again later: its tokens stay as they are.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bytescope.model.paged.page_pool import NOBODY, PAGE, View
from bytescope.train.generate.pages import NoPages, Pages
from bytescope.train.generate.request import Request, Running
from bytescope.train.generate.sampling import Draws
from bytescope.train.generate.steps import EngineSizes, Steps
from bytescope.train.user_errors import UserError

# Steps of prompts that those under way wait for: fewer and each step has few rows, more and they stand still.
PATIENCE = 4


class Engine:
    """Generates tokens: `submit` requests, then call `step` until none is left, or iterate over `answers`.

    Args:
      steps: the programs. params: the model's parameters, as `steps.model.shapes`. sizes: of everything.

    Attributes:
      pages: whose each page is. running: the requests under way. preempted: how often a sequence gave its pages back.
      count: steps run so far.
    """

    def __init__(self, steps: Steps, params: Any, sizes: EngineSizes):
        self.sizes, self.pages = sizes, Pages(sizes.pages)
        self.preempted = self.count = 0
        self._steps, self._params, self._pools = steps, params, steps.make_pools(sizes.pages)
        self._waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self._waited = 0  # steps of prompts that others have waited for
        self._submitted = 0

    # ---- requests ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Running:
        """Takes a request.

        Raises:
          UserError: it can never fit.
        """
        length = len(request.tokens) + request.most
        if not request.tokens:
            raise UserError("an empty prompt: give at least one token")
        if length > self.sizes.length:
            raise UserError(
                f"{len(request.tokens)} tokens of a prompt and {request.most} to generate are more than "
                f"{self.sizes.length} positions, the most of a sequence here: shorten one of them"
            )
        if -(-length // PAGE) > self.sizes.pages - 1:
            raise UserError(
                f"{length} positions need {-(-length // PAGE)} pages of {PAGE}, and the pool has "
                f"{self.sizes.pages - 1}: shorten the request, or give the pool more memory"
            )
        one = Running(self._submitted, request, list(request.tokens))
        self._submitted += 1
        self._waiting.append(one)
        return one

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self.running)

    def answers(self, requests: Iterable[Request]) -> Iterator[Running]:
        """Submits the requests and yields each as it ends."""
        for request in requests:
            self.submit(request)
        while self.busy:
            yield from (one for one in self.step() if one.ended)

    def finish(self, one: Running) -> None:
        """Ends a request early, with `ended` "text"."""
        if not one.ended:
            one.ended = "text"
        if one in self.running:
            self.running.remove(one)
        elif one in self._waiting:
            self._waiting.remove(one)
        self.pages.take(one.pages)

    def preempt(self, one: Running) -> None:
        """Takes the pages of a running request. The request waits at the front of the queue and is computed again."""
        self.running.remove(one)
        self.pages.take(one.pages)
        one.computed = one.known = 0
        self._waiting.appendleft(one)
        self.preempted += 1

    # ---- one step ---------------------------------------------------------------------------------------------

    def step(self) -> list[Running]:
        """Runs one step: pieces of prompts, or one token of each running sequence, which waits for at most PATIENCE
        steps of prompts. Returns the requests that got a token."""
        self._admit()
        behind = [one for one in self.running if one.missing > 1]
        ready = [one for one in self.running if one.missing == 1]
        if not behind or (ready and self._waited >= PATIENCE):
            self._waited = 0
            self._room({one.number: len(one.tokens) for one in ready})
            return self._run([(one, one.computed) for one in ready if one in self.running], 1)
        self._waited = self._waited + 1 if ready else 0
        width = self._width(behind)
        wanted, left = {}, self.sizes.chunk // width
        for one in behind:
            taken = min(-(-one.missing // width), left)
            left -= taken
            wanted[one.number] = min(len(one.tokens), one.computed + taken * width)
        self._room(wanted)
        pieces = []
        for one in behind:
            if one in self.running:  # not preempted for want of pages
                pieces += [(one, start) for start in range(one.computed, wanted[one.number], width)]
        return self._run(pieces, width)

    def _width(self, behind: Sequence[Running]) -> int:
        """Returns the width of the pieces with which a step computes the most tokens of these prompts. Of several such
        widths it is the largest, since the tokens of a piece read the pages of their sequence together."""

        def useful(width: int) -> int:
            left, found = self.sizes.chunk // width, 0
            for one in behind:
                taken = min(-(-one.missing // width), left)
                left, found = left - taken, found + min(one.missing, taken * width)
            return found

        return max(self.sizes.widths, key=lambda width: (useful(width), width))

    def _admit(self) -> None:
        """Starts waiting requests in their order while there are rows, and pages for the next prompt."""
        while self._waiting and len(self.running) < self.sizes.sequences:
            one = self._waiting[0]
            if -(-len(one.tokens) // PAGE) > self.pages.free:
                return
            self._waiting.popleft()
            one.pages = self.pages.begin(one.tokens)
            one.known, one.computed = len(one.pages), len(one.pages) * PAGE
            self.running.append(one)

    def _room(self, wanted: Mapping[int, int]) -> None:
        """Gives sequences the pages for `wanted`, number -> positions. If pages run out, the last sequence is
        preempted."""
        for one in list(self.running):
            while one.number in wanted and one in self.running:  # it may be preempted for one before it
                try:
                    self.pages.give(one.pages, wanted[one.number])
                    break
                except NoPages:
                    self.preempt(self.running[-1])

    def _run(self, pieces: Sequence[tuple[Running, int]], width: int) -> list[Running]:
        """Computes up to `width` tokens of each (sequence, start), and adds the next token to each sequence whose
        tokens are all computed. Returns these sequences."""
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
        chosen, self._pools = self._steps.run(
            self.sizes,
            drawing,
            self._params,
            self._pools,
            tokens,
            View(positions, table),
            last,
            _draws([one for one, _ in pieces], rows),
        )
        self.count += 1
        more = []
        for row, (one, start) in enumerate(pieces):
            if start + last[row] + 1 == len(one.tokens):
                more.append((one, int(chosen[row])))
        for one, token in more:
            if one.computed // PAGE > one.known:  # a page is full
                self.pages.computed(one.pages, one.tokens[: one.computed])
                one.known = one.computed // PAGE
            one.take(token)
            if one.ended:
                self.running.remove(one)
                self.pages.take(one.pages)
        return [one for one, _ in more]


def _draws(some: Sequence[Running], rows: int) -> Draws:
    """Returns the sampling settings of these rows; unused rows take the most likely token."""

    def column(field: str, dtype: Any) -> np.ndarray:
        out = np.zeros(rows, dtype)
        out[: len(some)] = [getattr(one.request, field) for one in some]
        return out

    return Draws(
        column("temperature", np.float32),
        column("top_k", np.int32),
        column("top_p", np.float32),
        column("min_p", np.float32),
        column("seed", np.uint32),
    )
