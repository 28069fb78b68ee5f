"""What a gradient's forward pass hands to its backward pass, by checkpoint name, read from the jaxpr."""

import math
from collections import Counter

import jax
import jax.numpy as jnp

INPUT = "(blocks input)"  # what a block starts from, by its name or without one


def gradient(program):
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), program.batch.rows))
    return jax.make_jaxpr(jax.value_and_grad(program.parts.objective))(program.state.params, program.eval_shapes, keys)


def named(variable, makers):
    """The checkpoint name of a value, INPUT for what a body was given or another block made."""
    while variable in makers and makers[variable].primitive.name in ("reduce_precision", "device_put"):
        variable = makers[variable].invars[0]
    maker = makers.get(variable)
    if maker is None or maker.primitive.name in ("add", "jit", "pjit"):  # another block's sum, the embedding's dropout
        return INPUT
    name = maker.params["name"] if maker.primitive.name == "name" else f"({maker.primitive.name})"
    return INPUT if name in ("block_in", "embed") else name


def crossing(jaxpr):
    """Bytes by name that the blocks' forward pass hands to their backward pass, parameters and random keys left out."""
    jaxpr, found = getattr(jaxpr, "jaxpr", jaxpr), Counter()
    makers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}

    def add(variable, bodys_makers, trips=1):
        value = variable.aval
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return
        found[named(variable, bodys_makers)] += trips * math.prod(value.shape) * value.dtype.itemsize

    for equation in jaxpr.eqns:
        stack, kind = str(equation.source_info.name_stack), equation.primitive.name
        if kind == "scan" and stack == "jvp(blocks)":
            body = equation.params["jaxpr"].jaxpr
            inside = {variable: inner for inner in body.eqns for variable in inner.outvars}
            for out, variable in zip(equation.outvars, body.outvars, strict=True):
                if len(out.aval.shape) > len(variable.aval.shape):  # one of each iteration, not the last one's
                    add(variable, inside, equation.params["length"])
        elif kind in ("remat2", "checkpoint") and "transpose(" in stack:
            for variable in {v for v in equation.invars if not hasattr(v, "val") and v in makers}:
                if "transpose(" not in str(makers[variable].source_info.name_stack):
                    add(variable, makers)
    return found


def custom(keys, names):
    return {**keys, "remat.policy": "custom", "remat.save": ",".join(sorted(names))}
