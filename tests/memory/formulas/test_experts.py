"""Mixtures of experts by formula: published counts, layers of two kinds by hand, what the commands say of them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from bytescope.configs import base
from bytescope.memory.__main__ import main
from bytescope.memory.cost.flops import count
from bytescope.memory.formulas import (
    expert_formulas,
    reconcile,
    rematerialized,
    training_state,
    transformer_formulas,
)
from bytescope.memory.formulas.memory_estimate import Question, estimate
from bytescope.memory.formulas.model_shape import ExpertShape, Latent, ModelShape, StepLayout
from bytescope.memory.formulas.training_state import ADAM
from bytescope.memory.records.result import plain
from bytescope.model import ModelConfig
from bytescope.model.experts import expert_rows as rows
from bytescope.model.experts.exchange import EXCHANGES
from bytescope.model.experts.expert_kernels import CAPACITY, KERNELS
from bytescope.model.placement import Peers
from bytescope.model.remat.policies import POLICIES
from bytescope.train.plan import config_facts
from bytescope.train.plan.config_facts import PRECISIONS, experts_of, model_facts, question_of
from bytescope.train.program.config_files import load_flat
from bytescope.train.run.metrics import frozen_matmul_parameters, model_flops_per_token
from support.json_results import read_result

pytestmark = pytest.mark.quick

MIXTRAL = ModelShape(32, 4096, 32, 8, 128, 14336, 32000, gated=True, tied=False, experts=ExpertShape(8, 2, 14336))
QWEN3 = ModelShape(
    48, 2048, 32, 4, 128, 6144, 151936, gated=True, tied=False, qk_norm=True, experts=ExpertShape(128, 8, 768)
)
DEEPSEEK = ModelShape(
    61,
    7168,
    128,
    128,
    128,
    18432,
    129280,
    gated=True,
    tied=False,
    experts=ExpertShape(256, 8, 2048, shared=1, dense_layers=3),
    latent=Latent(1536, 512, 64, 128),
)
# Of each two layers past the first the second has experts: layers 2 and 4 of five.
MIXED = ModelShape(
    5, 64, 4, 4, 16, 96, 128, gated=True, tied=True, experts=ExpertShape(8, 2, 32, shared=1, dense_layers=1, every=2)
)


def norms(model):
    """Parameters of norms, which the formulas leave out."""
    count = (2 * model.layers + 1) * model.width
    if model.qk_norm:
        count += model.layers * 2 * model.head_width
    if model.latent:
        count += model.layers * (model.latent.query_rank + model.latent.rank)
    return count


@pytest.mark.parametrize(
    "model, total, active",
    [(MIXTRAL, 46_702_792_704, 12.9e9), (QWEN3, 30_532_122_624, 3.3e9), (DEEPSEEK, 671_026_404_352, 37e9)],
    ids=["mixtral", "qwen3", "deepseek"],
)
def test_published_counts(model, total, active):
    """The weights on Hugging Face, DeepSeek-V3 without its multi-token head and the routers' biases; active as their
    papers round them."""
    assert transformer_formulas.parameter_count(model) + norms(model) == total
    assert transformer_formulas.active_count(model) == pytest.approx(active, rel=0.02)


def test_layers_of_two_kinds_by_hand():
    assert [MIXED.experts.has(layer) for layer in range(5)] == [False, False, True, False, True]
    attention, expert = 4 * 64 * 64, 3 * 64 * 32
    dense, mixture = attention + 3 * 64 * 96, attention + 64 * 8 + expert + 8 * expert
    kinds = expert_formulas.by_kind(MIXED)
    assert [kind.layers for kind in kinds] == [3, 2] and kinds[0].experts is None
    assert [kind.layers for kind in expert_formulas.by_kind(MIXED, 2, 4)] == [1, 1]
    assert list(map(transformer_formulas.layer_count, kinds)) == [dense, mixture]
    assert transformer_formulas.parameter_count(MIXED) == 3 * dense + 2 * mixture + 128 * 64
    assert transformer_formulas.active_count(MIXED) == transformer_formulas.parameter_count(MIXED) - 2 * 6 * expert
    assert expert_formulas.routed_count(MIXED) == 2 * 8 * expert


def test_flops_are_those_of_active_parameters():
    """6 a parameter and token, the look-up aside; and 12 a s for each width of a head."""
    tokens = 16 * 32
    core = 12 * 5 * 64 * 32 * tokens
    assert (
        transformer_formulas.model_flops(MIXED, 32, 16) == 6 * transformer_formulas.active_count(MIXED) * tokens + core
    )
    crammed = dataclasses.replace(MIXED, experts=dataclasses.replace(MIXED.experts, capacity=1.25, slots=True))
    assert transformer_formulas.model_flops(crammed, 32, 16) == transformer_formulas.model_flops(MIXED, 32, 16)
    full = transformer_formulas.hardware_flops(MIXED, 32, 16, "full") - transformer_formulas.model_flops(MIXED, 32, 16)
    assert full == 2 * (transformer_formulas.active_count(MIXED) - 128 * 64) * tokens + core / 3


def test_activations_of_a_layer_by_hand():
    """Router's logits in float32, rows of k experts a token that fill tiles of 16, and the shared expert's MLP."""
    _, mixture = expert_formulas.by_kind(MIXED)
    kept = transformer_formulas.layer_bytes(mixture, StepLayout(), 32, 1, attention="flash")
    attention = 2 * 64 + 3 * 64 + 64 + 2 * 4  # norm, input, queries, keys, values, context, sums of the softmax
    rows = 32 * 2 + 8 * 16
    assert kept == 2 * (32 * (attention + 2 * 64 + 3 * 32 + 2 * 8) + rows * (64 + 3 * 32))
    slotted = dataclasses.replace(mixture, experts=dataclasses.replace(mixture.experts, capacity=1.5, slots=True))
    fewer = kept - transformer_formulas.layer_bytes(slotted, StepLayout(), 32, 1, attention="flash")
    assert fewer == 2 * (rows - 8 * 16) * (64 + 3 * 32)  # 1.5 x 8 rows each, a multiple of 8
    sharded = transformer_formulas.layer_bytes(mixture, StepLayout(2, True), 32, 1, attention="flash")
    assert sharded == kept / 2 + 2 * rows * 64 / 2  # rows are as wide as before


@pytest.mark.parametrize(
    "kernel, factor",
    [("scan", 0.0), ("scan", 1.25), ("ragged", 0.0), ("ragged", 1.25), ("capacity", 1.25), ("capacity", 2.0)],
)
@pytest.mark.parametrize("tokens, k, count, ranks", [(96, 2, 8, 1), (96, 2, 8, 4), (4096, 8, 128, 8), (8192, 2, 8, 8)])
def test_rows_are_those_of_the_model(kernel, factor, tokens, k, count, ranks):
    """The static shapes of the trainer's exchanges, for each way to share the experts."""
    slotted = kernel == "capacity"
    model = base.get_config().model
    model.update(experts=count, experts_per_token=k, d_expert=64, capacity_factor=factor, moe_kernel=kernel)
    asked = experts_of({f"model.{key}": value for key, value in model.items()})
    dispatches = ("slots", "all_to_all") if slotted else ("local", "allgather", "ragged_all_to_all")
    for name in dispatches[:1] if ranks == 1 else dispatches[1:]:
        shape = EXCHANGES[name].shape(tokens, k, count, factor, KERNELS[kernel].tile, Peers(size=ranks))
        assert expert_formulas.rows(asked, tokens, ranks) == shape.rows


