"""Generates text with the model in training, at the end of a run.

The engine of train/generate is used, with the parameters in their training layout. Runs whose layers are divided into
pipeline stages, or whose experts are divided over several devices, generate nothing.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from bytescope.model import ModelConfig
from bytescope.model.paged.page_pool import PAGE
from bytescope.model.paged.paged_step import unstack_layers
from bytescope.model.placement import Placement
from bytescope.model.runs import BLOCKS, DENSE, layers_of, stack_of
from bytescope.train.data.batch_algebra import IGNORE
from bytescope.train.data.batches import Data, TokenSource
from bytescope.train.data.chat_template import Renderer, find_template
from bytescope.train.data.records import Chat, Malformed
from bytescope.train.data.tokenizer import JsonTokenizer
from bytescope.train.generate.engine import Engine
from bytescope.train.generate.model_source import Model
from bytescope.train.generate.request import Request
from bytescope.train.generate.steps import EngineSizes, Steps, own_bytes
from bytescope.train.program.program import Program

CHUNK = 4 * PAGE  # maximum prompt tokens per step
PROMPT_TOKENS = 32  # maximum tokens of a held-out document in the prompt of the sample


def read_part(prompt: list[int], count: int, length: int) -> list[int]:
    """Truncates a prompt so that its answer fits into a sequence of `length` tokens. Returns the end of the prompt.

    A prompt of fewer than `length` tokens is returned unchanged. Otherwise the last tokens are returned: as many as
    leave room for an answer of `count` tokens, but at least half of `length`.
    """
    if len(prompt) < length:
        return prompt
    return prompt[-min(max(length - count, length // 2), length - 1) :]


def can_generate(program: Program) -> bool:
    """Returns True if the engine can generate with the parameters as the program shards them. It cannot with pipeline
    stages, or with experts on several devices."""
    spread = program.model.experts and program.mesh.size > 1
    return program.parts.pipeline is None and not spread


def separate_layers(config: ModelConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a model with stacked layers as a tree in which every layer has its own arrays.

    On CPU devices, each array is a view of its row of the stack. Rows that do not begin at a multiple of 64 bytes, as
    XLA requires, are copied. If the stack is donated while views exist, XLA copies it instead of reusing its memory.

    Args:
      config: the model with stacked layers.
      params: the parameters, as arrays or as ShapeDtypeStructs with shardings. The axis of layers is not sharded.
    """

    def one(leaf: jax.Array | jax.ShapeDtypeStruct, row: int) -> jax.Array | jax.ShapeDtypeStruct:
        assert isinstance(leaf.sharding, NamedSharding)
        spec = PartitionSpec(*leaf.sharding.spec[1:])
        sharding = NamedSharding(leaf.sharding.mesh, spec, memory_kind=leaf.sharding.memory_kind)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)
        views = [
            jax.device_put(np.asarray(shard.data)[row], jax.sharding.SingleDeviceSharding(shard.device), may_alias=True)
            for shard in leaf.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape[1:], sharding, views)

    layers = {}
    for layer in range(config.n_layers):
        stack = stack_of(config, layer)
        row = layers_of(config, stack).index(layer)
        layers[layer] = jax.tree.map(partial(one, row=row), params[stack])
    return {**{name: leaf for name, leaf in params.items() if name not in (BLOCKS, DENSE)}, BLOCKS: layers}


