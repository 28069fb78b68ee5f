"""Published activation memory, from the compiler: the 22B of Korthikanti et al. 2022 (arXiv 2205.05198)."""

import pytest

from memory import ReportError, targets
from memory.analyze import report_of
from train.config import load, override
from train.program import build

B, S, H = 4, 2048, 6144
SHAPE = {
    "model.d_model": H, "model.n_heads": 64, "model.n_kv_heads": 64, "model.d_head": 96, "model.d_ff": 4 * H,
    "model.vocab_size": 51200, "model.dropout": 0.1, "model.attention": "naive", "batch.micro": B, "mesh.data": 1,
    "mesh.fsdp": 1, "mesh.tensor": 8,
}


def residual_bytes(layers, **overrides):
    """Residuals at the peak of the trainer's step on 8 described H100, bytes a device."""
    config = load("gpt3_175b")
    for key, value in {**SHAPE, "model.n_layers": layers, **overrides}.items():
        override(config, key, str(value))
    program = build(config, targets.parse("h100:8").devices())
    return report_of(program.compile_for_report()).breakdown["residuals"]


# (policy, sequence parallel) -> units of sbh a layer: 10 + 24/t, 34/t, 2, 2/t
ROWS = {("selective", False): 13.0, ("selective", True): 4.25, ("full", False): 2.0, ("full", True): 0.25}


@pytest.mark.parametrize(("policy", "sequence_parallel"), ROWS)
def test_activation_bytes_a_layer(policy, sequence_parallel):
    try:
        targets.parse("h100:8").devices()
    except ReportError as error:
        pytest.skip(str(error))
    keys = {"remat.policy": policy, "mesh.sequence_parallel": sequence_parallel}
    # The slope between depths at which the peak lies at the end of the forward pass.
    slope = (residual_bytes(36, **keys) - residual_bytes(24, **keys)) / 12
    assert slope / (S * B * H) == pytest.approx(ROWS[policy, sequence_parallel], rel=0.005)
