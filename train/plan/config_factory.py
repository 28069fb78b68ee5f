"""Builds the trainer's programs for `report` and `compare` from the overrides of a config and a target.

Overrides are dotted key -> text. The override `config` names the config. This module imports jax only when a program
is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.compare import row_cache, what_if
from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.compare.prepared_program import PreparedProgram
from bytescope.memory.compare.program_factory import ProgramFactory
from bytescope.memory.compare.what_if import Variant
from bytescope.memory.devices.xla_flags import flags_text
from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import Description
from bytescope.train.config_fields import FIELDS
from bytescope.train.launch.runtime import TRAIN_FRACTION
from bytescope.train.plan.config_grid import LAYERS, OFFLOAD, POLICY, SAVE, ConfigRow, policy_keys, policy_words
from bytescope.train.program import config_files as configs
from bytescope.train.source import NO_CONFIG, title_of

if TYPE_CHECKING:
    from bytescope.memory.devices.compiler import Compilation
    from bytescope.memory.devices.targets import Target
    from bytescope.memory.devices.xla_flags import Options
    from bytescope.train.program.program import Program

XLA_FLAGS = "xla.flags"
# Variant of a what-if -> the keys of the config that select it. The others are set by XLA_FLAGS.
WHAT_IF_KEYS: Mapping[str, Mapping[str, str]] = {
    "optimization level O1": {"xla.optimization_level": "O1"},
    "optimization level O3": {"xla.optimization_level": "O3"},
    "barriers from 64 MiB": {"xla.memory_fence": "64MiB"},
    what_if.SCHEDULER: {"xla.latency_hiding": "off"},
    **{f"memory slop {percent} %": {"xla.memory_slop": str(percent)} for percent in (50, 75, 125)},
    "cuBLAS, no Triton products": {"xla.gemm": "cublas"},
}
AUTO = "auto"  # the remat policy that a search replaces by a plan, with the rates of the target's devices


class ConfigFactory(ProgramFactory):
    """Builds training programs from configs, for the commands `report` and `compare`."""

    reference = "bytescope.train.plan.config_factory:FACTORY"
    row = ConfigRow
    memory_fraction = TRAIN_FRACTION

    def __call__(self, overrides: Mapping[str, Any], target: Target) -> PreparedProgram:
        """Returns the program of a config on the devices of a target. The program is not compiled yet.

        overrides: the name of the config under the key `config`, and values that replace values of the config, dotted
        key -> value.
        """
        name, pairs = split(overrides)
        return prepare_program(build_program(name, pairs, target), target, configs.load_flat(name, pairs))

    def spell_out(self, chosen: Mapping[str, str], fixed: Mapping[str, Any]) -> Mapping[str, str]:
        """Returns the config keys of one row of `compare`, dotted key -> text, in which a remat policy such as
        `custom(a,b)` is replaced by the keys `remat.policy=custom` and `remat.save=(a,b)`.

        With a policy other than `custom`, the tensor names that the config sets for `custom` are cleared, because they
        would be an error.

        Args:
            chosen: the keys in which the row differs from other rows, dotted key -> text.
            fixed: the overrides that all rows share.
        """
        if POLICY not in chosen:
            return chosen
        base = dict(fixed)
        if CONFIG in chosen:
            base[CONFIG] = chosen[CONFIG]
        flat = configs.load_flat(*split(base))
        keys = {**chosen, **policy_keys(chosen[POLICY])}
        ranges = any(str(text).endswith(":custom") for text in flat.get(LAYERS, ()))
        if keys[POLICY] != "custom" and not ranges:
            for key in (SAVE, OFFLOAD):
                if flat.get(key) and key not in keys:
                    keys[key] = "()"
        return keys

    def resolve(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the whole config after the overrides are applied, dotted key -> value.

        overrides: the name of the config under the key `config`, and values that replace values of the config.

        Raises:
            UserError: a key is unknown or a value is invalid.
        """
        return configs.load_flat(*split(overrides))

    def check(self, overrides: Mapping[str, Any]) -> None:
        """Checks the values of a config as far as this is possible without knowing the devices.

        Raises:
            ValueError: the config cannot run on any target. The error has an `exit_code`.
        """
        check_config(*split(overrides))

    def sources(self) -> Sequence[Path]:
        """Returns the source files that determine a training step: the model, and the parts of the trainer that build
        it.

        If one of these files changes, cached results are not used any more.
        """
        return row_cache.source_files(PROGRAM_MODULES)

    def choosing_sources(self, resolved: Mapping[str, Any]) -> Sequence[Path]:
        """Returns the source files whose code chooses, for `remat.policy=auto`, which tensors each layer saves; () if
        the config has another policy.

        If one of these files changes, cached results are not used any more.

        resolved: the whole config, dotted key -> value.
        """
        return row_cache.source_files(PLAN_MODULES) if resolved.get(POLICY) == AUTO else ()

    def split_options(
        self, overrides: Mapping[str, Any], target: Target
    ) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        """Splits overrides into the keys that are traced and the compiler options of the keys `xla.*`.

        Raises:
            ValueError: a key is unknown, or a value is invalid on the target. The error has an `exit_code`.
        """
        from bytescope.train.parallel.xla_options import compiler_options
        from bytescope.train.program.program_settings import read_settings

        traced = {key: text for key, text in overrides.items() if not key.startswith("xla.")}
        if len(traced) == len(overrides):
            return overrides, None
        name, pairs = split(overrides)
        with config_mistakes():
            settings = read_settings(configs.load(name, pairs))
            if settings.remat.policy == AUTO:  # the search for a plan compiles with the options
                return overrides, None
            xla_pass = settings.remat.xla_pass
            return traced, compiler_options(settings.xla, settings.mesh.prefetch, target.platform, xla_pass)

    def what_if(self, overrides: Mapping[str, Any], platform: str) -> Sequence[Variant]:
        """Returns the variants that `compare --what-if` compiles: the config with or without scan, as given, and with
        each row of `what_if.VARIANTS` as keys of the group `xla`, or as `xla.flags` if there is no key.

        overrides: the keys that all variants share. platform: the target's platform, such as "cuda".
        """
        flat = self.resolve(overrides)
        scan, remat_pass = flat["model.scan"], flat["remat.xla_pass"]
        loop = Variant(f"scan {'off' if scan else 'on'}", {"model.scan": str(not scan).lower()})
        variants = [loop, Variant(what_if.AS_GIVEN)]
        for change, options in what_if.VARIANTS.items():
            keys = WHAT_IF_KEYS.get(change)
            if change == what_if.REMAT:
                change = f"XLA's rematerialization {'off' if remat_pass else 'on'}"
                keys = {"remat.xla_pass": str(not remat_pass).lower()}
            flags = " ".join(filter(None, (flat[XLA_FLAGS], flags_text(options))))
            variants.append(Variant(change, keys or {XLA_FLAGS: flags}, what_if.refusal(options, platform)))
        return variants

    def formula(self, resolved: Mapping[str, Any], answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Returns the bytes and FLOPs that published formulas give for a compiled config; None if they do not cover it.

        The result is a `formulas.reconcile.Formula` as a JSON object, with keys such as `peak_bytes` and `model_flops`.

        Args:
            resolved: the whole config, dotted key -> value.
            answer: the JSON record of the compiled program that the worker process returned.
        """
        from bytescope.memory.formulas import reconcile
        from bytescope.train.plan.config_facts import model_facts

        platform = answer["target"].get("platform", "")
        formula = reconcile.formula_of(model_facts(resolved, answer["settled"], platform=platform), platform)
        return None if isinstance(formula, str) else dataclasses.asdict(formula)

    def describe(self, overrides: Mapping[str, Any], target: Target) -> dict[str, Any]:
        """Describes a config on a target for the remat search, which looks for the least recomputation that fits.
        Nothing is compiled.

        overrides: the name of the config under the key `config`, and values that replace values of the config.

        The keys of the result:

        - `block`: the graph of one block for one micro-batch, a `memory.remat.layer_graph.LayerGraph` as JSON.
        - `micro_steps`: number of micro-batches per call of the step.
        - `ranges`: maximum number of ranges of layers with different remat policies.
        - `policies`: policy -> names of the tensors that it saves; null if only the compiler knows them.
        - `moving`: the same mapping for the policies that move tensors to host memory.
        - `tokens_per_update`: number of tokens per update, over all devices.
        """
        from bytescope.train.plan.block_description import describe_block, fixed_policies, max_ranges

        name, pairs = split({**overrides, "model.scan": "true"})
        program = build_program(name, pairs, target)
        return {
            "block": dataclasses.asdict(describe_block(program)),
            "micro_steps": program.batch.accumulation if program.scanned else 1,
            "ranges": max_ranges(program),
            "policies": fixed_policies(),
            "moving": fixed_policies(moving=True),
            "tokens_per_update": tokens_of(program),
        }


FACTORY = ConfigFactory()


# The modules whose code determines a training step, or the figures of the step in `compare`. If this code changes,
# cached results are not used any more. A package stands for all its modules. Searches, views, commands and the training
# loop are not included.
PROGRAM_MODULES = (
    *("bytescope.model", "bytescope.memory.formulas"),
    *(f"bytescope.memory.remat.{name}" for name in ("layer_discovery", "layer_graph", "layer_values", "named_block")),
    *(f"bytescope.train.{name}" for name in ("parallel", "pipeline", "program", "step")),
    *("bytescope.train.config_fields", "bytescope.train.data.batch_algebra"),
    *(f"bytescope.train.plan.{name}" for name in ("block_description", "config_factory", "config_facts", "run_memory")),
)
# The modules whose code chooses, for `remat.policy=auto`, which tensors each layer saves.
PLAN_MODULES = (
    *("bytescope.memory.remat", "bytescope.memory.seconds"),
    *("bytescope.train.plan.config_grid", "bytescope.train.plan.remat_auto"),
)


def split(overrides: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """Splits overrides (dotted key -> value) into the name of the config, which is the value of the key `config`, and
    pairs (dotted key, text) of all others.

    Raises:
        ReportError: no config is named.
    """
    if not overrides.get(CONFIG):
        raise ReportError(NO_CONFIG)
    return overrides[CONFIG], [(key, text) for key, text in overrides.items() if key != CONFIG]


@contextlib.contextmanager
def config_mistakes() -> Iterator[None]:
    """Context manager that re-raises the ValueError of an invalid config as a ReportError, with the same message on
    one line."""
    try:
        yield
    except ValueError as error:
        if hasattr(error, "exit_code"):
            raise
        raise ReportError(" ".join(str(error).split())) from error


def check_config(name: str, overrides: Sequence[tuple[str, str]]) -> None:
    """Checks the values of a config as far as this is possible without knowing the devices. `overrides`: pairs (dotted
    key, text).

    The cache records which configs have passed. A check imports jax and the model, which a command does not need if all
    its results are in the cache.

    Raises:
        ValueError: a value of the config is invalid on every target. The error has an `exit_code`.
    """
    from bytescope.memory.devices.compiler import versions

    flat = configs.load_flat(name, overrides)
    sources = row_cache.digest_files(row_cache.source_files(PROGRAM_MODULES))
    passed = row_cache.key(flat, "", versions(), sources, measure=False) + "-check"
    if not names_files(flat) and row_cache.read(row_cache.folder(), passed):
        return
    from bytescope.train.program.checks import check_without_devices
    from bytescope.train.program.program_settings import read_settings

    with config_mistakes():
        check_without_devices(read_settings(configs.load(name, overrides)))
    if not names_files(flat):
        row_cache.write(row_cache.folder(), passed, {"status": "ok"})


def names_files(flat: Mapping[str, Any]) -> bool:
    """Returns whether a config has the path of a file or folder. If so, the compiled program may depend on its content.
    `flat`: the whole config, dotted key -> value."""
    return any(flat[key] and Path(flat[key]).exists() for key, field in FIELDS.items() if field.path)


def build_program(name: str, overrides: Sequence[tuple[str, str]], target: Target) -> Program:
    """Builds the training program of a config for the devices of a target. `overrides`: pairs (dotted key, text).

    `remat.policy=auto` is replaced by a plan (which tensors each layer saves) that fits the memory budget.

    Raises:
        ValueError: the config cannot run on the target. The error has an `exit_code`.
    """
    from bytescope.train.plan.remat_auto import settled_program

    with config_mistakes():
        return settled_program(configs.load(name, overrides), target.devices(), target=target)


def prepare_program(program: Program, target: Target, config: Mapping[str, Any]) -> PreparedProgram:
    """Returns a program that is not compiled yet, as a `PreparedProgram`: a function that compiles it, and the facts
    that `report` and `compare` show, such as its config and its tokens per update.

    config: the config to show in the report, dotted key -> value.
    """
    from bytescope.memory.formulas import reconcile
    from bytescope.model.names import NAMES
    from bytescope.train.plan.config_facts import model_facts
    from bytescope.train.plan.run_memory import loop_overhead
    from bytescope.train.program.checks import check_optimization_level

    settled = settle(program)
    facts = model_facts(config, settled, platform=target.platform)

    def compile_program(options: Options | None = None) -> tuple[Compilation, Target]:
        with config_mistakes():
            if options is not None:
                level = options.get("optimization_level")
                check_optimization_level(f"O{int(level) // 10}" if level else "", program.kernel[0], program.mesh.size)
            return program.compile_for_report(exact=True, pool_bytes=target.pool_bytes, options=options), target

    (kernel, why), (matmul, how) = program.kernel, program.matmul
    return PreparedProgram(
        compile_program,
        config=config,
        names=tuple(NAMES),
        loop=loop_overhead(program),
        calls_per_update=program.calls_per_update,
        tokens_per_update=tokens_of(program),
        facts=facts,
        model_flops=lambda counted: reconcile.model_flops(facts, counted),
        settled=settled,
        batch=settled["batch"],
        policy=policy_words(settled["segments"]),
        choices=f"attention {kernel} ({why})\nmatmuls {matmul} ({how})",
        measure=lambda compilation: measure_program(program, compilation.compiled),
    )


def describe(
    name: str, overrides: Sequence[tuple[str, str]], program: PreparedProgram, model_flops: int
) -> Description:
    """Returns the description of a config for its report: the name, the changed keys, the batch and the remat policy.

    Args:
        name: the config as the command line names it.
        overrides: pairs (dotted key, text) as the command line gives them.
        program: the program of the step.
        model_flops: FLOPs of the model per call of the step, over all devices.
    """
    return Description(
        name=title_of(name),
        changes=tuple(f"{key}={value}" for key, value in overrides),
        batch=program.batch,
        policy=program.policy,
        tokens=program.tokens_per_update or 0,
        calls=program.calls_per_update,
        model_flops=model_flops,
    )


def settle(program: Program) -> dict[str, Any]:
    """Returns the values that the trainer chose where the config leaves a choice (`auto` or -1), as JSON values.

    The keys:

    - `model.attention`: the attention kernel.
    - `mesh.AXIS`: the number of devices of each mesh axis, without -1.
    - `batch`: a description of the batch.
    - `segments`: a list with an entry for each range of layers: `layers` (their number), `policy` (the remat policy),
      `groups` (of layers that a nested policy checkpoints), `save` and `offload` (names of the tensors that are saved
      on the device and in host memory).
    """
    from bytescope.model.remat.policies import POLICIES

    segments = []
    for segment in program.remat.segments(program.model.n_layers):
        moved = segment.policy.moved
        segments.append(
            {
                "layers": segment.stop - segment.start,
                "policy": segment.name if segment.name in POLICIES else "custom",
                "groups": segment.groups,
                "save": [name for name in segment.policy.names if name not in moved],
                "offload": list(moved),
            }
        )
    mesh = {f"mesh.{axis}": size for axis, size in program.mesh.shape.items()}
    return {"model.attention": program.kernel[0], "batch": str(program.batch), **mesh, "segments": segments}


def tokens_of(program: Program) -> int:
    """Returns the number of tokens per optimizer update, over all devices."""
    import jax

    return jax.tree.leaves(program.batch_shapes)[0].size * program.calls_per_update


def measure_program(program: Program, compiled: Any) -> dict[str, float | None]:
    """Runs and times updates of a compiled step, from the program's initial state and with batches of zeros.

    Returns `step_seconds` (median per update), `tokens_per_s` over all devices, and `peak_bytes` on one device (None if
    the backend does not report it).

    compiled: the compiled step, as jax returns it.
    """
    import time

    import jax
    import jax.numpy as jnp

    from bytescope.memory.compare.prepared_program import time_updates

    state = program.init()
    zeros = jax.tree.map(
        lambda array: jax.jit(lambda: jnp.zeros(array.shape, array.dtype), out_shardings=array.sharding)(),
        program.batch_shapes,
    )

    def update() -> float:
        nonlocal state
        began = time.perf_counter()
        for _ in range(program.calls_per_update):
            state, metrics = compiled(state, zeros)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - began

    return time_updates(update, program.mesh.local_devices, tokens_of(program))
