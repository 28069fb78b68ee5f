"""Training with experts: the losses of every mesh, auxiliary losses, biases toward balance, and what is refused."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from bytescope.train.checkpoints.checkpoint import Checkpoints, Position
from bytescope.train.data.packing import ExampleSource
from bytescope.train.pipeline.stages import reorder
from bytescope.train.run.feed import put
from bytescope.train.run.initial_state import start_state
from bytescope.train.step.routing import EXPERT_LOAD, ROUTING_METRICS, move_router_biases, routing_metrics
from support.exhaustive import exhaustive
from support.toy import first_state, fixed_batches, made_state, run_losses, small_program

MIXTURE = {
    "model.experts": 8,
    "model.experts_per_token": 2,
    "model.d_expert": 16,
    "model.dense_layers": 1,
    "model.n_layers": 3,
    "model.shared_experts": 1,
    "loss.router_z": 1e-3,
}
BIASED = {**MIXTURE, "model.router": "sigmoid", "model.router_bias": True, "optimizer.router_bias_rate": 0.01}


def losses(overrides, devices=1):
    return run_losses(small_program({**BIASED, **overrides}, devices), steps=3)


@pytest.fixture(scope="module")
def plain():
    return losses({"batch.micro": 8})


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        ({"mesh.expert": 4, "mesh.fsdp": 2, "batch.micro": 1, "mesh.dispatch": "ragged_all_to_all"}, 8),
        *exhaustive(
            (
                {
                    "mesh.expert": 2,
                    "mesh.tensor": 2,
                    "mesh.fsdp": 1,
                    "mesh.strategy": "ddp",
                    "batch.micro": 4,
                    "mesh.sequence_parallel": True,
                    "remat.policy": "custom",
                    "remat.save": "router_logits,expert_gate,expert_up",
                },
                4,
            ),
            (
                {
                    "mesh.expert": 2,
                    "mesh.fsdp": 2,
                    "mesh.strategy": "zero1",
                    "batch.micro": 2,
                    "model.moe_kernel": "capacity",
                    "model.capacity_factor": 8.0,
                    "remat.layers": "0-2:minimal,2-3:none",
                    "remat.policy": "full",
                },
                4,
            ),
        ),
    ],
    ids=str,
)
def test_every_layout_has_the_losses_of_one_device(overrides, devices, plain):
    np.testing.assert_allclose(losses(overrides, devices), plain, rtol=1e-5)


@pytest.mark.exhaustive
def test_layers_of_both_kinds_may_alternate_and_micro_batches_in_a_loop_and_by_multisteps_agree():
    """With layers unrolled in one of them."""
    alternate = {"model.moe_every": 2, "model.dense_layers": 0, "model.n_layers": 4}
    both = [
        losses({**alternate, "batch.micro": 4, "batch.accumulation": 2, "batch.mode": mode, "model.scan": scan})
        for mode, scan in (("scan", True), ("multisteps", False))
    ]
    np.testing.assert_allclose(*both, rtol=1e-5)


def batch_of(program):
    batch = next(fixed_batches(program.batch.rows, program.batch.seq_len, program.model.vocab_size, 1))
    return {name: jnp.asarray(x) for name, x in batch.items()}


@pytest.mark.parametrize("layers", [{}, {"loss.balance_layers": "pooled"}], ids=["separate", "pooled"])
def test_auxiliary_losses_are_means_over_layers_times_the_counted_tokens(layers):
    """The pooled loss is one value for all layers; tests/train/weights/test_mixtures.py has it by transformers."""
    program = small_program({**MIXTURE, "loss.balance": 0.5, **layers})
    batch, params = batch_of(program), first_state(program).params
    objective, (loss, load) = jax.jit(program.parts.loss)(params, batch, None)
    tokens = (batch["targets"] >= 0).sum()
    wanted = loss + (0.5 * load.balance.mean() + 1e-3 * load.router_z.mean()) * tokens
    np.testing.assert_allclose(objective, wanted, rtol=1e-6)
    assert load.counts.shape == (2, 8) and objective > loss
    assert (load.balance[0] == load.balance[1]) == bool(layers)


def gradients_of(overrides, devices=1, balance=0.0):
    """The tally and the gradients of an update on eight rows, of which the last have few unmasked targets."""
    program = small_program({**MIXTURE, "loss.router_z": 0.1, "loss.balance": balance, **overrides}, devices)
    batch = {
        name: jnp.asarray(x).reshape(-1, program.batch.rows, 32)
        for name, x in next(fixed_batches(8, 32, 64, 1, masked=0.45)).items()
    }
    keys = jax.random.split(jax.random.key(0), 8).reshape(-1, program.batch.rows)
    tally, grads = jax.jit(program.parts.gradients)(first_state(program), batch, keys)
    return tally, reorder(jax.device_get(grads), program.order, {})


def assert_same_gradients(found, wanted):
    leaves = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, leaf), other in zip(leaves, jax.tree.leaves(found), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(other, leaf, atol=1e-6 * np.abs(leaf).max(), err_msg=name)


@pytest.fixture(scope="module")
def one_batch():
    return gradients_of({})


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        ({"batch.micro": 2, "batch.accumulation": 4}, 1),
        ({"batch.micro": 1, "batch.accumulation": 2, "mesh.fsdp": 4, "mesh.strategy": "zero2"}, 4),
        ({"batch.micro": 2, "batch.accumulation": 4, "mesh.stage": 2}, 2),
    ],
    ids=["one device", "ranks", "stages"],
)
def test_the_z_loss_of_micro_batches_with_uneven_masks_is_that_of_one_batch(overrides, devices, one_batch):
    """Gradients, of the routers too, and the metrics of the routing but the balance loss."""
    tally, grads = gradients_of({"batch.mode": "scan", **overrides}, devices)
    assert_same_gradients(grads, one_batch[1])
    found, wanted = (jax.device_get(routing_metrics(each.routing, each.tokens)) for each in (tally, one_batch[0]))
    for name in ("router_z", "router_entropy", "load_max", "idle_experts"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("overrides", "devices", "layers"),
    [
        ({"batch.micro": 2, "mesh.fsdp": 2}, 2, "separate"),
        *exhaustive(
            ({"batch.micro": 4, "mesh.stage": 2}, 2, "separate"),
            ({"batch.micro": 4, "mesh.stage": 2}, 2, "pooled"),
        ),
    ],
    ids=["ranks", "stages", "stages, pooled"],
)
def test_the_balance_loss_of_uneven_masks_is_that_of_one_device(overrides, devices, layers):
    """Of the same micro-batches: it is computed over the tokens that all ranks have of one."""
    both = {"batch.mode": "scan", "batch.accumulation": 2, "loss.balance_layers": layers}
    wanted = gradients_of({**both, "batch.micro": 4}, balance=0.1)
    found = gradients_of({**both, **overrides}, devices, balance=0.1)
    assert_same_gradients(found[1], wanted[1])
    np.testing.assert_allclose(found[0].routing.balance, wanted[0].routing.balance, rtol=1e-6)


def step_on_examples(overrides, devices, rows):
    """Metrics and parameters after an update on examples of 20 and 12 positions: four rows of two each, or eight."""
    program = small_program(
        {**MIXTURE, "model.n_layers": 2, "loss.balance": 0.1, "data.format": "pairs", "batch.micro": rows, **overrides},
        devices,
    )
    starts = np.cumsum([0, *[21, 13] * 4])
    tokens = np.random.default_rng(5).integers(0, 64, starts[-1]).astype(np.uint16)
    learned = np.arange(starts[-1]) % 3 > 0
    source = ExampleSource(
        tokens, learned, starts, np.arange(8), seq_len=32, packing=program.config.data.packing, vocab_size=64
    )
    assert len(source) == rows
    state, metrics = program.step(first_state(program), put(source.batch(range(rows)), program.batch_shapes))
    return jax.device_get((metrics, state.params))


@pytest.fixture(scope="module")
def packed_step():
    """Four rows without padding."""
    return step_on_examples({}, 1, 4)


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        ({"model.moe_kernel": "capacity", "model.capacity_factor": 1.0, "mesh.context": 2, "mesh.fsdp": 1}, 2),
    ],
    ids=str,
)
def test_padded_examples_have_the_metrics_and_the_update_of_packed_ones(overrides, devices, packed_step):
    """With slots that the tokens fit into, but not the padding too."""
    (metrics, params), (wanted, packed_params) = (
        step_on_examples({"data.packing": False, **overrides}, devices, 8),
        packed_step,
    )
    assert metrics.keys() == wanted.keys() and metrics["dropped_share"] == 0
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    wanted, found = packed_params["w_token"], params["w_token"]
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.fixture(scope="module")
def biased():
    return small_program(BIASED)


def test_a_step_moves_the_biases_and_tells_the_load(biased):
    program = biased
    state = first_state(program)
    before = np.asarray(state.frozen["blocks"]["experts"]["router_bias"])
    _, (_, load) = jax.jit(program.parts.loss)(state.params, batch_of(program), None, state.frozen)
    counts = np.asarray(load.counts)
    state, metrics = program.step(state, put(jax.device_get(batch_of(program)), program.batch_shapes))
    moved = np.asarray(state.frozen["blocks"]["experts"]["router_bias"]) - before
    np.testing.assert_allclose(moved, 0.01 * np.sign(counts.mean(-1, keepdims=True) - counts), atol=1e-7)
    assert moved.dtype == np.float32 and set(ROUTING_METRICS) <= set(metrics)
    np.testing.assert_allclose(metrics["load_max"], (counts.max(-1) / counts.mean(-1)).max(), rtol=1e-6)
    np.testing.assert_allclose(metrics[EXPERT_LOAD], counts / counts.mean(-1, keepdims=True), rtol=1e-6)


def test_a_resumed_run_goes_on_bit_for_bit(biased, tmp_path):
    """Parameters, moments, and biases, which are in the checkpoint though no gradient trains them."""

    def go_on(state):
        return biased.step(state, put(jax.device_get(batch_of(biased)), biased.batch_shapes))[0]

    state = go_on(first_state(biased))
    assert np.asarray(state.frozen["blocks"]["experts"]["router_bias"]).any()
    with contextlib.closing(Checkpoints(tmp_path, 1)) as checkpoints:
        checkpoints.save(state, Position(1, biased.batch.rows))
        checkpoints.wait()
        restored, _ = start_state(biased, checkpoints, Console(quiet=True))
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(go_on(each)) for each in (restored, state)))


def test_biases_come_back_beside_what_else_is_frozen(tmp_path):
    """The routers from the seed, their biases from the checkpoint."""
    program = small_program({**BIASED, "model.scan": False, "optimizer.freeze": "*w_router"})
    state = made_state(program)
    for layer in (1, 2):
        state.frozen["blocks"][layer]["experts"]["router_bias"] += layer
    with contextlib.closing(Checkpoints(tmp_path, 1)) as checkpoints:
        checkpoints.save(state, Position(1, program.batch.rows))
        checkpoints.wait()
        blocks = start_state(program, checkpoints, Console(quiet=True))[0].frozen["blocks"]
    first = program.init_frozen()["blocks"]
    for layer in (1, 2):
        np.testing.assert_array_equal(blocks[layer]["experts"]["router_bias"], np.full(8, layer, np.float32))
        np.testing.assert_array_equal(blocks[layer]["experts"]["w_router"], first[layer]["experts"]["w_router"])


def test_biases_stay_where_adapters_alone_are_trained(biased):
    parts = small_program({**BIASED, "lora.rank": 4}).parts
    frozen = object()
    assert parts.move_biases(frozen, None) is frozen and biased.parts.bias_rate > parts.bias_rate == 0


@pytest.mark.quick
def test_biases_of_unrolled_layers_move_layer_by_layer():
    frozen = {"blocks": {1: {"experts": {"router_bias": jnp.zeros(2)}}, 3: {"experts": {"router_bias": jnp.ones(2)}}}}
    moved = move_router_biases(frozen, jnp.array([[1.0, 3.0], [2.0, 2.0]]), jnp.float32(0.5))["blocks"]
    assert moved[1]["experts"]["router_bias"].tolist() == [0.5, -0.5]
    assert moved[3]["experts"]["router_bias"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "precision",
    [
        {"mesh.strategy": "zero1", "mesh.fsdp": 2, "batch.micro": 4},
        *exhaustive(
            {"precision.preset": "bf16_params"},
            {"precision.cast": "step"},
        ),
    ],
    ids=str,
)
def test_routers_are_float32_in_every_precision(precision):
    program = small_program({**BIASED, "precision.preset": "bf16", **precision}, precision.get("mesh.fsdp", 1))
    assert program.state.params["blocks"]["experts"]["w_router"].dtype == jnp.float32
    copy = jax.eval_shape(program.parts.weights.copy, program.state.params)["blocks"]["experts"]
    assert copy["w_router"].dtype == jnp.float32 and copy["w_up"].dtype == jnp.bfloat16
    after = jax.eval_shape(program.step, program.state, program.batch_shapes)[0]
    assert after.params["blocks"]["experts"]["w_router"].dtype == jnp.float32


def test_no_device_gathers_the_experts_of_others_for_an_update():
    text = (
        small_program(
            {
                **MIXTURE,
                "model.d_model": 64,
                "model.d_expert": 64,
                "optimizer.name": "adamw_8bit",
                "mesh.expert": 4,
                "mesh.fsdp": 1,
                "batch.micro": 2,
            },
            4,
        )
        .compile()
        .as_text()
    )
    lines = [line for line in text.splitlines() if " all-gather(" in line]
    assert lines and not [line for line in lines if "optimizer" in line]


def test_replicas_sum_shards_of_the_experts_gradients():
    """Reduced over fsdp first, of which each rank keeps its half, so that the sum over data is one of halves."""
    mesh = {"mesh.data": 2, "mesh.fsdp": 2, "batch.micro": 2, "model.dense_layers": 0, "model.n_layers": 1}
    text = small_program({**MIXTURE, **mesh, "model.shared_experts": 0}, 4).compile().as_text()
    sums = [line.split(" all-reduce(")[0] for line in text.splitlines() if " all-reduce(" in line]
    assert sum(line.count("f32[8,16,16]") for line in sums) == 3  # gate, up and down, each [8, 32 / 2, 16]
    assert sum(line.count("f32[8,32,16]") for line in sums) == 0


def test_layers_of_both_stacks_are_updated_one_by_one(plain):
    """Of the moments in host memory, a layer at a time on the device."""
    program = small_program({**BIASED, "batch.micro": 8, "offload.optimizer": True})
    assert sorted(part.turns for part in program.parts.partwise.parts[0] if part.stacked) == [1, 2]
    np.testing.assert_allclose(run_losses(program, steps=3), plain, rtol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"model.experts": 0, "mesh.expert": 2}, "mesh.expert=2 cannot be combined with model.experts=0"),
        ({"mesh.expert": 3}, "model.experts=8 is not divisible by mesh.expert=3"),
        ({"mesh.expert": 6}, "set mesh.expert=2, and use mesh.fsdp"),
        (
            {"mesh.expert": 2, "mesh.dispatch": "all_to_all"},
            "mesh.dispatch=all_to_all cannot be combined with model.moe_kernel=auto",
        ),
        (
            {"mesh.expert": 2, "mesh.dispatch": "allgather", "model.moe_kernel": "capacity"},
            "set mesh.dispatch=all_to_all",
        ),
        ({"precision.preset": "fp8"}, "precision.preset=fp8 cannot be combined with model.experts=8"),
        ({"lora.base": "nf4", "lora.rank": 4}, "lora.base=nf4 cannot be combined with model.experts=8"),
        (
            {"optimizer.fused_backward": True, "optimizer.clip": "layer"},
            "optimizer.fused_backward=true cannot be combined with model.experts",
        ),
        ({"model.router": "sofmax"}, "did you mean softmax"),
        ({"model.moe_kernel": "groupd"}, "did you mean grouped"),
        ({"mesh.dispatch": "all2all"}, "mesh.dispatch='all2all'"),
        ({"loss.balance": -1.0}, "loss.balance=-1.0"),
        ({"loss.balance_layers": "pool"}, "did you mean pooled"),
        ({"model.experts_per_token": 9}, "model.experts_per_token=9 is more than model.experts=8"),
        ({"model.mlp_chunk": 8}, "model.mlp_chunk=8 cannot be combined with model.experts=8"),
        ({"model.bias": True}, "model.bias=true cannot be combined with model.experts"),
        ({"model.dense_layers": 3}, "none of the 3 layers (model.n_layers) has experts"),
    ],
    ids=str,
)
def test_what_experts_cannot_be_combined_with_is_refused_in_a_line(overrides, words):
    count = overrides.get("mesh.expert", 1)
    with pytest.raises(ValueError) as caught:
        small_program({**MIXTURE, "mesh.fsdp": 1, **overrides}, count)
    assert words in str(caught.value) and "\n" not in str(caught.value)
