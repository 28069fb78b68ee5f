"""The order in memory of an array inside a program, where it is better said than left to the compiler."""

import jax
from jax.experimental.layout import Layout, with_layout_constraint


def row_major(x: jax.Array) -> jax.Array:
    """`x` [...], its last dimension contiguous: the order that arguments have."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
