"""The page of the benchmark: for each graph a chart of recomputed FLOPs against peak memory, drawn by the view layer of
`bytescope.memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graph import Graph
from jinja2 import ChoiceLoader, FileSystemLoader
from markupsafe import Markup

from bytescope.memory.view import frame

if TYPE_CHECKING:
    from run import Candidate, Row

HERE = Path(__file__).parent
# Answers with a peak above this multiple of the largest budget are not drawn, because they would compress the others.
FURTHEST = 1.15
# Of a solver with more answers than this, only the Pareto front of peak and recomputed FLOPs is drawn.
MOST_POINTS = 100
# Maximum length of a setting in a tooltip, in characters.
MAX_SETTING_LENGTH = 80


def render(results: Sequence[tuple[Graph, Sequence[Row]]]) -> str:
    """Returns the HTML of the page, which needs no network."""
    environment = frame.environment()
    environment = environment.overlay(loader=ChoiceLoader([FileSystemLoader(HERE), environment.loader]))
    graphs = [_data(graph, rows) for graph, rows in results]
    return environment.get_template("auto_remat.html").render(
        page="auto_remat",
        title="Automatic rematerialization",
        data={"graphs": graphs, "inversions": [one for one in graphs if any(s["settings"] for s in one["solvers"])]},
        static=_static,
        heading="Automatic rematerialization: recomputation at the same peak",
        where="an open benchmark",
        facts=[f"{len(results)} graphs, ten budgets each"],
        versions=f"jax {metadata.version('jax')}",
        figures=[],
        max_multiple=FURTHEST,
        max_points=MOST_POINTS,
        sources=[f"{graph.name}: {graph.source}" for graph, _ in results],
    )


def _static(name: str) -> Markup:
    own = HERE / name
    return Markup(own.read_text(encoding="utf-8")) if own.exists() else frame.static(name)


def _cut(setting: str) -> str:
    return setting if len(setting) <= MAX_SETTING_LENGTH else setting[: MAX_SETTING_LENGTH - 1] + "…"


def _undominated(candidates: Sequence[Candidate]) -> list[Candidate]:
    best, found = float("inf"), []
    for one in sorted(candidates, key=lambda one: (one.score.peak_bytes, one.score.recomputed_flops)):
        if one.score.recomputed_flops < best:
            best = one.score.recomputed_flops
            found.append(one)
    return found


def _data(graph: Graph, rows: Sequence[Row]) -> dict[str, Any]:
    most = FURTHEST * graph.budgets[-1]
    solvers = []
    for row in rows:
        drawn = [one for one in row.candidates if one.score.peak_bytes <= most]
        if len(drawn) > MOST_POINTS:
            drawn = _undominated(drawn)
        best = [(budget, one) for budget, one in zip(graph.budgets, row.best) if one]
        settings = []
        if row.solver.startswith("torch"):
            for one in row.candidates:
                settings += [
                    {"x": float(setting), "y": one.score.peak_bytes, "saved": one.score.saved_bytes}
                    for setting in one.setting.split()
                ]
            settings.sort(key=lambda point: point["x"])
        solvers.append(
            {
                "name": row.solver,
                "points": [
                    {
                        "x": one.score.peak_bytes,
                        "y": one.score.recomputed_flops / graph.forward_flops,
                        "setting": _cut(one.setting),
                    }
                    for one in drawn
                ],
                "best": [{"x": budget, "y": one.score.recomputed_flops / graph.forward_flops} for budget, one in best],
                "settings": settings,
            }
        )
    return {"name": graph.name, "solvers": solvers}
