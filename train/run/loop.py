"""The training run: claim the run directory, report the memory, then step, evaluate and save.

`run` is one start of the command, `train` its loop; a step is a row of ACCUMULATION in train/step/modes.py.
"""

import contextlib
import dataclasses
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict
from rich.console import Console

from bytescope.memory.devices.live import predicted_in_use, sample
from bytescope.train.checkpoints.checkpoint import Checkpoints, Position
from bytescope.train.checkpoints.workdir import METRICS, Identity, claimed
from bytescope.train.data.batches import Data, DataConfig, check_vocab, open_data, train_batches
from bytescope.train.generate.training_sample import sample_text
from bytescope.train.launch.failures import explained
from bytescope.train.launch.processes import ALONE, Processes
from bytescope.train.launch.runtime import forget_peak, return_freed_memory
from bytescope.train.launch.signals import Stop
from bytescope.train.plan import refusal
from bytescope.train.plan.remat_auto import settled_program
from bytescope.train.program.doubtful_settings import doubtful_data, doubtful_settings
from bytescope.train.program.program import Program
from bytescope.train.program.run_command import UNKNOWN, Command
from bytescope.train.run import profile, startup, summary, wandb_run
from bytescope.train.run.display import TOLD_WAIT, Display
from bytescope.train.run.evaluation import ANSWERS, EvalPrompts, held_out_loss
from bytescope.train.run.feed import feed, local_rows
from bytescope.train.run.initial_state import fingerprint_of_adapter, fingerprint_of_weights, start_state
from bytescope.train.run.metrics import MetricsLog, adapter_parameters, has_evaluation, model_flops_per_token
from bytescope.train.run.recorders import Recorders
from bytescope.train.run.run_directory import PAGE
from bytescope.train.run.step_timer import Clock
from bytescope.train.step.optimizer.loss_scale import LEAST, SCALED_REMEDY, scale_metrics
from bytescope.train.step.routing import loads_by_layer, routing_row
from bytescope.train.step.state import TrainState
from bytescope.train.user_errors import NonFinite, UserError


@dataclasses.dataclass
class Run:
    """What the parts of the loop share; `peak_flops`: of one device, per second, None where that is not known;
    `predicted_bytes`: what the measured ones of a row are to be compared with."""

    program: Program
    data: Data
    checkpoints: Checkpoints
    log: MetricsLog
    recorders: Recorders
    display: Display
    compiled: startup.Compiled
    peak_flops: float | None
    predicted_bytes: int
    profile: profile.Profile
    processes: Processes
    stop: list[str]  # signals that this process got
    prompts: EvalPrompts
    answers: MetricsLog  # to those prompts
    agreed: list[str] = dataclasses.field(default_factory=list)  # signals that all processes act on
    evaluated: tuple[int, float] | None = None  # the step of this start's last evaluation, and its held-out loss

    @property
    def config(self) -> ConfigDict:
        """The settled config."""
        return self.program.config

    def stopping(self) -> bool:
        """Whether any process was asked to stop. All processes call it at the same places, so that all stop at one."""
        if not self.agreed:
            self.agreed = [name for names in self.processes.gather(self.stop) for name in names]
        return bool(self.agreed)

    def record(self, row: dict[str, Any], values: dict[str, Any] | None = None) -> None:
        """Writes one row of metrics to disk, to the recorders and to the screen; `values`: all metrics of its step."""
        self.log.write(row)
        self.recorders.write(row, loads_by_layer(values or {}, self.program.model))
        self.display.show(row)


def data_config(config: ConfigDict) -> DataConfig:
    """The group `data` of a config as a dataclass."""
    return DataConfig(**config.data)


@profile.hosted("evaluation")
def evaluate(run: Run, state: TrainState, step: int) -> float | None:
    """Evaluates after `step` and records the loss and the answers to the prompts; returns the held-out loss in nats per
    token, or None if a signal came first: then the next start evaluates."""
    working = partial(run.processes.at, f"evaluating at step {step}")
    held_out = held_out_loss(run.program, run.data, state, run.stopping, working)
    if held_out is None:
        return None
    loss, tokens = held_out
    run.evaluated = (step, loss)
    for row in run.prompts.answers(state.model_params, step):
        run.answers.write(row)
    run.record({"step": step, "eval_loss": loss, "eval_tokens": tokens})  # last: this row marks the step as evaluated
    return loss


