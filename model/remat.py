"""Rematerialization policies: what a block keeps for its backward pass. One row a policy.

A policy is a way to wrap the function of one block. Under `lax.scan` the loop already keeps
XLA from merging the recomputed values with the originals, so `prevent_cse=False` is right and
cheaper there; unrolled layers need `prevent_cse=True`, or common-subexpression elimination
undoes the recomputation altogether.
"""

import dataclasses
from collections.abc import Callable

import jax
from jax import checkpoint_policies as cp


@dataclasses.dataclass(frozen=True)
class RematPolicy:
    """`saveable` is a `jax.checkpoint` policy; None leaves the block unwrapped: nothing recomputed."""

    summary: str
    saveable: Callable[..., bool] | None

    def wrap(self, block: Callable, *, scanned: bool) -> Callable:
        """`block` with this policy's residuals."""
        if self.saveable is None:
            return block
        # Not policy=None: inside jax.checkpoint that means full recomputation.
        return jax.checkpoint(block, policy=self.saveable, prevent_cse=not scanned)


POLICIES = {
    "none": RematPolicy("every residual kept, nothing recomputed", None),
    "full": RematPolicy("only the input of each block kept, the block recomputed", cp.nothing_saveable),
    "dots": RematPolicy("outputs of all matrix products kept", cp.dots_saveable),
    "dots_no_batch": RematPolicy(
        "outputs of matrix products with weights kept, the attention core recomputed",
        cp.dots_with_no_batch_dims_saveable),
}
