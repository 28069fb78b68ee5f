"""LoRA by formula: counts and bytes of the papers, a layer by hand, and the command."""

import dataclasses

import pytest

from bytescope.memory.__main__ import main
from bytescope.memory.errors import ReportError
from bytescope.memory.formulas import (
    adapter_formulas,
    rematerialized,
    training_state,
    transformer_formulas,
)
from bytescope.memory.formulas.memory_estimate import Question, check, estimate
from bytescope.memory.formulas.model_shape import TARGETS, Adapters, ModelShape, StepLayout, gpt
from bytescope.memory.formulas.training_state import ADAM
from bytescope.train.plan.config_facts import PRECISIONS, question_of
from bytescope.train.program.config_files import load_flat
from support.json_results import read_result

pytestmark = pytest.mark.quick

LLAMA_8B = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, gated=True, tied=False)
# Touvron et al. 2023 (arXiv 2302.13971), table 2, and the MLP's width of the released weights.
LLAMA_65B = ModelShape(80, 8192, 64, 64, 128, 22016, 32000, gated=True, tied=False)
ALONE = StepLayout()
GPT3 = gpt(96, 12288, 96, 50257, dropout=False)


def with_adapters(model, rank, targets=TARGETS, base="bf16"):
    return dataclasses.replace(model, adapters=Adapters(rank, targets, base))


def frozen(model, base, layout=ALONE, sharded=False):
    model = with_adapters(model, 8, base=base)
    count = transformer_formulas.parameter_count(model)
    return adapter_formulas.frozen_bytes(model, count, transformer_formulas.table_count(model), layout, sharded)


@pytest.mark.parametrize("rank, millions", [(1, 4.7), (8, 37.7)])
def test_adapters_of_gpt_3_are_those_of_the_paper(rank, millions):
    """Hu et al. 2021, table 4: 4.7M and 37.7M trained parameters, of queries and values."""
    assert adapter_formulas.adapter_count(with_adapters(GPT3, rank, ("q", "v"))) / 1e6 == pytest.approx(
        millions, abs=0.05
    )


def test_gpt_3_takes_a_third_of_the_memory():
    """Hu et al. 2021, section 4.2: 1.2 TB becomes 350 GB, and a checkpoint of rank 4 has 35 MB."""
    count = 175e9
    whole = training_state.state_bytes_per_parameter(PRECISIONS["pure_bf16"], ADAM)
    assert (whole["params"] + whole["optimizer"]) * count == 1.05e12  # the rest of 1.2 TB are activations
    model = with_adapters(GPT3, 4, ("q", "v"))
    found = estimate(Question(count, model, precision=PRECISIONS["pure_bf16"]))
    assert found.state["frozen"] == 350e9
    assert sum(found.state.values()) / 350e9 == pytest.approx(1, abs=0.001)
    assert 2 * adapter_formulas.adapter_count(model) / 2**20 == pytest.approx(35, abs=1.1)


def test_bits_of_nf4_are_those_of_the_paper():
    """Dettmers et al. 2023, section 3: double quantization leaves 0.127 bits a parameter for constants."""
    assert 8 * adapter_formulas.BASES["nf4"].element - 4 == pytest.approx(0.127, abs=0.0005)


def test_65b_fits_a_card_of_48_gb():
    """Dettmers et al. 2023, abstract and section 1: more than 780 GB in 16 bits become less than 48 GB."""
    whole = training_state.state_bytes_per_parameter(PRECISIONS["bf16_params"], ADAM)
    assert sum(whole.values()) * 65e9 == 780e9
    asked = Question(
        transformer_formulas.parameter_count(LLAMA_65B),
        with_adapters(LLAMA_65B, 64, base="nf4"),
        sequence=512,
        precision=PRECISIONS["pure_bf16"],
        attention="flash",
    )
    found = estimate(asked)
    assert (
        found.total("full")
        < 48e9
        < estimate(dataclasses.replace(asked, model=with_adapters(LLAMA_65B, 64, base="int8"))).total("full")
    )


def test_frozen_llama_8b_by_hand():
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    tables, outputs = 2 * 2 * 128256 * 4096, 32 * (4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096)
    assert frozen(LLAMA_8B, "bf16") == 2 * matrices + tables
    assert frozen(LLAMA_8B, "int8") == matrices + 4 * outputs + tables
    assert frozen(LLAMA_8B, "nf4") == matrices // 2 + matrices // 64 + 4 * (matrices // 64 // 256) + tables
    assert frozen(LLAMA_8B, "nf4", StepLayout(tensor=2, data=4), True) == frozen(LLAMA_8B, "nf4") / 8
    assert frozen(LLAMA_8B, "nf4", StepLayout(data=4)) == frozen(LLAMA_8B, "nf4")


