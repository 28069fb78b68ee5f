"""An open benchmark of automatic rematerialization: recomputed FLOPs of every solver at the same peak memory.

    python tests/bench/auto_remat/run.py                                    # all graphs and solvers, as a table
    python tests/bench/auto_remat/run.py --graph gpt llama --solver bytescope torch-dp
    python tests/bench/auto_remat/run.py --json=results.json --html=results.html
    python tests/bench/auto_remat/run.py --ask-torch                        # asks torch again, about 15 minutes
    python tests/bench/auto_remat/run.py --ask-maxtext=ENVIRONMENT/bin/python

README.md says what is measured, and how to add a graph or a solver. The answers of torch and MaxText are files that the
last two commands write, so the benchmark runs without them.

Asserted for bytescope and bytescope-alone: an answer for every budget, no peak above it, and no more recomputation at a
larger budget; exit code 1 if not. The last is so by construction for bytescope, because all budgets choose among the
same answers. For bytescope-alone, which searches for each budget on its own, it is a finding.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from evaluator import Score, evaluate
from graph import Graph, GraphError, load
from solvers import ALONE, ANSWERS, Answers, ask_maxtext, ask_torch, find_solvers, record

GRAPHS = Path(__file__).parent / "graphs"
TORCH = ("dp", "greedy", "ilp")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An evaluated answer: the solver's setting and the score of the values that it saves."""

    setting: str
    score: Score


@dataclasses.dataclass(frozen=True)
class Row:
    """All answers of a solver for a graph, and the best that fits each budget (None if none fits)."""

    solver: str
    candidates: tuple[Candidate, ...]
    best: tuple[Candidate | None, ...]


def score_answers(graph: Graph, solver: str, answers: Answers) -> Row:
    """Evaluates all answers of a solver and chooses for each budget the one with the fewest recomputed FLOPs; of equal
    ones, the one with the lowest peak.
    """
    candidates = tuple(Candidate(setting, evaluate(graph, saved)) for setting, saved in answers.items())
    best = []
    for budget in graph.budgets:
        fitting = [one for one in candidates if one.score.peak_bytes <= budget]
        key = lambda one: (one.score.recomputed_flops, one.score.peak_bytes)  # noqa: E731
        best.append(min(fitting, key=key, default=None))
    return Row(solver, candidates, tuple(best))


def score_alone(graph: Graph, solver: str, solve: Callable[[Graph], Answers]) -> Row:
    """Asks a solver for each budget separately, as if the graph had no other. No budget may use the answer for
    another one.
    """
    rows = []
    for budget in graph.budgets:
        single = dataclasses.replace(graph, budgets=(budget,))
        rows.append(score_answers(single, solver, solve(single)))
    candidates = {candidate.setting: candidate for row in rows for candidate in row.candidates}
    best = (row.best[0] for row in rows)
    return Row(solver, tuple(candidates.values()), tuple(one and candidates[one.setting] for one in best))


def broken_promises(graph: Graph, row: Row) -> list[str]:
    """Returns one sentence for each budget that a solver does not keep to: a peak above the budget, or more
    recomputation at a larger budget.
    """
    problems = []
    before = None
    for budget, best in zip(graph.budgets, row.best):
        if best is None:
            problems.append(f"{graph.name}: nothing fits {budget} bytes")
            continue
        if best.score.peak_bytes > budget:
            problems.append(f"{graph.name}: the peak {best.score.peak_bytes} is above the budget {budget}")
        if before is not None and best.score.recomputed_flops > before:
            problems.append(f"{graph.name}: more is recomputed at {budget} bytes than at a smaller budget")
        before = best.score.recomputed_flops
    return problems


def inversion(row: Row) -> tuple[Candidate, Candidate] | None:
    """Returns two answers of torch (smaller, larger setting) of which the smaller setting has the higher peak. Of
    all such pairs, it is the one with the largest quotient of the peaks; None if there is no such pair.
    """
    ordered = []
    for one in row.candidates:
        ordered += [(float(setting), one) for setting in one.setting.split()]
    ordered.sort(key=lambda pair: pair[0])
    worst, ratio = None, 1.0
    for at, (_, small) in enumerate(ordered):
        for _, large in ordered[at + 1 :]:
            quotient = small.score.peak_bytes / large.score.peak_bytes
            if quotient > ratio:
                worst, ratio = (small, large), quotient
    return worst


# ---- what is printed and written ---------------------------------------------------------------------------------


