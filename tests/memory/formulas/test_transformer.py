"""The formulas give back the papers' own tables."""

import dataclasses

import pytest

from bytescope.memory.formulas import training_state, transformer_formulas
from bytescope.memory.formulas.model_shape import ModelShape, StepLayout, gpt
from bytescope.memory.formulas.training_state import ADAM, MIXED
from bytescope.train.plan.config_facts import OPTIMIZERS, PRECISIONS

pytestmark = pytest.mark.quick

S, V, A100 = 2048, 51200, 312e12

# Korthikanti et al. 2022, table 3 and 5: heads, width, layers, GPUs, batch, seconds with sequence parallelism and
# selective recomputation -> MFU, HFU in per cent.
RUNS = {
    "22B": ((48, 6144, 64), 8, 4, 1.10, 41.5, 43.7),
    "175B": ((96, 12288, 96), 64, 64, 13.75, 51.4, 52.8),
    "530B": ((105, 20480, 128), 280, 280, 37.83, 56.0, 57.0),
    "1T": ((128, 25600, 160), 512, 512, 71.49, 56.3, 57.0),
}
LAYER_22B = gpt(48, 6144, 64, V)


def in_sbh(tensor, sequence, recompute):
    size = transformer_formulas.layer_bytes(LAYER_22B, StepLayout(tensor, sequence), S, 4, recompute=recompute)
    return size / (S * 4 * LAYER_22B.width)


@pytest.mark.parametrize("name", RUNS)
def test_mfu_and_hfu_of_the_paper(name):
    """The paper's FLOPs with selective recomputation have three forward passes of the attention core, of which only one
    is recomputed: s/(3h) instead of 2s/(9h)."""
    shape, devices, batch, seconds, mfu, hfu = RUNS[name]
    model = gpt(*shape, V)
    core = transformer_formulas.hardware_flops(model, S, batch, "selective") - transformer_formulas.model_flops(
        model, S, batch
    )
    for computed, published in (
        (transformer_formulas.model_flops(model, S, batch), mfu),
        (transformer_formulas.model_flops(model, S, batch) + 3 * core, hfu),
    ):
        assert 100 * computed / (seconds * devices * A100) == pytest.approx(published, abs=0.2)


@pytest.mark.parametrize("name", RUNS)
def test_flops_are_the_papers_closed_form(name):
    (L, h, a), _, B, *_ = RUNS[name]
    model = gpt(L, h, a, V)
    assert transformer_formulas.model_flops(model, S, B) == pytest.approx(
        72 * B * L * S * h**2 * (1 + S / (6 * h) + V / (12 * h * L)), rel=1e-12
    )
    assert transformer_formulas.hardware_flops(model, S, B, "selective") == pytest.approx(
        72 * B * L * S * h**2 * (1 + 2 * S / (9 * h) + V / (12 * h * L)), rel=1e-12
    )
    assert transformer_formulas.hardware_flops(model, S, B, "full") == pytest.approx(
        96 * B * L * S * h**2 * (1 + S / (6 * h)) + 6 * B * S * h * V, rel=1e-12
    )


@pytest.mark.parametrize(
    "row, tensor, sequence, recompute",
    [
        (26.33, 8, False, "none"),
        (17.58, 8, True, "none"),
        (13.00, 8, False, "selective"),
        (4.25, 8, True, "selective"),
        (2.00, 8, False, "full"),
        (0.25, 8, True, "full"),
        (34 + 5 * 64 * S / 6144, 1, False, "none"),
        (34, 1, False, "selective"),
        (2, 1, True, "full"),
    ],
)
def test_activation_rows_of_the_paper(row, tensor, sequence, recompute):
    assert in_sbh(tensor, sequence, recompute) == pytest.approx(row, abs=0.005)


