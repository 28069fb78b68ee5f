"""Every way to divide memory over devices leaves the loss where it was and holds what it says, no more."""

import dataclasses
import functools
import math
import re

import jax
import numpy as np
import pytest

from bytescope.memory.analysis import report_of
from bytescope.memory.devices import targets
from bytescope.model.attention.attention_kernels import KERNELS
from bytescope.train.parallel.axes import AXES, STRATEGIES, make_mesh
from bytescope.train.parallel.layout import Layout
from bytescope.train.program.program import build
from support.described import SMALL_GPU, described
from support.exhaustive import exhaustive
from support.hlo_text import collectives
from support.toy import run_losses, small_config, small_program

EQUAL = 1e-5  # relative, fp32
STEPS = 5

# mesh and batch (16 sequences an update), devices
LAYOUTS = {
    "ddp, scan": (
        {"mesh.strategy": "ddp", "mesh.data": 2, "batch.micro": 1, "batch.accumulation": 4, "batch.mode": "scan"},
        4,
    ),
    "zero1 x context x tensor, scan": (
        {
            "mesh.strategy": "zero1",
            "mesh.context": 2,
            "mesh.tensor": 2,
            "batch.micro": 4,
            "batch.accumulation": 2,
            "batch.mode": "scan",
        },
        8,
    ),
    "hybrid zero2 x tensor, scan": (
        {
            "mesh.strategy": "zero2",
            "mesh.data": 2,
            "mesh.tensor": 2,
            "batch.micro": 2,
            "batch.accumulation": 2,
            "batch.mode": "scan",
        },
        8,
    ),
    "hybrid zero3, layers gathered ahead, multisteps": (
        {"mesh.data": 2, "mesh.prefetch": 2, "batch.micro": 2, "batch.accumulation": 2},
        4,
    ),
    "data 2 x context 4": ({"mesh.data": 2, "mesh.context": 4, "batch.micro": 8}, 8),
    "tensor 4, sequence parallel, padded vocabulary": (
        {
            "mesh.tensor": 4,
            "mesh.sequence_parallel": True,
            "model.n_kv_heads": 4,
            "model.vocab_size": 63,
            "model.vocab_multiple": 4,
            "batch.micro": 8,
        },
        8,
    ),
    "fsdp 2 x context 2 x tensor 2, sequence parallel, learned positions": (
        {
            "mesh.context": 2,
            "mesh.tensor": 2,
            "mesh.sequence_parallel": True,
            "model.position": "learned",
            "batch.micro": 8,
        },
        8,
    ),
    "unrolled, nothing recomputed, padded vocabulary, full loss": (
        {
            "model.scan": False,
            "remat.policy": "none",
            "model.vocab_size": 63,
            "model.vocab_multiple": 4,
            "mesh.tensor": 2,
            "loss.kind": "full",
            "batch.micro": 8,
        },
        4,
    ),
}
# Each axis once: more of them is exhaustive.
FIRST = (
    "ddp, scan",
    "zero1 x context x tensor, scan",
    "tensor 4, sequence parallel, padded vocabulary",
)


def one_device(same):
    """The same model and global batch in one piece on one device."""
    return run_losses(small_program({**same, "batch.micro": 16}), STEPS)


@pytest.fixture(scope="module")
def one():
    known = {}

    def of(overrides):
        layout = ("model.scan", "model.vocab_multiple")  # of the same numbers
        same = {key: value for key, value in overrides.items() if key.startswith("model.") and key not in layout}
        if str(same) not in known:
            known[str(same)] = one_device(same)
        return known[str(same)]

    return of


@pytest.mark.parametrize("name", [*FIRST, *exhaustive(*(name for name in LAYOUTS if name not in FIRST))])
def test_losses_equal_those_of_one_device(name, one):
    overrides, devices = LAYOUTS[name]
    np.testing.assert_allclose(run_losses(small_program(overrides, devices), STEPS), one(overrides), rtol=EQUAL)


def state_bytes(program):
    """Bytes of the state on one device, as compiled."""
    arguments = program.compile().memory_analysis().argument_size_in_bytes
    return arguments - sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * 4 for leaf in jax.tree.leaves(program.batch_shapes)
    )