def test_latent_attention_by_hand():
    """Keys and values of 128 heads, and the latents before and after their norms."""
    kind, _ = expert_formulas.by_kind(DEEPSEEK)
    kept = transformer_formulas.layer_bytes(kind, StepLayout(), 4096, 1, attention="flash")
    attention = 2 * 7168 + 2 * 1536 + 2 * 512 + 2 * 128 * 192 + 2 * 128 * 128 + 2 * 128
    assert kept == 4096 * 2 * (attention + 2 * 7168 + 3 * 18432)
    tokens, core = 4096, 6 * 61 * 4096 * 128 * (192 + 128)
    matrices = transformer_formulas.active_count(DEEPSEEK) - 129280 * 7168
    assert transformer_formulas.model_flops(DEEPSEEK, 4096, 1) == (6 * matrices + core) * tokens


@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK, MIXED], ids=["mixtral", "deepseek", "mixed"])
def test_a_layer_computes_its_active_matrices_and_recomputes_all_but_its_last_products(model):
    """2 FLOPs a parameter that a token meets, and the core; nothing reads what the down projections give."""
    for kind in expert_formulas.by_kind(model):
        core = 2 * kind.heads * (kind.score_width + kind.value_width) * 4096
        active = transformer_formulas.layer_count(kind) - expert_formulas.idle_count(kind) // kind.layers
        forward = rematerialized.forward_flops(kind, "flash", 4096)
        assert forward == 2 * active + core
        again = rematerialized.walk(kind, "flash", ()).recomputed
        down = kind.width * kind.dense_width
        if kind.experts:
            down += kind.width * kind.experts.width * kind.experts.per_token
        assert rematerialized.recomputed_flops(kind, "flash", again, 4096) == forward - 2 * down
        kept = rematerialized.walk(kind, "flash", POLICIES["selective"].names).recomputed
        assert not kept & {"dispatched", "expert_gate", "expert_up", "expert_act", "router_logits"}