@profile.hosted("wait_for_metrics")
def finish_step(run: Run, step: int, metrics: dict[str, jax.Array], clock: Clock) -> None:
    """Waits for the metrics of one step, while the next one runs, checks them and records them.

    Raises:
      NonFinite: the loss, or a gradient that no loss scale explains, is not finite.
    """
    values = jax.device_get(metrics)
    batch, mesh = run.program.batch, run.program.mesh
    if slow := clock.tick(batch.tokens_at(step - 1)):
        run.display.note(f"step {step} took {slow}")
    loss = float(values["loss"])
    scaling, norm = scale_metrics(values), float(values["grad_norm"])
    # With a loss scale an update whose gradients overflow is skipped; a scale that never stops falling ends the run.
    broken = scaling["loss_scale"] < LEAST if scaling else not math.isfinite(norm)
    if broken or not math.isfinite(loss):
        raise _non_finite(run, step, loss, norm, scaling)
    run.display.advance(step)
    if step % run.config.train.log_every and step != run.config.train.steps:
        return
    lap = clock.lap()
    flops = (
        lap.tokens
        / lap.seconds
        * model_flops_per_token(
            run.program.model, batch.seq_len, run.program.frozen, adapter_parameters(run.program.state.params)
        )
    )
    mfu = flops / (run.peak_flops * mesh.size) if run.peak_flops else None
    live = sample(mesh.local_devices[0])
    memory = {**live.metrics(prefix=""), "predicted_bytes": run.predicted_bytes} if live else {}
    run.record(
        {
            "step": step,
            "loss": loss,
            "grad_norm": norm if math.isfinite(norm) else None,
            "lr": float(values["lr"]),
            **scaling,
            **routing_row(values),
            "batch_tokens": batch.tokens_at(step - 1),
            "tokens_per_s": lap.tokens / lap.seconds,
            "step_time_s": lap.seconds,
            "data_wait_s": lap.data_wait,
            "mfu": mfu,
            "hfu": mfu and mfu * run.compiled.flops_ratio,
            "memory": memory,
        },
        values,
    )


def _non_finite(run: Run, step: int, loss: float, norm: float, scaling: dict[str, float]) -> NonFinite:
    """The error of a step that is not finite, with the checkpoint to go back to."""
    run.checkpoints.wait()
    good = run.checkpoints.steps()
    last = f"the last good checkpoint is step {good[-1]} in {run.checkpoints.root}" if good else "no checkpoint yet"
    shown = "".join(f", {name.replace('_', ' ')} {value:g}" for name, value in scaling.items())
    return NonFinite(
        f"loss {loss}, gradient norm {norm}{shown} at step {step}; {last}. Lower "
        f"--config.optimizer.learning_rate, {SCALED_REMEDY if scaling else ''}"
        "or look at the data of that step"
    )


def train(run: Run, state: Any, start: Position, clock: Clock) -> Any:
    """Steps from `start` to the end of the run, or to a signal. Returns the state, which is saved by then."""
    config, program = run.config.train, run.program
    batches = feed(
        program,
        train_batches(
            run.data,
            rows=program.batch.rows * program.batch.read_steps,
            row_slices=local_rows(program),
            seed=run.config.seed,
            position=start.sequences,
            config=data_config(run.config),
        ),
        start.step,
    )
    pending, step, saved = None, start.step, start.step

    @profile.hosted("checkpoint")
    def save(eval_loss: float | None) -> int:
        sequences = start.sequences + program.batch.rows_before(step) - program.batch.rows_before(start.step)
        run.processes.at(f"saving step {step}")
        run.checkpoints.save(state, Position(step, sequences), eval_loss, program.order)
        return step

    def finish_pending() -> None:
        nonlocal pending
        if pending is not None:
            finish_step(run, *pending, clock)
        pending = None

    def turn_profile() -> None:
        finish_pending()
        run.profile.turn(state)
        clock.skip()

    if _eval_due(config, step) and not run.processes.from_first(has_evaluation(run.log.path, step)):
        evaluate(run, state, step)  # a signal cut that short last time
    while step < config.steps and not run.stopping():
        if run.profile.begins(step):
            turn_profile()
        with profile.update(step + 1):
            run.processes.at(f"waiting for the data of step {step + 1}")
            with clock.reading(), profile.host("wait_for_data"):
                micro_batches = next(batches)
            run.processes.at(f"in step {step + 1}")
            with jax.transfer_guard("disallow"):
                for batch in micro_batches:
                    state, metrics = run.compiled.step(state, batch)  # `train_step`, compiled
            clock.dispatched(metrics["loss"])
            finish_pending()
        step += 1
        pending, last = (step, metrics), step == config.steps
        if run.profile.ends(step):
            turn_profile()
        eval_due = _eval_due(config, step)
        save_due = last or _every(config.checkpoint_every, step)
        if eval_due or save_due:
            finish_pending()  # nothing is saved before its loss is known to be finite
            with run.display.doing("evaluating" if eval_due else "saving"):
                eval_loss = evaluate(run, state, step) if eval_due else None
                saved = save(eval_loss) if save_due else saved
            clock.skip()
    finish_pending()
    if saved != step:
        save(None)
    run.profile.end()  # of updates that a signal cut short
    run.checkpoints.wait()
    run.processes.at("")
    return state