def count_parameters(program):
    return sum(leaf.size for leaf in jax.tree.leaves(program.state.params))


@pytest.fixture(scope="module")
def scalars():
    """Bytes of steps, counts and tallies, which are whole everywhere."""
    alone = small_program()
    found = state_bytes(alone) - 12 * count_parameters(alone)
    assert 0 < found < 64
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero3", *exhaustive("zero1", "zero2")])
def test_state_is_divided_exactly(strategy, scalars):
    """12 bytes a parameter of master and moments: all of it under ddp, a share of it under the others."""
    parameters = count_parameters(small_program())
    program = small_program({"mesh.strategy": strategy, "mesh.data": 2, "mesh.fsdp": 4}, 8)
    ways = 4 if STRATEGIES[strategy].stored else 1
    assert state_bytes(program) == 12 * parameters / ways + scalars


def test_what_is_not_divided_is_biases_alone(scalars):
    """Biases of heads and MLP have no width to divide: whole under zero3, and the padding of the vocabulary shows."""
    program = small_program({"model.bias": True, "model.vocab_size": 63, "model.vocab_multiple": 8}, 8)
    names = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(program.state.params):
        if leaf.sharding.shard_shape(leaf.shape) == leaf.shape:
            names[path[-1].key] = leaf.size
    assert set(names) == {"b_q", "b_k", "b_v", "b_up"}
    whole = sum(names.values())
    assert state_bytes(program) == 12 * ((count_parameters(program) - whole) / 8 + whole) + scalars
    assert program.state.params["w_token"].shape == (64, 32)


def in_blocks(text, direction):
    """Collectives of the scanned blocks: `direction` jvp (forward) or transpose (backward)."""
    phase = {"jvp": "/jvp(blocks)/while", "transpose": "/transpose(jvp(blocks))/while"}[direction]
    return [one for ones in collectives(text).values() for one in ones if phase in one[2]]


def test_tensor_parallel_blocks_reduce_twice_in_each_direction():
    """Shoeybi et al. 2019: after attention and after the MLP, and before each on the way back."""
    program = small_program({"mesh.tensor": 2, "remat.policy": "none"}, 2)
    text = program.compile().as_text()
    for direction in ("jvp", "transpose"):
        assert [kind for kind, _, _ in in_blocks(text, direction)] == ["all-reduce"] * 2


@pytest.mark.exhaustive
def test_sequence_parallel_blocks_gather_in_and_scatter_out():
    """Korthikanti et al. 2022, section 4.2.2; in the backward pass the inputs are gathered once more for the
    gradients of the parameters."""
    config = small_config(
        {
            "mesh.tensor": 2,
            "mesh.sequence_parallel": True,
            "remat.policy": "none",
            "precision.preset": "bf16",
            "model.n_layers": 8,
        }
    )
    text = build(config, described("h100:2")).compile().as_text()
    # Small collectives are combined into one, and one that runs alone prints no operands: what counts is how many
    # arrays come out, whole [B, L, D] or this rank's [B, L/2, D].
    made = {"all-gather": "[8,32,32]", "reduce-scatter": "[8,16,32]", "all-reduce": "[8,32,32]"}
    whole = [
        {kind: sum(result.count(shape) for other, result, _ in ones if other == kind) for kind, shape in made.items()}
        for ones in collectives(text).values()
    ]
    assert {"all-gather": 2, "reduce-scatter": 2, "all-reduce": 0} in whole
    assert {"all-gather": 4, "reduce-scatter": 2, "all-reduce": 0} in whole


@pytest.mark.parametrize("remat", ["full", *exhaustive("none")])
def test_zero3_gathers_one_layer_at_a_time_and_twice(remat):
    """No array that a collective makes holds a stack of layers; a matrix is gathered forward and once more back."""
    text = small_program({"remat.policy": remat, "model.n_layers": 6}, 4).compile().as_text()
    results = [result for ones in collectives(text).values() for kind, result, _ in ones]
    assert results and not [result for result in results if re.search(r"\[6,", result)]
    for direction in ("jvp", "transpose"):
        gathered = [result for kind, result, _ in in_blocks(text, direction) if kind == "all-gather"]
        assert sum("32,48]" in result or "48,32]" in result for result in gathered) == 3  # gate, up, down