class Sampler:
    """Answers prompts with the engine during training, one after the other. The engine's programs are compiled once.

    Args:
      program: the training program, which has the model and its devices.
      count: maximum number of tokens per answer.
      longest: maximum number of tokens per prompt.
    """

    def __init__(self, program: Program, count: int, longest: int):
        self.program, self.count = program, count
        length = min(longest + count, program.batch.seq_len)
        # On a CPU, a step would copy each layer's weights out of the stack of layers.
        self.separate = program.model.scan and program.mesh.devices.flat[0].platform == "cpu"
        abstract, shapes = program.abstract(place=Placement()), program.state.model_params
        if self.separate:
            place = Placement()
            abstract = nnx.eval_shape(lambda: unstack_layers(program.transformer(nnx.Rngs(params=0), place=place)))
            shapes = separate_layers(program.model, shapes)
        model = Model(abstract.config, program.precision, nnx.split(abstract)[0], shapes, program.layout)
        self.steps = Steps(model, program.precision.compute)
        pages = -(-length // PAGE)
        self.sizes = EngineSizes(pages + 1, 1, min(CHUNK, PAGE * pages), length)

    def answer(self, params: Any, prompt: Sequence[int], temperature: float) -> list[int]:
        """Returns up to `count` tokens that follow the prompt. Prompt and answer have at most `data.seq_len` tokens; of
        a longer prompt, only the end is used.

        `temperature`: sampling temperature; 0 takes the most likely token.
        """
        longest = self.program.batch.seq_len
        read = read_part(list(prompt), self.count, longest) or [0]
        seed = self.program.config.seed % 2**32
        request = Request(tuple(read), min(self.count, longest - len(read)), temperature=temperature, seed=seed)
        if self.separate:
            params = separate_layers(self.program.model, params)
        [running] = Engine(self.steps, params, self.sizes).answers([request])
        return list(running.answer)

    def own_bytes(self, drawing: bool) -> int:
        """Returns the bytes on a device that the engine adds to the parameters: the KV cache, and the temporary buffers
        and results of the larger one of its two programs (for prompts, for single tokens).

        `drawing`: True if tokens are sampled.
        """
        sizes = []
        for rows, width in ((self.sizes.rows(1, self.sizes.chunk), self.sizes.chunk), (1, 1)):
            sizes.append(own_bytes(self.steps.compilation(self.sizes, rows, width, drawing).executable))
        return max(sizes) + self.sizes.pages * self.steps.page_bytes


def sample_bytes(program: Program) -> int:
    """Returns the bytes on a device that the sample at the end of a run needs in addition to the training state."""
    config = program.config.train
    longest = program.batch.seq_len - 1 - config.sample_tokens  # tokens of the longest prompt
    return Sampler(program, config.sample_tokens, max(longest, 1)).own_bytes(config.sample_temperature > 0)


def generate(program: Program, params: Any, prompt: list[int], count: int, temperature: float) -> list[int]:
    """Returns up to `count` tokens that follow the prompt. Prompt and answer have at most `data.seq_len` tokens; of a
    longer prompt, only the end is used.

    `temperature`: sampling temperature; 0 takes the most likely token.
    """
    return Sampler(program, count, len(prompt)).answer(params, prompt, temperature)


def sample_prompt(config: ConfigDict, data: Data) -> list[int]:
    """Returns the token ids of the prompt for the sample at the end of a run.

    The prompt is `train.sample_prompt`. If the data are chats, it is a user's message, and the chat template is
    applied. If it is empty, the prompt is from held-out data: an example up to its first answer, or the beginning of
    the text if the loss covers all of it.
    """
    text = config.train.sample_prompt
    if text and config.data.format != "chat":
        return data.encode(text)
    if isinstance(data.heldout, TokenSource):
        window = data.heldout[0]
        return window[window != IGNORE][: min(PROMPT_TOKENS, config.data.seq_len // 2)].tolist()
    if not text:
        row = data.heldout[0]
        learned = np.argmax(row["targets"] != IGNORE) + 1
        read = learned if config.data.loss_on == "assistant" else min(PROMPT_TOKENS, config.data.seq_len // 2)
        return row["inputs"][:read].tolist()
    # The model reads the rendered text before the answer.
    chat = Chat([{"role": "user", "content": text}, {"role": "assistant", "content": ""}], None)
    renderer = Renderer(find_template(data.tokenizer, config.data.chat_template))
    rendered = renderer.render(chat, before=True, up_to=False)
    if isinstance(rendered, Malformed):  # no error, since the run is already trained
        return data.encode(text)
    tokenizer = data.tokenizer.parsing() if isinstance(data.tokenizer, JsonTokenizer) else data.tokenizer
    return tokenizer.encode(rendered.before[-1]).tolist()


def sample_text(program: Program, data: Data, params: Any) -> str:
    """Generates a sample and returns the text of prompt and answer, or "" if `train.sample_tokens` is 0 or the engine
    cannot generate."""
    config = program.config.train
    if not config.sample_tokens or not can_generate(program):
        return ""
    prompt = sample_prompt(program.config, data)
    return data.decode(prompt + generate(program, params, prompt, config.sample_tokens, config.sample_temperature))
