"""bytescope fit for the program of an adapter, such as `bytescope fit maxtext:llama3-8b h100:8`: searches the remat
policy, the batch and the loop over the layers, and prints the answer as keys of the trainer.

For each batch, the search finds the least recomputation that fits, among the tensors that the trainer can keep by name.
Each program is the trainer's own step, made with the keys that are printed. Of the batches, the one with the most
predicted tokens per second is chosen.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from typing import Any

from bytescope.memory.adapters.trainers import TrainerFactory
from bytescope.memory.commands.arguments import check_files
from bytescope.memory.commands.fit_program import ProgramSearch, limits_of, show_and_write
from bytescope.memory.compare.fit_search import Step
from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.compare.search_limits import Limits
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError
from bytescope.memory.remat.remat_problem import LayerPlan, RematProblem
from bytescope.memory.remat.remat_search import FULL, NONE
from bytescope.memory.report.remat_planning import Built, StepCompiler, policy_name
from bytescope.memory.seconds.ranking import TIE
from bytescope.memory.subjects.subject import make_report
from bytescope.memory.subjects.trainer_subject import described
from bytescope.memory.view.progress_bar import ProgressBar, progress

# Maximum batch on one device that is tried, and maximum number of programs compiled for the policies of one batch.
MAX_BATCH, MAX_COMPILES = 64, 8


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
    with progress(None) as bar:
        search = TrainerSearch(factory, overrides, target, args.budget, bar, limits_of(args))
        search.run()
    return show_and_write(args, search.result())


class AdapterCompiler(StepCompiler):
    """Compiles the step of an adapter with the trainer's keys of each remat policy that a search proposes.

    Args:
        factory: makes the programs.
        overrides: the trainer's keys with their values, without the policy.
        target: the devices to compile for.
    """

    def __init__(self, factory: TrainerFactory, overrides: Mapping[str, Any], target: Target):
        self.overrides, self._factory, self._devices = overrides, factory, target
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
        keys = policy if isinstance(policy, dict) else self.keys_of(())  # else the probe that keeps nothing
        try:
            return self.build(keys)
        except ReportError as error:
            if not self.built:
                raise
            raise RuntimeError(str(error)) from error  # the search goes on without this plan

    def build(self, keys: Mapping[str, str]) -> Built:
        """Compiles the program with further keys of the trainer. Raises ReportError if it cannot be compiled."""
        words = [f"{key}={value}" for key, value in {**self.overrides, **keys}.items() if key != CONFIG]
        return Built.of(keys, *make_report(described(self._make(keys), words)))


class TrainerSearch(ProgramSearch):
    """Searches the remat policy and the batch of an adapter's program, and whether its layers run in a loop.

    Args:
        factory: makes the programs.
        overrides: the program's name and the trainer's keys from the command line. The search does not change them.
        target: the devices to compile for.
        budget: the memory budget as text; None for all bytes that are available on a device.
        bar: the progress bar.
        limits: the limits of the search.
    """

    def __init__(
        self,
        factory: TrainerFactory,
        overrides: Mapping[str, Any],
        target: Target,
        budget: str | None,
        bar: ProgressBar,
        limits: Limits,
    ):
        super().__init__(str(overrides[CONFIG]), target, budget, bar, limits)
        self._factory, self._overrides = factory, overrides

    def flags(self, keys: Mapping[str, str]) -> str:
        """Returns the trainer's keys that select a program."""
        given = {key: value for key, value in self._overrides.items() if key != CONFIG}
        return shlex.join(f"{key}={value}" for key, value in {**given, **keys}.items())

    def _search(self) -> None:
        self._search_batches()
        self._try_other_loop()

    def _choose(self) -> None:
        self.best = self._fastest()

    def _fastest(self) -> Step | None:
        """Returns the program with the most predicted tokens per second among the programs that fit; None if none fits.
        Of programs that are equally fast, returns the one with the least recomputation, then the fewest bytes."""
        most = max((step.tokens_per_s for step in self.fitting), default=0.0)
        tied = [step for step in self.fitting if step.tokens_per_s * (1 + TIE) >= most]
        return min(tied, key=lambda step: (step.answer["recompute_flops_fraction"], step.allocated), default=None)

    def _search_batches(self) -> None:
        """Searches the remat policies for the batch of the command line. If the command line has none, searches them
        for the largest power of two that fits with everything recomputed, then for half of this batch, and so on while
        the smaller batch is faster."""
        key = self._factory.batch_key
        if key in self._overrides:
            compiler = self._compile_batch({})
            if compiler is not None:
                self._search_policies(compiler)
            return
        compilers = {batch: self._compile_batch({key: str(batch)}) for batch in (1, 2)}
        first, second = (step.allocated for step in self.steps)
        batch = 2
        while batch < MAX_BATCH and first + (second - first) * (2 * batch - 1) <= self.budget:
            batch *= 2
        best = 0.0
        while batch:
            compiler = compilers[batch] if batch in compilers else self._compile_batch({key: str(batch)})
            if compiler is not None:
                self._search_policies(compiler)
                fastest = self._fastest()
                now = fastest.tokens_per_s if fastest else 0.0
                if best and now <= best:
                    return
                best = now
            batch //= 2

    def _compile_batch(self, keys: Mapping[str, str]) -> AdapterCompiler | None:
        """Compiles the program with one batch and everything recomputed. Returns the compiler for this batch; None if
        the program does not fit.

        keys: the trainer's key of the batch with its value; {} for the batch of the command line.
        """
        self.start(_words({**keys, self._factory.policy_key: "full"}))
        compiler = AdapterCompiler(self._factory, {**self._overrides, **keys}, self.target)
        if self._compiler is None:
            self.use_compiler(compiler)
        keys = {**keys, **compiler.full.policy}
        return compiler if self.add(_words(keys), compiler.full, "micro", keys).fits else None

    def _search_policies(self, compiler: AdapterCompiler) -> None:
        """Searches the least recomputation with which the batch of `compiler` fits. Does nothing if this batch cannot
        be faster than the best program so far, even without recomputation."""
        fastest, counted = self._fastest(), compiler.full.counted
        speed = float(compiler.full.report.prediction.get("tokens_per_s") or 0.0)
        possible = speed * counted.total / max(counted.total - counted.recomputed, 1)
        if fastest is not None and possible < fastest.tokens_per_s:
            return
        key = self._factory.batch_key
        batch = {key: compiler.overrides[key]} if key not in self._overrides else {}

        def variant_of(plan: LayerPlan) -> tuple[str, Mapping[str, str]]:
            keys = {**batch, **compiler.policy(plan)}
            return _words(keys), keys

        self.search_plans(compiler, variant_of, MAX_COMPILES)

    def _try_other_loop(self) -> None:
        """Compiles the best program so far with unrolled layers; if no program fits, the smallest one. Does nothing if
        the command line says whether the layers are unrolled."""
        key, step = self._factory.scan_key, self._fastest() or self.tightest
        if key in self._overrides or step is None or not isinstance(self._compiler, AdapterCompiler):
            return
        keys = {**step.keys, key: "false"}
        self.start(_words(keys))
        try:
            built: Built | str = self._compiler.build(keys)
        except ReportError as error:
            built = str(error)
        self.add(_words(keys), built, "neighbour", keys)


def _words(keys: Mapping[str, str]) -> str:
    """Returns the trainer's keys as short text, such as "remat_policy=custom decoder_layer_input=device". Keys of
    tensors that are recomputed are left out."""
    return " ".join(f"{key}={value}" for key, value in keys.items() if value != "remat")
