"""What a fit may change: meshes, micro-batches, squeezes, and the words for them."""

import math
import re

import pytest

from bytescope.memory.errors import ReportError
from bytescope.train.plan.fit import fit_space
from bytescope.train.plan.fit.fit_space import LEVERS, SQUEEZES
from support.fit_trials import FLAT, SEQ

pytestmark = pytest.mark.quick

ALL = frozenset(LEVERS)


def space(n_devices=8, per_host=8, sequences=16, levers=ALL, given=(), **flat):
    """A space of an update of so many sequences; `flat`: keys with a `_` for the first dot."""
    values = {**FLAT, **{key.replace("_", ".", 1): value for key, value in flat.items()}}
    return fit_space.space_of(values, given, levers, n_devices, per_host, int(sequences * SEQ))


def names(one):
    """Each mesh of a space as its strategy and the sizes of its axes."""
    return [
        " ".join(
            [
                axes["strategy"],
                *(f"{axis[0]}{axes[axis]}" for axis in ("data", "fsdp", "expert", "tensor") if axes[axis] > 1),
            ]
        )
        for axes in map(one.axes, one.meshes())
    ]


def test_one_device_has_one_mesh():
    assert space(1, 1).meshes() == [{}]


def test_meshes_of_one_host_and_of_two():
    assert names(space()) == ["zero3 f8", "zero2 f8", "zero1 f8", "ddp f8", "zero3 f4 t2", "zero3 f2 t4", "ddp t8"]
    assert names(space(16, 8)) == [
        "zero3 f16",
        "zero3 d2 f8",
        "zero2 f16",
        "zero1 f16",
        "ddp f16",
        "zero3 f8 t2",
        "zero3 f4 t4",
        "zero3 f2 t8",
    ]
    assert space().meshes()[0] == {}, "the config's own comes first, untouched"
    for mesh in space().meshes()[1:]:
        assert math.prod(int(mesh[f"mesh.{axis}"]) for axis in ("data", "expert", "context")) == 1


def test_experts_are_shared_by_a_host_or_half_of_it():
    """Beside the meshes of any model; of more devices than experts no mesh shares them all."""

    def shared(one):
        return [name for name in names(one) if "e" in name.split(" ", 1)[1]]

    assert shared(space(model_experts=8)) == ["zero3 e8", "zero3 f2 e4"]
    assert shared(space(16, 8, 32, model_experts=128)) == ["zero3 e16", "zero3 f2 e8", "zero3 f4 e4"]
    assert shared(space(16, 8, 32, model_experts=8)) == ["zero3 f2 e8", "zero3 f4 e4"]
    own = space(model_experts=8, mesh_expert=8, mesh_fsdp=1)
    assert names(own)[0] == "zero3 e8" and own.ranks({}) == 8 and names(own).count("zero3 e8") == 1
    assert fit_space.describe_variant({"mesh.expert": "4", "mesh.fsdp": "-1"}, own).startswith(
        "zero3 fsdp 2 x expert 4"
    )


def staged(one):
    """The meshes with stages: stages, fsdp, tensor, schedule, chunks."""
    found = [(one.axes(keys), keys) for keys in one.meshes()]
    return [
        (axes["stage"], axes["fsdp"], axes["tensor"], axes["schedule"], keys["pipeline.virtual"])
        for axes, keys in found
        if axes["stage"] > 1
    ]


def test_stages_are_meshes_too():
    """In chunks, the most of them as a V, on several hosts with tensor parallelism; 4 of 4 layers have one chunk."""
    deep = {"model_scan": True, "model_n_layers": 32, "sequences": 64}
    assert staged(space(**deep)) == [
        (2, 4, 1, "interleaved", "2"),
        (4, 2, 1, "interleaved", "2"),
        (8, 1, 1, "interleaved", "2"),
        (8, 1, 1, "v", "2"),
    ]
    assert staged(space(16, 8, **deep))[-2:] == [(8, 2, 1, "v", "2"), (2, 1, 8, "interleaved", "2")]
    assert staged(space(model_scan=True, sequences=64)) == [
        (2, 4, 1, "interleaved", "2"),
        (4, 2, 1, "1f1b", "1"),
        (2, 4, 1, "v", "2"),
    ]
    for refused in (
        {"model_scan": False},
        {"given": ["pipeline.virtual"]},
        {"offload_params": True},
        {"given": ["batch.mode"], "batch_mode": "multisteps"},
    ):
        assert not staged(space(**{**deep, **refused}))