def test_what_lies_outside_the_layers_and_on_the_first_stage():
    h, L, b, t = LAYER_22B.width, LAYER_22B.layers, 4, 8
    for p in (1, 4):
        closed = S * b * h * L / t * (p / L + (p == 1) * 4 / L * (1 + V / h))
        assert transformer_formulas.outside_bytes(LAYER_22B, StepLayout(t, True, pipeline=p), S, b) == pytest.approx(
            closed
        )
    assert transformer_formulas.layers_in_flight(96, StepLayout(pipeline=8)) == 96
    assert transformer_formulas.layers_in_flight(96, StepLayout(pipeline=8, interleave=3)) == pytest.approx(
        96 * (1 + 7 / 24)
    )
    chunked = transformer_formulas.outside_bytes(LAYER_22B, StepLayout(), S, b, logit_tokens=1024)
    assert transformer_formulas.outside_bytes(LAYER_22B, StepLayout(), S, b) - chunked == 4 * V * (S * b - 1024)


def test_llama_and_flash_forms_by_hand():
    """One token of Llama 3 8B: norms and what they give, queries, context, keys, values, the MLP's three, sums."""
    llama = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, gated=True, tied=False)
    kept = transformer_formulas.layer_bytes(llama, StepLayout(), S, 1, attention="flash")
    assert kept == S * (2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336) + 4 * 32)
    assert transformer_formulas.layer_bytes(llama, StepLayout(), S, 1, attention="flash", recompute="selective") == kept
    naive = transformer_formulas.layer_bytes(llama, StepLayout(), S, 1)
    assert naive == kept - 4 * 32 * S + 2 * 32 * S * S
    assert transformer_formulas.layer_bytes(llama, StepLayout(), S, 1, itemsize=4, recompute="selective") == 2 * (
        kept - 4 * 32 * S
    )
    assert transformer_formulas.recomputed_bytes(llama, StepLayout(), S, 1, recompute="full") == naive - 2 * 4096 * S
    assert transformer_formulas.recomputed_bytes(llama, StepLayout(), S, 1, recompute="none") == 0
    assert transformer_formulas.parameter_count(llama) == pytest.approx(8.03e9, rel=1e-3)
    # 6 FLOPs a matrix parameter and token, the look-up table apart, and 12 s for each of 4096 in 32 layers.
    assert transformer_formulas.model_flops(llama, S, 1) == pytest.approx(
        S * (6 * (transformer_formulas.parameter_count(llama) - 128256 * 4096) + 12 * 32 * 4096 * S)
    )


def test_dropout_is_what_its_masks_cost():
    dry = dataclasses.replace(LAYER_22B, dropout=False)
    assert transformer_formulas.layer_bytes(dry, StepLayout(), S, 1) == pytest.approx(
        S * 6144 * (32 + 2 * 64 * S / 6144)
    )


def test_published_sizes_of_states():
    adam = training_state.state_bytes_per_parameter(MIXED, ADAM)
    assert sum(adam.values()) * 7e9 == 112e9
    assert sum(training_state.state_bytes_per_parameter(PRECISIONS["mixed_fp32_grads"], ADAM).values()) == 20
    gpt3 = gpt(96, 12288, 96, 50257)
    assert transformer_formulas.parameter_count(gpt3) == pytest.approx(175e9, rel=0.005)
    assert PRECISIONS["fp32"].params * 175e9 == 700e9


@pytest.mark.parametrize(
    "stage, closed", [(0, lambda n: 16), (1, lambda n: 4 + 12 / n), (2, lambda n: 2 + 14 / n), (3, lambda n: 16 / n)]
)
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_zero_stages(stage, closed, ranks):
    layout = StepLayout(data=ranks, zero=stage)
    each = training_state.state_bytes_per_parameter(MIXED, ADAM, layout)
    assert sum(each.values()) == pytest.approx(closed(ranks))
    halved = training_state.state_bytes_per_parameter(MIXED, ADAM, dataclasses.replace(layout, tensor=2))
    assert sum(halved.values()) == pytest.approx(closed(ranks) / 2)


@pytest.mark.parametrize(
    "optimizer, size",
    [("sgd", 0), ("momentum", 4), ("lion", 4), ("adamw", 8), ("adamw_8bit", 2 + 8 / 128), ("adafactor", 0)],
)
def test_optimizers(optimizer, size):
    assert training_state.state_bytes_per_parameter(PRECISIONS["fp32"], OPTIMIZERS[optimizer])["optimizer"] == size
