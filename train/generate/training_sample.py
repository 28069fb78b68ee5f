"""Text from the model in training: at the end of a run, and at evaluations if `train.eval_prompts` is set.

It comes from the engine of train/generate, over pages, with the parameters as they lie on the mesh. Where the layers
lie on stages, or experts on several devices, every token is a pass over the whole buffer instead, one program of a
static length: the model is causal, so that positions behind the last token do not matter.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from bytescope.memory.devices.compiler_log import hold_back_log
from bytescope.model.paged.page_pool import PAGE
from bytescope.model.placement import Placement
from bytescope.train.data.batch_algebra import IGNORE
from bytescope.train.data.batches import Data
from bytescope.train.data.chat_template import Renderer, find_template
from bytescope.train.data.example_content import Chat, Malformed
from bytescope.train.data.tokenizer import JsonTokenizer
from bytescope.train.generate.engine import Engine
from bytescope.train.generate.model_source import Model
from bytescope.train.generate.request import Request
from bytescope.train.generate.steps import EngineSizes, Steps, own_bytes
from bytescope.train.pipeline.forward import PipelineForward
from bytescope.train.program.program import Program

CHUNK = 4 * PAGE  # tokens of prompts in one step
SEQUENCES = 8  # prompts that are answered at once


def _generate(program: Program, temperature: float, params: Any, tokens_BL: jax.Array, span: jax.Array) -> jax.Array:
    """Returns tokens_BL, int32, with the positions from span[0] up to span[1] generated. span: int32 [2]."""
    transformer, hidden = nnx.merge(program.graph, params), _hidden(program, params)
    # A layout that shards sequences may order them differently: positions_L[i] is the position stored at index i.
    positions_L = program.layout.positions(tokens_BL.shape[1])
    key = jax.random.key(program.config.seed)

    def extend(place: jax.Array, tokens_BL: jax.Array) -> jax.Array:
        x_BLD = hidden(jnp.take(tokens_BL, positions_L, axis=1))
        last = jnp.argmax(positions_L == place - 1)
        x_B1D = jax.lax.dynamic_slice_in_dim(x_BLD, last, 1, axis=1)
        logits_BV = transformer.logits(x_B1D.astype(jnp.float32), jnp.float32)[:, 0]
        if temperature:
            chosen_B = jax.random.categorical(jax.random.fold_in(key, place), logits_BV / temperature)
        else:
            chosen_B = jnp.argmax(logits_BV, axis=-1)
        return jax.lax.dynamic_update_slice_in_dim(tokens_BL, chosen_B.astype(tokens_BL.dtype)[:, None], place, axis=1)

    return jax.lax.fori_loop(span[0], span[1], extend, tokens_BL)


def _hidden(program: Program, params: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns the function from int32 tokens [B, L] to the normed output of the last block."""
    if (stages := program.parts.pipeline) is None:
        return nnx.merge(program.graph, params).hidden
    return partial(PipelineForward(stages.graph, stages.schedule, stages.units).hidden, params)


def _jitted(program: Program, temperature: float) -> Any:
    # Replicated, so that every process can read the result.
    return jax.jit(partial(_generate, program, temperature), out_shardings=program.layout.sharding())


def lower_generate(program: Program) -> jax.stages.Lowered:
    """Lowers the program of whole passes for the devices of `program`, which may be described ones."""
    # One row per rank: a batch of one would not divide over the mesh.
    tokens = jax.ShapeDtypeStruct(
        (program.batch.ranks, program.batch.seq_len), jnp.int32, sharding=program.layout.sharding(("batch", None))
    )
    span = jax.ShapeDtypeStruct((2,), jnp.int32)
    return _jitted(program, program.config.train.sample_temperature).lower(program.state.model_params, tokens, span)


