"""The training run: claims the run directory, reports the memory, then steps, evaluates and saves.

`run` is one start of the command, and `train` its loop. The step functions are rows of ACCUMULATION in
train/step/train_step.py.
"""

import contextlib
import dataclasses
import math
import shlex
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict
from rich.console import Console

from bytescope.memory.devices.live import (
    LiveMemory,
    measure_call,
    on_cpu_devices,
    predicted_in_use,
    resolves_temporaries,
    sample,
)
from bytescope.memory.host.host_ledger import expect, ledger
from bytescope.memory.host.host_terms import LIBRARIES
from bytescope.memory.host.process_memory import host_phase, release_free_memory, resident
from bytescope.memory.records.host_record import HostTerm
from bytescope.train.checkpoints.checkpoint import Checkpoints, Position
from bytescope.train.checkpoints.checkpoint_memory import expect_restore, expect_saves, saves_overlap
from bytescope.train.checkpoints.workdir import claimed, recordable
from bytescope.train.config_fields import MIN_LOSS_SCALE
from bytescope.train.data.batches import Data, DataConfig, check_vocab, open_data, train_batches
from bytescope.train.data.tokenizer import IdTokenizer
from bytescope.train.export.config_json import config_json
from bytescope.train.generate.training_sample import can_generate, sample_text
from bytescope.train.launch.failures import explained
from bytescope.train.launch.processes import ALONE, Processes
from bytescope.train.launch.signals import Stop
from bytescope.train.plan import refusal
from bytescope.train.plan.remat_auto import settled_program
from bytescope.train.program.config_files import flatten
from bytescope.train.program.program import Program
from bytescope.train.program.run_command import UNKNOWN, Command
from bytescope.train.run import profile, startup, summary
from bytescope.train.run.display import MIN_NOTED_WAIT, Display
from bytescope.train.run.feed import feed, held_out_loss, local_rows
from bytescope.train.run.initial_state import fingerprint_of_adapter, fingerprint_of_weights, start_state
from bytescope.train.run.metrics import MetricsLog, adapter_parameters, has_evaluation, model_flops_per_token
from bytescope.train.run.recorders import Recorders, check
from bytescope.train.run.run_directory import PAGE
from bytescope.train.run.step_timer import Clock
from bytescope.train.source import METRICS
from bytescope.train.step.optimizer.loss_scale import SCALED_REMEDY, scale_metrics
from bytescope.train.step.routing import routing_row
from bytescope.train.step.state import TrainState
from bytescope.train.user_errors import NonFinite, UserError
from bytescope.train.weights.folder import read_config


@dataclasses.dataclass(frozen=True)
class RunStart:
    """One start of `bytescope train`. A run that is interrupted and resumed has several starts.

    Fields:
      workdir: the run directory.
      console: where output is printed.
      processes: the processes that train together.
      traced: the updates that the flag --profile traces.
      command: the command of this start, from which messages suggest the next command.
      began: time of the start, in seconds of `time.monotonic`.
      stop: records signals such as SIGTERM, after which the run saves and ends.
    """

    workdir: Path
    console: Console
    processes: Processes
    traced: profile.ProfiledUpdates
    command: Command
    began: float
    stop: Stop


@dataclasses.dataclass
class Run:
    """The data that the functions of the training loop share.

    Fields:
      program: the training program.
      data: the training and held-out data.
      checkpoints: reads and writes the run's checkpoints.
      log: the file metrics.jsonl.
      recorders: send metrics to wandb, and write the run page.
      display: prints metrics and the progress bar.
      compiled: the compiled step and its memory report.
      flops_per_token: model FLOPs of a token in a step.
      peak_flops: peak FLOPs per second of one device; None if unknown.
      predicted_bytes: predicted bytes in use per device, shown beside the measured bytes.
      profile: traces some updates if the user asked for it.
      processes: the processes that train together.
      stop: names of signals that this process received.
      device_peak: measured bytes of arrays and temporaries of the step on the CPU devices of this process; None on
        accelerators, before the measurement, and if the temporaries are too small for it (`resolves_temporaries`).
      agreed: names of the signals, received by any process, that all processes have agreed to act on.
      evaluated: (step, held-out loss) of this start's last evaluation, None before it.
    """

    program: Program
    data: Data
    checkpoints: Checkpoints
    log: MetricsLog
    recorders: Recorders
    display: Display
    compiled: startup.Compiled
    flops_per_token: float
    peak_flops: float | None
    predicted_bytes: int
    profile: profile.Profile
    processes: Processes
    stop: list[str]
    device_peak: int | None = None
    agreed: list[str] = dataclasses.field(default_factory=list)
    evaluated: tuple[int, float] | None = None

    @property
    def config(self) -> ConfigDict:
        """The resolved config of the run, with all config keys."""
        return self.program.config

    def stopping(self) -> bool:
        """Returns True if any process of the run has received a signal to stop.

        All processes must call it at the same points of the loop, so that all stop at the same step.
        """
        if not self.agreed:
            for names in self.processes.gather(self.stop):
                self.agreed += names
        return bool(self.agreed)

    def record(self, row: dict[str, Any]) -> None:
        """Appends a row of metrics to metrics.jsonl, sends it to wandb and prints it."""
        self.log.write(row)
        self.recorders.write(row)
        self.display.show(row)