def test_gradients_are_reduced_once_an_update():
    """In-step accumulation: no collective inside the loop over micro-batches; one for each update after it."""
    program = small_program({"mesh.strategy": "ddp", "batch.mode": "scan", "batch.accumulation": 4}, 4)
    text = program.compile().as_text()
    ones = [one for ones in collectives(text).values() for one in ones]
    assert not [operation for _, _, operation in ones if "transpose(jvp" in operation]
    assert [operation for _, _, operation in ones if "/reduce/" in operation]
    per_step = small_program({"mesh.strategy": "zero2", "batch.mode": "scan", "batch.accumulation": 4}, 4)
    text = per_step.compile().as_text()
    assert [one for ones in collectives(text).values() for one in ones if "transpose(jvp" in one[2]]


@pytest.mark.exhaustive
def test_gradients_under_cudnn_and_a_tensor_split_are_reduced_once_an_update():
    """Over the ranks nothing is sent in the loop over micro-batches; after it the gradients that a device holds are."""
    overrides = {
        **SMALL_GPU,
        "model.n_kv_heads": 2,
        "model.n_layers": 2,
        "data.seq_len": 256,
        "mesh.strategy": "zero1",
        "mesh.tensor": 2,
        "batch.mode": "scan",
        "batch.accumulation": 4,
    }
    program = build(small_config(overrides), described("h100:4"))
    assert program.kernel[0] == "cudnn"
    found = report_of(program.compile_for_report(), target=targets.parse("h100:4")).collectives
    assert not [one for one in found if "/while/" in one.op_name and one.axes != ("tensor",)]
    stored = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(program.state.params))
    sent = [(one.axes, one.times * one.bytes) for one in found if one.kind == "reduce-scatter"]
    assert {axes for axes, _ in sent} == {("fsdp",)}
    assert sum(size for _, size in sent) == 4 * stored * program.mesh.shape["fsdp"]


def test_a_kernel_with_its_own_partitioner_runs_on_the_heads_of_a_device(one, monkeypatch):
    """Between ranks that reduce gradients once. JAX's plain attention stands for cuDNN's, which no CPU runs."""
    rows, plain = {}, jax.nn.dot_product_attention

    def attend(q, k, v, *, is_causal, implementation):
        assert implementation == "cudnn"
        rows[len(q)] = {x.shape for x in (q, k, v)}
        return plain(q, k, v, is_causal=is_causal)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    monkeypatch.setitem(KERNELS, "cudnn", dataclasses.replace(KERNELS["cudnn"], refuses=lambda *_: None))
    program = small_program(
        {
            "model.attention": "cudnn",
            "mesh.strategy": "zero1",
            "mesh.tensor": 2,
            "mesh.sequence_parallel": True,
            "batch.micro": 4,
            "batch.accumulation": 2,
            "batch.mode": "scan",
        },
        4,
    )
    np.testing.assert_allclose(run_losses(program, STEPS), one({}), rtol=EQUAL)
    assert rows[4] == {(4, 32, 2, 8), (4, 32, 1, 8)}  # of 4 heads and 2 of keys and values


def test_no_device_sees_the_whole_batch_or_all_logits():
    # 88: no other dimension, nor a product of two, is that wide or half as wide.
    program = small_program(
        {"mesh.tensor": 2, "loss.kind": "full", "batch.micro": 2, "model.vocab_size": 88, "model.vocab_multiple": 8}, 8
    )
    text = program.compile().as_text()
    rows, vocabulary = program.batch.rows, program.model.vocab_size
    # Tokens of the fsdp group alone are gathered whole, as integers, for the divided table.
    assert not re.search(rf"f32\[{rows},32,(32|{vocabulary}|{vocabulary // 2})\]", text)
    assert re.search(rf"f32\[2,32,{vocabulary // 2}\]", text)
    assert not re.search(rf"f32\[\d+,32,{vocabulary}\]", text)