def table(graph: Graph, rows: Sequence[Row]) -> str:
    """Returns a Markdown table: recomputed FLOPs as a share of the forward pass, a column for each budget."""
    lines = [
        f"| {graph.name}, budget in MiB | " + " | ".join(f"{budget / 2**20:.0f}" for budget in graph.budgets) + " |",
        "|---|" + "---:|" * len(graph.budgets),
    ]
    lowest = []
    for column in zip(*(row.best for row in rows)):
        lowest.append(min((one.score.recomputed_flops for one in column if one), default=None))
    for row in rows:
        cells = []
        for one, least in zip(row.best, lowest):
            share = f"{one.score.recomputed_flops / graph.forward_flops:.1%}" if one else "-"
            cells.append(f"**{share}**" if one and one.score.recomputed_flops == least else share)
        lines.append(f"| {row.solver} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def to_json(results: Sequence[tuple[Graph, Sequence[Row]]]) -> dict[str, Any]:
    out: dict[str, Any] = {"versions": {"jax": metadata.version("jax")}, "graphs": {}}
    for graph, rows in results:
        solvers = {}
        for row in rows:
            places = {id(one): number for number, one in enumerate(row.candidates)}
            solvers[row.solver] = {
                "candidates": [{"setting": one.setting, **dataclasses.asdict(one.score)} for one in row.candidates],
                "best": [None if one is None else places[id(one)] for one in row.best],
            }
        out["graphs"][graph.name] = {
            "budgets": graph.budgets,
            "forward_flops": graph.forward_flops,
            "flops": graph.flops,
            "solvers": solvers,
        }
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in GRAPHS.glob("*.json"))
    parser.add_argument("--graph", nargs="+", default=names, metavar="NAME", help="graphs (default: all)")
    parser.add_argument("--solver", nargs="+", metavar="NAME", help="solvers (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all answers and scores")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with a chart for each graph")
    parser.add_argument("--ask-torch", action="store_true", help="ask torch's partitioner again")
    parser.add_argument("--ask-maxtext", metavar="PYTHON", help="ask MaxText's estimator with this interpreter")
    args = parser.parse_args()
    unknown = [name for name in args.graph if name not in names]
    if unknown:
        parser.error(f"no graph is named {unknown[0]}; the graphs are {', '.join(names)}")
    try:
        graphs = [load(GRAPHS / f"{name}.json") for name in args.graph]
    except GraphError as error:
        parser.error(str(error))
    if args.ask_torch:
        version = f"torch {metadata.version('torch')}, scipy {metadata.version('scipy')}"
        for solver in TORCH:
            answers = {}
            for graph in graphs:
                print(f"asking torch's {solver} about {graph.name}", file=sys.stderr)
                answers[graph.name] = ask_torch(graph, solver)
            record(ANSWERS / f"torch-{solver}.json", f"torch {solver}", version, answers)
    if args.ask_maxtext:
        out = Path(tempfile.mkdtemp()) / "policies.json"
        answers = ask_maxtext(args.ask_maxtext, graphs, out)
        version = f"maxtext {json.loads(out.read_text(encoding='utf-8'))['version']}"
        record(ANSWERS / "maxtext.json", "MaxText's estimator", version, answers)
    solvers = find_solvers()
    chosen = args.solver or list(solvers)
    unknown = [name for name in chosen if name not in solvers]
    if unknown:
        parser.error(f"no solver is named {unknown[0]}; the solvers are {', '.join(solvers)}")

    results, problems = [], []
    for graph in graphs:
        rows = []
        for name in chosen:
            if name == ALONE:
                rows.append(score_alone(graph, name, solvers[name]))
            elif answers := solvers[name](graph):
                rows.append(score_answers(graph, name, answers))
        results.append((graph, rows))
        print(table(graph, rows) + "\n", flush=True)
        for row in rows:
            if row.solver in ("bytescope", ALONE):
                problems += broken_promises(graph, row)
            pair = inversion(row) if row.solver.startswith("torch") else None
            if pair:
                small, large = pair
                print(
                    f"{row.solver}: activation_memory_budget={small.setting.split()[0]} has a peak of "
                    f"{small.score.peak_bytes / 2**20:.0f} MiB, {large.setting.split()[0]} of "
                    f"{large.score.peak_bytes / 2**20:.0f} MiB ({small.score.peak_bytes / large.score.peak_bytes:.2f}x)"
                )
        print()
    if args.json:
        args.json.write_text(json.dumps(to_json(results), indent=1) + "\n", encoding="utf-8")
    if args.html:
        from page import render

        args.html.write_text(render(results), encoding="utf-8")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
