"""bytescope fit for the program of an adapter, such as `bytescope fit maxtext:llama3-8b h100:8`: searches the remat
policy, the batch and the loop over the layers, and prints the answer as keys of the trainer.

For each batch, the search finds the least recomputation that fits, among the tensors that the trainer can keep by name.
Each program is the trainer's own step, made with the keys that are printed. Of the batches, the one with the most
predicted tokens per second is chosen. The result has the keys of the module `fit_program`; `best` also has `flags`, the
keys to give to the trainer.
"""

from __future__ import annotations

import argparse
import math
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

from bytescope.memory.adapters.trainers import TrainerFactory
from bytescope.memory.commands.arguments import check_files
from bytescope.memory.commands.fit_program import ProgramSearch, show_and_write, show_head
from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.cost import flops
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError
from bytescope.memory.remat.remat_problem import CompiledPlan, LayerPlan, RematProblem
from bytescope.memory.remat.remat_search import FULL, NONE, RematSearch
from bytescope.memory.report.remat_planning import Built, StepCompiler, policy_name
from bytescope.memory.report.report_object import Report
from bytescope.memory.seconds.ranking import TIE
from bytescope.memory.subjects.subject import make_report
from bytescope.memory.subjects.trainer_subject import described
from bytescope.memory.view.progress_bar import progress

# Maximum batch on one device that is tried, and maximum number of programs compiled for the policies of one batch.
MAX_BATCH, MAX_COMPILES = 64, 8