def test_stages_have_at_least_as_many_micro_batches():
    one = space(model_scan=True, model_n_layers=32, sequences=48)
    by_stages = {
        axes["stage"]: one.micros(keys)
        for keys in one.meshes()
        if (axes := one.axes(keys))["schedule"] == "interleaved"
    }
    assert by_stages == {2: [1, 2, 3, 6], 4: [1, 2, 3, 6], 8: [1, 2, 3, 6]}
    assert (
        space(model_scan=True, model_n_layers=32, sequences=8, batch_mode="multisteps").batch(
            {"mesh.stage": "8", "mesh.fsdp": "1"}, 1
        )["batch.mode"]
        == "scan"
    )
    own = space(model_scan=True, mesh_stage=2, mesh_fsdp=4, pipeline_schedule="1f1b", sequences=4)
    assert own.meshes()[0] == {} and own.micros({}) == [1], "what is given runs with few micro-batches too"


def test_the_configs_own_mesh_stays_first_and_comes_once():
    own = space(mesh_tensor=2, mesh_strategy="zero3", mesh_sequence_parallel=True)
    assert own.meshes()[0] == {} and names(own)[0] == "zero3 f4 t2" and names(own).count("zero3 f4 t2") == 1


def test_tensor_parallel_sizes_divide_the_heads_and_the_host():
    assert [mesh.get("mesh.tensor") for mesh in space(model_n_kv_heads=2).meshes()][-2:] == ["1", "2"]
    assert not [name for name in names(space(6, 3, 12)) if "t" in name.split()[-1]]


def test_meshes_whose_ranks_do_not_divide_the_batch_are_left_out():
    assert names(space(sequences=4)) == ["zero3 f4 t2", "zero3 f2 t4", "ddp t8"]


def test_a_given_key_of_the_mesh_holds():
    one = space(given=["mesh.fsdp"])
    assert one.meshes() == [{}] and "sharding" not in one.levers
    assert space(levers=ALL - {"sharding"}).meshes() == [{}]


def test_micro_batches_divide_the_update():
    assert space(1, 1).micros({}) == [1, 2, 4, 8, 16] and space(8, 8, 48).micros({}) == [1, 2, 3, 6]
    assert space(16, 8, 64).micros({"mesh.tensor": "8", "mesh.fsdp": "-1"}) == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("less", [{"levers": ALL - {"micro"}}, {"given": ["batch.micro"]}])
def test_without_the_lever_the_micro_batch_is_the_configs(less):
    one = space(1, 1, batch_micro=4, **less)
    assert one.micros({}) == [4] and one.batch({}, 4)["batch.accumulation"] == "4"


@pytest.mark.parametrize("less", [{"levers": ALL - {"accumulation"}}, {"given": ["batch.accumulation"]}])
def test_without_the_lever_the_accumulation_is_the_configs(less):
    assert space(1, 1, batch_accumulation=8, **less).micros({}) == [2]
    assert space(8, 8, 64, batch_accumulation=2, **less).micros({}) == [4]


def test_a_given_policy_holds():
    assert "remat" not in space(given=["remat.policy"]).levers


def test_the_keys_of_a_batch():
    assert space().batch({}, 1) == {
        "batch.micro": "1",
        "batch.tokens": "0",
        "batch.accumulation": "2",
        "batch.mode": "scan",
    }
    assert "batch.mode" not in space().batch({}, 2), "one micro-batch is no accumulation"
    assert "batch.mode" not in space(given=["batch.mode"]).batch({}, 1)


@pytest.mark.parametrize(
    ("flat", "sequences"), [({}, 64), ({"batch_tokens": 4 * 8 * SEQ}, 32), ({"mesh_tensor": 8, "mesh_fsdp": 1}, 8)]
)
def test_the_batch_is_the_configs_unless_it_is_given(flat, sequences):
    values = {**FLAT, **{key.replace("_", ".", 1): value for key, value in flat.items()}}
    assert fit_space.space_of(values, (), ALL, 8, 8, None).sequences == sequences


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"sequences": 3, "given": ["mesh.fsdp"]},
            "3072 tokens are 3 sequences, which cannot be divided over 8 ranks: give --batch-tokens=8192 or a multiple",
        ),
        ({"sequences": 1, "n_devices": 6, "per_host": 3}, "over 6 ranks"),
        (
            {"sequences": 0.5},
            "--batch-tokens=512 is not a multiple of the sequence length 1024: give a multiple of 1024",
        ),
        ({"sequences": 1.5}, "--batch-tokens=1536"),
        (
            {"levers": ALL - {"micro", "sharding"}, "batch_micro": 3},
            "8 ranks with batch.micro=3: give --batch-tokens=24576 or a multiple",
        ),
        (
            {"given": ["batch.micro", "batch.accumulation", "mesh.data"]},
            "with batch.micro=1 and batch.accumulation=8: give --batch-tokens=65536",
        ),
    ],
)
def test_a_batch_that_cannot_be(asked, message):
    with pytest.raises(ReportError) as error:
        space(**asked)
    assert message in str(error.value) and "\n" not in str(error.value)


