"""`bytescope report --names`: shapes, copies, bytes and the cost of making a name again, by hand counts."""

import pytest

from bytescope.memory.__main__ import main
from bytescope.memory.cost.named_tensors import named_tensors
from bytescope.model.names import NAMES
from bytescope.model.remat.policies import ADAPTERS, EXPERTS, LATENTS, QUANTIZED
from bytescope.train.plan.block_description import trace_gradient
from support.json_results import read_result
from support.toy import small_program


def table(**overrides):
    program = small_program(overrides)
    return program, {tensor.name: tensor for tensor in named_tensors(trace_gradient(program))}


@pytest.mark.parametrize("scan", [True, False])
def test_every_name_with_its_copies_bytes_and_cost(scan):
    _, found = table(**{"model.scan": scan, "remat.policy": "full"})
    absent = {name for name in NAMES if name.endswith("mask")} | {
        "probs_dropped",
        "lse",
        *QUANTIZED,
        *ADAPTERS,
        *EXPERTS,
        *LATENTS,
    }
    assert set(found) == set(NAMES) - absent
    tokens, D, F, H, K, S = 8 * 32, 32, 48, 4, 8, 32
    assert found["up"].shape == (8, 32, F) and found["up"].copies == 3 and found["embed"].copies == 1
    assert found["up"].bytes_each == tokens * F * 4 and found["up"].bytes == 3 * tokens * F * 4
    costs = {
        "up": 2 * tokens * D * F,
        "mlp_out": 2 * tokens * F * D,
        "attn_out": 2 * tokens * H * K * D,
        "probs": 2 * tokens * H * K * S,
        "context": 2 * tokens * H * K * S,
        "act": 0,
        "attn_norm": 0,
        "final_norm": 0,
    }
    assert {name: found[name].flops for name in costs} == costs


def test_experts_have_their_names():
    """Rows of 2 of 4 experts a token, which fill tiles of 128; the layer before them has the names of an MLP."""
    found = table(**{"model.experts": 4, "model.d_expert": 16, "model.dense_layers": 1})[1]
    rows = 2 * 8 * 32 + 4 * 128
    assert set(EXPERTS) <= set(found) and found["dispatched"].shape == (rows, 1, 32) and found["gate"].copies == 1
    assert found["expert_act"].bytes == 2 * rows * 16 * 4 and found["expert_up"].flops == 2 * rows * 32 * 16
    assert found["router_logits"].flops == 2 * 8 * 32 * 32 * 4


def test_dropout_masks_and_the_chunked_kernel_have_their_names():
    assert {"probs_mask", "attn_out_mask", "mlp_out_mask", "embed_mask"} <= set(table(**{"model.dropout": 0.1})[1])
    found = table(**{"model.attention": "chunked"})[1]
    assert "lse" in found and "probs" not in found and found["context"].flops > 0


def test_the_command_divides_over_the_mesh(capsys, tmp_path):
    out = tmp_path / "names.json"
    code = main(
        [
            "report",
            "--names",
            "tiny",
            "--config.mesh.fsdp=4",
            "--config.mesh.data=1",
            "--config.mesh.tensor=2",
            "cpu:8",
            f"--json={out}",
        ]
    )
    text = capsys.readouterr().out
    assert code == 0 and "mlp_norm" in text and max(len(line.rstrip()) for line in text.splitlines()) <= 100
    rows = {row["name"]: row for row in read_result(out)["names"]}
    assert rows["up"]["sharding"] == "B fsdp, F tensor" and rows["mid"]["sharding"] == "B fsdp"
    assert rows["up"]["bytes_per_layer"] == 64 * 128 * 384 * 4 // 8
    assert rows["mid"]["bytes_per_layer"] == 64 * 128 * 128 * 4 // 4


def test_a_mistake_is_one_line(capsys):
    assert main(["report", "--names", "tinny"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
