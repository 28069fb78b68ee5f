"""The trainer's programs for `report` and `compare`: from the overrides of a config and a target to a program.

Overrides are dotted key -> text; the key `config` names the config. Nothing here starts jax before it has to.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bytescope.memory.compare import row_cache
from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.compare.prepared_program import PreparedProgram
from bytescope.memory.compare.program_factory import ProgramFactory
from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import Subject
from bytescope.train.plan.config_grid import LAYERS, OFFLOAD, POLICY, SAVE, ConfigRow, policy_keys, policy_words
from bytescope.train.program import config_files as configs
from bytescope.train.source import title_of

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from bytescope.memory.devices.compiler import Compilation
    from bytescope.memory.devices.targets import Target
    from bytescope.train.program.program import Program

AUTO = "auto"  # the remat policy that a search settles, by the rates of the target's devices


class ConfigFactory(ProgramFactory):
    """Makes the programs of configs; `program_factory.ProgramFactory` has the contract of each method."""

    reference = "bytescope.train.plan.config_factory:FACTORY"
    row = ConfigRow

    def __call__(self, overrides: Mapping[str, Any], target: Target) -> PreparedProgram:
        """Returns the program of a config on a target's devices, not compiled yet."""
        name, pairs = split(overrides)
        config = configs.load(name, pairs)
        return prepare_program(build_program(config, target), target, configs.flatten(config))

    def spell_out(self, chosen: Mapping[str, str], fixed: Mapping[str, Any]) -> Mapping[str, str]:
        """Returns the keys of a combination, with its policy as config keys.

        A config's own names for `custom` are an error under any other policy, so they are cleared then.
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
        """Returns the whole config, dotted key -> value. Raises UserError for an unknown key or a wrong value."""
        return configs.load_flat(*split(overrides))

    def check(self, overrides: Mapping[str, Any]) -> None:
        """Raises ValueError with an `exit_code` for a config that can run on no target."""
        check_config(*split(overrides))

    def sources(self) -> Sequence[Path]:
        """Returns the files of the model, and those of the trainer that make the step."""
        return row_cache.source_files(making_programs())

    def choosing_sources(self, resolved: Mapping[str, Any]) -> Sequence[Path]:
        """Returns the files that settle a remat policy of `auto`."""
        return row_cache.source_files(choosing_plans()) if resolved.get(POLICY) == AUTO else ()

    def formula(self, resolved: Mapping[str, Any], answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Returns the figures of the published formulas for a row, a `formulas.reconcile.Formula` as JSON."""
        from bytescope.memory.formulas import reconcile
        from bytescope.train.plan.config_facts import model_facts

        platform = answer["target"].get("platform", "")
        found = reconcile.formula_of(model_facts(resolved, answer["settled"], platform=platform), platform)
        return None if isinstance(found, str) else dataclasses.asdict(found)

    def describe(self, overrides: Mapping[str, Any], target: Target) -> dict[str, Any]:
        """Describes a config on a target for the search for the least recomputation; nothing is compiled.

        `block`: a `memory.remat.layer_graph.LayerGraph` as JSON, of one micro-batch. `micro_steps`: micro-batches per
        call of the step. `ranges`: maximum number of ranges of layers with different patterns. `policies`: policy ->
        names that it keeps, null if only the compiler knows. `moving`: the same for policies that move tensors to host
        memory. `tokens_per_update`: over all devices.
        """
        from bytescope.train.plan.block_description import describe_block, fixed_policies, most_ranges

        name, pairs = split({**overrides, "model.scan": "true"})
        program = build_program(configs.load(name, pairs), target)
        return {
            "block": dataclasses.asdict(describe_block(program)),
            "micro_steps": program.batch.accumulation if program.scanned else 1,
            "ranges": most_ranges(program),
            "policies": fixed_policies(),
            "moving": fixed_policies(moving=True),
            "tokens_per_update": tokens_of(program),
        }


FACTORY = ConfigFactory()


