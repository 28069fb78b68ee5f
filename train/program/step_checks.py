"""Checks for problems of a config that are visible only in the traced or the compiled step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bytescope.memory.devices.compiler import Compilation
from bytescope.memory.hlo import mesh as hlo_mesh
from bytescope.memory.hlo.dataflow import COLLECTIVES
from bytescope.memory.hlo.loops import MAX_TURNS, trip_count
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.jaxprs import checkpoint_names_in
from bytescope.model.names import NAMES
from bytescope.train.program.choices import Choices
from bytescope.train.step.state import TrainState


def check_traced(choices: Choices, loss: Callable[..., Any], state: TrainState) -> None:
    """Traces the loss and checks it against the config. The program must have the checkpoint names that the config
    saves or offloads. If the config needs an update layer by layer, the other settings must allow it.

    Args:
      choices: all settings of the training program.
      loss: (params, batch, dropout_key_B, frozen) -> (total, auxiliary output), where B is the number of sequences.
      state: the abstract training state.

    Raises:
      ValueError: the program lacks a checkpoint name of the config, or a setting needs the update of all layers
        together.
    """
    _check_checkpoint_names(choices, loss, state)
    settings = choices.settings
    if settings.layerwise_key and choices.precision.loss_scale == "dynamic":
        raise ValueError(
            f"{settings.layerwise_key} cannot be combined with precision.preset={settings.precision.preset}: an "
            "overflow in one layer would have to undo the update of all layers; choose precision.preset=bf16, which "
            "needs no loss scale"
        )
    if settings.optimizer.fused_backward and not choices.schedule:
        _check_fused_backward(choices, state)


def _check_checkpoint_names(choices: Choices, loss: Callable[..., Any], state: TrainState) -> None:
    # JAX itself ignores unknown names.
    asked, batch = choices.remat.asked, choices.batch
    if not asked:
        return
    tokens_BL = jax.ShapeDtypeStruct((batch.rows, batch.seq_len), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch.rows))
    arrays = dict.fromkeys(choices.batch_names, tokens_BL)
    # Some names exist only in custom gradients, so the gradient is traced.
    traced = jax.make_jaxpr(jax.grad(loss, has_aux=True))(state.params, arrays, keys, state.frozen)
    present = checkpoint_names_in(traced)
    if missing := asked - present:
        raise ValueError(
            f"checkpoint name {min(missing)!r} does not occur in this program: choose from {', '.join(sorted(present))}"
        )


def _check_fused_backward(choices: Choices, state: TrainState) -> None:
    settings, model = choices.settings, choices.model
    asked = "optimizer.fused_backward=true"
    if model.experts:
        raise ValueError(
            f"{asked} cannot be combined with model.experts={model.experts}: the auxiliary losses of experts are "
            "known only after all layers; set optimizer.fused_backward=false"
        )
    if "blocks" not in state.params:
        raise ValueError(
            f"{asked} cannot be used when all blocks are frozen (optimizer.freeze): no layer has an update; set "
            "optimizer.fused_backward=false"
        )
    if choices.batch.accumulation > 1:
        raise ValueError(
            f"{asked} cannot be combined with {choices.batch.accumulation} micro-steps per update "
            "(batch.accumulation), because a layer is updated before the next micro-batch is read: raise batch.micro "
            "instead"
        )
    if settings.optimizer.clip_norm and settings.optimizer.clip == "global":
        raise ValueError(
            f"{asked} cannot be combined with optimizer.clip_norm={settings.optimizer.clip_norm}: the norm of all "
            "gradients is known only after all layers are updated; set optimizer.clip=layer, or optimizer.clip_norm=0"
        )
    if not model.scan:
        raise ValueError(
            f"{asked} cannot be combined with model.scan=false: the update is part of the loop over layers; set "
            "model.scan=true"
        )
    for segment in choices.remat.segments(model.n_layers):
        if segment.groups > 1:
            raise ValueError(
                f"{asked} cannot be combined with remat.policy={segment.name}: groups of layers are recomputed "
                "together; set remat.policy=full, or another policy without groups"
            )


def check_compiled(choices: Choices, compilation: Compilation) -> None:
    """Checks the compiled step for offloading that has no effect and for deadlocks.

    Args:
      choices: all settings of the training program.
      compilation: the compiled step.

    Raises:
      ValueError: an offload policy moves nothing, or some pipeline stages would wait forever in a collective.
    """
    _check_offload_moves_tensors(choices, compilation)
    if choices.schedule:
        check_collectives(compilation, choices.layout.mesh)


def _check_offload_moves_tensors(choices: Choices, compilation: Compilation) -> None:
    segments = choices.remat.segments(choices.model.n_layers)
    offloading = [segment.name for segment in segments if segment.policy.offloads]
    on_cpu = choices.layout.mesh.devices.flat[0].platform == "cpu"
    if offloading and not on_cpu and compilation.stats and not compilation.stats.host_temp_bytes:
        raise ValueError(
            f"remat.policy={offloading[0]} moves nothing to host memory in this program: choose other names from "
            f"{', '.join(NAMES)}, or set remat.policy=full"
        )


def check_collectives(compilation: Compilation, mesh: Mesh) -> None:
    """Checks that no collective of a compiled step waits for the devices of a pipeline stage that does not execute it.

    The stages run loops and branches inside the `jax.shard_map` over the stages different numbers of times. So a
    collective inside such a loop must not wait for devices of two stages.

    A collective waits for these devices (openxla/xla, 2026, the sources of jaxlib 0.10):

    * All but permutes: the devices of its replica group.
    * A permute on the CPU: all devices. The rendezvous of a collective has the devices in its replica groups
      (`CollectiveThunk::GetRendezvousKey`); a permute has no replica groups, so its rendezvous has all devices.
    * A permute on a GPU: the devices that its source-target pairs connect, and all devices of the same process. The
      clique of a permute has all devices (`CollectivePermuteThunk::GetP2PConfig`), and the first call on a clique is a
      rendezvous of its devices in this process (`CollectiveThunk::FirstCallRendezvous`, pull request 38932). Not yet
      checked on hardware.

    Raises:
      ValueError: there is such a collective. The message names the first one and the remedy.
    """
    module, devices = compilation.program.module, list(mesh.devices.flat)
    stages = np.indices(mesh.devices.shape)[mesh.axis_names.index("stage")].ravel()
    for instruction in module.of_opcode(*COLLECTIVES, *(f"{kind}-start" for kind in COLLECTIVES)):
        if not _is_skipped_by_stages(module, instruction):
            continue
        links = hlo_mesh.groups_of(module.data, instruction.span, module.devices)
        waiting = list(links)
        if instruction.opcode.removesuffix("-start") == "collective-permute":
            # On the CPU all devices wait together, as if they were in one process.
            owners = [0 if devices[0].platform == "cpu" else device.process_index for device in devices]
            for process in set(owners):
                waiting.append([number for number, owner in enumerate(owners) if owner == process])
        for group in waiting:
            if len(set(stages[group])) > 1:
                spanned = [axis for axis in hlo_mesh.spanned(links, tuple(mesh.shape.items())) if axis != "stage"]
                remedies = [f"mesh.{axis}=1" for axis in (*spanned, "stage")]
                shape = module.shape(instruction)
                raise ValueError(
                    f"the step would hang: {module.metadata(instruction).op_name} ({instruction.opcode} "
                    f"{shape.dtype}{list(shape.dims)}) waits for {len(group)} devices, and some never reach it, "
                    "because pipeline stages run the loop around it different numbers of times; set "
                    f"{' or '.join(remedies)}"
                )


def _is_skipped_by_stages(module: Module, instruction: Instruction) -> bool:
    # A loop has the same number of iterations on all stages if XLA knows the number.
    pending, seen = [instruction.computation], {instruction.computation}
    while pending:
        for caller in module.callers(pending.pop()):
            op_name = module.metadata(caller).op_name
            if caller.opcode == "while":
                varies = bool(MAX_TURNS.search(op_name)) or trip_count(module, caller) is None
            else:
                varies = caller.opcode == "conditional"
            if varies and "shard_map" in op_name:
                return True
            if caller.computation not in seen:
                seen.add(caller.computation)
                pending.append(caller.computation)
    return False