def read_part(prompt: list[int], count: int, length: int) -> list[int]:
    """Returns the tokens of a prompt that the model reads, if `length` positions hold these and the answer.

    All of them if they leave room for one token; of a longer prompt its end: it leaves room for `count` tokens, but is
    at least half of the positions.
    """
    if len(prompt) < length:
        return prompt
    return prompt[-min(max(length - count, length // 2), length - 1) :]


def over_pages(program: Program) -> bool:
    """Returns whether a program's samples are generated over pages, and not by whole passes."""
    spread = program.model.experts and program.mesh.size > 1
    return program.parts.pipeline is None and not spread


class Sampler:
    """Answers prompts with any parameters of a program; its steps are compiled once.

    Args:
      count: tokens of an answer. longest: of a prompt. rows: prompts at once.
    """

    def __init__(self, program: Program, count: int, longest: int, rows: int = 1):
        self.program, self.count = program, count
        self.length = min(longest + count, program.batch.seq_len)
        self.rows = min(rows, SEQUENCES)
        graph, _ = nnx.split(program.abstract(place=Placement()))
        model = Model(program.model, program.precision, graph, program.state.model_params, program.layout)
        self.steps = Steps(model, "blocks", program.precision.compute)
        pages = self.rows * -(-self.length // PAGE) + 1
        self.sizes = EngineSizes(pages, self.rows, min(CHUNK, PAGE * -(-self.length // PAGE)), self.length)

    def answers(self, params: Any, prompts: Sequence[Sequence[int]], temperature: float) -> list[list[int]]:
        """Returns up to `count` tokens that follow `read_part` of each prompt, as many as `data.seq_len` leaves room
        for."""
        seed = self.program.config.seed % 2**32
        requests = []
        for prompt in prompts:
            read = read_part(list(prompt), self.count, self.program.batch.seq_len) or [0]
            most = min(self.count, self.program.batch.seq_len - len(read))
            requests.append(Request(tuple(read), most, temperature=temperature, seed=seed))
        engine = Engine(self.steps, params, self.sizes)
        found = {one.number: list(one.answer) for one in engine.answers(requests)}
        return [found[number] for number in sorted(found)]

    def own_bytes(self, drawing: bool) -> int:
        """Bytes on a device of pool, temporaries and results of the largest step."""
        found = []
        for rows, width in ((self.sizes.rows(1, self.sizes.chunk), self.sizes.chunk), (self.rows, 1)):
            found.append(own_bytes(self.steps.compilation(self.sizes, rows, width, drawing).executable))
        return max(found) + self.sizes.pages * self.steps.page_bytes


def sample_bytes(program: Program) -> int:
    """Returns the bytes on a device that the sample at the end of a run takes beside the state."""
    config = program.config.train
    if over_pages(program):
        longest = program.batch.seq_len - 1 - config.sample_tokens  # of a prompt that fills the rest
        return Sampler(program, config.sample_tokens, max(longest, 1)).own_bytes(config.sample_temperature > 0)
    with hold_back_log():
        return own_bytes(lower_generate(program).compile())


def generate(program: Program, params: Any, prompt: list[int], count: int, temperature: float) -> list[int]:
    """Returns up to `count` tokens that follow `read_part` of a prompt, as many as `data.seq_len` leaves room for."""
    length = program.batch.seq_len
    prompt = read_part(prompt, count, length) or [0]
    if over_pages(program):
        return Sampler(program, count, len(prompt)).answers(params, [prompt], temperature)[0]
    return by_whole_passes(program, params, prompt, count, temperature)


def by_whole_passes(program: Program, params: Any, prompt: list[int], count: int, temperature: float) -> list[int]:
    """Returns the same as `generate`, by a pass over the whole buffer for each token."""
    length = program.batch.seq_len
    # Only the first row is used; see lower_generate.
    tokens = np.zeros((program.batch.ranks, length), np.int32)
    tokens[:, : len(prompt)] = prompt
    end = min(len(prompt) + count, length)
    out = _jitted(program, temperature)(
        params,
        jax.device_put(tokens, program.layout.sharding(("batch", None))),
        np.asarray([len(prompt), end], np.int32),
    )
    return np.asarray(out)[0, len(prompt) : end].tolist()


def sample_prompt(config: ConfigDict, data: Data) -> list[int]:
    """Returns the token ids that the sample at the end of a run begins with.

    For chats `train.sample_prompt` is a user's message in the chat template. If it is empty, text begins with "def ",
    and examples begin with a held-out example up to its first unmasked target.
    """
    text = config.train.sample_prompt
    if config.data.format == "text":
        return data.encode(text or "def ")
    if not text:
        row = data.heldout[0]
        return row["inputs"][: np.argmax(row["targets"] != IGNORE) + 1].tolist()
    if config.data.format != "chat":
        return data.encode(text)
    # The model reads the rendered text before the answer.
    chat = Chat([{"role": "user", "content": text}, {"role": "assistant", "content": ""}], None)
    with Renderer(find_template(data.tokenizer, config.data.chat_template)) as renderer:
        (rendered,) = renderer.render([chat], before=True, up_to=False)
    if isinstance(rendered, Malformed):  # not refused, because the run is already trained
        return data.encode(text)
    tokenizer = data.tokenizer.parsing() if isinstance(data.tokenizer, JsonTokenizer) else data.tokenizer
    return tokenizer.encode(rendered.before[-1]).tolist()


def sample_text(program: Program, data: Data, params: Any) -> str:
    """Returns the prompt and the text that the model generates after it; "" if `train.sample_tokens` is 0."""
    config = program.config.train
    if not config.sample_tokens:
        return ""
    prompt = sample_prompt(program.config, data)
    return data.decode(prompt + generate(program, params, prompt, config.sample_tokens, config.sample_temperature))
