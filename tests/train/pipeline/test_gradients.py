"""Training through the stages of a pipeline: the losses of one device, for every schedule and all that it meets."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from bytescope.memory.devices.compiler import compile_lowered
from bytescope.train.checkpoints.checkpoint import Checkpoints, Position
from bytescope.train.data.batch_algebra import IGNORE
from bytescope.train.parallel.axes import AXES, make_mesh
from bytescope.train.pipeline.stages import reorder
from bytescope.train.program.step_checks import check_collectives
from bytescope.train.run.feed import put
from bytescope.train.run.initial_state import start_state
from support.exhaustive import exhaustive
from support.toy import first_state, fixed_batches, run_losses, small_program

# Adam divides rounding by rounding where a gradient is 0 but for that: an epsilon above it keeps losses together.
DEEP = {"model.n_layers": 8, "batch.mode": "scan", "batch.accumulation": 8, "optimizer.eps": 1e-5}
MIXTURE = {
    "model.experts": 4,
    "model.experts_per_token": 2,
    "model.d_expert": 16,
    "model.dense_layers": 1,
    "loss.balance": 0.1,
    "loss.router_z": 1e-3,
    "model.router": "sigmoid",
    "model.router_bias": True,
    "optimizer.router_bias_rate": 0.01,
}
FEW = {"batch.accumulation": 4}
INTERLEAVED = {"pipeline.schedule": "interleaved", "pipeline.virtual": 2}


def pipelined(stages, ranks=1, **overrides):
    """A program of `stages` x `ranks` devices and the sequences of one device."""
    mesh = {"mesh.stage": stages, "mesh.fsdp": ranks, "batch.micro": 4 // ranks}
    return small_program({**DEEP, **mesh, **overrides}, stages * ranks * overrides.get("mesh.tensor", 1))


def checked_losses(program):
    """Losses of three updates with the executable of a run: one that would hang is refused when it is compiled."""
    return run_losses(program, steps=3, step=program.compile_for_report().compiled)


@pytest.fixture(scope="module")
def plain():
    """Losses on one device, by the overrides that change the arithmetic."""
    known = {}

    def of(steps=3, **overrides):
        key = (steps, *sorted(overrides.items()))
        if key not in known:
            known[key] = run_losses(small_program({**DEEP, "batch.micro": 4, **overrides}), steps=steps)
        return known[key]

    return of


@pytest.mark.parametrize(
    ("stages", "ranks", "overrides"),
    [
        (4, 1, INTERLEAVED),
        *exhaustive((2, 1, {"pipeline.schedule": "v"}), (4, 2, {})),
    ],
    ids=str,
)
def test_every_schedule_has_the_losses_of_one_device(stages, ranks, overrides, plain):
    """Eight micro-batches: one a stage, two, and four."""
    np.testing.assert_allclose(checked_losses(pipelined(stages, ranks, **overrides)), plain(), rtol=1e-6)


@pytest.mark.parametrize(
    ("arithmetic", "overrides"),
    [
        ({"model.n_layers": 4, "batch.accumulation": 2, "lora.rank": 4}, {"mesh.tensor": 2}),
        *exhaustive(
            (
                {"model.dropout": 0.1, "model.tie_embeddings": True, "model.position": "learned", **FEW},
                {"remat.policy": "minimal", "mesh.strategy": "zero1", **INTERLEAVED},
            ),
            ({"model.n_layers": 7, **FEW}, {"pipeline.schedule": "v", "remat.policy": "none"}),
        ),
    ],
    ids=str,
)
def test_dropout_uneven_layers_and_adapters_have_the_losses_of_one_device(arithmetic, overrides, plain):
    """Two stages of two data-parallel ranks, some of them of two tensor-parallel ranks each: the gradients of
    adapters, which the latter replicate, must not move between them where the other stage does not take part."""
    mesh = {"mesh.stage": 2, "mesh.fsdp": 2, "batch.micro": 2}
    program = small_program({**DEEP, **arithmetic, **mesh, **overrides}, 4 * overrides.get("mesh.tensor", 1))
    np.testing.assert_allclose(checked_losses(program), plain(**arithmetic), rtol=1e-6)


def sent(x):
    """A permute within a stage."""
    return jax.lax.ppermute(x, "tensor", [(0, 1), (1, 0)])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("collective", "turns", "remedy"),
    [
        (sent, lambda stage: 1 - stage, "set mesh.tensor=1 or mesh.stage=1"),
        (lambda x: jax.lax.psum(x, "stage"), lambda stage: 1 - stage, "set mesh.stage=1"),
        (lambda x: jax.lax.psum(x, "tensor"), lambda stage: 1 - stage, ""),
        (sent, lambda stage: 3, ""),
    ],
    ids=("permute", "sum over stages", "sum within a stage", "equal turns"),
)
def test_a_collective_that_a_stage_skips_is_refused_in_a_line(devices, collective, turns, remedy):
    """On the CPU a permute waits for all devices, those of a stage that runs its loop no turn, too."""
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"stage": 2, "tensor": 2}, devices[:4])

    def step(x):
        return jax.lax.fori_loop(0, turns(jax.lax.axis_index("stage")), lambda _, x: collective(x), x)

    spec = jax.sharding.PartitionSpec("stage", "tensor")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compilation = compile_lowered(jax.jit(mapped).lower(jax.ShapeDtypeStruct((2, 2), jnp.float32)))
    if not remedy:
        check_collectives(compilation, mesh)
        return
    start = r"^the step would hang: jit\(step\)/.* \((collective-permute|all-reduce) float32\[1, 1\]\) waits for"
    with pytest.raises(ValueError, match=start) as caught:
        check_collectives(compilation, mesh)
    assert str(caught.value).endswith(remedy) and "\n" not in str(caught.value)


@pytest.mark.exhaustive
def test_layers_that_are_all_frozen_have_no_gradients(plain):
    frozen = {"model.n_layers": 4, "batch.accumulation": 2, "optimizer.freeze": "blocks.*"}
    np.testing.assert_allclose(run_losses(pipelined(2, **frozen), steps=2), plain(2, **frozen), rtol=1e-6)


@pytest.mark.exhaustive
def test_sixteen_bits_stay_within_rounding(plain):
    """XLA's CPU compiler would abort on sums of 16 bits over the stages."""
    bits = {"precision.preset": "bf16", "model.n_layers": 4, "batch.accumulation": 2}
    np.testing.assert_allclose(run_losses(pipelined(2, **bits), steps=2), plain(2, **bits), rtol=1e-3)


