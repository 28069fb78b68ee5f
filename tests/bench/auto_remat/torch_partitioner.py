"""Asks torch's min-cut partitioner with `activation_memory_budget` which values of a graph to save.

The partitioner (`torch._functorch.partitioners`) reads a joint FX graph: which operation a node is, the bytes of its
result, who reads it, and its runtime. `joint_module` builds such a graph from a benchmark graph, with one FX node per
node, so that its answer consists of names of the benchmark graph. Nothing of it runs. The FLOPs of a node are given
through `CustomRuntimeEstimator`; torch's own "flops" estimator would count the same products.
"""

from __future__ import annotations

from typing import Any

import torch
from graph import GIVEN, Graph
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten
# Kind -> an operation that the partitioner treats in the same way (`get_default_op_list`): products are compute
# intensive, elementwise operations and reductions can be fused and recomputed, and so can indexing. Sorting cannot.
TARGETS = {
    "matmul": aten.mm.default,
    "convolution": aten.convolution.default,
    "attention": aten._scaled_dot_product_flash_attention.default,
    "elementwise": aten.add.Tensor,
    "reduction": aten.sum.dim_IntList,
    "index": aten.index.Tensor,
    "other": aten.sort.default,
}
SOLVERS = ("dp", "greedy", "ilp")
# Settings of activation_memory_budget that are tried: every 1/40, and a few small ones.
SETTINGS = (*(number / 40 for number in range(41)), 0.005, 0.01, 0.015)


class GivenFlops(partitioners.CustomRuntimeEstimator):  # type: ignore[misc]
    """The runtime of a node is its FLOPs, as with torch's estimator "flops"."""

    def __call__(self, node: fx.Node) -> float:
        return max(node.meta["flops"], 1)

    def uuid(self) -> Any:
        return None


def joint_module(graph: Graph) -> tuple[fx.GraphModule, dict[str, str], list[int]]:
    """Returns (joint FX graph, FX node name -> node name, positions of parameters among the inputs)."""
    joint, by_name, names = fx.Graph(), {}, {}
    static = []
    primals = [node for node in graph.nodes if node.kind in ("input", "parameter")]
    tangents = [node for node in graph.nodes if node.kind == "cotangent"]
    with FakeTensorMode():
        for number, node in enumerate(primals, 1):
            by_name[node.name] = joint.placeholder(f"primals_{number}")
            if node.kind == "parameter":
                static.append(number - 1)
        for number, node in enumerate(tangents, 1):
            by_name[node.name] = joint.placeholder(f"tangents_{number}")
        for node in graph.nodes:
            if node.kind not in GIVEN:
                by_name[node.name] = joint.call_function(TARGETS[node.kind], tuple(map(by_name.get, node.inputs)))
        for node in graph.nodes:
            made = by_name[node.name]
            made.meta["val"] = torch.empty(node.bytes, dtype=torch.uint8)
            made.meta["flops"] = node.flops
            names[made.name] = node.name
    joint.output(tuple(by_name[name] for name in (*graph.outputs, *graph.gradients)))
    output = next(node for node in joint.nodes if node.op == "output")
    output.meta["desc"] = [None] * len(output.args[0])
    return fx.GraphModule(torch.nn.Module(), joint), names, static


def saved_values(graph: Graph, setting: float, solver: str) -> tuple[str, ...]:
    """Returns the names of the forward results that torch saves with `activation_memory_budget=setting`.

    solver: `activation_memory_budget_solver`, one of SOLVERS. Inputs and parameters, which torch keeps too, are left
    out.
    """
    module, names, static = joint_module(graph)
    with functorch_config.patch(
        activation_memory_budget=setting,
        activation_memory_budget_solver=solver,
        activation_memory_budget_runtime_estimator=GivenFlops(),
        cse=False,  # operations of one kind with the same inputs are not the same operation
    ):
        forward, _ = partitioners.min_cut_rematerialization_partition(
            module, None, num_fwd_outputs=len(graph.outputs), static_lifetime_input_indices=static
        )
    output = next(node for node in forward.graph.nodes if node.op == "output")
    saved = [names[node.name] for node in output.args[0][len(graph.outputs) :] if isinstance(node, fx.Node)]
    nodes = graph.by_name
    return tuple(dict.fromkeys(name for name in saved if nodes[name].kind not in GIVEN))
