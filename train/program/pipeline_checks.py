"""What a pipeline cannot be combined with, each in a line."""

from jax.sharding import Mesh
from ml_collections import ConfigDict

from bytescope.memory.devices.compiler import Compilation
from bytescope.memory.hlo import divergence
from bytescope.memory.hlo import mesh as hlo_mesh
from bytescope.model import ModelConfig, RematPlan
from bytescope.train.data.batch_algebra import BatchAlgebra
from bytescope.train.parallel.layout import Layout
from bytescope.train.pipeline.schedule import Schedule
from bytescope.train.pipeline.schedules import make_schedule
from bytescope.train.pipeline.stages import Stages


def check_pipeline(
    config: ConfigDict, layout: Layout, model: ModelConfig, remat: RematPlan, batch: BatchAlgebra
) -> tuple[Schedule, Stages] | tuple[None, None]:
    """The schedule of a config, and where its layers lie; None without stages.

    Raises:
      ValueError: what stages cannot be combined with, with the remedy.
    """
    stages = layout.mesh.shape["stage"]
    asked = f"mesh.stage={stages}"
    if stages == 1:
        if config.pipeline.virtual > 1:
            raise ValueError(
                f"pipeline.virtual={config.pipeline.virtual} with mesh.stage=1: there are no stages; set "
                "mesh.stage, or pipeline.virtual=1"
            )
        return None, None
    segments = remat.segments(model.n_layers)
    refused = [
        (
            config.batch.mode != "scan",
            f"batch.mode={config.batch.mode}",
            "micro-batches of one step pass through the stages; set batch.mode=scan",
        ),
        (not model.scan, "model.scan=false", "stages hold stacked layers; set model.scan=true"),
        (
            model.experts and model.moe_every > 1,
            f"model.moe_every={model.moe_every}",
            "a chunk has its dense layers first; set model.moe_every=1",
        ),
        (
            len(segments) > 1,
            f"remat.layers={','.join(config.remat.layers)}",
            "one program runs on all stages; set one remat.policy for all layers",
        ),
        (
            any(segment.groups > 1 for segment in segments),
            f"remat.policy={config.remat.policy}",
            "a chunk keeps the inputs of its blocks; set remat.policy=full",
        ),
        (
            any(segment.policy.offloads for segment in segments),
            f"remat.policy={config.remat.policy}",
            "the stash is in device memory; set remat.policy=full",
        ),
        (
            config.optimizer.fused_backward,
            "optimizer.fused_backward=true",
            "gradients are sums over micro-batches; set it false",
        ),
        (config.offload.params, "offload.params=true", "stages read their layers once a micro-batch; set it false"),
        (
            config.mesh.context > 1,
            f"mesh.context={config.mesh.context}",
            "sends of a ring wait for all devices, whose stages are at different layers; set mesh.context=1",
        ),
        (
            config.pipeline.schedule == "zero_bubble",
            "pipeline.schedule=zero_bubble",
            "with recomputation its gradients of weights recompute each block once more; set pipeline.schedule=v",
        ),
    ]
    for is_asked, what, why in refused:
        if is_asked:
            raise ValueError(f"{asked} with {what}: {why}")
    schedule = make_schedule(config.pipeline.schedule, stages, batch.accumulation, config.pipeline.virtual)
    if model.n_layers < schedule.virtual_stages:
        raise ValueError(
            f"{asked} with model.n_layers={model.n_layers}: {schedule.virtual_stages} virtual stages need "
            "a layer each; set fewer stages, or a smaller pipeline.virtual"
        )
    if model.padded_vocab % (stages * layout.mesh.shape["tensor"]):
        raise ValueError(
            f"{asked} with {model.padded_vocab} rows of the token table, which the stages share: set "
            f"model.vocab_multiple={stages * layout.mesh.shape['tensor']}"
        )
    return schedule, Stages.of(model, schedule)


def check_collectives(compilation: Compilation, mesh: Mesh) -> None:
    """Checks that no collective of a compiled step waits for devices of a stage that skips it.

    Raises:
      ValueError: names the first collective that does, with the remedy.
    """
    module, devices = compilation.program.module, mesh.devices.flat
    axes, (_, layouts) = tuple(mesh.shape.items()), hlo_mesh.of_compiled(compilation.executable)
    skipped = next(
        divergence.skipped_collectives(
            module,
            axes,
            hlo_mesh.match(module, layouts),
            devices[0].platform,
            [device.process_index for device in devices],
        ),
        None,
    )
    if skipped is None:
        return
    spanned = [axis for axis in hlo_mesh.spanned(skipped.links, axes) if axis != "stage"]
    remedies = [f"mesh.{axis}=1" for axis in (*spanned, "stage")]
    shape = module.shape(skipped.instruction)
    raise ValueError(
        f"the step would hang: {skipped.op_name} ({skipped.instruction.opcode} {shape.dtype}{list(shape.dims)}) waits "
        f"for {len(skipped.waits)} devices, and some never reach it, because pipeline stages run the loop around it "
        f"different numbers of times; set {' or '.join(remedies)}"
    )