def go_on(program, state, steps):
    """(losses of further updates on fixed batches, the state after them)."""
    losses = []
    for host in fixed_batches(program.batch.global_rows, 32, 64, steps):
        batch = {name: x.reshape(*shape.shape) for (name, x), shape in zip(host.items(), program.batch_shapes.values())}
        state, metrics = program.step(state, put(batch, program.batch_shapes))
        losses.append(float(metrics["loss"]))
    return losses, state


@pytest.mark.exhaustive
def test_a_run_goes_on_under_other_stages_and_schedules(tmp_path):
    """From one device to a V of uneven stages, on to interleaved ones, and back: the curve of one device."""
    layers = {"model.n_layers": 7, "batch.accumulation": 2}
    programs = [
        small_program({**DEEP, **layers, "batch.micro": 4}),
        pipelined(2, **layers, **{"pipeline.schedule": "v"}),
        pipelined(2, **layers, **{**INTERLEAVED, "pipeline.virtual": 3}),
    ]
    programs.append(programs[0])
    state, alone, found, wanted = first_state(programs[0]), first_state(programs[0]), [], []
    for number, program in enumerate(programs):
        if number:
            with contextlib.closing(Checkpoints(tmp_path / str(number - 1), 1)) as checkpoints:
                state, _ = start_state(program, checkpoints, Console(quiet=True))
        losses, state = go_on(program, state, 2)
        found += losses
        losses, alone = go_on(programs[0], alone, 2)
        wanted += losses
        with contextlib.closing(Checkpoints(tmp_path / str(number), 1)) as checkpoints:
            checkpoints.save(state, Position(1, 8), order=program.order)
            checkpoints.wait()
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(*(jax.tree.leaves(each.params["blocks"])[0] for each in (state, alone)), atol=1e-6)


def test_evaluation_passes_through_the_stages():
    programs = [small_program({**DEEP, "batch.micro": 4}), pipelined(2, **{"pipeline.schedule": "v"})]
    host = next(fixed_batches(4, 32, 64, 1))
    states = [first_state(program) for program in programs]
    tallies = [
        program.evaluate(state.params, put(host, program.eval_shapes), None) for program, state in zip(programs, states)
    ]
    np.testing.assert_allclose(tallies[1].loss, tallies[0].loss, rtol=1e-6)


