"""Prepares trained parameters for a step, and gradients for the update."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from bytescope.model import Precision
from bytescope.train.parallel.axes import BATCH
from bytescope.train.parallel.layout import Layout
from bytescope.train.step.optimizer.host_offload import is_hosted


@dataclasses.dataclass(frozen=True)
class Weights:
    """Casts and gathers trained parameters for a step, and casts and shards gradients, as the ZeRO strategy requires.

    Fields:
      layout: the sharding of arrays over the mesh.
      axes: tree with the logical axes of each parameter, such as ("vocab", "d_model").
      contracted: tree of bools, True if only matrix products read the parameter.
      always_float32: tree of bools, True if the parameter is float32 in every precision.
      precision: the dtypes of parameters, computation and gradients.
    """

    layout: Layout
    axes: Any
    contracted: Any
    always_float32: Any
    precision: Precision

    def copy(self, params: Any) -> Any:
        """Returns the parameters that the step computes with.

        Under zero1 and zero2 this is a gathered copy, with matrices in the compute dtype. Parameters that are float32
        in every precision stay float32. Under zero2 the copy has only matrices: the token table stays sharded as under
        zero3, and norms and biases are gathered as they are read.

        With `precision.cast=step` every other parameter is cast to the compute dtype too, under any strategy. Without
        it, ddp and zero3 return `params` unchanged.
        """
        strategy, cast = self.layout.strategy, self.precision.copied
        gathers = strategy.stored and not strategy.by_layer
        if not gathers and not cast:
            return params

        def one(param, axes, contracted, always_float32):
            with jax.named_scope("param_copy"):
                if (contracted or cast) and not always_float32:
                    param = param.astype(self.precision.compute)
                if gathers and (contracted or not strategy.gradients):
                    return self.layout.gather(param, axes)
                return self.layout.shard_like_stored(param, axes) if cast else param

        copy = self._map(one, params, self.contracted, self.always_float32)
        # The barrier makes one copy for all readers: otherwise the compiler would cast again for each unrolled layer.
        return jax.lax.optimization_barrier(copy) if cast else copy

    def gradients(self, grads: Any) -> Any:
        """Returns the gradients of one micro-batch in the dtype and sharding in which gradients are stored."""

        def keep(grad, axes):
            if is_hosted(grad):  # already in host memory, with the same sharding
                return grad
            return self.layout.total(self.layout.reduced(grad), axes)

        return self._map(keep, grads)

    def totals(self, grads: Any) -> Any:
        """Shards gradients that were summed over micro-batches, in the sharding in which gradients are stored. Their
        dtype does not change."""
        return self._map(self.layout.total, grads)

    def _map(self, function: Callable, *trees: Any) -> Any:
        leaves, structure = jax.tree.flatten(trees[0])
        axes = jax.tree.leaves(self.axes, is_leaf=lambda node: isinstance(node, tuple))
        updated = [function(*row) for row in zip(leaves, axes, *map(jax.tree.leaves, trees[1:]))]
        return jax.tree.unflatten(structure, updated)

    def specs(self) -> Any:
        """Returns the PartitionSpec over the data-parallel ranks of each gradient that `reduce` returns."""

        def own(axes):
            dims = [self.layout.mesh_axes(axis, state=self.layout.strategy.stored) for axis in axes]
            return P(*["fsdp" if "fsdp" in dim else None for dim in dims])

        return jax.tree.map(own, self.axes, is_leaf=lambda node: isinstance(node, tuple))

    def reduce(self, grads: Any) -> Any:
        """Sums gradients over the data-parallel ranks, once per update. Call it inside a `jax.shard_map` over these
        ranks. Each rank gets the shard of the sum that it stores."""
        local = self.layout.local

        def one(grad, axes, spec):
            def summed(grad):
                if "fsdp" not in spec or self.layout.mesh.shape["fsdp"] == 1:
                    return jax.lax.psum(grad, BATCH)
                return jax.lax.psum(
                    jax.lax.psum_scatter(grad, "fsdp", scatter_dimension=list(spec).index("fsdp"), tiled=True), "data"
                )

            # Every device sends its own shard: if `tensor` were left to the compiler, XLA would gather what it then
            # scatters.
            return local.own(summed, (axes,), axes)(self.layout.reduced(grad))

        return self._map(one, grads, self.specs())