def test_embedded_tokens_are_never_whole_with_context_parallelism():
    """Columns of the token table become sequences and positions, in both passes, without an array of all of them."""
    program = small_program({"mesh.context": 4, "batch.micro": 2}, 8)
    rows, length, width = program.batch.rows, 32, program.model.d_model
    text = program.compile().as_text()
    columns = rf"f32\[({rows},{length}|{rows * length},1),{width // 8}\]"  # the shape depends on the version of XLA
    assert re.search(columns, text), "each device looks up its columns"
    assert f"[{rows},{length},{width}]" not in text


@functools.cache
def compiled_for_gpus(prefetch):
    """(program, executable) of zero3 on four GPUs."""
    keys = {"mesh.strategy": "zero3", "precision.preset": "bf16", "model.d_model": 256, "batch.micro": 1}
    program = build(small_config({**keys, "model.n_layers": 12, "mesh.prefetch": prefetch}), described("h100:4"))
    return program, program.compile()


def test_described_gpus_scatter_gradients_and_gather_no_stack():
    ones = [one for ones in collectives(compiled_for_gpus(0)[1].as_text()).values() for one in ones]
    assert {"reduce-scatter", "all-gather"} <= {kind for kind, _, _ in ones}
    large = [result for kind, result, _ in ones if kind == "all-reduce" and re.search(r"\[\d+,\d+", result)]
    assert not large, "a gradient is reduced whole"
    assert not [result for kind, result, _ in ones if kind == "all-gather" and "[12," in result]


@pytest.mark.exhaustive
def test_prefetch_gathers_ahead_at_a_price():
    """More of the parameters are whole at once, and XLA is told to pipeline."""
    made = [compiled_for_gpus(ahead) for ahead in (0, 2)]
    assert [bool(program.compiler_options) for program, _ in made] == [False, True]
    temps = [compiled.memory_analysis().temp_size_in_bytes for _, compiled in made]
    assert temps[1] > temps[0]
    assert not small_program({"mesh.prefetch": 2}, 4).compiler_options  # options of the GPU compiler


def test_colliding_axes_are_refused_with_both_dimensions():
    layout = Layout(make_mesh({**dict.fromkeys(AXES, 1), "fsdp": 2}, jax.devices()[:2]))
    with pytest.raises(ValueError, match=r"use mesh axis fsdp twice: d_model -> .*fsdp.* and d_model -> .*fsdp"):
        layout.spec(("d_model", "d_model"), state=True)


@pytest.mark.parametrize(
    ("overrides", "devices", "message"),
    [
        ({"mesh.tensor": 3}, 8, r"mesh.tensor=3 does not divide 8 devices: use 1, 2, 4 or 8"),
        (
            {"mesh.data": 4, "mesh.tensor": 4},
            8,
            "does not divide the 2 of 8 devices that mesh.data=4 leaves: use 1 or 2",
        ),
        (
            {"mesh.fsdp": 2, "mesh.tensor": 2},
            8,
            "takes 4 of 8 devices: set one of these sizes, such as mesh.fsdp, to -1",
        ),
        ({"mesh.data": -1, "mesh.fsdp": -1}, 8, "or -1 for at most one axis"),
        ({"mesh.fsdp": 5}, 5, "parameter .*d_model=32 is not divisible by fsdp 5"),
        ({"mesh.tensor": 8}, 8, "kv_heads=2 is not divisible by tensor 8"),
        ({"mesh.strategy": "zero4"}, 1, "choose one of ddp, zero1, zero2, zero3"),
        ({"mesh.context": 4, "data.seq_len": 36}, 4, "data.seq_len=36 is not divisible by 2 x mesh.context 4"),
        (
            {"mesh.tensor": 2, "mesh.sequence_parallel": True, "data.seq_len": 31},
            2,
            "is not divisible by mesh.tensor 2",
        ),
        ({"mesh.context": 2, "model.dropout": 0.1}, 2, "ring attention has no dropout"),
        ({"mesh.context": 2, "model.attention": "naive"}, 2, "set model.attention=auto"),
        ({"model.vocab_multiple": 0}, 1, "model.vocab_multiple=0"),
        ({"model.vocab_size": 63, "mesh.tensor": 2}, 2, "vocab=63 is not divisible by tensor 2"),
    ],
)
def test_what_does_not_divide_is_refused(overrides, devices, message):
    with pytest.raises(ValueError, match=message):
        build(small_config(overrides), jax.devices()[:devices])