def measure(program: Program, device_peak: int | None = None) -> LiveMemory | None:
    """Measures the memory of this process's first device, or of all its devices together if they are CPU devices.

    device_peak: measured bytes of arrays and temporaries of the step on CPU devices; None if unknown.
    """
    live = sample(program.mesh.local_devices[0])
    return on_cpu_devices(live, device_peak) if live and live.source == "host" else live


@profile.hosted("evaluation")
@host_phase("evaluate")
def evaluate(run: Run, state: TrainState, step: int) -> float | None:
    """Evaluates after `step`, and records the loss.

    Returns the held-out loss in nats per token, or None if a signal interrupted the evaluation. The next start then
    repeats it.
    """
    working = partial(run.processes.at, f"evaluating at step {step}")
    held_out = held_out_loss(run.program, run.data, state, run.stopping, working)
    if held_out is None:
        return None
    loss, tokens = held_out
    run.evaluated = (step, loss)
    run.record({"step": step, "eval_loss": loss, "eval_tokens": tokens})
    return loss


@profile.hosted("wait_for_metrics")
def finish_step(run: Run, step: int, metrics: dict[str, jax.Array], clock: Clock) -> None:
    """Waits for the metrics of one step while the next step runs, checks them and records them.

    Args:
      step: number of the step, from 1.
      metrics: the metrics that the step returned, on the device.
      clock: measures the durations of steps.

    Raises:
      NonFinite: the loss is not finite, or a gradient is not finite and there is no loss scale to reduce.
    """
    values = jax.device_get(metrics)
    batch, mesh = run.program.batch, run.program.mesh
    clock.tick(batch.tokens)
    loss = float(values["loss"])
    scaling, norm = scale_metrics(values), float(values["grad_norm"])
    # With a loss scale an update whose gradients overflow is skipped. A scale that keeps falling ends the run.
    broken = scaling["loss_scale"] < MIN_LOSS_SCALE if scaling else not math.isfinite(norm)
    if broken or not math.isfinite(loss):
        raise _non_finite_error(run, step, loss, norm, scaling)
    run.display.advance(step)
    if step % run.config.train.log_every and step != run.config.train.steps:
        return
    lap = clock.lap()
    tokens_per_s = lap.tokens / lap.seconds
    mfu = tokens_per_s * run.flops_per_token / (run.peak_flops * mesh.size) if run.peak_flops else None
    live = measure(run.program, run.device_peak)
    memory = {**live.metrics(prefix=""), "predicted_bytes": run.predicted_bytes} if live else {}
    run.record(
        {
            "step": step,
            "loss": loss,
            "grad_norm": norm if math.isfinite(norm) else None,
            "lr": float(values["lr"]),
            **scaling,
            **routing_row(values),
            "batch_tokens": batch.tokens,
            "tokens_per_s": tokens_per_s,
            "step_time_s": lap.seconds,
            "data_wait_s": lap.data_wait,
            "mfu": mfu,
            "hfu": mfu and mfu * run.compiled.flops_ratio,
            "memory": memory,
        }
    )


def record_host_memory(run: Run, step: int) -> None:
    """Writes a row to metrics.jsonl with the host memory of this start by phase, in bytes of one process: "predicted"
    and "measured". If there are several processes, each value is that of the process with the most.

    All processes must call it at the same point. `step`: the last update of this start.
    """
    host = ledger()
    predicted = {phase: host.predicted(phase) for phase in host.phases() if host.predicted(phase) is not None}
    rows = run.processes.gather([predicted, dict(host.measured)])
    highest: list[dict[str, int]] = [{}, {}]
    for row in rows:
        for values, own in zip(highest, row):
            for phase, size in own.items():
                values[phase] = max(size, values.get(phase, 0))
    memory = {"processes": len(rows), "predicted": highest[0], "measured": highest[1]}
    run.log.write({"step": step, "host_memory": memory})


