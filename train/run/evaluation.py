"""Evaluation of a run: the loss on held-out data, and answers to the prompts of `train.eval_prompts`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from bytescope.train.data.batches import Data, heldout_batches
from bytescope.train.generate.answers import read_rows
from bytescope.train.generate.training_sample import Sampler, can_generate
from bytescope.train.program.program import Program
from bytescope.train.run.feed import held_out_rows, put
from bytescope.train.step.state import Tally, TrainState
from bytescope.train.user_errors import UserError

ANSWERS = "answers.jsonl"  # in the run directory


def held_out_loss(
    program: Program, data: Data, state: TrainState, stopping: Callable[[], bool], working: Callable[[], None]
) -> tuple[float, int] | None:
    """Evaluates on the held-out data. Returns (loss in nats per token, number of tokens), or None if the run is stopped
    before the end.

    Args:
      program: the training program.
      data: the training and held-out data.
      state: the training state.
      stopping: function that returns True if the run is to stop.
      working: function that is called before each batch.
    """
    total: Tally | None = None
    batches = heldout_batches(
        data,
        rows=program.batch.rows,
        row_slices=held_out_rows(program),
        sequences=program.config.train.eval_sequences or None,
    )
    for host in batches:
        if stopping():
            return None
        working()
        tally = program.evaluate(state.params, put(host, program.eval_shapes), state.frozen)
        # At most one batch is queued ahead of the devices: hundreds starved the threads of simulated devices.
        total = tally if total is None else jax.tree.map(jax.numpy.add, jax.block_until_ready(total), tally)
    assert total is not None  # held-out data is never empty
    loss, tokens = (float(x) for x in jax.device_get((total.loss, total.tokens)))
    return loss / max(tokens, 1.0), int(tokens)


class EvalPrompts:
    """Answers the prompts in the file `train.eval_prompts` at each evaluation.

    Raises:
      UserError: the file of prompts cannot be read, a row has no text, `train.sample_tokens` is 0, or the engine cannot
        generate with the layout of the run.
    """

    def __init__(self, program: Program, data: Data):
        config = program.config.train
        self.data, self.texts, self._temperature = data, list[str](), config.sample_temperature
        if not config.eval_prompts:
            return
        for number, row in enumerate(read_rows(Path(config.eval_prompts).expanduser(), "train.eval_prompts")):
            if not isinstance(row.get("text"), str):
                raise UserError(
                    f"train.eval_prompts={config.eval_prompts} row {number} has no text: write rows such as"
                    ' {"text": "Once"}'
                )
            self.texts.append(row["text"])
        if not config.sample_tokens:
            raise UserError(
                f"train.eval_prompts={config.eval_prompts} cannot be combined with train.sample_tokens=0: set "
                "train.sample_tokens to the number of tokens per answer"
            )
        if not can_generate(program):
            raise UserError(
                f"train.eval_prompts={config.eval_prompts} cannot be combined with pipeline stages or with experts on "
                "several devices: leave it empty, and answer the prompts with bytescope generate after the run"
            )
        self._prompts = [data.encode(text) for text in self.texts]
        self._sampler = Sampler(program, config.sample_tokens, max(map(len, self._prompts)), len(self._prompts))

    def answers(self, params: Any, step: int) -> list[dict[str, Any]]:
        """Generates an answer to each prompt with the parameters after update `step`. Returns rows for the file of
        answers, with the keys step, row, prompt and text."""
        if not self.texts:
            return []
        answers = self._sampler.answers(params, self._prompts, self._temperature)
        rows = []
        for number, (text, answer) in enumerate(zip(self.texts, answers)):
            rows.append({"step": step, "row": number, "prompt": text, "text": self.data.decode(answer)})
        return rows