@pytest.mark.parametrize(
    "layout, dense, routed",
    [
        (StepLayout(data=16, zero=3, expert=8), 1 / 16, 1 / 16),
        (StepLayout(data=16, zero=0, expert=8), 1, 1 / 8),
        (StepLayout(2, data=4, zero=3), 1 / 8, 1 / 8),
        (StepLayout(data=8, zero=3, expert=8), 1 / 8, 1 / 8),
    ],
)
def test_experts_are_sharded_over_their_axis_in_any_case(layout, dense, routed):
    """Float32 masters, gradients and moments: 16 bytes a parameter of a device."""
    share = expert_formulas.routed_count(MIXTRAL) / transformer_formulas.parameter_count(MIXTRAL)
    each = training_state.state_bytes_per_parameter(PRECISIONS["bf16"], ADAM, layout, share)
    assert sum(each.values()) == pytest.approx(16 * ((1 - share) * dense + share * routed))


def test_an_estimate_tells_total_and_active(tmp_path, capsys):
    shape = [
        "model.n_layers=32",
        "model.d_model=4096",
        "model.n_heads=32",
        "model.n_kv_heads=8",
        "model.d_ff=14336",
        "model.vocab_size=32000",
        "model.mlp=swiglu",
        "model.tie_embeddings=False",
        "model.experts=8",
        "h100:8",
        "mesh.expert=8",
    ]
    assert main(["estimate", "gpt:46702526464", *shape, f"--json={tmp_path / 'e.json'}"]) == 0
    out, document = capsys.readouterr().out, read_result(tmp_path / "e.json")
    assert document["parameters"] == {"total": 46_702_526_464, "active": 12_879_659_008}
    assert "46,702,526,464 parameters" in out and "12,879,659,008 active" in out
    assert max(map(len, out.splitlines())) <= 100
    expected = plain(estimate(Question(46702526464, MIXTRAL, StepLayout(data=8, expert=8))).result())
    assert document["policies"] == expected["policies"] and document["model_flops"] == expected["model_flops"]
    assert main(["estimate", "gpt:47e9", "model.experts=8"]) == 0  # the shape follows from the count
    assert "of 8 experts" in capsys.readouterr().out


def test_a_dense_model_is_active_as_a_whole(tmp_path):
    assert main(["estimate", "gpt:7b", f"--json={tmp_path / 'e.json'}"]) == 0
    assert read_result(tmp_path / "e.json")["parameters"] == {"total": 7e9, "active": 7e9}


