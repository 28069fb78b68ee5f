"""The one evaluator that scores every solver: the peak memory and the recomputed FLOPs of a set of saved values.

The rules, for a graph and a set of forward results that are saved:

- The forward pass computes what the outputs and the saved values need, in the order of the graph. A result is freed
  after its last use in the forward pass, unless it is saved. Outputs live until the end of the forward pass.
- The backward pass runs its operations in the order of the graph. Before an operation runs, the forward results that it
  reads and that are not in memory are computed, and before them what they read. A result that was computed in the
  backward pass is freed after its last use there, so nothing is computed more than twice.
- A saved value lives until its last use in the backward pass. Gradients live until the end. Inputs of the graph live
  throughout; cotangents from the start of the backward pass until their last use.
- Every operation reads its inputs while its result is already in memory: no fusion, no in-place updates.

A saved value that the backward pass does not use is not kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from graph import BACKWARD, GIVEN, Graph, is_choice


@dataclasses.dataclass(frozen=True)
class Score:
    """The result of an evaluation.

    Fields:
        peak_bytes: maximum bytes in memory at one time, without parameters.
        forward_peak_bytes, backward_peak_bytes: the maximum in each of the two passes.
        saved_bytes: bytes of the saved values that the backward pass uses.
        recomputed_flops: FLOPs of the operations that run a second time.
        recomputed_bytes: bytes of the results that are computed a second time.
        saved: names of the saved values that the backward pass uses.
    """

    peak_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    saved_bytes: int
    recomputed_flops: int
    recomputed_bytes: int
    saved: tuple[str, ...]


def evaluate(graph: Graph, saved: Collection[str]) -> Score:
    """Returns the peak memory and the recomputed FLOPs of a step that saves these forward results.

    saved: names of forward operations. Raises ValueError if a name is not a forward operation of the graph.
    """
    nodes = graph.by_name
    for name in saved:
        if name not in nodes or not is_choice(nodes[name]):
            raise ValueError(f"{name} is not a forward operation of {graph.name}; only their results can be saved")
    chosen = frozenset(saved)
    backward = _backward_order(graph, chosen)
    used = {name for step in backward for name in nodes[step].inputs} | set(graph.gradients)
    kept = chosen & used
    forward = _forward_order(graph, kept)

    always = sum(node.bytes for node in graph.nodes if node.kind == "input")
    forward_peak = _peak(graph, forward, start=frozenset(), end=kept | set(graph.outputs))
    given = {node.name for node in graph.nodes if node.kind == "cotangent"}
    backward_peak = _peak(graph, backward, start=kept | given, end=frozenset(graph.gradients))
    again = set(forward) & set(backward)
    return Score(
        always + max(forward_peak, backward_peak),
        always + forward_peak,
        always + backward_peak,
        sum(nodes[name].bytes for name in kept),
        sum(nodes[name].flops for name in again),
        sum(nodes[name].bytes for name in again),
        tuple(node.name for node in graph.nodes if node.name in kept),
    )


def _forward_order(graph: Graph, kept: Collection[str]) -> list[str]:
    needed = {*kept, *graph.outputs}
    order = []
    for node in reversed(graph.nodes):
        if node.name in needed and is_choice(node):
            needed.update(node.inputs)
            order.append(node.name)
    return order[::-1]


def _backward_order(graph: Graph, saved: Collection[str]) -> list[str]:
    """Returns the operations of the backward pass in the order in which they run, with recomputed forward operations
    immediately before the operation that needs them first.
    """
    nodes = graph.by_name
    needed = set(graph.gradients)  # a backward operation without use does not run
    for node in reversed(graph.nodes):
        if node.name in needed and node.phase == BACKWARD:
            needed.update(node.inputs)
    order: list[str] = []
    done: set[str] = set(saved)
    for node in graph.nodes:
        if node.phase != BACKWARD or node.name not in needed:
            continue
        # (name, whether its inputs are in memory): depth first, inputs in the order in which the operation reads them.
        stack = [(node.name, False)]
        while stack:
            name, ready = stack.pop()
            if name in done or nodes[name].kind in GIVEN:
                continue
            if ready:
                done.add(name)
                order.append(name)
                continue
            stack.append((name, True))
            stack += [(source, False) for source in reversed(nodes[name].inputs)]
    return order


def _peak(graph: Graph, order: list[str], start: Collection[str], end: Collection[str]) -> int:
    """Returns the maximum bytes in memory while the operations in `order` run. Inputs of the graph are not counted.

    start: results that are in memory before the first operation. end: results that are in memory after the last one.
    """
    nodes = graph.by_name
    last_use: dict[str, int] = {}
    for number, name in enumerate(order):
        last_use[name] = number
        for source in nodes[name].inputs:
            last_use[source] = number
    freed_after: dict[int, list[str]] = {}
    for name, number in last_use.items():
        if name not in end and nodes[name].kind not in ("input", "parameter"):
            freed_after.setdefault(number, []).append(name)
    live = peak = sum(nodes[name].bytes for name in start)
    for number, name in enumerate(order):
        live += nodes[name].bytes
        peak = max(peak, live)
        live -= sum(nodes[freed].bytes for freed in freed_after.get(number, ()))
    return peak