def _non_finite_error(run: Run, step: int, loss: float, norm: float, scaling: dict[str, float]) -> NonFinite:
    run.checkpoints.wait()
    good = run.checkpoints.steps()
    last = f"the last good checkpoint is step {good[-1]} in {run.checkpoints.root}" if good else "no checkpoint yet"
    scaling_text = "".join(f", {name.replace('_', ' ')} {value:g}" for name, value in scaling.items())
    return NonFinite(
        f"loss {loss}, gradient norm {norm}{scaling_text} at step {step}; {last}. Lower "
        f"--config.optimizer.learning_rate, {SCALED_REMEDY if scaling else ''}or look at the data of that step"
    )


def train(run: Run, state: Any, start: Position, clock: Clock) -> Any:
    """Trains from position `start` (updates done, sequences consumed) until the run ends or a signal arrives. Returns
    the state, which is then already saved. `clock`: measures the durations of steps."""
    config, program = run.config.train, run.program
    batches = feed(
        program,
        train_batches(
            run.data,
            rows=program.batch.global_rows,
            row_slices=local_rows(program),
            seed=run.config.seed,
            position=start.sequences,
            config=DataConfig(**run.config.data),
        ),
    )
    pending, step, saved = None, start.step, start.step
    # The update whose memory is measured on CPU devices: the second one of this start, because the first also starts
    # threads. Temporaries that are too small cannot be measured.
    measured, devices = None, program.mesh.local_devices
    if devices[0].platform == "cpu" and resolves_temporaries(run.compiled.report.predicted_bytes, len(devices)):
        measured = min(start.step + 2, config.steps)

    def update(state: Any, micro_batches: list[Any]) -> Any:
        with jax.transfer_guard("disallow"):
            for batch in micro_batches:
                state, metrics = run.compiled.step(state, batch)  # the compiled `train_step`
        return state, metrics

    def measured_update(state: Any, micro_batches: list[Any]) -> Any:
        return jax.block_until_ready(update(state, micro_batches))

    def eval_due() -> bool:
        return step > 0 and (step == config.steps or _every(config.eval_every, step))

    @profile.hosted("checkpoint")
    def save(eval_loss: float | None) -> int:
        sequences = start.sequences + (step - start.step) * program.batch.global_rows
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

    if eval_due() and not run.processes.from_first(has_evaluation(run.log.path, step)):
        evaluate(run, state, step)  # a signal interrupted this evaluation in the previous start
    while step < config.steps and not run.stopping():
        if run.profile.begins(step):
            turn_profile()
        with profile.update(step + 1):
            run.processes.at(f"waiting for the data of step {step + 1}")
            with clock.reading(), profile.host("wait_for_data"):
                micro_batches = next(batches)
            run.processes.at(f"in step {step + 1}")
            if step + 1 == measured:
                finish_pending()
                jax.block_until_ready(state)  # on all devices
                called = measure_call(partial(measured_update, state, micro_batches))
                (state, metrics), run.device_peak = called
            else:
                state, metrics = update(state, micro_batches)
            clock.dispatched(metrics["loss"])
            finish_pending()
        step += 1
        pending, last = (step, metrics), step == config.steps
        if run.profile.ends(step):
            turn_profile()
        evaluates, save_due = eval_due(), last or _every(config.checkpoint_every, step)
        if evaluates or save_due:
            finish_pending()  # the loss must be known to be finite before anything is saved
            with run.display.doing("evaluating" if evaluates else "saving"):
                eval_loss = evaluate(run, state, step) if evaluates else None
                saved = save(eval_loss) if save_due else saved
            clock.skip()
    finish_pending()
    if saved != step:
        save(None)
    run.profile.end()  # if a signal interrupted the traced updates
    run.checkpoints.wait()
    run.processes.at("")
    return state


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
    """Runs one start of `bytescope train`, from the config to the last checkpoint.

    Args:
      workdir: the run directory, new or to be resumed.
      extend: True to allow more steps than the run was planned for.
      processes: the processes that train together. Each calls this function with the same arguments, and only the
        console of process 0 prints.
      asked: the updates to trace (--profile).
      command: the command of this start, from which messages suggest the next command.
      stop: records signals such as SIGTERM, after which the run saves and ends. If it is None, this call records them.

    Raises:
      UserError: an error that the user can fix. train/user_errors.py lists the kinds and their exit codes.
    """
    began = time.monotonic()
    asked.updates(0, config.train.steps)
    if processes.first:
        check(config.train.wandb)
    try:
        with startup.progress_lines(console, "planning the step", command.verbose) as tell:
            program = settled_program(config, tell=tell, agree=processes.from_first)
    except UserError:  # keeps the exit code of its kind
        raise
    except ValueError as error:  # a config that cannot run on these devices; the message has the remedy
        raise UserError(str(error)) from error
    data = open_data(DataConfig(**config.data))
    fingerprints = fingerprint_of_weights(program), fingerprint_of_adapter(program)
    batch = program.batch
    identity = recordable(config, command, batch.global_rows, data.fingerprint, *fingerprints, micro_rows=batch.rows)
    check_vocab(data, config.model.vocab_size)
    with (
        contextlib.nullcontext(stop) if stop else Stop(lambda: processes.interrupt("interrupted")) as stop,
        claimed(workdir, identity, extend=extend, processes=processes) as notes,
        contextlib.closing(Checkpoints(workdir, config.train.keep, processes, program.state)) as checkpoints,
        processes.together(),
    ):  # closing waits for the other processes, which are informed of an error before that
        for note in notes:
            console.print(note, soft_wrap=True)
        done = checkpoints.steps()
        finished = bool(done) and done[-1] >= config.train.steps and has_evaluation(workdir / METRICS, done[-1])
        if processes.from_first(finished):
            summary.say(console, f"{workdir} is finished: step {done[-1]} of {config.train.steps}")
            summary.show_commands(console, next_commands(program.config, data, workdir, command))
            return
        asked.updates(processes.from_first(done[-1] if done else 0), config.train.steps)
        startup.show_program(console, program, data.description, verbose=command.verbose)
        summary.show(console, [("passes", startup.passes(program, len(data.train)))])
        read = config.train.steps * program.batch.global_rows
        for line in startup.doubtful_settings(program.settings, data, read):
            summary.say(console, f"warning: {line}")
        compiled = startup.compile_or_refuse(program, command, workdir, console, processes)
        start = RunStart(workdir, console, processes, asked, command, began, stop)
        report = compiled.report
        with explained(
            report, program.mesh.local_devices[0], lambda: refusal.advice_without_compiling(report, command)
        ):
            _train_and_sample(start, program, data, checkpoints, compiled)


