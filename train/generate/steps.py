"""The compiled step programs of an engine: a few static shapes, each compiled once. The devices need not be present.

A step ends with the choice of the next token of each sequence: the most likely token, or a sample with the request's
random key. A sampled token depends only on the logits, the request's seed and the token's position, never on other
sequences of the batch. Temperature is applied first, then top-k, and then top-p to the tokens that top-k kept, as in
transformers.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from bytescope.memory.analysis import report_of
from bytescope.memory.devices.compiler import Compilation, compile_lowered, stats_of
from bytescope.memory.devices.targets import Target
from bytescope.memory.hlo.jax_types import CompiledStage
from bytescope.memory.records.report_record import ReportRecord
from bytescope.model.paged import paged_step as decode
from bytescope.model.paged.page_pool import PAGE, View
from bytescope.train.generate.model_source import Model
from bytescope.train.parallel.xla_options import for_pallas
from bytescope.train.step.optimizer.host_offload import device_bytes

# Pattern of argument names -> role of the argument in the memory report.
ROLES = (("^params", "params"), ("^pools", "cache"))


@dataclasses.dataclass(frozen=True)
class EngineSizes:
    """The static shapes of an engine's programs.

    Fields:
      pages: number of pages of the KV cache, including the scratch page.
      sequences: maximum number of concurrent sequences.
      chunk: maximum number of prompt tokens per step, a multiple of PAGE.
      length: maximum number of token positions per sequence.
    """

    pages: int
    sequences: int
    chunk: int
    length: int

    @property
    def table(self) -> int:
        """Number of pages that a sequence of maximum length needs."""
        return -(-self.length // PAGE)

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of prompt tokens that a row of a step may have: one page, four pages, or a chunk."""
        return (*(width for width in (PAGE, 4 * PAGE) if width < self.chunk), self.chunk)

    def rows(self, count: int, width: int) -> int:
        """Returns the number of rows (batch size) of the program that runs `count` sequences with `width` tokens each.

        Rows beyond `count` are padding, so that few programs have to be compiled. A program for prompts always has
        chunk / width rows. A program for single tokens has a power of four, or the maximum number of sequences.
        """
        if width > 1:
            return self.chunk // width
        rows = 1
        while rows < count:
            rows *= 4
        return min(rows, self.sequences)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature_B", "top_k_B", "top_p_B", "seed_B"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Draws:
    """Sampling settings of each row of a batch. All arrays have the shape [B], where B is the number of rows.

    Fields:
      temperature_B: float32; 0 takes the most likely token.
      top_k_B: int32, keeps only the k most likely tokens; 0 keeps all tokens.
      top_p_B: float32, keeps the most likely tokens until their total probability is p; 1 keeps all tokens.
      seed_B: uint32, the random seed.
    """

    temperature_B: Any  # each field is a jax.Array in a step, an np.ndarray on the host, or a ShapeDtypeStruct
    top_k_B: Any
    top_p_B: Any
    seed_B: Any


def filtered(logits_BV: jax.Array, draws: Draws) -> jax.Array:
    """Divides the logits by the temperature and applies top-k and top-p. Returns logits, float32 [B, V] (B sequences, V
    tokens of the vocabulary).

    Tokens that a filter drops get the lowest float32. The most likely token is never dropped.
    """
    dropped = jnp.finfo(jnp.float32).min
    scaled_BV = logits_BV.astype(jnp.float32) / jnp.where(draws.temperature_B > 0, draws.temperature_B, 1.0)[:, None]
    order_BV = jnp.argsort(-scaled_BV, axis=-1, stable=True)
    sorted_BV = jnp.take_along_axis(scaled_BV, order_BV, axis=-1)
    # Ties with the k-th token are kept.
    last_B1 = jnp.clip(draws.top_k_B, 1, scaled_BV.shape[-1])[:, None] - 1
    kept_BV = (draws.top_k_B[:, None] == 0) | (sorted_BV >= jnp.take_along_axis(sorted_BV, last_B1, axis=-1))
    probs_BV = jax.nn.softmax(jnp.where(kept_BV, sorted_BV, dropped), axis=-1)
    # A token is kept while the tokens before it sum to less than top_p.
    kept_BV &= (jnp.cumsum(probs_BV, axis=-1) - probs_BV < draws.top_p_B[:, None]) | (draws.top_p_B[:, None] >= 1)
    kept_BV = kept_BV.at[:, 0].set(True)
    sorted_BV = jnp.where(kept_BV, sorted_BV, dropped)
    return jnp.zeros_like(sorted_BV).at[jnp.arange(len(order_BV))[:, None], order_BV].set(sorted_BV)


def choose(logits_BV: jax.Array, draws: Draws, places_B: jax.Array, drawing: bool) -> jax.Array:
    """Returns the next token of each sequence, int32 [B].

    Args:
      logits_BV: the model's output for the last token of each sequence, one value for each token of the vocabulary.
      draws: temperature, top-k, top-p and seed of each sequence. Temperature 0 takes the most likely token.
      places_B: position of the next token in its sequence. With the seed it determines the random numbers.
      drawing: False if all rows take the most likely token, so that nothing has to be sorted.
    """
    likeliest_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    if not drawing:
        return likeliest_B

    def draw(logits_V: jax.Array, seed: jax.Array, place: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), place), logits_V)

    drawn_B = jax.vmap(draw)(filtered(logits_BV, draws), draws.seed_B, places_B).astype(jnp.int32)
    return jnp.where(draws.temperature_B > 0, drawn_B, likeliest_B)