@pytest.mark.exhaustive
def test_experts_have_the_losses_loads_and_biases_of_one_device():
    """The gradients of routers, which tensor-parallel ranks replicate, must not move between them where the other stage
    does not take part. Loads and biases are in the order of layers."""
    overrides = {**DEEP, **MIXTURE, "model.n_layers": 5, "batch.accumulation": 2}
    mesh = {"mesh.stage": 2, "mesh.fsdp": 1, "mesh.expert": 2, "mesh.tensor": 2, "mesh.sequence_parallel": True}
    found = []
    for program in (
        small_program({**overrides, "batch.micro": 4}),
        small_program({**overrides, **mesh, "batch.micro": 2, "pipeline.schedule": "v"}, 8),
    ):
        step, state, losses = program.compile_for_report().compiled, first_state(program), []
        for host in fixed_batches(8, 32, 64, 3):
            batch = {name: x.reshape(2, 4, 32) for name, x in host.items()}
            state, metrics = step(state, put(batch, program.batch_shapes))
            losses.append(float(metrics["loss"]))
        frozen = reorder(jax.device_get(state.frozen), program.order, {})
        found.append((losses, np.asarray(metrics["expert_load"]), frozen["blocks"]["experts"]["router_bias"]))
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-6)
    assert 0 < np.abs(found[0][2]).max() <= np.float32(0.03)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"batch.mode": "multisteps"}, "set batch.mode=scan"),
        ({"model.scan": False}, "set model.scan=true"),
        ({"remat.layers": "0-2:none", "remat.policy": "full"}, "set one remat.policy for all layers"),
        ({"remat.policy": "sqrt"}, "remat.policy=sqrt"),
        ({"remat.policy": "offload"}, "keeps the saved block inputs in device memory"),
        ({"mesh.stage": 1, "pipeline.virtual": 2}, "there is only one stage"),
        ({"model.n_layers": 1}, "give at most 1 virtual stages"),
        ({"pipeline.schedule": "1f1bb"}, "did you mean 1f1b"),
        ({"pipeline.schedule": "zero_bubble"}, "zero_bubble is gone: set pipeline.schedule=1f1b"),
        ({"pipeline.virtual": 2}, "set pipeline.virtual=1"),
        ({"pipeline.schedule": "v", "pipeline.virtual": 3}, "set pipeline.virtual=2"),
        (
            {"pipeline.schedule": "interleaved", "pipeline.virtual": 2, "batch.accumulation": 3},
            "set batch.accumulation=4",
        ),
        ({"model.vocab_size": 63}, "set model.vocab_multiple=2"),
    ],
    ids=str,
)
def test_what_stages_cannot_be_combined_with_is_refused_in_a_line(overrides, words):
    count = overrides.get("mesh.stage", 2)
    with pytest.raises(ValueError) as caught:
        small_program({**DEEP, "mesh.stage": count, "mesh.fsdp": 1, **overrides}, count)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.exhaustive
def test_packed_rows_stay_within_their_examples():
    """Segments of a micro-batch travel with it: every stage reads those of the micro-batch that it has."""
    found = []
    for program in (
        small_program({**DEEP, "model.n_layers": 4, "batch.micro": 4, "batch.accumulation": 4}),
        pipelined(2, **{"model.n_layers": 4, "batch.accumulation": 4, "pipeline.schedule": "v"}),
    ):
        batch = {name: jnp.asarray(x).reshape(4, 4, 32) for name, x in next(fixed_batches(16, 32, 64, 1)).items()}
        lengths = jnp.arange(4, 20).reshape(4, 4, 1)  # of the first example of each row
        batch["segments"] = jnp.where(jnp.arange(32)[None, None] < lengths, 1, 2).astype(jnp.int32)
        keys = jax.random.split(jax.random.key(0), 16).reshape(4, 4)
        tally, grads = jax.jit(program.parts.gradients)(first_state(program), batch, keys)
        found.append((tally.loss, reorder(jax.device_get(grads), program.order, {})))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-6)
    for leaf, other in zip(*(jax.tree.leaves(grads) for _, grads in found), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-6 * np.abs(other).max())


@pytest.mark.exhaustive
def test_padding_and_a_pooled_balance_loss_pass_through_the_stages():
    """The pool of a micro-batch has the shares of layers on all stages; padding is in none of them."""
    overrides = {
        **MIXTURE,
        "model.n_layers": 4,
        "batch.accumulation": 2,
        "loss.balance_layers": "pooled",
        "data.format": "pairs",
        "data.packing": False,
    }
    found = []
    for program in (
        small_program({**DEEP, **overrides, "batch.micro": 4}),
        pipelined(2, **overrides, **{"pipeline.schedule": "v"}),
    ):
        batch = {name: jnp.asarray(x).reshape(2, 4, 32) for name, x in next(fixed_batches(8, 32, 64, 1)).items()}
        real = jnp.arange(32)[None, None] < jnp.arange(8, 24, 2).reshape(2, 4, 1)
        batch = {
            "inputs": batch["inputs"],
            "targets": jnp.where(real, batch["targets"], IGNORE),
            "mask": real.astype(jnp.int32),
        }
        keys = jax.random.split(jax.random.key(0), 8).reshape(2, 4)
        tally, grads = jax.jit(program.parts.gradients)(first_state(program), batch, keys)
        assert tally.routing.counts.sum() == 3 * 2 * real.sum()  # layers with experts, experts of a token
        found.append((tally, reorder(jax.device_get(grads), program.order, {})))
    for leaf, other in zip(*(jax.tree.leaves(each) for each in found), strict=True):
        np.testing.assert_allclose(leaf, other, atol=2e-6 * np.abs(other).max())
