"""The training graph of a benchmark instance: forward and backward operations with their bytes and FLOPs, as JSON.

README.md describes the format. Views (reshapes, transposes, broadcasts) are not in a graph: an operation that reads a
view reads the value behind it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

# Values that exist before the graph runs. Parameters are always in memory, so their bytes are not counted.
GIVEN = ("input", "parameter", "cotangent")
KINDS = (*GIVEN, "matmul", "convolution", "attention", "elementwise", "reduction", "index", "other")
FORWARD, BACKWARD = "forward", "backward"


class GraphError(ValueError):
    """A graph file that breaks a rule of the format."""


@dataclasses.dataclass(frozen=True)
class Node:
    """An operation and its one result.

    Fields:
        name: unique name.
        kind: one of KINDS.
        bytes: bytes of the result. An operation with several results counts as one result with all their bytes.
        flops: FLOPs of the operation. Elementwise operations have 0 unless the source of the graph counts them.
        inputs: names of the results that the operation reads.
        phase: "backward" if the operation depends on a cotangent, else "forward".
        block: the block (such as a transformer layer) to which the operation belongs, "" for none.
        label: name of the operation inside its block. Equal blocks have equal labels.
        checkpoint_name: the name given with `jax.ad_checkpoint.checkpoint_name`, "" for none.
        policies: entries of `jax.checkpoint_policies` that keep the result.
    """

    name: str
    kind: str
    bytes: int
    flops: int = 0
    inputs: tuple[str, ...] = ()
    phase: str = FORWARD
    block: str = ""
    label: str = ""
    checkpoint_name: str = ""
    policies: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Graph:
    """A training step's forward and backward pass.

    Fields:
        name: the name of the instance, such as "gpt".
        source: where the graph comes from.
        nodes: operations in the order in which a step without recomputation runs them.
        outputs: names of the forward results that the loss reads.
        gradients: names of the results that stay in memory until the end: gradients of parameters and inputs.
        budgets: byte budgets for the peak, ascending.
        facts: sizes of the model that a solver may need, such as "emb_dim" for MaxText's estimator.
    """

    name: str
    source: str
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    budgets: tuple[int, ...] = ()
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @functools.cached_property
    def read_by_backward(self) -> tuple[str, ...]:
        """Names of the forward operations whose results a backward operation reads."""
        read = {name for node in self.nodes if node.phase == BACKWARD for name in node.inputs}
        return tuple(node.name for node in self.nodes if node.name in read and is_choice(node))

    @functools.cached_property
    def block_inputs(self) -> tuple[str, ...]:
        """Names of the forward operations whose results another block reads: what `jax.checkpoint` around every block
        keeps under every policy.
        """
        crossing: dict[str, None] = {}
        for node in self.nodes:
            if node.phase == FORWARD and node.kind not in GIVEN:
                for name in node.inputs:
                    source = self.by_name[name]
                    if is_choice(source) and source.block != node.block:
                        crossing[name] = None
        return tuple(crossing)

    @property
    def flops(self) -> int:
        """FLOPs of a step without recomputation."""
        return sum(node.flops for node in self.nodes)

    @property
    def forward_flops(self) -> int:
        return sum(node.flops for node in self.nodes if node.phase == FORWARD)


def is_choice(node: Node) -> bool:
    """Returns whether a solver decides about a node: it is computed in the forward pass and can be saved."""
    return node.phase == FORWARD and node.kind not in GIVEN


def load(path: Path) -> Graph:
    """Reads and checks a graph file. Raises GraphError with the file and the node if the file breaks a rule."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        nodes = []
        for fields in values["nodes"]:
            lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
            nodes.append(Node(**{**fields, **lists}))
        graph = Graph(
            values["name"],
            values["source"],
            tuple(nodes),
            tuple(values["outputs"]),
            tuple(values["gradients"]),
            tuple(values["budgets"]),
            values.get("facts", {}),
        )
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise GraphError(f"{path}: {error}; README.md describes the format") from error
    problem = find_problem(graph)
    if problem:
        raise GraphError(f"{path}: {problem}")
    return graph


def find_problem(graph: Graph) -> str:
    """Returns the first rule that a graph breaks, as a sentence; "" for a valid graph."""
    seen: dict[str, Node] = {}
    for node in graph.nodes:
        if node.name in seen:
            return f"two nodes are named {node.name}"
        if node.kind not in KINDS:
            return f"{node.name} has the kind {node.kind}, which is none of {', '.join(KINDS)}"
        if node.phase not in (FORWARD, BACKWARD):
            return f"{node.name} has the phase {node.phase}, which is neither forward nor backward"
        if node.bytes < 0 or node.flops < 0:
            return f"{node.name} has negative bytes or FLOPs"
        for name in node.inputs:
            if name not in seen:
                return f"{node.name} reads {name}, which no earlier node computes"
            if node.phase == FORWARD and (seen[name].phase == BACKWARD or seen[name].kind == "cotangent"):
                return f"{node.name} is in the forward pass and reads {name} of the backward pass"
        if node.kind in GIVEN and node.inputs:
            return f"{node.name} is given and has inputs"
        seen[node.name] = node
    for name in (*graph.outputs, *graph.gradients):
        if name not in seen:
            return f"the result {name} is not a node"
    if list(graph.budgets) != sorted(set(graph.budgets)):
        return "the budgets are not ascending"
    return ""


def save(graph: Graph, path: Path) -> None:
    """Writes a graph file with one node per line. Fields with their default value are left out."""
    defaults = {field.name: field.default for field in dataclasses.fields(Node)}
    lines = []
    for node in graph.nodes:
        fields = {key: value for key, value in dataclasses.asdict(node).items() if value != defaults[key]}
        lines.append(json.dumps(fields, separators=(",", ":")))
    head = {
        "name": graph.name,
        "source": graph.source,
        "facts": graph.facts,
        "budgets": list(graph.budgets),
        "outputs": list(graph.outputs),
        "gradients": list(graph.gradients),
    }
    rows = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    text = "{\n" + ",\n".join(rows) + ',\n"nodes": [\n' + ",\n".join(lines) + "\n]\n}\n"
    path.write_text(text, encoding="utf-8")