def _train_and_sample(
    start: RunStart, program: Program, data: Data, checkpoints: Checkpoints, compiled: startup.Compiled
) -> None:
    """Restores or creates the state, opens the logs, trains, and prints a sample of generated text at the end."""
    console, first, report = start.console, start.processes.first, compiled.report
    metrics_file, steps = start.workdir / METRICS, program.config.train.steps
    release_free_memory()  # memory freed after compiling
    before = measure(program)
    _expect_saves(program, checkpoints)
    _expect_restore(program, checkpoints, console)
    with host_phase("initialize"):
        state, position = start_state(program, checkpoints, console)
    traced = start.traced.updates(position.step, steps) if first else range(0)
    release_free_memory()  # memory freed after restoring
    adapters = adapter_parameters(program.state.params)
    with (
        contextlib.closing(MetricsLog(metrics_file, position.step, first)) as log,
        Recorders(
            start.workdir,
            flatten(program.config),
            report,
            first,
            lambda line: console.print(line, soft_wrap=True),
        ) as recorders,
        Display(console, steps, position.step) as display,
        profile.Profile(traced, start.workdir, report, console) as tracer,
    ):
        run = Run(
            program,
            data,
            checkpoints,
            log,
            recorders,
            display,
            compiled,
            model_flops_per_token(program.model, program.batch.seq_len, program.frozen, adapters),
            startup.peak_flops(program),
            predicted_in_use(report, before),
            tracer,
            start.processes,
            start.stop.names,
        )
        start.stop.watch()
        with contextlib.closing(Clock()) as clock, host_phase("train"):
            state = train(run, state, position, clock)
        display.close()
        _show_end(start, run, position.step + 1, before, state, clock)