class LimitReached(Exception):
    """The search has reached its limit on compiles or seconds. The message says which limit."""


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope fit` for the program of an adapter. Returns the exit code: 0 if a program fits, 3 if none fits,
    130 after Ctrl-C."""
    check_files(args)
    subject = args.subject
    factory, overrides = subject.factory(args.target), subject.overrides()
    if factory.policy_key in overrides:
        raise ReportError(
            f"{factory.policy_key}={overrides[factory.policy_key]} cannot be given to fit, which searches it: leave it "
            f"out, or use bytescope report {subject.name}"
        )
    factory.check(overrides)
    target = subject.target_of(factory, args.target)
    limits = (args.max_compiles or math.inf, args.max_seconds or math.inf)
    search = AdapterSearch(factory, overrides, target, args.budget, *limits)
    search.run_all()
    return show_and_write(args, search.result())


class AdapterCompiler(StepCompiler):
    """Compiles the step of an adapter with the trainer's keys of each remat policy that a search proposes.

    Args:
        factory: makes the programs.
        overrides: the trainer's keys with their values, without the policy.
        target: the devices to compile for.
        check_limits: called before each compilation.
    """

    def __init__(
        self,
        factory: TrainerFactory,
        overrides: Mapping[str, Any],
        target: Target,
        check_limits: Callable[[], None] = lambda: None,
    ):
        self.overrides = overrides
        self._factory, self._devices, self._check_limits = factory, target, check_limits
        super().__init__(lambda: self._make({}).trace(), lambda: make_report(self._make({})), only_names=True)

    @property
    def names(self) -> set[str]:
        """Checkpoint names of the tensors for which the trainer has a key that says whether the tensor is kept or
        recomputed."""
        return self._factory.names_with_keys({value.name for value in self.values.values.values() if value.name})

    def _make(self, keys: Mapping[str, str]) -> Any:
        return self._factory({**self.overrides, **keys}, self._devices)

    def policy(self, plan: LayerPlan) -> Any:
        """Returns the trainer's keys that express a remat plan. For the plan that recomputes nothing, these keys keep
        all tensors of `names`."""
        if policy_name(plan) == FULL:
            return self.keys_of(())
        if policy_name(plan) == NONE:
            return self.keys_of(tuple(self.names))
        return self.keys_of(self.values.values[label].name for label in plan.ranges[0][0].save)

    def keys_of(self, kept: Any) -> dict[str, str]:
        """Returns the trainer's keys of the remat policy that keeps the tensors with the names `kept` and recomputes
        all others."""
        return self._factory.keys_of_names(self.names, set(kept))

    def problem(self) -> RematProblem:
        """Returns the remat problem that the search solves. The policies of `jax.checkpoint_policies` are left out,
        because no key of the trainer can select them."""
        from bytescope.memory.remat.layer_values import with_names

        problem = super().problem()
        labels = {value.label for value in self.values.values.values() if value.name in self.names}
        return RematProblem(with_names(problem.graph, labels), problem.rates, problem.passes, problem.cost)

    def _build(self, policy: Any) -> Built:
        self._check_limits()
        keys = policy if isinstance(policy, dict) else self.keys_of(())  # else the probe that keeps nothing
        try:
            program = self._make(keys)
            words = [f"{key}={value}" for key, value in {**self.overrides, **keys}.items() if key != CONFIG]
            report, compilation = make_report(described(program, words))
        except ReportError as error:
            if not self.built:
                raise
            raise RuntimeError(str(error)) from error  # the search goes on without this plan
        return Built(keys, Report.of(report), flops.count(compilation.jaxpr))


class AdapterSearch(ProgramSearch):
    """Searches the remat policy and the batch of an adapter's program, and whether its layers run in a loop.

    Args:
        factory: makes the programs.
        overrides: the program's name and the trainer's keys from the command line. The search does not change them.
        target: the devices to compile for.
        budget: the memory budget as text; None for all bytes that are available on a device.
        max_compiles: maximum number of programs to compile.
        max_seconds: seconds after which no compilation starts, except the first.
    """

    def __init__(
        self,
        factory: TrainerFactory,
        overrides: Mapping[str, Any],
        target: Target,
        budget: str | None,
        max_compiles: float = math.inf,
        max_seconds: float = math.inf,
    ):
        super().__init__(str(overrides[CONFIG]), target, budget)
        self._factory, self._overrides = factory, overrides
        self._max_compiles, self._max_seconds = max_compiles, max_seconds

    def run_all(self) -> None:
        """Compiles the programs of the search, and chooses the fastest that fits. Ctrl-C or a limit on compiles or
        seconds ends the search."""
        with progress(None) as self._bar:
            try:
                self._search_batches()
                self._other_loop()
            except LimitReached as reason:
                self.stopped = str(reason)
            except KeyboardInterrupt:
                self.stopped = "Ctrl-C"
        row = self._fastest()
        if row is not None:
            given = {key: value for key, value in self._overrides.items() if key != CONFIG}
            flags = shlex.join(f"{key}={value}" for key, value in {**given, **row["keys"]}.items())
            self._best = {**row, "policy": "", "policy_name": "", "kept": [], "code": [], "flags": flags}

    def _check_limits(self) -> None:
        """Raises LimitReached if no further program may be compiled."""
        if len(self.walk) >= self._max_compiles:
            raise LimitReached(f"the limit on compiles ({len(self.walk)}) was reached")
        if self.walk and time.monotonic() - self._began > self._max_seconds:
            raise LimitReached(f"the time limit ({self._max_seconds:g} s) was reached")

    def _fastest(self) -> dict[str, Any] | None:
        """Returns the row with the most predicted tokens per second among the programs that fit; None if none fits. Of
        rows that are equally fast, returns the one with the least recomputation, then the fewest bytes."""
        fitting = [row for row in self.walk if row["fits"]]
        most = max((row["predicted_tokens_per_s"] or 0.0 for row in fitting), default=0.0)
        tied = [row for row in fitting if (row["predicted_tokens_per_s"] or 0.0) * (1 + TIE) >= most]
        return min(tied, key=lambda row: (row["recompute_flops_fraction"], row["allocated_bytes"]), default=None)

    def _search_batches(self) -> None:
        """Searches the remat policies for the batch of the command line. If the command line has none, searches them
        for the largest power of two that fits with everything recomputed, then for half of this batch, and so on while
        the smaller batch is faster."""
        key = self._factory.batch_key
        if key in self._overrides:
            compiler = self._compile_batch({})
            if compiler is not None:
                self._policies(compiler)
            return
        compilers = {batch: self._compile_batch({key: str(batch)}) for batch in (1, 2)}
        first, second = (row["allocated_bytes"] for row in self.walk)
        batch = 2
        while batch < MAX_BATCH and first + (second - first) * (2 * batch - 1) <= self.budget:
            batch *= 2
        best = 0.0
        while batch:
            compiler = compilers[batch] if batch in compilers else self._compile_batch({key: str(batch)})
            if compiler is not None:
                self._policies(compiler)
                fastest = self._fastest()
                now = (fastest["predicted_tokens_per_s"] or 0.0) if fastest else 0.0
                if best and now <= best:
                    return
                best = now
            batch //= 2

    def _compile_batch(self, keys: Mapping[str, str]) -> AdapterCompiler | None:
        """Compiles the program with one batch and everything recomputed. Returns the compiler for this batch; None if
        the program does not fit.

        keys: the trainer's key of the batch with its value; {} for the batch of the command line.
        """
        self.label(_words({**keys, self._factory.policy_key: "full"}))
        compiler = AdapterCompiler(self._factory, {**self._overrides, **keys}, self._target, self._check_limits)
        if self._compiler is None:
            self._compiler, self.budget = compiler, compiler.budget(self._asked)
            with self.beside_bar():
                show_head(self._name, self._target, self.budget, compiler.layers)
        row = self._add_built(compiler.full, keys, "micro")
        return compiler if row["fits"] else None

    def _policies(self, compiler: AdapterCompiler) -> None:
        """Searches the least recomputation with which the batch of `compiler` fits. Does nothing if this batch cannot
        be faster than the best program so far, even without recomputation."""
        fastest, counted = self._fastest(), compiler.full.counted
        possible = _tokens_per_s(compiler.full) * counted.total / max(counted.total - counted.recomputed, 1)
        if fastest is not None and possible < (fastest["predicted_tokens_per_s"] or 0.0):
            return
        key = self._factory.batch_key
        keys = {key: compiler.overrides[key]} if key not in self._overrides else {}
        compiler.starting = lambda plan: self.label(_words({**keys, **compiler.policy(plan)}))

        def tell(tried: CompiledPlan) -> None:
            name = policy_name(tried.plan) or str(tried.plan)
            if name == FULL:  # compiled with its batch
                return
            if tried.ok:
                self._add_built(compiler.built[name], keys, "remat")
            else:
                self.add(_words({**keys, **compiler.policy(tried.plan)}), tried.compiled.status, "remat", keys)

        RematSearch(compiler.problem(), compiler, tell).run(self.budget, most=MAX_COMPILES)

    def _other_loop(self) -> None:
        """Compiles the best program so far with unrolled layers; if no program fits, the smallest one. Does nothing if
        the command line says whether the layers are unrolled."""
        key = self._factory.scan_key
        if key in self._overrides:
            return
        row = self._fastest() or min(self.walk, key=lambda row: row["allocated_bytes"])
        keys = {**row["keys"], key: "false"}
        self._check_limits()
        self.label(_words(keys))
        program = self._factory({**self._overrides, **keys}, self._target)
        words = [f"{key}={value}" for key, value in keys.items()]
        try:
            report, compilation = make_report(described(program, words))
        except ReportError as error:
            self.add(_words(keys), str(error), "neighbour", keys)
            return
        self.add(_words(keys), Built(keys, Report.of(report), flops.count(compilation.jaxpr)), "neighbour", keys)

    def _add_built(self, built: Built, keys: Mapping[str, str], stage: str) -> dict[str, Any]:
        return self.add(_words({**keys, **built.policy}), built, stage, {**keys, **built.policy})


def _tokens_per_s(built: Built) -> float:
    return float(built.report.prediction.get("tokens_per_s") or 0.0)


def _words(keys: Mapping[str, str]) -> str:
    """Returns the trainer's keys as short text, such as "remat_policy=custom decoder_layer_input=device". Keys of
    tensors that are recomputed are left out."""
    return " ".join(f"{key}={value}" for key, value in keys.items() if value != "remat")