def _eval_due(config: ConfigDict, step: int) -> bool:
    return step > 0 and (step == config.steps or _every(config.eval_every, step))


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


def run(
    config: ConfigDict,
    *,
    workdir: Path,
    extend: bool,
    console: Console,
    processes: Processes = ALONE,
    asked: profile.ProfiledUpdates = profile.NOTHING,
    command: Command = UNKNOWN,
    stop: Stop | None = None,
) -> None:
    """One start of `bytescope train`: everything from the config to the last checkpoint.

    Args:
      workdir: the run directory, new or to be resumed. extend: allow more steps than the run was planned for.
      processes: those that train together; each of them calls this with the same arguments, and the console of all
        but process 0 is silent.
      asked: updates to trace. command: what started the run, to say what to type next.
      stop: takes the signals over; without one it does so for this call alone.

    Raises:
      UserError: what a user can mend, by kind; train/user_errors.py has the exit codes.
    """
    began = time.monotonic()
    asked.updates(0, config.train.steps)
    if processes.first:
        wandb_run.check(config.train.wandb)
    try:
        with startup.told(console, "planning the step", command.verbose) as tell:
            program = settled_program(config, tell=tell, agree=processes.from_first)
    except UserError:  # it has the exit code of its kind
        raise
    except ValueError as error:  # a config that cannot run here; the message has the remedy
        raise UserError(str(error)) from error
    data = open_data(data_config(config))
    check_vocab(data, config.model.vocab_size)
    prompts = EvalPrompts(program, data)
    identity = Identity.of(
        config,
        program.batch.global_rows,
        data.fingerprint,
        fingerprint_of_weights(program),
        fingerprint_of_adapter(program),
    )
    with (
        contextlib.nullcontext(stop) if stop else Stop(lambda: processes.interrupt("interrupted")) as stop,
        claimed(workdir, identity, extend=extend, processes=processes) as notes,
        contextlib.closing(Checkpoints(workdir, config.train.keep, processes)) as checkpoints,
        processes.together(),
    ):  # closing waits for the other processes: they learn of an error before that
        for note in notes:
            console.print(note, soft_wrap=True)
        done = checkpoints.steps()
        if processes.from_first(_finished(config, workdir, done)):
            _require_undamaged(program, checkpoints, done)
            summary.say(console, f"{workdir} is finished: step {done[-1]} of {config.train.steps}")
            summary.show_commands(console, {"for more steps": command.extend(workdir, 2 * config.train.steps)})
            return
        asked.updates(processes.from_first(done[-1] if done else 0), config.train.steps)
        startup.show_program(console, program, data.description, verbose=command.verbose)
        summary.show(console, [("passes", startup.passes(program, len(data.train)))])
        read = program.batch.rows_before(config.train.steps)
        warnings = doubtful_settings(program.settings, program.mesh.devices.flat[0].platform)
        for line in (*warnings, *doubtful_data(program.settings, data, read)):
            summary.say(console, f"warning: {line}")
        compiled = startup.compile_or_refuse(program, command, workdir, console, processes)
        report = compiled.report
        with explained(
            report, program.mesh.local_devices[0], lambda: refusal.advice_without_compiling(report, command)
        ):
            _train_and_sample(
                program, data, checkpoints, compiled, workdir, console, processes, asked, command, began, stop, prompts
            )


