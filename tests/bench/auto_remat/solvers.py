"""The solvers of the benchmark. A solver is a function of a graph that returns candidate answers for its budgets.

An answer is a set of forward results to save. The benchmark evaluates every candidate, and for each budget takes the
one that fits and recomputes the fewest FLOPs. So a solver without a byte budget, such as a list of policies or torch's
relative setting, is scored as if the user tries all of its settings.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from evaluator import evaluate
from graph import Graph, Node, is_choice

from bytescope.memory.remat.layer_graph import GraphStep, LayerGraph
from bytescope.memory.remat.layer_values import with_names, worth_deciding
from bytescope.memory.remat.remat_problem import (
    LayerPlan,
    PassSeconds,
    PlanFigures,
    RecomputeRates,
    RematProblem,
)
from bytescope.memory.remat.remat_search import NONE, RematSearch
from bytescope.memory.remat.remat_solver import pareto_patterns

ANSWERS = Path(__file__).parent / "answers"
# Setting of a solver -> names of the forward results that it saves.
Answers = Mapping[str, Sequence[str]]


# ---- bytescope ---------------------------------------------------------------------------------------------------


# The first value of a graph counts as larger than an equal last one by one part in LATER.
LATER = 100
RATES = RecomputeRates({"bf16": 1.0}, 1.0)


def bytescope(graph: Graph) -> Answers:
    """The search of `bytescope.memory.remat` for a model with `jax.checkpoint` around every block, whose inputs are
    therefore always kept. The evaluator takes the place of the compiler.

    Returns the best plan of each budget, with the plan as the text of the setting.
    """
    layers = _Layers(graph, frozenset(graph.block_inputs))
    problem = RematProblem(layers.graph, RATES, PassSeconds(), cost="flops")

    def compile(plans: Sequence[LayerPlan]) -> Iterable[PlanFigures]:
        for plan in plans:
            score = evaluate(graph, layers.saved(plan))
            yield PlanFigures(score.peak_bytes, flops=score.recomputed_flops)

    search = RematSearch(problem, compile)
    search.compile(search.fixed)
    outcomes = search.run_all([float(budget) for budget in graph.budgets])
    best = [outcome.best for outcome in outcomes if outcome.best is not None]
    return {str(tried.plan): layers.saved(tried.plan) for tried in best}


def bytescope_whole(graph: Graph) -> Answers:
    """The solver of `bytescope.memory.remat` for one `jax.checkpoint` around the whole model: no value has to be kept.

    Returns all patterns that the solver finds to be optimal in kept bytes and recomputed FLOPs. There are up to a
    thousand of them, so a user would not compile each one.
    """
    layers = _Layers(graph, frozenset())
    patterns = pareto_patterns(layers.graph, RATES, cost="flops")
    return {pattern.text(): layers.saved(LayerPlan(((pattern, 1),))) for pattern in patterns}


class _Layers:
    """The forward pass of a benchmark graph as the `LayerGraph` that the solver reads.

    If all blocks are equal and their inputs are kept, the graph is one layer that repeats. Otherwise the whole forward
    pass is one layer.

    Args:
        whole: the benchmark graph.
        kept: names of the results that are always kept.
    """

    def __init__(self, whole: Graph, kept: frozenset[str]):
        self._whole, self._kept = whole, kept
        blocks: dict[str, list[Node]] = {}
        for node in whole.nodes:
            if is_choice(node):
                blocks.setdefault(node.block, []).append(node)
        kinds = {tuple((node.label, node.bytes, node.flops) for node in nodes) for nodes in blocks.values()}
        self._repeated = bool(kept) and len(kinds) == 1 and len(blocks) > 1
        self._blocks = list(blocks.values()) if self._repeated else [[n for nodes in blocks.values() for n in nodes]]
        # No other block reads the result of the last one.
        self.graph = self._layer_graph(self._blocks[-1])

    def _layer_graph(self, nodes: Sequence[Node]) -> LayerGraph:
        number = {node.name: at for at, node in enumerate(nodes)}
        kept = frozenset() if self._repeated else self._kept
        steps = []
        for node in nodes:
            ins = tuple(sorted(number[name] for name in node.inputs if name in number and name not in kept))
            unit = "bf16" if node.flops else ""
            flops = (node.flops,)
            size = node.bytes
            if not self._kept:
                # Of two equal values, the later one is kept: its backward pass comes first, while all others are kept.
                size += size * (len(nodes) - number[node.name]) // (LATER * len(nodes))
            outs = (number[node.name],)
            steps.append(GraphStep(outs, ins, self._label(node), flops, node.flops, unit, (size,)))
        read_by_backward = set(self._whole.read_by_backward)
        read = [node for node in nodes if node.name in read_by_backward and node.name not in kept]
        sizes = [self._whole.by_name[name].bytes for name in self._kept]
        carry = (max(sizes) if self._repeated else sum(sizes)) if sizes else 0
        every = carry + sum(node.bytes for node in read)
        graph = LayerGraph(len(self._blocks), tuple(steps), tuple(number[node.name] for node in read), carry, every)
        # The solver treats elementwise work as free. Where a graph gives it FLOPs, every result may be worth keeping.
        costly = any(node.flops and node.kind in ("elementwise", "reduction") for node in nodes)
        return graph if costly else with_names(graph, worth_deciding(graph))

    def _label(self, node: Node) -> str:
        return node.label if self._repeated else node.name

    def saved(self, plan: LayerPlan) -> tuple[str, ...]:
        """Returns the names of the results that a plan saves, in the order of the graph."""
        saved = set(self._kept)
        layer = 0
        for pattern, count in plan.ranges:
            for nodes in self._blocks[layer : layer + count]:
                for node in nodes:
                    if pattern.policy == NONE:
                        wanted = node.name in self._whole.read_by_backward
                    else:
                        wanted = self._label(node) in pattern.save
                    if wanted:
                        saved.add(node.name)
            layer += count
        return tuple(node.name for node in self._whole.nodes if node.name in saved)


# ---- jax ---------------------------------------------------------------------------------------------------------


def jax_policies(graph: Graph) -> Answers:
    """The entries of `jax.checkpoint_policies`, in `jax.checkpoint` around every block, and no checkpoint at all.

    The graph states which policies keep a result: jax's own policy was called with its equation. Policies that need
    names or host memory are left out.
    """
    policies = dict.fromkeys(policy for node in graph.nodes for policy in node.policies)
    if not policies:
        return {}
    answers = {"nothing_saveable": graph.block_inputs}
    for policy in policies:
        kept = [node.name for node in graph.nodes if policy in node.policies]
        answers[policy] = (*graph.block_inputs, *kept)
    # What plain autodiff keeps: everything that the backward pass reads.
    answers["everything_saveable"] = (*graph.block_inputs, *graph.read_by_backward)
    return answers


# ---- Chen et al. -------------------------------------------------------------------------------------------------


def chen_greedy(graph: Graph) -> Answers:
    """The greedy algorithm of Chen et al. (2016, arXiv 1604.06174, algorithm 3) with many segment sizes.

    It saves a result when the results since the last saved one exceed the segment size. As in Checkmate's
    `strategy_chen.py`, it may save only results through which the whole forward pass goes (articulation points).
    """
    nodes = [node for node in graph.nodes if is_choice(node)]
    last_use = {name: len(nodes) for name in graph.outputs}
    for number in range(len(nodes) - 1, -1, -1):
        if nodes[number].name in last_use:
            for name in nodes[number].inputs:
                last_use.setdefault(name, number)
    needed = [node for node in nodes if node.name in last_use]
    number_of = {node.name: number for number, node in enumerate(nodes)}
    points = set()
    live: set[str] = set()
    for node in needed:
        live = {name for name in live if last_use[name] > number_of[node.name]} | {node.name}
        if live == {node.name}:
            points.add(node.name)
    total = sum(node.bytes for node in needed)
    answers: dict[str, Sequence[str]] = {}
    for size in range(1, 101):
        segment, saved = 0, []
        for node in needed:
            segment += node.bytes
            if node.name in points and segment > total * size / 200:
                saved.append(node.name)
                segment = 0
        answers[f"segment of {size / 200:.1%}"] = saved
    return answers


# ---- MaxText -----------------------------------------------------------------------------------------------------

# Runs in MaxText's environment. The candidates of `search_policy_only` (maxtext/utils/estimator.py, 0.2.5, lines 309 to
# 350): its first policy keeps every tensor, and it takes the next one until one fits. `is_oom`, which compiles, is not
# called: the benchmark's evaluator answers whether a policy fits.
_MAXTEXT = """
import json, sys, types
from importlib import metadata
from maxtext.utils import estimator
answers = {}
for name, facts in json.load(sys.stdin).items():
    config = types.SimpleNamespace(**{**facts, "fused_mlp": False, "mlp_activations": facts["mlp_activations"] * ["x"]})
    tensors = estimator.generate_priority_list(config, [])
    policy = estimator.RematPolicy(tensor_names=tensors, initial_level=estimator.Action.DEVICE)
    answers[name] = []
    while policy is not None:
        answers[name].append(policy.to_dict)
        policy = policy.previous_policy()
