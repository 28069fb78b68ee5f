"""Builds a graph from torch: the joint forward and backward graph that AOTAutograd traces becomes nodes.

`llama_197838` is a model of the shape in https://github.com/pytorch/pytorch/issues/197838, in which the peak rises when
`activation_memory_budget` falls: its smallest configuration has 16 layers and
512 tokens. The issue states no widths: width 256, hidden width 704 and four sequences are ours.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from graph import BACKWARD, FORWARD, Graph, Node
from torch import fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback
from torch.utils.flop_counter import flop_registry

VIEWS = (
    "view",
    "_unsafe_view",
    "transpose",
    "t",
    "permute",
    "detach",
    "expand",
    "alias",
    "unsqueeze",
    "squeeze",
    "getitem",
)
KINDS = {
    "mm": "matmul",
    "bmm": "matmul",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "mean": "reduction",
    "sum": "reduction",
}
LAYERS, BATCH, LENGTH, WIDTH, HIDDEN, HEADS = 16, 4, 512, 256, 704, 4


def norm(scale_D: Any, x_BLD: Any) -> Any:
    return x_BLD * torch.rsqrt(x_BLD.pow(2).mean(-1, keepdim=True) + 1e-5) * scale_D


def block(params: Any, x_BLD: Any) -> Any:
    attention_norm, query, key, value, out, mlp_norm, gate, up, down = params
    batch, length, _ = x_BLD.shape
    h_BLD = norm(attention_norm, x_BLD)
    heads = []
    for weight in (query, key, value):
        heads.append((h_BLD @ weight).view(batch, length, HEADS, -1).transpose(1, 2))
    context_BHLK = F.scaled_dot_product_attention(*heads, is_causal=True)
    x_BLD = x_BLD + context_BHLK.transpose(1, 2).reshape(batch, length, -1) @ out
    h_BLD = norm(mlp_norm, x_BLD)
    return x_BLD + (F.silu(h_BLD @ gate) * (h_BLD @ up)) @ down


def trace_llama(layers: int = LAYERS, length: int = LENGTH) -> fx.GraphModule:
    """Returns the joint graph of a Llama-like model, whose nodes are annotated with their blocks. Nothing is run."""
    shapes = [(WIDTH,), *[(WIDTH, WIDTH)] * 4, (WIDTH,), *[(WIDTH, HIDDEN)] * 2, (HIDDEN, WIDTH)]

    def model(x_BLD: Any, *params: Any) -> Any:
        for number in range(layers):
            with traceback.annotate({"block": f"b{number}"}):
                x_BLD = block(params[len(shapes) * number : len(shapes) * (number + 1)], x_BLD)
        return (x_BLD,)

    with FakeTensorMode(), traceback.preserve_node_meta():
        params = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes * layers]
        x_BLD = torch.empty((BATCH, length, WIDTH), dtype=torch.bfloat16, requires_grad=True)
        module = aot_export_joint_simple(model, [x_BLD, *params], trace_joint=True)
    module.graph.eliminate_dead_code()
    return fx.GraphModule(module, fx_graph_cse(module.graph))


def graph_of(module: fx.GraphModule, name: str, source: str) -> tuple[Graph, dict[str, str]]:
    """Returns (graph, name of an FX node -> name of the node that has its result) of a joint FX graph.

    Views are removed, as in every graph of the benchmark. The first placeholder is the input, the others are
    parameters; the first output is the model's result.
    """
    nodes: list[Node] = []
    names: dict[str, str] = {}
    backward: set[str] = set()
    labels: dict[tuple[str, str], int] = {}
    outputs: list[str] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            kind = "cotangent" if "tangents" in node.name else "input" if not nodes else "parameter"
            nodes.append(Node(node.name, kind, _bytes(node)))
            names[node.name] = node.name
            continue
        if node.op == "output":
            outputs = [names[one.name] for one in node.args[0]]
            continue
        operation = getattr(node.target, "_overloadpacket", node.target).__name__
        if operation in VIEWS:
            names[node.name] = names[node.args[0].name]
            continue
        block = node.meta.get("custom", {}).get("block", "")
        label = f"{operation}.{labels.setdefault((block, operation), 0)}"
        labels[block, operation] += 1
        inputs = tuple(dict.fromkeys(names[one.name] for one in node.all_input_nodes))
        late = any(one in backward or one.startswith("tangents") for one in inputs)
        names[node.name] = full = f"{block}.{label}" if block else label
        if late:
            backward.add(full)
        kind = KINDS.get(operation, "elementwise")
        phase = BACKWARD if late else FORWARD
        nodes.append(Node(full, kind, _bytes(node), _flops(node), inputs, phase, block, label))
    return Graph(name, source, tuple(nodes), tuple(outputs[:1]), tuple(dict.fromkeys(outputs[1:]))), names


def _bytes(node: fx.Node) -> int:
    values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
    return sum(value.untyped_storage().nbytes() for value in values if isinstance(value, torch.Tensor))


def _flops(node: fx.Node) -> int:
    packet = getattr(node.target, "_overloadpacket", None)
    # The CPU's attention has the arguments of the GPU's and no entry of its own.
    name = getattr(packet, "__name__", "").replace("_for_cpu", "")
    count = flop_registry.get(getattr(torch.ops.aten, name, packet)) if name else None
    if count is None:
        return 0
    args = [one.meta["val"] if isinstance(one, fx.Node) else one for one in node.args]
    return int(count(*args, **node.kwargs, out_val=node.meta["val"]))


def llama_197838() -> Graph:
    source = "https://github.com/pytorch/pytorch/issues/197838, rebuilt; joint graph traced by torch's AOTAutograd"
    return graph_of(trace_llama(), "llama_197838", source)[0]