def _finished(config: ConfigDict, workdir: Path, saved: list[int]) -> bool:
    """Whether the last of the saved steps is the run's last one, and was evaluated."""
    return bool(saved) and saved[-1] >= config.train.steps and has_evaluation(workdir / METRICS, saved[-1])


def _require_undamaged(program: Program, checkpoints: Checkpoints, saved: list[int]) -> None:
    """Raises UserError if the last checkpoint is damaged. An unfinished run moves a damaged checkpoint aside and
    continues from the one before it; for a finished run the user decides whether to lose these updates."""
    with explained(None, program.mesh.local_devices[0]):
        damage = checkpoints.damage(saved[-1], program.state, program.order)
    if damage:
        before = f"continues from checkpoint {saved[-2]}" if len(saved) > 1 else "trains from the start"
        raise UserError(
            f"checkpoint {saved[-1]} in {checkpoints.root} is damaged ({damage}): restore its files from a "
            f"copy, or move {checkpoints.root / str(saved[-1])} away: then the same command {before}"
        )


def _train_and_sample(
    program: Program,
    data: Data,
    checkpoints: Checkpoints,
    compiled: startup.Compiled,
    workdir: Path,
    console: Console,
    processes: Processes,
    asked: profile.ProfiledUpdates,
    command: Command,
    began: float,
    stop: Stop,
    prompts: EvalPrompts,
) -> None:
    """Restores or initializes the state, opens the logs, trains, and shows a sample at the end."""
    config, device = program.config.train, program.mesh.local_devices[0]
    return_freed_memory()  # what compiling has freed
    forget_peak()
    before = sample(device)
    state, position = start_state(program, checkpoints, console)
    traced = asked.updates(position.step, config.steps) if processes.first else range(0)
    return_freed_memory()  # what restoring has freed
    keeps_answers = processes.first and bool(prompts.texts)
    # Of an evaluation that was cut short there may be answers, which are written again.
    answered = position.step - (not has_evaluation(workdir / METRICS, position.step))
    with (
        contextlib.closing(MetricsLog(workdir / METRICS, position.step, processes.first)) as log,
        contextlib.closing(MetricsLog(workdir / ANSWERS, answered, keeps_answers, ("text",))) as answers,
        Recorders(
            workdir,
            position.step,
            program.config,
            compiled.report,
            processes.first,
            lambda line: console.print(line, soft_wrap=True),
        ) as recorders,
        Display(console, config.steps, position.step) as display,
        profile.Profile(traced, workdir, compiled.report, console) as tracer,
    ):
        run = Run(
            program,
            data,
            checkpoints,
            log,
            recorders,
            display,
            compiled,
            startup.peak_flops(program),
            predicted_in_use(compiled.report, before),
            tracer,
            processes,
            stop.names,
            prompts,
            answers,
        )
        stop.watch()
        with contextlib.closing(Clock(checkpoints.saving)) as clock:
            state = train(run, state, position, clock)
        display.close()
        last = max(checkpoints.steps(), default=0)  # 0: stopped before the first update, nothing is saved
        text = "" if run.agreed else sample_text(program, data, state.model_params)
        end = summary.End(
            position.step + 1,
            last,
            config.steps,
            time.monotonic() - began,
            run.evaluated,
            clock.tokens_per_s(),
            compiled.report,
            before,
            sample(device),
            checkpoints.root / str(last) if last else None,
            workdir / PAGE,
        )
        if run.agreed:
            display.note(
                f"{run.agreed[0]}: saved step {last}; the command below resumes from there"
                if last
                else f"{run.agreed[0]} before the first update: nothing is saved"
            )
            summary.show(console, end.rows())
            summary.show_commands(console, {"to resume" if last else "to start again": command.resume(workdir)})
            return
        if (waited := clock.waited()) >= TOLD_WAIT:
            display.note(
                f"the devices spent {100 * waited:.0f} % of the time waiting for data: raise data.workers and "
                "data.prefetch, or read token shards (bytescope prepare)"
            )
        recorders.finish(config.steps, text)
        if text:
            display.note(f"sample:\n{text}")
        summary.show(console, end.rows())
        summary.show_commands(console, {"for more steps": command.extend(workdir, 2 * config.steps)})