def test_what_a_layer_keeps_for_adapters_by_hand():
    """Inputs of frozen matrices go, those of adapted ones stay, each with r numbers a token."""

    def kept(model, policy="none"):
        return transformer_formulas.layer_bytes(model, StepLayout(), 10, 1, attention="flash", recompute=policy)

    plain, every = kept(LLAMA_8B), kept(with_adapters(LLAMA_8B, 16))
    assert every == plain + 10 * 2 * 16 * 7
    queries = kept(with_adapters(LLAMA_8B, 16, ("q", "v")))
    assert queries == plain - 10 * 2 * (4096 + 14336) + 10 * 2 * 16 * 2  # inputs of gate and up, and of down
    assert kept(with_adapters(LLAMA_8B, 16), "full") == kept(LLAMA_8B, "full")
    assert kept(with_adapters(gpt(4, 64, 4, 100), 3)) - kept(gpt(4, 64, 4, 100)) == 10 * 2 * 3 * 6  # without a gate


def test_what_a_policy_of_names_keeps():
    def walked(model, save=("attn_norm", "mlp_norm", "act")):
        return rematerialized.walk(model, "flash", save)

    assert walked(LLAMA_8B).kept == walked(with_adapters(LLAMA_8B, 16)).kept >= {"attn_norm", "mlp_norm", "act"}
    queries = walked(with_adapters(LLAMA_8B, 16, ("q",)))
    assert "act" not in queries.kept | queries.recomputed and "attn_norm" in queries.kept


def test_frozen_matrices_take_four_flops_and_adapters_six():
    model, tokens = with_adapters(LLAMA_8B, 16), 2048
    weights = transformer_formulas.parameter_count(LLAMA_8B) - 128256 * 4096  # looking a token up multiplies nothing
    added = 6 * adapter_formulas.adapter_count(model) * tokens
    assert (
        transformer_formulas.model_flops(LLAMA_8B, tokens, 1) - transformer_formulas.model_flops(model, tokens, 1)
        == 2 * weights * tokens - added
    )
    assert (
        transformer_formulas.hardware_flops(model, tokens, 1, "full")
        - transformer_formulas.model_flops(model, tokens, 1)
        == transformer_formulas.hardware_flops(LLAMA_8B, tokens, 1, "full")
        - transformer_formulas.model_flops(LLAMA_8B, tokens, 1)
        + added / 3
    )


def test_only_adapters_have_gradients_and_moments():
    asked = Question(8e9, with_adapters(LLAMA_8B, 16, base="nf4"), precision=PRECISIONS["bf16"], offload="none")
    found, count = estimate(asked), adapter_formulas.adapter_count(asked.model)
    assert {role: found.state[role] / count for role in training_state.ROLES} == {
        "params": 4,
        "gradients": 4,
        "optimizer": 8,
    }
    fused = estimate(dataclasses.replace(asked, fused=True))
    assert fused.state["gradients"] == 4 * count / 32
    assert "frozen" not in estimate(dataclasses.replace(asked, model=LLAMA_8B)).state


def test_the_command(capsys, tmp_path):
    path = tmp_path / "a.json"
    assert main(["estimate", "llama_8b", "lora.rank=16", "lora.base=nf4", f"--json={path}"]) == 0
    out = capsys.readouterr().out
    assert "41,943,040 trained" in " ".join(out.split()) and "frozen parameters" in out
    assert max(map(len, out.splitlines())) <= 100
    row = read_result(path)["policies"]["full"]
    assert row["frozen"] == frozen(LLAMA_8B, "nf4") and row["params"] == 4 * 41943040
    main(["estimate", "llama_8b", "lora.rank=0"])
    assert "frozen" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["lora.rank=16", "lora.targets=q,w"], "'w' is not the name of a matrix"),
        (["lora.rank=-1"], "the rank -1 of the adapters is out of range"),
        (
            ["lora.rank=4", "lora.targets=gate"],
            "no layer of this model has these matrices; give some of q,k,v,o,up",
        ),
        (["lora.rank=4", "lora.base=nf5"], "formulas exist for bf16, nf4, int8"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, words):
    assert main(["estimate", "gpt:7b", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_config_says_its_adapters():
    config = load_flat("llama_8b", [])
    assert question_of(config).model.adapters is None
    config |= {"lora.rank": 8, "lora.targets": ("q", "v"), "lora.base": "int8"}
    assert check(question_of(config)).model.adapters == Adapters(8, ("q", "v"), "int8")
    with pytest.raises(ReportError, match="optimizer.freeze=w_token has no formula"):
        question_of(config | {"optimizer.freeze": ("w_token",)})
