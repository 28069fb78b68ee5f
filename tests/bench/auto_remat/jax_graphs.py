"""Builds a graph from jax: every block of a model is differentiated by jax, and the equations become nodes.

A model is a list of blocks. The forward and backward pass of a block are traced into one jaxpr (`jax.vjp` and its
application to a cotangent), without running anything. Blocks are then connected: a block reads results of earlier
blocks, and its cotangent is the sum of the cotangents that the reading blocks return.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from graph import BACKWARD, FORWARD, Graph, Node

from bytescope.memory.cost.flops import count_equation

# Calls whose body is part of the graph. A jitted function named in OPAQUE is one operation, as a fused kernel is.
CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint")
OPAQUE = {"flash_forward": "attention", "flash_backward": "attention"}
VIEWS = (
    "reshape",
    "transpose",
    "broadcast_in_dim",
    "squeeze",
    "expand_dims",
    "slice",
    "split",
    "copy",
    "stop_gradient",
    "name",
    "optimization_barrier",
    "reduce_precision",
)
PRODUCTS = {"dot_general": "matmul", "ragged_dot_general": "matmul", "conv_general_dilated": "convolution"}
INDEXING = ("gather", "scatter", "scatter-add", "dynamic_slice", "dynamic_update_slice", "sort", "top_k", "cumsum")
# The entries of jax.checkpoint_policies that need no names and no host memory.
POLICIES = ("everything_saveable", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a model, such as a transformer layer.

    Fields:
        name: name of the block in the graph.
        function: function(params, *inputs) -> result, an array.
        params: pytree of ShapeDtypeStructs.
        inputs: for each input, the name of the block that computes it, or the name of an input of the model.
    """

    name: str
    function: Callable[..., Any]
    params: Any
    inputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Traced:
    """The joint jaxpr of a block as nodes with numbers instead of names.

    Fields:
        nodes: operations; their inputs are texts such as "param.0", "input.0", "cotangent" or "op.17".
        result: the text of the block's result.
        input_gradients: for each input, the text of its cotangent; "" if the input has none.
        param_gradients: the texts of the gradients of the parameters.
    """

    nodes: tuple[Node, ...]
    result: str
    input_gradients: tuple[str, ...]
    param_gradients: tuple[str, ...]
    params: tuple[int, ...]
    result_spec: Any


def build_graph(
    name: str, source: str, blocks: Sequence[Block], given: Mapping[str, Any], facts: Mapping[str, Any]
) -> Graph:
    """Returns the graph of a model whose last block computes the result that the loss reads.

    Args:
        name, source, facts: as in Graph.
        blocks: the blocks, each after the blocks that it reads.
        given: name of an input of the model -> ShapeDtypeStruct.
    """
    traced_by_key: dict[Any, _Traced] = {}
    traced: dict[str, _Traced] = {}
    specs = dict(given)
    nodes = [Node(key, "input", _bytes(spec)) for key, spec in given.items()]
    results = {key: key for key in given}
    local: dict[str, dict[str, str]] = {}
    for block in blocks:
        shapes = tuple((specs[key].shape, str(specs[key].dtype)) for key in block.inputs)
        key = (block.function, shapes, str(block.params))
        if key not in traced_by_key:
            traced_by_key[key] = _trace(block, [specs[one] for one in block.inputs])
        one = traced[block.name] = traced_by_key[key]
        specs[block.name] = one.result_spec
        names = {f"input.{number}": results[before] for number, before in enumerate(block.inputs)}
        for number, size in enumerate(one.params):
            names[f"param.{number}"] = f"{block.name}.param.{number}"
            nodes.append(Node(f"{block.name}.param.{number}", "parameter", size, block=block.name))
        for node in one.nodes:
            names[node.name] = f"{block.name}.{node.label}"
        nodes += [_renamed(node, names, block.name) for node in one.nodes if node.phase == FORWARD]
        local[block.name] = names
        results[block.name] = names.get(one.result, one.result)
    last = blocks[-1].name
    nodes.append(Node("cotangent", "cotangent", _bytes(specs[last])))
    cotangents: dict[str, list[str]] = {last: ["cotangent"]}
    gradients = []
    for block in reversed(blocks):
        one, names = traced[block.name], local[block.name]
        arriving = cotangents[block.name]
        names["cotangent"] = arriving[0]
        for number, more in enumerate(arriving[1:]):
            total = f"{block.name}.cotangent.{number}"
            size = _bytes(specs[block.name])
            reads = (names["cotangent"], more)
            nodes.append(Node(total, "elementwise", size, 0, reads, BACKWARD, block.name, f"cotangent.{number}"))
            names["cotangent"] = total
        nodes += [_renamed(node, names, block.name) for node in one.nodes if node.phase == BACKWARD]
        gradients += [names[gradient] for gradient in one.param_gradients if gradient in names]
        for before, gradient in zip(block.inputs, one.input_gradients):
            if gradient and before in traced:
                cotangents.setdefault(before, []).append(names[gradient])
            elif gradient:
                gradients.append(names[gradient])
    alive = _used(nodes, [results[last], *gradients])
    kept = tuple(node for node in nodes if node.name in alive or node.kind in ("input", "cotangent"))
    return Graph(name, source, kept, (results[last],), tuple(dict.fromkeys(gradients)), (), dict(facts))


