"""Computes log-probabilities of texts under a model, in chunks over a paged KV cache, so that texts may be long."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bytescope.memory.devices.compiler_log import hold_back_log
from bytescope.model.paged import paged_step as decode
from bytescope.model.paged.page_pool import NOBODY, PAGE, View
from bytescope.train.generate.steps import EngineSizes, Steps, own_bytes


@dataclasses.dataclass(frozen=True)
class ScoredText:
    """A scored text.

    Attributes:
      number: index of the text in the list of texts.
      tokens: its token ids.
      logprobs: log-probability in nats of each token except the first, float32 [n - 1].
    """

    number: int
    tokens: Sequence[int]
    logprobs: np.ndarray


class Scorer:
    """Computes the log-probabilities of the tokens of texts.

    Args:
      steps: the model and its devices. Only programs that score are compiled.
      length: maximum number of tokens of a text.
      chunk: maximum number of tokens per step.
    """

    def __init__(self, steps: Steps, length: int, chunk: int):
        self.sizes = EngineSizes(-(-max(length, chunk) // PAGE) + 1, 1, chunk, length)
        self._steps = steps
        self._programs: dict[int, jax.stages.Compiled] = {}

    @property
    def bytes(self) -> int:
        """Sum of the bytes on one device of the weights, the KV cache, and the temporary buffers of the largest
        program.

        Compiles the program if necessary.
        """
        own = own_bytes(self._compile_for_width(self.sizes.chunk))
        return self._steps.weight_bytes + self.sizes.pages * self._steps.page_bytes + own

    def score(self, params: Any, texts: Sequence[Sequence[int]]) -> Iterator[ScoredText]:
        """Yields each text with the log-probabilities of its tokens. Short texts come first, several of them per step.

        Args:
          params: the weights on the devices.
          texts: the token ids of each text.
        """
        pools = self._steps.make_pools(self.sizes.pages)
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        while order:
            width = next((width for width in self.sizes.widths if width >= len(texts[order[0]])), self.sizes.chunk)
            some = [number for number in order if len(texts[number]) <= width] or order[:1]
            some = some[: self.sizes.chunk // width]
            order = order[len(some) :]
            scored, pools = self._score_batch(params, pools, [texts[number] for number in some], width)
            for number, logprobs in zip(some, scored):
                yield ScoredText(number, texts[number], logprobs)

    def _score_batch(
        self, params: Any, pools: Any, texts: Sequence[Sequence[int]], width: int
    ) -> tuple[list[np.ndarray], Any]:
        """Computes the log-probabilities in nats of the tokens of some texts, except the first tokens. Returns (float32
        [number of tokens - 1] for each text, the new KV cache).

        Args:
          params: the weights on the devices.
          pools: the KV cache of each layer.
          texts: the token ids of each text.
          width: number of tokens of each text per step.
        """
        rows = self.sizes.chunk // width
        table, page = np.full((rows, self.sizes.table), NOBODY, np.int32), NOBODY + 1
        for row, text in enumerate(texts):
            count = -(-len(text) // PAGE)
            table[row, :count] = np.arange(page, page + count)
            page += count
        logprobs_by_text: list[list[np.ndarray]] = [[] for _ in texts]
        for start in range(0, max(map(len, texts)), width):
            tokens, targets = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.int32)
            positions = np.full((rows, width), -1, np.int32)
            for row, text in enumerate(texts):
                part, after = text[start : start + width], text[start + 1 : start + width + 1]
                tokens[row, : len(part)], targets[row, : len(after)] = part, after
                positions[row, : len(part)] = np.arange(start, start + len(part))
            logprobs_BT, pools = self._compile_for_width(width)(params, pools, tokens, targets, View(positions, table))
            logprobs = np.asarray(logprobs_BT)
            for row, text in enumerate(texts):
                logprobs_by_text[row].append(logprobs[row, : max(len(text[start + 1 : start + width + 1]), 0)])
        return [np.concatenate(pieces) for pieces in logprobs_by_text], pools

    def _compile_for_width(self, width: int) -> jax.stages.Compiled:
        if width not in self._programs:
            steps, everywhere = self._steps, self._steps.model.layout.sharding()
            pools = steps.pool_shapes(self.sizes.pages)

            def array(columns: int) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct((self.sizes.rows(1, width), columns), jnp.int32, sharding=everywhere)

            places = jax.tree.map(lambda leaf: leaf.sharding, pools)
            run = jax.jit(self._step, donate_argnums=1, out_shardings=(everywhere, places))
            with hold_back_log(), steps.for_kernels():
                self._programs[width] = run.lower(
                    steps.model.shapes, pools, array(width), array(width), View(array(width), array(self.sizes.table))
                ).compile()
        return self._programs[width]

    def _step(self, params: Any, pools: Any, tokens_BT: jax.Array, targets_BT: jax.Array, view: View):
        """Runs the model on the tokens. Returns the log-probability in nats of each target, float32 [B, T], and the new
        KV cache. B is the number of texts, T the number of tokens of each text.

        Args:
          params: the weights.
          pools: the KV cache of each layer.
          tokens_BT: token ids, int32.
          targets_BT: the token that follows each token, int32.
          view: position of each token in its text, and the KV cache pages of each text.
        """
        steps = self._steps
        model = nnx.merge(steps.model.graph, params)
        x_BTD, pools = decode.step(model, tokens_BT, view, pools)
        logits_BTV = model.logits(x_BTD, jnp.float32)
        chosen_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
        return chosen_BT - jax.nn.logsumexp(logits_BTV, axis=-1), pools
