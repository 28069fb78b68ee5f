"""bytescope fit MODULE:FUNCTION: finds the least recomputation with which a user's training step fits a memory budget.

The step is traced and compiled with each remat policy that the search of `memory.plan_remat` proposes. The answer is a
policy for `jax.checkpoint`, with the bytes, seconds and recomputed FLOPs of the step that was compiled with it. The
module `memory.compare.fit_search` lists the keys of the JSON result.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bytescope.memory.commands.arguments import DOES_NOT_FIT, INTERRUPTED, check_files, show_written
from bytescope.memory.compare.fit_search import FitSearch, Step
from bytescope.memory.compare.search_limits import CTRL_C, Limits

if TYPE_CHECKING:
    from bytescope.memory.compare.fit_view import FitTable
    from bytescope.memory.compare.prepared_program import PreparedProgram
    from bytescope.memory.devices.targets import Target
    from bytescope.memory.remat.layer_discovery import Layer
    from bytescope.memory.remat.recognition import Value
    from bytescope.memory.remat.remat_problem import LayerPlan, SearchOutcome
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
    from bytescope.memory.view.progress_bar import progress

    subject = args.subject
    subject.start(args.target)
    function = FunctionFactory(user_program.load_function(subject.name))
    target, keys = subject.devices(args.target), dict(subject.keys)
    made = [function.call(keys, target)]

    def make() -> PreparedProgram:
        if not made or is_stage(made[0].program):  # a traced step keeps its policies: it is traced again
            return prepare(made.pop() if made else function.call(keys, target), args.target)
        return prepare(made[0], args.target)

    with progress(None) as bar:
        search = FunctionSearch(subject.name, target, args.budget, bar, make, args.only_names)
        search.run()
    return show_and_write(args, search.result())


class ProgramSearch(FitSearch):
    """A search that compiles in this process, one program after the other. A subclass chooses the programs.

    Args:
        name: the name of the program.
        target: the devices to compile for.
        budget: the memory budget as text, such as "72GiB"; None for all bytes that are available on a device. The
            attribute `budget` is 0 until the first program is compiled.
        bar: the progress bar.
        limits: the limits of the search.
    """

    def __init__(
        self, name: str, target: Target, budget: str | None, bar: ProgressBar, limits: Limits | None = None
    ) -> None:
        from bytescope.memory.compare.fit_view import Lines

        self._lines = Lines(bar)
        super().__init__(name, target, 0, limits=limits, show=self._lines.show)
        self._bar, self._asked = bar, budget
        self._compiler: StepCompiler | None = None
        self._of_best: dict[str, Any] = {"policy": "", "policy_name": "", "kept": [], "code": []}

    def start(self, what: str) -> None:
        """Call it before a program is compiled: checks the limits, counts the program, and shows what is compiled and
        how many programs are done. what: the program in a few words."""
        self.limits.check()
        self._bar([what], self.limits.compiles)
        self.limits.compiles += 1

    def use_compiler(self, compiler: StepCompiler) -> None:
        """Takes the budget and the layers of the search from its first compiler, and prints them."""
        from bytescope.memory.report.remat_plan import describe_layers

        self._compiler, self.budget = compiler, compiler.budget(self._asked)
        self._lines.show_head(self.target, self.budget, [self.name], describe_layers(compiler.layers))

    def add(self, what: str, built: Built | str, stage: str = "remat", keys: Mapping[str, str] = {}) -> Step:
        """Records a program, unless it is recorded already. Returns it.

        Args:
            what: the program in a few words.
            built: the compiled program, or the error message if it could not be compiled.
            stage: the stage of the search.
            keys: the trainer's keys that the search set in the program.
        """
        from bytescope.memory.seconds.step_prediction import StepPrediction

        known = next((step for step in self.steps if (step.what, step.keys) == (what, keys)), None)
        if known is not None:
            return known
        if isinstance(built, str):
            return self.record(self.judge(stage, what, keys, {"status": built}, None))
        report, counted = built.report, built.counted
        answer = {
            "status": "ok",
            "allocated_bytes": report.allocated_bytes,
            "host_bytes": report.host_bytes,
            "recomputed_flops": counted.recomputed,
            "recompute_flops_fraction": counted.recomputed / max(counted.total - counted.recomputed, 1),
            "breakdown": report.breakdown,
        }
        return self.record(self.judge(stage, what, keys, answer, StepPrediction.stated(report)))

    def search_plans(
        self,
        compiler: StepCompiler,
        variant_of: Callable[[LayerPlan], tuple[str, Mapping[str, str]]],
        most: int,
        fixed: bool = False,
    ) -> SearchOutcome:
        """Searches the least recomputation that fits, and records each program.

        Args:
            compiler: compiles the plans.
            variant_of: a plan -> the program with this plan in a few words, and the trainer's keys that select it.
            most: maximum number of compiles.
            fixed: whether all of jax's own policies are compiled too.
        """
        from bytescope.memory.remat.remat_problem import CompiledPlan
        from bytescope.memory.remat.remat_search import RematSearch

        def tell(tried: CompiledPlan) -> None:
            what, keys = variant_of(tried.plan)
            self.add(what, compiler.of_plan(tried.plan) if tried.ok else tried.compiled.status, keys=keys)

        compiler.starting = lambda plan: self.start(variant_of(plan)[0])
        search = RematSearch(compiler.problem(), compiler, tell)
        if fixed:
            search.compile(search.fixed)
        return search.run(self.budget, most=most)

    def result(self) -> dict[str, Any]:
        """Returns the result of the search as JSON values."""
        layers = self._compiler.layers if self._compiler else ()
        named = [{key: getattr(layer, key) for key in ("name", "where", "times", "how")} for layer in layers]
        return {**self.to_json(self.flags, self._of_best), "layers": named}

    def flags(self, keys: Mapping[str, str]) -> str:
        """Returns the words of a command line that select a program. A function has none."""
        return ""


class FunctionSearch(ProgramSearch):
    """Searches the remat policy of a function's program: as it is written, then with jax's own policies and the
    policies of the search.

    Args:
        make: function that makes the program. Each call traces the program again.
        only_names: whether layers may keep only values that have a name.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        budget: str | None,
        bar: ProgressBar,
        make: Callable[[], PreparedProgram],
        only_names: bool = False,
    ) -> None:
        super().__init__(name, target, budget, bar)
        self._make, self._only_names = make, only_names

    def _search(self) -> None:
        from bytescope.memory.remat.remat_search import FULL, MAX_COMPILES
        from bytescope.memory.report.remat_planning import BUILT_IN, Built, StepCompiler, policy_name
        from bytescope.memory.subjects.subject import make_report

        def trace() -> Any:
            program = self._make()
            return program.trace() if program.trace else None

        self.start(AS_WRITTEN)
        written = Built.of(None, *make_report(self._make()))
        self.start(BUILT_IN[FULL])
        compiler = StepCompiler(trace, lambda: make_report(self._make()), only_names=self._only_names)
        self.use_compiler(compiler)
        first = self.add(AS_WRITTEN, written, "baseline")
        best = self.search_plans(compiler, lambda plan: (describe_plan(plan), {}), MAX_COMPILES, fixed=True).best
        if best is None:
            return
        if first.fits and written.counted.recomputed <= compiler.of_plan(best.plan).counted.recomputed:
            self.best = first
            return
        self.best = next(step for step in self.steps if step.what == describe_plan(best.plan))
        name = BUILT_IN.get(policy_name(best.plan), "")
        kept = () if name else compiler.kept(best.plan)
        policy, code = code_of(name, kept, compiler.layers[0])
        named = ("label", "name", "type", "count", "bytes", "where")
        self._of_best = {
            "policy": policy,
            "policy_name": name,
            "kept": [{key: getattr(value, key) for key in named} for value in kept],
            "code": code,
        }

    def _choose(self) -> None:
        if self.best is None:  # the search ended early, or only the program as it is written fits
            self.best = min(self.fitting, key=lambda step: step.answer["recomputed_flops"], default=None)


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


def show_and_write(args: argparse.Namespace, out: Mapping[str, Any], tables: Sequence[FitTable] = ()) -> int:
    """Prints the result of a search and writes the files of --json and --html. Returns the exit code.

    out: the JSON of the result. tables: tables below the result.
    """
    from bytescope.memory.commands.json_output import write_compiled
    from bytescope.memory.compare.fit_view import render_page, render_text
    from bytescope.memory.records.result_envelope import MemoryLimit
    from bytescope.memory.view.console import put

    put(render_text(out, tables))
    limit = MemoryLimit(out["budget_bytes"], f"the budget, --budget={args.budget}") if args.budget else None
    write_compiled(args, out, lambda: render_page(out, tables), [out["rates"]], limit=limit)
    show_written(args.json, args.html)
    if out["stopped"] == CTRL_C:
        return INTERRUPTED
    return 0 if out["best"] else DOES_NOT_FIT


def limits_of(args: argparse.Namespace) -> Limits:
    """Returns the limits of --max-compiles and --max-seconds."""
    return Limits(args.max_compiles or math.inf, args.max_seconds or math.inf)
