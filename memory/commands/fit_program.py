"""bytescope fit MODULE:FUNCTION: finds the least recomputation with which a user's training step fits a memory budget.

The step is traced and compiled with each remat policy that the search of `memory.plan_remat` proposes. The answer is a
policy for `jax.checkpoint`, with the bytes, seconds and recomputed FLOPs of the step that was compiled with it.

Keys of the JSON result (sizes are bytes on ONE device):

- `best`: the row of `walk` that was chosen; null if nothing fits. It also has `policy` (the code of the policy, "" if
  the program needs no change), `policy_name` (the name in `jax.checkpoint_policies`, "" for other policies), `code`
  (lines of code for the source), `breakdown` (row -> bytes) and `kept`, the values that every layer keeps: `label`,
  `name` (the checkpoint name, "" for none), `type`, `count` and `bytes` in all layers, `where`.
- `walk`: the programs that were compiled, in order: `stage`, `what`, `keys` (the trainer's keys that the search set, {}
  for a function), `allocated_bytes`, `host_bytes`, `predicted_seconds` with `predicted_seconds_low` and
  `predicted_seconds_high`, `predicted_tokens_per_s` (null if the tokens are unknown), `recomputed_flops`,
  `recompute_flops_fraction` (recomputed FLOPs divided by all other FLOPs), `fits`, `verdict`. Figures are null if the
  program could not be compiled.
- `certificate`: if nothing fits, the row of `walk` with the fewest bytes, with `missing_bytes` and `breakdown`; null if
  something fits.
- `layers`: the layers that were found: `name`, `where`, `times`, `how`.
- `program`, `budget_bytes`, `target`, `versions`, `programs` (number of programs compiled), `seconds` (duration of the
  search), `stopped` (why the search ended early; "" if it did not), `rates` (the source of the rates behind the
  predicted seconds).
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from bytescope.memory.commands.arguments import DOES_NOT_FIT, INTERRUPTED, check_files, show_written, write
from bytescope.memory.records.report_record import RowName
from bytescope.memory.units import human

if TYPE_CHECKING:
    from bytescope.memory.compare.prepared_program import PreparedProgram
    from bytescope.memory.devices.targets import Target
    from bytescope.memory.remat.layer_discovery import Layer
    from bytescope.memory.remat.recognition import Value
    from bytescope.memory.report.remat_planning import Built, StepCompiler
    from bytescope.memory.view.progress_bar import ProgressBar

AS_WRITTEN = "as written"


def add_only_names(parser: argparse.ArgumentParser) -> None:
    """Adds --only-names, for a user's own program."""
    parser.add_argument(
        "--only-names",
        action="store_true",
        help="for FILE.py:FUNCTION: save only values that your code names with checkpoint_name, so that the policy of "
        "jax.checkpoint is the only line to change",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope fit` for a user's function. Returns the exit code: 0 if a policy fits, 3 if none fits, 130 after
    Ctrl-C."""
    check_files(args)
    from bytescope.memory.compare.prepared_program import prepare
    from bytescope.memory.compare.program_factory import FunctionFactory
    from bytescope.memory.program import user_program
    from bytescope.memory.program.compilation import is_stage

    subject = args.subject
    subject.start(args.target)
    function = FunctionFactory(user_program.load_function(subject.name))
    target, keys = subject.devices(args.target), dict(subject.keys)
    made = [function.call(keys, target)]

    def make() -> PreparedProgram:
        if not made or is_stage(made[0].program):  # a traced step keeps its policies: it is traced again
            return prepare(made.pop() if made else function.call(keys, target), args.target)
        return prepare(made[0], args.target)

    search = ProgramSearch(subject.name, target, args.budget, args.only_names)
    search.run(make)
    return show_and_write(args, search.result())


class ProgramSearch:
    """Searches the remat policy of a program, and records a row for each program that it compiles.

    Args:
        name: the name of the program.
        target: the devices to compile for.
        budget: the memory budget as text, such as "72GiB"; None for all bytes that are available on a device.
        only_names: whether layers may keep only values that have a name.
    """

    def __init__(self, name: str, target: Target, budget: str | None, only_names: bool = False):
        self._name, self._target, self._asked, self._only_names = name, target, budget, only_names
        self.walk: list[dict[str, Any]] = []
        self.budget, self.stopped = 0, ""
        self._compiler: StepCompiler | None = None
        self._best: dict[str, Any] | None = None
        self._breakdowns: dict[str, Mapping[RowName, int]] = {}
        self._rates = ""
        self._bar: ProgressBar | None = None
        self._started = 0
        self._began = time.monotonic()

    def run(self, make: Callable[[], PreparedProgram]) -> None:
        """Compiles the program as it is written, then with the policies of the search. Ctrl-C ends the search.

        make: function that makes the program. Each call traces the program again.
        """
        from bytescope.memory.remat.remat_search import FULL
        from bytescope.memory.report.remat_planning import BUILT_IN, Built, StepCompiler
        from bytescope.memory.report.report_object import Report
        from bytescope.memory.subjects.subject import make_report
        from bytescope.memory.view.progress_bar import progress

        def trace() -> Any:
            program = make()
            return program.trace() if program.trace else None

        with progress(None) as bar:
            self._bar = bar
            self.label(AS_WRITTEN)
            report, compilation = make_report(make())
            written = Built(None, Report.of(report), _count(compilation))
            try:
                self.label(BUILT_IN[FULL])
                compiler = self._compiler = StepCompiler(
                    trace, lambda: make_report(make()), only_names=self._only_names
                )
                compiler.starting = lambda plan: self.label(describe_plan(plan))
                self.budget = compiler.budget(self._asked)
                with self.beside_bar():
                    show_head(self._name, self._target, self.budget, compiler.layers)
                self.add(AS_WRITTEN, written, "baseline")
                self._search(compiler)
            except KeyboardInterrupt:
                self.stopped = "Ctrl-C"

    def _search(self, compiler: StepCompiler) -> None:
        from bytescope.memory.remat.remat_problem import CompiledPlan
        from bytescope.memory.report.remat_planning import plan_step, policy_name

        def tell(tried: CompiledPlan) -> None:
            name = policy_name(tried.plan) or str(tried.plan)
            self.add(describe_plan(tried.plan), compiler.built[name] if tried.ok else tried.compiled.status)

        found = plan_step(compiler, self._asked, tell)
        if found.plan is None:
            return
        written = self.walk[0]
        if written["fits"] and written["recomputed_flops"] <= found.plan.recomputed_flops:
            self._best = {**written, "policy": "", "policy_name": "", "kept": [], "code": []}
            return
        kept = () if found.plan.name else found.plan.kept
        what = found.plan.name or _keeps([value.label for value in found.plan.kept])
        row = next(row for row in self.walk if row["what"] == what)
        policy, code = code_of(found.plan.name, kept, compiler.layers[0])
        self._best = {
            **row,
            "policy": policy,
            "policy_name": found.plan.name,
            "kept": [_value_to_json(value) for value in kept],
            "code": code,
        }

    def add(self, what: str, built: Built | str, stage: str = "remat", keys: Mapping[str, str] = {}) -> dict[str, Any]:
        """Adds a program to the rows of the search and prints its row. Returns the row.

        Args:
            what: the policy of the program in a few words.
            built: the compiled program, or the error message if it could not be compiled.
            stage: the stage of the search, a key of `fit_program_view.STAGES`.
            keys: the trainer's keys that the search set in the program.
        """
        row = {"stage": stage, "what": what, "keys": dict(keys), **dict.fromkeys(_FIGURES), "fits": False}
        if isinstance(built, str):
            row["verdict"] = built
        else:
            self._fill(row, built)
        self.walk.append(row)
        with self.beside_bar():
            show_row(row, time.monotonic() - self._began)
        return row

    def label(self, what: str) -> None:
        """Shows on the progress bar which program is compiled now; the programs before it are done. what: its policy in
        a few words."""
        if self._bar is not None:
            self._bar([what], self._started)
        self._started += 1

    def beside_bar(self) -> AbstractContextManager[None]:
        """Context manager that hides the progress bar, so that text can be printed."""
        return self._bar.aside() if self._bar is not None else nullcontext()

    def _fill(self, row: dict[str, Any], built: Built) -> None:
        from bytescope.memory.seconds.step_prediction import StepPrediction

        report, counted = built.report, built.counted
        prediction = StepPrediction.stated(report)
        over = report.allocated_bytes - self.budget
        if prediction is not None:
            row["predicted_seconds"] = prediction.seconds
            row["predicted_seconds_low"], row["predicted_seconds_high"] = prediction.low, prediction.high
            row["predicted_tokens_per_s"], self._rates = prediction.tokens_per_s, prediction.rates
        row["allocated_bytes"], row["host_bytes"] = report.allocated_bytes, report.host_bytes
        row["recomputed_flops"] = counted.recomputed
        row["recompute_flops_fraction"] = counted.recomputed / max(counted.total - counted.recomputed, 1)
        row["fits"] = over <= 0
        row["verdict"] = "fits" if over <= 0 else f"exceeds by {human(over)}"
        self._breakdowns[row["what"]] = dict(report.breakdown)

    def result(self) -> dict[str, Any]:
        """Returns the result of the search as JSON values. The module docstring lists the keys."""
        from bytescope.memory.devices.compiler import versions

        best, certificate = self._best, None
        if best is None:
            done = [row for row in self.walk if row["fits"]] if self.stopped else []
            if done:
                best = {**min(done, key=lambda row: row["recomputed_flops"]), **_UNFINISHED}
        if best is None:
            compiled = [row for row in self.walk if row["allocated_bytes"] is not None]
            if compiled:
                row = min(compiled, key=lambda row: row["allocated_bytes"])
                certificate = {**row, "missing_bytes": row["allocated_bytes"] - self.budget}
        for row in filter(None, (best, certificate)):
            row["breakdown"] = self._breakdowns[row["what"]]
        layers = self._compiler.layers if self._compiler else ()
        return {
            "program": self._name,
            "best": best,
            "walk": self.walk,
            "certificate": certificate,
            "layers": [
                {"name": layer.name, "where": layer.where, "times": layer.times, "how": layer.how} for layer in layers
            ],
            "budget_bytes": self.budget,
            "target": self._target.to_json(),
            "versions": dict(versions()),
            "programs": len(self.walk),
            "seconds": time.monotonic() - self._began,
            "stopped": self.stopped,
            "rates": self._rates,
        }


# The figures of a row; None if the program could not be compiled.
_FIGURES = (
    "allocated_bytes",
    "host_bytes",
    "predicted_seconds",
    "predicted_seconds_low",
    "predicted_seconds_high",
    "predicted_tokens_per_s",
    "recomputed_flops",
    "recompute_flops_fraction",
)
# The fields of `best` if the search was interrupted.
_UNFINISHED: Mapping[str, Any] = {"policy": "", "policy_name": "", "kept": [], "code": []}


def _count(compilation: Any) -> Any:
    from bytescope.memory.cost import flops

    return flops.count(compilation.jaxpr) if compilation.jaxpr is not None else flops.FlopCount()


def _value_to_json(value: Value) -> dict[str, Any]:
    return {key: getattr(value, key) for key in ("label", "name", "type", "count", "bytes", "where")}


# ---- the answer as code ----------------------------------------------------------------------------------------------


def describe_plan(plan: Any) -> str:
    """Describes a remat plan in a few words: the name of its policy in `jax.checkpoint_policies`, or the values that
    the plan keeps."""
    from bytescope.memory.report.remat_planning import BUILT_IN, policy_name

    name = policy_name(plan)
    return BUILT_IN.get(name, name) or _keeps(plan.ranges[0][0].save)


def _keeps(labels: Sequence[str]) -> str:
    return f"keeps {', '.join(sorted(labels))}"


# Names of functions in flax and equinox that run a layer under jax.checkpoint.
_LIBRARY_NAMES = ("core_fn", "fun_checkpoint")


# Beginnings of the names of primitives with several results. `checkpoint_name` names only one of them.
_KERNELS = ("dot_product_attention", "pallas_call", "ffi_call", "custom_vjp_call")


def _primitive(value: Value) -> str:
    return "" if value.name else value.key.partition(" ")[0]


def code_of(name: str, kept: Sequence[Value], layer: Layer) -> tuple[str, list[str]]:
    """Returns (the policy as code, the lines of code for the source of the program).

    Args:
        name: the policy's name in `jax.checkpoint_policies`; "" if the policy keeps single values.
        kept: the values that the policy keeps.
        layer: the layer that gets the policy.
    """
    from bytescope.memory.report.buffer_tables import line

    lines = []
    names: dict[str, None] = {}
    kernels = sorted({_primitive(value) for value in kept if _primitive(value).startswith(_KERNELS)})
    kept = [value for value in kept if not _primitive(value).startswith(_KERNELS)]
    if any(not value.name for value in kept):
        lines.append("from jax.ad_checkpoint import checkpoint_name")
    for value in kept:
        own = value.name or re.sub(r"\W+", "_", value.label)
        names[own] = None
        if not value.name:
            place = f" at {line(value.where)}" if value.where else ""
            lines += [f"# x: {value.label}, {value.type}{place}", f'x = checkpoint_name(x, "{own}")']
    policy = f"jax.checkpoint_policies.{name}"
    if not name:
        listed = ", ".join(f'"{one}"' for one in sorted(names))
        policy = f"jax.checkpoint_policies.save_only_these_names({listed})"
    if kernels:
        lines.append("# a kernel with several results is kept as a whole, by the name of its primitive")
        tests = " or ".join(f'primitive.name == "{kernel}"' for kernel in kernels)
        policy = f"jax.checkpoint_policies.save_from_both_policies({policy}, lambda primitive, *_, **__: {tests})"
    lines.append(f"policy = {policy}")
    in_library = layer.name in _LIBRARY_NAMES or "/site-packages/" in layer.where or not layer.name.isidentifier()
    block = "block" if in_library else layer.name
    if layer.how == "checkpoint":
        lines.append("# the checkpoint of the program: jax.checkpoint, nn.remat, nnx.remat or eqx.filter_checkpoint")
    cse = ", prevent_cse=False" if layer.how == "scan" else ""
    if layer.where:
        lines.append(f"# {line(layer.where)}")
    lines.append(f"jax.checkpoint({block}, policy=policy{cse})")
    return policy, lines


# ---- the terminal and the files --------------------------------------------------------------------------------------


def show_head(name: str, target: Target, budget: int, layers: Sequence[Layer]) -> None:
    """Prints the program, the target, the budget and the layers of a search."""
    from rich.console import Group

    from bytescope.memory.devices.limits import limit_share
    from bytescope.memory.report.remat_plan import describe_layers
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_layout import Items, Prose

    size = f"{human(budget)} per device", limit_share(target.to_json(), budget)
    put(
        Group(
            Items([name, f"on {target.name}", f"within {', '.join(filter(None, size))}"], gap=1, title="fit"),
            *(Prose(text, "dim") for text in describe_layers(layers)),
            Prose("each line: time, allocated on one device, predicted seconds, recomputed, verdict; policy", "dim"),
        )
    )


def show_row(row: Mapping[str, Any], at: float) -> None:
    """Prints a compiled program in one line. `at`: seconds from the start of the search."""
    from rich.console import Group
    from rich.text import Text

    from bytescope.memory.view.console import put, safe
    from bytescope.memory.view.figures import count, percent, seconds
    from bytescope.memory.view.text_layout import Prose

    if row["allocated_bytes"] is None:
        line = Text.assemble(f"{at:6.1f} s  ", (safe(row["verdict"]), "yellow"))
    else:
        line = Text.assemble(
            f"{at:6.1f} s  {human(row['allocated_bytes']):>11}  {seconds(row['predicted_seconds']):>8}  "
            f"{percent(row['recompute_flops_fraction']):>6}  ",
            f"{count(row['predicted_tokens_per_s'])} tokens/s  " if row["predicted_tokens_per_s"] else "",
            (row["verdict"], "green" if row["fits"] else "red"),
        )
    put(Group(Prose(line), Prose(safe(row["what"]), indent=10)))


def show_and_write(args: argparse.Namespace, out: Mapping[str, Any]) -> int:
    """Prints the result of a search and writes the files of --json and --html. Returns the exit code."""
    from bytescope.memory.commands.fit_program_view import render_page, render_text
    from bytescope.memory.commands.json_output import COMPILED, predicted_caveat, write_json
    from bytescope.memory.records.result_envelope import MemoryLimit
    from bytescope.memory.view.console import put

    put(render_text(out))
    limit = MemoryLimit(out["budget_bytes"], f"the budget, --budget={args.budget}") if args.budget else None
    write_json(args, out, limit=limit, caveats=(COMPILED, *predicted_caveat(out["rates"])))
    if args.html:
        write(args.html, render_page(out))
    show_written(args.json, args.html)
    if out["stopped"] == "Ctrl-C":
        return INTERRUPTED
    return 0 if out["best"] else DOES_NOT_FIT
