"""The engine: in every step a chunk of a prompt, or one token of each sequence under way, whatever there is to do.

Prompts go through in chunks, so that a long one does not hold up the others for long (Agrawal et al. 2023, arXiv
2308.16369). Sequences join and leave between steps (Yu et al. 2022, Orca). Where pages run out, the sequence that came
last gives its own back and is computed again later: its tokens stay as they are.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bytescope.model import decode
from bytescope.model.attention.paged import NOBODY, PAGE, View
from bytescope.train.errors import UserError
from bytescope.train.generation.pages import NoPages, Pages
from bytescope.train.generation.request import Asked, Running
from bytescope.train.generation.sampling import Draws, choose


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static shapes of an engine.

    Fields:
      pages: of the pool, NOBODY among them. sequences: under way at once. chunk: tokens of a prompt in one step.
      length: positions of a sequence at most.
    """

    pages: int
    sequences: int
    chunk: int
    length: int

    @property
    def table(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.length // PAGE)

    def rows(self, count: int) -> int:
        """Rows of the step for so many sequences: a power of four, or all."""
        found = 1
        while found < count:
            found *= 4
        return min(found, self.sequences)


def run_step(graph: nnx.GraphDef, kernel: str, drawing: bool, params: Any, pools: Sequence[Any], tokens_BT: jax.Array,
             view: View, last_B: jax.Array, draws: Draws) -> tuple[jax.Array, list[Any]]:
    """(int32 [B], the token that follows the one at `last_B` of each row; the pools)."""
    model = nnx.merge(graph, params)
    x_BTD, pools = decode.step(model, tokens_BT, view, pools, kernel)
    x_B1D = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)
    with jax.named_scope("head"):
        logits_BV = model.logits(x_B1D, jnp.float32)[:, 0]
    places_B = jnp.take_along_axis(view.positions_BT, last_B[:, None], axis=1)[:, 0] + 1
    with jax.named_scope("sampling"):
        return choose(logits_BV, draws, places_B, drawing), pools


class Engine:
    """Generates. `submit` requests, then `step` until none is left, or iterate over `answers`.

    Args:
      model: the config's, built with layers of their own or stacked. kernel: a row of `paged.KERNELS`.

    Attributes:
      pages: whose each page is. preempted: how often a sequence gave its pages back. steps: run so far.
    """

    def __init__(self, graph: nnx.GraphDef, params: Any, pools: Sequence[Any], sizes: Sizes, kernel: str = "blocks"):
        self.sizes, self.pages = sizes, Pages(sizes.pages)
        self.preempted = self.steps = 0
        self._params, self._pools = params, list(pools)
        self._step = {drawing: jax.jit(partial(run_step, graph, kernel, drawing), donate_argnums=1)
                      for drawing in (False, True)}
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._count = 0

    # ---- requests ---------------------------------------------------------------------------------------------

    def submit(self, asked: Asked) -> Running:
        """Takes a request.

        Raises:
          UserError: it can never fit.
        """
        length = len(asked.tokens) + asked.most
        if not asked.tokens:
            raise UserError("an empty prompt: give at least one token")
        if length > self.sizes.length:
            raise UserError(f"{len(asked.tokens)} tokens of a prompt and {asked.most} to generate are more than the "
                            f"model's {self.sizes.length} positions: shorten one of them")
        if -(-length // PAGE) > self.sizes.pages - 1:
            raise UserError(f"{length} positions need {-(-length // PAGE)} pages of {PAGE}, and the pool has "
                            f"{self.sizes.pages - 1}: shorten the request, or give the pool more memory")
        one = Running(self._count, asked, list(asked.tokens))
        self._count += 1
        self._waiting.append(one)
        return one

    @property
    def busy(self) -> bool:
        """Whether any request is left."""
        return bool(self._waiting or self._running)

    def answers(self, asked: Iterable[Asked]) -> Iterator[Running]:
        """Each request as it ends."""
        for one in asked:
            self.submit(one)
        while self.busy:
            yield from (one for one in self.step() if one.ended)

    # ---- one step ---------------------------------------------------------------------------------------------

    def step(self) -> list[Running]:
        """Runs a step. Returns the requests that have one token more."""
        self._admit()
        chunk = next((one for one in self._running if one.missing > 1), None)
        if chunk is not None:
            self._room(chunk, min(len(chunk.tokens), chunk.computed + self.sizes.chunk))
            return self._run([chunk] if chunk in self._running else [], self.sizes.chunk)
        for one in list(self._running):
            if one in self._running:  # it may have been preempted for one before it
                self._room(one, len(one.tokens))
        return self._run(self._running, 1)

    def _admit(self) -> None:
        """Lets those that wait begin, first come first served, where there are rows and pages for their prompt."""
        while self._waiting and len(self._running) < self.sizes.sequences:
            one = self._waiting[0]
            if -(-len(one.tokens) // PAGE) > self.pages.free:
                return
            self._waiting.popleft()
            one.pages = self.pages.begin(one.tokens)
            one.computed = len(one.pages) * PAGE
            self._running.append(one)

    def _room(self, one: Running, length: int) -> None:
        """Pages for so many positions of a sequence, if need be those of sequences that came after it, or its own."""
        while True:
            try:
                return self.pages.give(one.pages, length)
            except NoPages:
                last = self._running[-1]
                self._preempt(last)
                if last is one:
                    return None

    def _preempt(self, one: Running) -> None:
        self._running.remove(one)
        self.pages.take(one.pages)
        one.computed = 0
        self._waiting.appendleft(one)
        self.preempted += 1

    def _run(self, some: Sequence[Running], width: int) -> list[Running]:
        """Computes up to `width` tokens of each sequence; adds the next token to those of which all are computed."""
        if not some:
            return []
        rows = self.sizes.rows(len(some))
        tokens, positions = np.zeros((rows, width), np.int32), np.full((rows, width), -1, np.int32)
        table, last = np.full((rows, self.sizes.table), NOBODY, np.int32), np.zeros(rows, np.int32)
        for row, one in enumerate(some):
            count = min(one.missing, width)
            tokens[row, :count] = one.tokens[one.computed:one.computed + count]
            positions[row, :count] = np.arange(one.computed, one.computed + count)
            table[row, :len(one.pages)], last[row] = one.pages, count - 1
        drawing = any(one.asked.temperature > 0 for one in some)
        found, self._pools = self._step[drawing](self._params, self._pools, tokens, View(positions, table), last,
                                                 _draws(some, rows))
        self.steps += 1
        chosen, more = np.asarray(found), []
        for row, one in enumerate(some):
            one.computed += min(one.missing, width)
            if not one.missing:
                self.pages.computed(one.pages, one.tokens[:one.computed])
                one.take(int(chosen[row]))
                more.append(one)
        for one in more:
            if one.ended:
                self._running.remove(one)
                self.pages.take(one.pages)
        return more


def _draws(some: Sequence[Running], rows: int) -> Draws:
    """How the tokens of these rows are chosen; rows of nobody take the likeliest."""
    def column(field: str, dtype: Any) -> np.ndarray:
        out = np.zeros(rows, dtype)
        out[:len(some)] = [getattr(one.asked, field) for one in some]
        return out

    return Draws(column("temperature", np.float32), column("top_k", np.int32), column("top_p", np.float32),
                 column("min_p", np.float32), column("seed", np.uint32))
