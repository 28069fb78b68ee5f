"""Writes the graph files of the benchmark, `graphs/*.json`, from jax, torch and Keras models.

    python tests/bench/auto_remat/make_graphs.py            # all
    python tests/bench/auto_remat/make_graphs.py gpt unet   # some

Needs the extras `test` and `hf`. Nothing is run: jax and torch only trace.

Each graph gets ten budgets. The first is the peak of keeping only the inputs of blocks, which is `jax.checkpoint`
around every block. The last is the peak of also keeping every forward result that costs FLOPs, so that none are
recomputed. The others are equally spaced between the two.
"""

import dataclasses
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
from evaluator import evaluate
from graph import Graph, find_problem, is_choice, save

GRAPHS = Path(__file__).parent / "graphs"
BUDGETS = 10


def with_budgets(graph: Graph) -> Graph:
    """Returns the graph with its ten budgets in bytes."""
    low = evaluate(graph, graph.block_inputs).peak_bytes
    costly = [node.name for node in graph.nodes if is_choice(node) and node.flops]
    score = evaluate(graph, {*graph.block_inputs, *costly})
    assert score.recomputed_flops == 0
    steps = [low + (score.peak_bytes - low) * number // (BUDGETS - 1) for number in range(BUDGETS)]
    return dataclasses.replace(graph, budgets=tuple(steps))


def main() -> int:
    from checkmate_graphs import INSTANCES
    from models import MODELS
    from torch_graphs import llama_197838

    makers = {**MODELS, "llama_197838": llama_197838, **{maker.__name__: maker for maker in INSTANCES}}
    unknown = [name for name in sys.argv[1:] if name not in makers]
    if unknown:
        print(f"no graph is named {unknown[0]}; the graphs are {', '.join(makers)}", file=sys.stderr)
        return 2
    GRAPHS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or makers:
        graph = with_budgets(makers[name]())
        problem = find_problem(graph)
        assert not problem, problem
        save(graph, GRAPHS / f"{name}.json")
        sizes = ", ".join(f"{budget / 2**20:.0f}" for budget in graph.budgets)
        print(f"{name}: {len(graph.nodes)} nodes, {graph.flops / 1e9:.1f} GFLOP, budgets {sizes} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