def _renamed(node: Node, names: Mapping[str, str], block: str) -> Node:
    inputs = tuple(dict.fromkeys(names[source] for source in node.inputs))
    return dataclasses.replace(node, name=names[node.name], inputs=inputs, block=block)


def _used(nodes: Sequence[Node], results: Sequence[str]) -> set[str]:
    used = set(results)
    for node in reversed(nodes):
        if node.name in used:
            used.update(node.inputs)
    return used


def _bytes(spec: Any) -> int:
    return int(np.prod(spec.shape)) * spec.dtype.itemsize


# ---- one block ---------------------------------------------------------------------------------------------------


def _trace(block: Block, inputs: Sequence[Any]) -> _Traced:
    params, tree = jax.tree.flatten(block.params)
    result = jax.eval_shape(block.function, block.params, *inputs)
    active = [number for number, spec in enumerate(inputs) if jax.numpy.issubdtype(spec.dtype, jax.numpy.floating)]

    def joint(params: Any, inputs: Any, cotangent: Any) -> Any:
        def of_active(params: Any, *some: Any) -> Any:
            every = list(inputs)
            for number, value in zip(active, some):
                every[number] = value
            return block.function(jax.tree.unflatten(tree, params), *every)

        value, pull = jax.vjp(of_active, params, *(inputs[number] for number in active))
        return value, pull(cotangent)

    closed = jax.make_jaxpr(joint)(params, list(inputs), result)
    walk = _Walk()
    names = [f"param.{number}" for number in range(len(params))]
    names += [f"input.{number}" for number in range(len(inputs))]
    names.append("cotangent")
    outs = walk.add(closed.jaxpr, [_Value(name, name == "cotangent") for name in names])
    value, gradients = outs[0], outs[1:]
    by_input = dict(zip(active, gradients[len(params) :]))
    return _Traced(
        tuple(walk.nodes),
        value.name,
        tuple(by_input[number].name if number in by_input else "" for number in range(len(inputs))),
        tuple(gradient.name for gradient in gradients[: len(params)]),
        tuple(_bytes(spec) for spec in params),
        result,
    )


@dataclasses.dataclass(frozen=True)
class _Value:
    """What an equation reads: the text of its node, "" for a constant, and whether it depends on the cotangent."""

    name: str
    backward: bool


class _Walk:
    """Turns the equations of a jaxpr into nodes, in order. Bodies of calls are walked in place."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._labels: dict[str, int] = {}

    def add(self, jaxpr: Any, given: Sequence[_Value]) -> list[_Value]:
        env = dict(zip(jaxpr.invars, given))
        constant = _Value("", False)

        def read(atom: Any) -> _Value:
            return constant if hasattr(atom, "val") else env.get(atom, constant)

        for equation in jaxpr.eqns:
            ins = [read(atom) for atom in equation.invars]
            primitive = equation.primitive.name
            body = next((equation.params[key] for key in ("jaxpr", "call_jaxpr") if key in equation.params), None)
            if primitive in CALLS and body is not None and equation.params.get("name") not in OPAQUE:
                outs = self.add(getattr(body, "jaxpr", body), ins)
            elif primitive in VIEWS:
                outs = [ins[0]] * len(equation.outvars)
                if primitive == "name":
                    self._name(ins[0], equation.params["name"])
            else:
                outs = [self._operation(equation, ins)] * len(equation.outvars)
            env.update(zip(equation.outvars, outs))
        return [read(atom) for atom in jaxpr.outvars]

    def _operation(self, equation: Any, ins: Sequence[_Value]) -> _Value:
        primitive = equation.primitive.name
        kind = PRODUCTS.get(primitive) or OPAQUE.get(equation.params.get("name", ""), "")
        if not kind:
            kind = "elementwise"
            if primitive.startswith(("reduce_", "arg")):
                kind = "reduction"
            elif primitive in INDEXING:
                kind = "index"
            elif primitive.startswith(("random", "threefry")):
                kind = "other"
        label = equation.params["name"] if kind == "attention" else primitive
        self._labels[label] = number = self._labels.get(label, 0) + 1
        backward = any(value.backward for value in ins)
        avals = [atom.aval for atom in equation.invars]
        policies = []
        for policy in POLICIES:
            decide = getattr(jax.checkpoint_policies, policy)
            if kind != "attention" and decide(equation.primitive, *avals, **equation.params):
                policies.append(policy)
        if kind == "attention":
            # jax asks about the products inside a kernel written in jax; a real kernel is kept by this policy only.
            policies = ["everything_saveable"]
        node = Node(
            f"op.{len(self.nodes)}",
            kind,
            sum(_bytes(variable.aval) for variable in equation.outvars if hasattr(variable.aval, "shape")),
            int(count_equation(equation).total),
            tuple(dict.fromkeys(value.name for value in ins if value.name)),
            BACKWARD if backward else FORWARD,
            label=f"{label}.{number}",
            policies=() if backward else tuple(policies),
        )
        self.nodes.append(node)
        return _Value(node.name, backward)

    def _name(self, value: _Value, name: str) -> None:
        for number, node in enumerate(self.nodes):
            if node.name == value.name and not node.checkpoint_name:
                self.nodes[number] = dataclasses.replace(node, checkpoint_name=name)