def whats(one):
    return [SQUEEZES.index(squeeze) for squeeze in one.squeezes()]


def test_squeezes_are_those_of_the_levers():
    assert whats(space()) == list(range(9))
    batch = frozenset({"micro", "accumulation"})
    assert whats(space(levers=batch)) == [0]
    assert whats(space(levers=batch | {"offload"})) == [0, 1, 2, 3]
    assert whats(space(levers=batch | {"precision"})) == [0, 4, 6, 8]


def test_squeezes_that_given_keys_contradict_are_left_out():
    assert whats(space(given=["offload.optimizer"])) == [0, 1, 4, 6, 8]
    assert whats(space(given=["precision.preset"])) == [0, 1, 2, 3, 4, 5]
    assert whats(space(given=["optimizer.clip"])) == [0, 1, 2, 3, 4, 5, 6]


def test_no_other_optimizer_becomes_adamw():
    assert whats(space(optimizer_name="muon")) == [0, 1, 2, 3, 7]


def test_what_changes_the_arithmetic_comes_last():
    order = ["precision" in squeeze.levers for squeeze in SQUEEZES]
    assert order == sorted(order) and order[0] is False


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ({"precision_preset": "fp32"}, {"precision.preset": "bf16"}),
        ({}, {}),
        ({"precision_preset": "fp32", "given": ["precision.preset"]}, {}),
        ({"precision_preset": "fp32", "levers": ALL - {"precision"}}, {}),
    ],
)
def test_the_baseline_computes_in_bf16(more, keys):
    assert space(**more).baseline() == keys


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"batch.micro": "2", "batch.accumulation": "4"}, "zero3 fsdp 8, 2 x 4"),
        (
            {
                "mesh.data": "2",
                "mesh.fsdp": "2",
                "mesh.tensor": "2",
                "mesh.strategy": "zero2",
                "batch.accumulation": "1",
            },
            "zero2 data 2 x fsdp 2 x tensor 2, 1 x 1",
        ),
        ({"mesh.tensor": "8", "batch.accumulation": "1"}, "tensor 8, 1 x 1"),
        (
            {
                "batch.accumulation": "1",
                "offload.optimizer": "true",
                "precision.preset": "bf16_params",
                "optimizer.name": "adamw_8bit",
                "optimizer.fused_backward": "true",
                "optimizer.clip": "layer",
            },
            "zero3 fsdp 8, 1 x 1, offload.optimizer, preset=bf16_params, name=adamw_8bit, optimizer.fused_backward",
        ),
    ],
)
def test_a_variant_in_words(keys, text):
    assert fit_space.describe_variant(keys, space()) == text


def test_one_device_in_words():
    assert fit_space.describe_variant({"batch.accumulation": "1"}, space(1, 1)) == "one device, 1 x 1"


@pytest.mark.parametrize(("text", "found"), [(None, ALL), ("remat, micro", {"remat", "micro"})])
def test_levers_by_name(text, found):
    assert fit_space.choose_levers(text) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("remat,rmat", "--vary=remat,rmat: unknown lever 'rmat': did you mean remat?"),
        ("", "--vary=: unknown lever '': choose one of remat, micro"),
        ("remat,", "unknown lever ''"),
    ],
)
def test_a_lever_that_does_not_exist(text, message):
    with pytest.raises(ReportError, match=re.escape(message)):
        fit_space.choose_levers(text)


def test_adapters_have_squeezes_of_their_own():
    """Their state is small: neither its dtypes nor its place are worth a variant."""
    asked = space(lora_rank=16)
    assert [squeeze.keys.get("lora.base", "") for squeeze in asked.squeezes()] == ["", "int8", "nf4", "", "nf4"]
    assert not any(
        key.startswith(("optimizer", "precision", "offload")) for squeeze in asked.squeezes() for key in squeeze.keys
    )
    held = space(lora_rank=16, given=["lora.base"])
    assert [squeeze.what for squeeze in held.squeezes()] == ["recomputation", "activations in host memory"]