def next_commands(config: ConfigDict, data: Data, workdir: Path, command: Command) -> dict[str, str]:
    """Returns the commands that a user may run after a finished run: what for -> command, quoted for a shell.

    Models that no family of transformers can express are not exported.
    """
    commands = {"for more steps": command.extend(workdir, 2 * config.train.steps)}
    if not isinstance(data.tokenizer, IdTokenizer):
        chat = ["--chat"] if config.data.format == "chat" else []
        commands["to generate text"] = shlex.join(["bytescope", "generate", str(workdir), *chat, "--prompt=TEXT"])
    with contextlib.suppress(UserError):
        config_json(config.model.to_dict(), read_config(config.init.folder) if config.init.folder else None)
        commands["for transformers and vLLM"] = shlex.join(
            ["bytescope", "export", str(workdir), str(workdir / "model")]
        )
    commands["for the page of the run"] = shlex.join(["bytescope", "report", str(workdir), "--html=run.html"])
    return commands


def _expect_saves(program: Program, checkpoints: Checkpoints) -> None:
    """Tells the ledger of host memory what saving will hold."""
    config, done = program.config.train, checkpoints.steps()
    overlaps = saves_overlap(config.steps, config.checkpoint_every, done[-1] if done else None)
    expect_saves(program.state, program.mesh.devices.flat[0].platform, jax.process_count(), overlaps)


def _expect_restore(program: Program, checkpoints: Checkpoints, console: Console) -> None:
    """Tells the ledger of host memory what restoring the newest checkpoint will hold, and warns if the processes of a
    node read the same bytes."""
    done = checkpoints.steps()
    if not done:
        return
    platform, folder = program.mesh.devices.flat[0].platform, checkpoints.root / str(done[-1])
    for finding in expect_restore(program.state, platform, jax.process_count(), folder):
        summary.say(console, f"warning: {finding.message}; {finding.remedy}")


def _expect_compile_of_sample() -> None:
    # The programs of the sample are compiled while the process holds the training state.
    libraries = sum(term.bytes for term in ledger().terms_of("compile") if term.name == LIBRARIES)
    held = max((resident()[0] or 0) - libraries, 0)
    expect([HostTerm("compile", "run before the sample", held, "resident memory of this process before the sample")])


def _show_end(
    start: RunStart, run: Run, first_step: int, before: LiveMemory | None, state: TrainState, clock: Clock
) -> None:
    """Prints the summary of this start of the run, a sample of generated text, and the commands to continue with.

    Args:
      first_step: number of this start's first update.
      before: device memory before the state was created.
      clock: has measured the durations of steps.
    """
    program, console, checkpoints = run.program, start.console, run.checkpoints
    last = max(checkpoints.steps(), default=0)  # 0: stopped before the first update, so nothing is saved
    text = ""
    if run.config.train.sample_tokens and not run.agreed:
        release_free_memory()  # temporaries of updates
        if can_generate(program):
            _expect_compile_of_sample()
        with host_phase("sample"):
            text = sample_text(program, run.data, state.model_params)
    record_host_memory(run, max(last, first_step - 1))
    rows = summary.end_rows(
        first=first_step,
        last=last,
        steps=run.config.train.steps,
        seconds=time.monotonic() - start.began,
        evaluated=run.evaluated,
        tokens_per_s=clock.tokens_per_s(),
        report=run.compiled.report,
        before=before,
        live=measure(program, run.device_peak),
        checkpoint=checkpoints.root / str(last) if last else None,
        page=start.workdir / PAGE,
    )
    if run.agreed:
        run.display.note(
            f"{run.agreed[0]}: saved step {last}; the command below resumes from there"
            if last
            else f"{run.agreed[0]} before the first update: nothing is saved"
        )
        summary.show(console, rows)
        command = start.command.resume(start.workdir)
        summary.show_commands(console, {"to resume" if last else "to start again": command})
        return
    waited = clock.waited()
    if waited >= MIN_NOTED_WAIT:
        run.display.note(
            f"the devices spent {100 * waited:.0f} % of the time waiting for data: raise data.workers and "
            "data.prefetch, or read token shards (bytescope prepare)"
        )
    run.recorders.finish(text)
    if text:
        run.display.note(f"sample:\n{text}")
    summary.show(console, rows)
    summary.show_commands(console, next_commands(run.config, run.data, start.workdir, start.command))