def making_programs() -> tuple[ModuleType, ...]:
    """Returns the modules, and packages with all their modules, whose code makes the step of a config or the figures of
    its row. Searches, views, commands and the code around the step are not among them."""
    from bytescope import model
    from bytescope.memory import formulas
    from bytescope.memory.remat import layer_discovery, layer_graph, layer_values, named_block
    from bytescope.train import parallel, pipeline, program, step
    from bytescope.train.data import batch_algebra
    from bytescope.train.plan import block_description, config_factory, config_facts, run_peak

    return (
        *(model, formulas, layer_discovery, layer_graph, layer_values, named_block),
        *(parallel, pipeline, program, step, batch_algebra),
        *(block_description, config_factory, config_facts, run_peak),
    )


def choosing_plans() -> tuple[ModuleType, ...]:
    """Returns the modules, and packages with all their modules, that choose the plan of `remat.policy=auto`."""
    from bytescope.memory import remat, seconds
    from bytescope.train.plan import config_grid, remat_auto

    return remat, seconds, config_grid, remat_auto


def split(overrides: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """Returns (the config's name, the other overrides). Raises ReportError if no config is named."""
    if not overrides.get(CONFIG):
        raise ReportError(f"{configs.NO_CONFIG}, or --grid=config=A,B")
    return overrides[CONFIG], [(key, text) for key, text in overrides.items() if key != CONFIG]


@contextlib.contextmanager
def config_mistakes() -> Iterator[None]:
    """A context that turns a config's ValueError into a ReportError, whose message says what to change."""
    try:
        yield
    except ValueError as error:
        if hasattr(error, "exit_code"):
            raise
        raise ReportError(" ".join(str(error).split())) from error


def check_config(name: str, overrides: Sequence[tuple[str, str]]) -> None:
    """Raises ValueError with an `exit_code` for a value in a config that can run on no target."""
    from bytescope.train.program.checks import check_without_devices
    from bytescope.train.program.program_settings import read_settings

    with config_mistakes():
        check_without_devices(read_settings(configs.load(name, overrides)))


def build_program(config: ConfigDict, target: Target) -> Program:
    """Returns the program of a config on a target's devices; `remat.policy=auto` is settled.

    Raises ValueError with an `exit_code` for a config that cannot run there.
    """
    from bytescope.train.plan.remat_auto import settled_program

    with config_mistakes():
        return settled_program(config, target.devices())


def prepare_program(program: Program, target: Target, config: Mapping[str, Any]) -> PreparedProgram:
    """Returns a program with the trainer's facts about it, for `report` and `compare`.

    config: dotted key -> value, as the report shows it.
    """
    from bytescope.memory.formulas import reconcile
    from bytescope.model.names import NAMES
    from bytescope.train.plan.config_facts import model_facts
    from bytescope.train.plan.run_peak import loop_overhead

    settled = settle(program)
    facts = model_facts(config, settled, platform=target.platform)

    def compile_program() -> tuple[Compilation, Target]:
        with config_mistakes():
            return program.compile_for_report(exact=True), target

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
        choices=f"attention {kernel} ({why})\nproducts {matmul} ({how})",
        measure=lambda compilation: measure_program(program, compilation.compiled),
    )


def subject_of(name: str, overrides: Sequence[tuple[str, str]], program: PreparedProgram, model_flops: int) -> Subject:
    """Returns what the report of a config's step calls it.

    name, overrides: as the command line gives them. model_flops: of one call, over all devices.
    """
    return Subject(
        name=title_of(name),
        changes=tuple(f"{key}={value}" for key, value in overrides),
        batch=program.batch,
        policy=program.policy,
        tokens=program.tokens_per_update or 0,
        calls=program.calls_per_update,
        model_flops=model_flops,
    )


def settle(program: Program) -> dict[str, Any]:
    """Returns the settled values of a program's config, as JSON values: the kernel under `model.attention`, the mesh's
    axes without -1, `batch` in words, and `segments`: for each range of layers {"layers", "policy", "groups", "save",
    "offload"}, the last two names of tensors."""
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
    """Returns the tokens per optimizer update, over all devices."""
    import jax

    return jax.tree.leaves(program.batch_shapes)[0].size * program.calls_per_update


def measure_program(program: Program, compiled: Any) -> dict[str, float | None]:
    """Runs updates of the executable on batches of zeros, from the program's initial state."""
    import time

    import jax
    import jax.numpy as jnp

    from bytescope.memory.compare.measured_steps import time_updates

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
