"""What one block keeps for its backward pass, as JAX lists it."""

import re

import jax
import jax.numpy as jnp
from flax import nnx

from support.toy import small_program

ITEMSIZE = {"f32": 4, "bf16": 2, "bool": 1, "i32": 4, "u32": 4}  # bytes, by JAX's short names


def block_residuals(capsys, **overrides):
    """[(name or "", shape, bytes an element)] of what the first block keeps of 2 x 16 tokens besides its parameters and
    keys; "x" is its input."""
    program = small_program(overrides)
    transformer = program.transformer(nnx.Rngs(params=0))
    graph, state = nnx.split(transformer.blocks)
    block = transformer._block(transformer.runs[0], graph)
    layer = jax.tree.map(lambda leaf: leaf[0], state)
    x = jnp.ones((2, 16, program.model.d_model), program.precision.compute)
    keys = jax.random.split(jax.random.key(0), 2) if program.model.dropout else None
    jax.ad_checkpoint.print_saved_residuals(lambda x, layer: block(x, layer, 0, keys, None), x, layer)
    found = []
    for line in capsys.readouterr().out.splitlines():
        kind, shape = re.match(r"([\w<>]+)\[([\d,]*)\]", line).groups()
        if "argument layer" in line or "key<" in line:
            continue
        name = re.search(r"named '(\w+)'", line)
        shape = tuple(int(size) for size in shape.split(",") if size)
        found.append((name[1] if name else "x" if "argument x" in line else "", shape, ITEMSIZE[kind]))
    return found