def test_a_config_says_its_experts_and_its_attention():
    keys = [
        ("model.experts", "8"),
        ("model.experts_per_token", "3"),
        ("model.d_expert", "64"),
        ("mesh.fsdp", "2"),
        ("model.shared_experts", "1"),
        ("model.dense_layers", "1"),
        ("model.moe_every", "2"),
        ("mesh.expert", "4"),
    ]
    asked = question_of(load_flat("tiny", keys))
    assert asked.model.experts == ExpertShape(8, 3, 64, 1, 1, 2) and asked.layout == StepLayout(
        data=8, zero=3, expert=4
    )
    capacity = question_of(load_flat("tiny", [*keys, ("model.moe_kernel", "capacity")]))
    assert capacity.model.experts.capacity == 1.25 and capacity.model.experts.slots
    latent = question_of(load_flat("tiny", [("model.attention_kind", "mla"), ("model.mla_q_rank", "48")]))
    assert latent.model.latent == Latent(48, 512, 64, 128)


@pytest.mark.parametrize(
    "overrides",
    [
        {"model.experts": "8", "model.d_expert": "64", "model.shared_experts": "1", "model.dense_layers": "1"},
        {"model.experts": "4", "model.moe_every": "2", "model.mlp": "gelu"},
        {"model.attention_kind": "mla", "model.mla_q_rank": "48"},
        {"model.attention_kind": "mla"},
    ],
    ids=["shared", "every second", "latent", "latent, no rank of queries"],
)
def test_a_runs_utilization_counts_the_same_flops(overrides):
    """Of active parameters: what `train` divides by the peak is the formula."""
    config = load_flat("tiny", list(overrides.items()))
    model = ModelConfig.from_dict(
        {key.removeprefix("model."): value for key, value in config.items() if key.startswith("model.")}
    )
    assert model_flops_per_token(model, 64) * 64 == transformer_formulas.model_flops(question_of(config).model, 64, 1)
    matrices = [f"blocks.{name}" for name in ("attention.w_o", "experts.w_router", "experts.w_up", "shared.w_down")]
    frozen = [name for name in matrices if model.experts or "attention" in name]
    assert frozen_matmul_parameters(model, frozen) > 0
    assert frozen_matmul_parameters(model, ["blocks.experts.router_bias", "blocks.norm_mlp.scale"]) == 0


def test_the_formulas_assume_the_models_default_capacity():
    assert config_facts.CAPACITY == CAPACITY


def test_capacity_and_padding_are_no_model_flops():
    """A step as it is settled: 8 sequences a rank of data, fsdp and expert."""
    config = load_flat("tiny", [("model.experts", "8"), ("model.moe_kernel", "capacity")])
    settled = {"mesh.data": 2, "mesh.fsdp": 1, "mesh.expert": 4, "mesh.context": 1, "mesh.tensor": 1}
    length, sequences = config["data.seq_len"], 8 * config["batch.micro"]
    expected = transformer_formulas.model_flops(question_of(config).model, length, sequences)
    assert reconcile.model_flops(model_facts(config, settled), 1e30) == expected
    assert reconcile.model_flops(model_facts({**config, "model.experts": 0}, settled), 7) == 7


def test_a_kernels_cost_estimate_is_what_it_computes():
    """Forward, and both gradients: tiles of the rows that are there, whatever the loops over them say."""
    shape = rows.tiled_shape(64, 4, 16)
    tiles = rows.Tiles(*(jnp.zeros(n, jnp.int32) for n in (shape.tiles, 4, 4)))
    x, w = jnp.zeros((shape.rows, 32), jnp.bfloat16), jnp.zeros((4, 32, 48), jnp.bfloat16)
    products = KERNELS["grouped"]

    def step(x, w, tiles):
        y = products.forward(x, w, tiles)
        return products.to_rows(y, w, tiles), products.to_weights(x, y, tiles)

    found = count(jax.make_jaxpr(step)(x, w, tiles))
    assert found.total == 3 * 2 * shape.rows * 32 * 48 and found.by == {("forward", "bf16"): found.total}
    assert not found.notes
