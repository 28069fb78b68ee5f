"""The compiled step programs of an engine: a few static shapes, each compiled once. The devices need not be present."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
from bytescope.train.generate.sampling import Draws, choose
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
      stored: dtype of the KV cache. 8-bit dtypes have scales.
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

    def run(
        self,
        sizes: EngineSizes,
        drawing: bool,
        params: Any,
        pools: Sequence[Any],
        tokens: np.ndarray,
        view: View,
        last: np.ndarray,
        draws: Draws,
    ) -> tuple[np.ndarray, list[Any]]:
        """Runs a step. Returns the next token of each row, int32 [B] on the host, and the new KV cache. The old KV
        cache is donated.

        Args:
          sizes: static shapes of the programs.
          drawing: True to sample the next token, False to take the most likely one.
          params: the parameters on the devices.
          pools: the KV cache of each layer.
          tokens: token ids, int32 [B, T].
          view: position of each token in its sequence, and the KV cache pages of each sequence.
          last: index of the token in each row that the next token follows, int32 [B].
          draws: sampling settings of each row.
        """
        rows, width = tokens.shape
        chosen, new_pools = self.compilation(sizes, rows, width, drawing).executable(
            params, pools, tokens, view, last, draws
        )
        return np.asarray(chosen), new_pools