def own_bytes(compiled: CompiledStage) -> int:
    """Returns the bytes of a program's temporary buffers and results on one device, without its arguments.

    Returns 0 if the runtime reports no memory statistics.
    """
    stats = stats_of(compiled)
    return 0 if stats is None else stats.own_bytes


class Steps:
    """The programs that compute the tokens of a step, one for each batch shape. A program is compiled when it is first
    used.

    Args:
      model: the model. Its devices need not be present if the programs are only compiled.
      stored: dtype of the KV cache. int8 has scales.
      pool_bytes: bytes of jax's pool if the devices are described GPUs; None otherwise.
    """

    def __init__(self, model: Model, stored: DTypeLike, pool_bytes: int | None = None):
        self.model, self.stored = model, jnp.dtype(stored)
        self._pool_bytes = pool_bytes
        self._compilations: dict[tuple, Compilation] = {}

    @property
    def page_bytes(self) -> int:
        """Bytes on one device of a KV cache page, summed over the layers."""
        return device_bytes(self.pool_shapes(1))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters on one device."""
        return device_bytes(self.model.shapes)

    def pool_shapes(self, pages: int) -> list[Any]:
        """Returns the KV cache of each layer as ShapeDtypeStructs with shardings. The heads are sharded over the mesh
        axes whose size divides their number.
        """
        mesh = self.model.layout.mesh
        heads = 1 if self.model.config.attention_kind == "mla" else self.model.config.n_kv_heads
        axes, size = [], 1
        for axis in ("tensor", "fsdp"):
            if mesh.shape[axis] > 1 and heads % (size * mesh.shape[axis]) == 0:
                axes.append(axis)
                size *= mesh.shape[axis]

        def one(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            spec = PartitionSpec(None, None, tuple(axes) or None, *(None,) * (leaf.ndim - 3))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        shapes = jax.eval_shape(
            partial(decode.make_pools, self.model.config, pages, self.stored, self.model.precision.compute)
        )
        return jax.tree.map(one, shapes)

    @functools.cached_property
    def make_pools(self) -> Callable[[int], list[Any]]:
        """A function that allocates an empty KV cache of a number of pages on the devices, and returns the cache of
        each layer. It is compiled once for a number of pages, not for each engine."""
        return jax.jit(
            lambda pages: decode.make_pools(self.model.config, pages, self.stored, self.model.precision.compute),
            static_argnums=0,
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, self.pool_shapes(1)),
        )

    def _trace(self, sizes: EngineSizes, rows: int, width: int, drawing: bool) -> jax.stages.Traced:
        everywhere = self.model.layout.sharding()

        def array(*shape: int, dtype: DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

        pools = self.pool_shapes(sizes.pages)
        draws = Draws(
            array(rows, dtype=jnp.float32),
            array(rows),
            array(rows, dtype=jnp.float32),
            array(rows, dtype=jnp.uint32),
        )

        # Reports show the names of these arguments. `last`: the index in each row of the token that the next one
        # follows.
        def step(params, pools, tokens, view, last, draws):
            model = nnx.merge(self.model.graph, params)
            x_BTD, new_pools = decode.step(model, tokens, view, pools)
            x_B1D = jnp.take_along_axis(x_BTD, last[:, None, None], axis=1)
            with jax.named_scope("head"):
                logits_BV = model.logits(x_B1D, jnp.float32)[:, 0]
            places_B = jnp.take_along_axis(view.positions_BT, last[:, None], axis=1)[:, 0] + 1
            with jax.named_scope("sampling"):
                return choose(logits_BV, draws, places_B, drawing), new_pools

        places = jax.tree.map(lambda leaf: leaf.sharding, pools)
        run = jax.jit(step, donate_argnums=1, out_shardings=(everywhere, places))
        return run.trace(
            self.model.shapes,
            pools,
            array(rows, width),
            View(array(rows, width), array(rows, sizes.table)),
            array(rows),
            draws,
        )

    def compilation(self, sizes: EngineSizes, rows: int, width: int, drawing: bool) -> Compilation:
        """Returns the compiled step program for a batch of `rows` sequences with `width` tokens each.

        `drawing`: True if the next tokens are sampled, False for the most likely tokens.
        """
        key = sizes.pages, sizes.table, rows, width, drawing
        if key not in self._compilations:
            with self.for_kernels():
                traced = self._trace(sizes, rows, width, drawing)
                self._compilations[key] = compile_lowered(
                    traced.lower(), exact=False, jaxpr=traced.jaxpr, device_memory_bytes=self._pool_bytes
                )
        return self._compilations[key]

    def for_kernels(self) -> contextlib.AbstractContextManager:
        """Returns the context in which the programs must be compiled. If the kernel of the experts is a Pallas kernel,
        it sets the XLA options that the kernel needs.
        """
        grouped = self.model.config.moe_kernel == "grouped"
        return for_pallas(self.model.layout.mesh) if grouped else contextlib.nullcontext()

    def report(self, sizes: EngineSizes, rows: int, width: int, drawing: bool, target: Target) -> ReportRecord:
        """Returns the memory report of the step program for a batch of `rows` sequences with `width` tokens each.

        `drawing`: True if the next tokens are sampled. `target`: the devices to report on.
        """
        return report_of(self.compilation(sizes, rows, width, drawing), target=target, roles=ROLES)

    def extra_bytes(self, sizes: EngineSizes, report: ReportRecord) -> int:
        """Returns the bytes on a device that a program needs besides the parameters and the KV cache: temporary
        buffers, results and runtime overheads.

        `report`: the memory report of the program.
        """
        return report.predicted_bytes - self.weight_bytes - sizes.pages * self.page_bytes