json.dump({"version": metadata.version("maxtext"), "answers": answers}, open(sys.argv[1], "w"))
"""


def ask_maxtext(python: str, graphs: Sequence[Graph], out: Path) -> Mapping[str, Answers]:
    """Returns, for each transformer, the policies that MaxText's estimator goes through until one fits.

    The estimator moves tensors to host memory before it recomputes them. The benchmark has no host memory, so a tensor
    that the estimator offloads is recomputed here. The order of the tensors is the estimator's.

    Args:
        python: an interpreter with MaxText.
        out: file for the answer of that interpreter.
    """
    facts = {graph.name: graph.facts for graph in graphs if graph.facts}
    command = [python, "-c", _MAXTEXT, str(out)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, input=json.dumps(facts), text=True, check=True, env=environment, stdout=subprocess.DEVNULL)
    found = json.loads(out.read_text(encoding="utf-8"))["answers"]
    answers: dict[str, dict[str, Sequence[str]]] = {}
    for graph in graphs:
        for policy in found.get(graph.name, ()):
            kept = [tensor for tensor, action in policy.items() if action == "device"]
            saved = [node.name for node in graph.nodes if node.checkpoint_name in kept]
            setting = "+".join(kept) or "full"
            answers.setdefault(graph.name, {}).setdefault(setting, (*graph.block_inputs, *saved))
    return answers


# ---- torch -------------------------------------------------------------------------------------------------------


def ask_torch(graph: Graph, solver: str) -> Answers:
    """Returns torch's answers for every setting of `activation_memory_budget` in `torch_partitioner.SETTINGS`.

    solver: `activation_memory_budget_solver`.
    """
    import torch_partitioner

    settings = torch_partitioner.SETTINGS
    return {f"{setting:g}": torch_partitioner.saved_values(graph, setting, solver) for setting in settings}


# ---- recorded answers --------------------------------------------------------------------------------------------


def recorded(path: Path, graph: Graph) -> Answers:
    """Returns the answers of a file for a graph, {} if the file has none for it. README.md describes the format."""
    rows = json.loads(path.read_text(encoding="utf-8"))["answers"].get(graph.name, [])
    return {row["setting"]: row["saved"] for row in rows}


def record(path: Path, solver: str, versions: str, answers: Mapping[str, Answers]) -> None:
    """Writes a file of answers. Settings with the same saved values share a row."""
    lines = []
    for name, by_setting in answers.items():
        settings: dict[tuple[str, ...], list[str]] = {}
        for setting, saved in by_setting.items():
            settings.setdefault(tuple(saved), []).append(setting)
        rows = []
        for saved, same in settings.items():
            rows.append(json.dumps({"setting": " ".join(same), "saved": saved}, separators=(",", ":")))
        lines.append(f"{json.dumps(name)}: [\n" + ",\n".join(rows) + "\n]")
    head = f'"solver": {json.dumps(solver)}, "versions": {json.dumps(versions)}'
    path.write_text("{\n" + head + ', "answers": {\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")


# Solvers that are functions. All others are files in `answers/`.
ALONE = "bytescope-alone"  # is asked for each budget separately
SOLVERS: dict[str, Callable[[Graph], Answers]] = {
    "bytescope": bytescope,
    ALONE: bytescope,
    "bytescope-whole": bytescope_whole,
    "jax": jax_policies,
    "chen": chen_greedy,
}


def find_solvers() -> dict[str, Callable[[Graph], Answers]]:
    """Returns every solver by name: the functions, then the files in `answers/`."""
    found = dict(SOLVERS)
    for path in sorted(ANSWERS.glob("*.json")):
        found[path.stem] = lambda graph, path=path: recorded(path, graph)
    return found
