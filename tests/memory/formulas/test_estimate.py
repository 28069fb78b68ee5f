"""The instant calculator: its sums, its command, and its page against the same numbers in Python."""

import dataclasses
import html as entities
import json
import re
import shlex

import pytest

from bytescope.memory.__main__ import main
from bytescope.memory.devices import limits, targets
from bytescope.memory.devices.chips import CHIPS
from bytescope.memory.formulas import transformer_formulas
from bytescope.memory.formulas.memory_estimate import Question, check, estimate, shape_for
from bytescope.memory.formulas.model_shape import Adapters, ExpertShape, Latent, ModelShape, StepLayout, gpt
from bytescope.memory.formulas.training_state import ADAM, MIXED
from bytescope.memory.records.result import plain
from bytescope.train.plan import estimate_page
from bytescope.train.plan.assumed_model import parse_count
from bytescope.train.plan.config_facts import OPTIMIZERS, PRECISIONS, question_of
from bytescope.train.program.config_files import load_flat, purposes
from support.browser import browse, one_file
from support.json_results import read_result

LLAMA_8B = Question(
    8_029_995_008,
    ModelShape(32, 4096, 32, 8, 128, 14336, 128256, gated=True, tied=False),
    StepLayout(data=8, zero=3),
    8192,
    1,
    PRECISIONS["bf16"],
    ADAM,
    "flash",
    1024,
)
MIXTRAL = Question(
    46_702_526_464,
    dataclasses.replace(
        ModelShape(32, 4096, 32, 8, 128, 14336, 32000, gated=True, tied=False), experts=ExpertShape(8, 2, 14336)
    ),
    StepLayout(data=16, zero=3, expert=8),
    4096,
    1,
    PRECISIONS["bf16"],
    ADAM,
    "flash",
    1024,
)
# With the kernel `ragged`.
UNPADDED = dataclasses.replace(
    MIXTRAL,
    model=dataclasses.replace(MIXTRAL.model, experts=dataclasses.replace(MIXTRAL.model.experts, padded=False)),
)
# Dense layers, shared experts and latent attention, at a tenth of DeepSeek-V3's width.
DEEPSEEK = Question(
    5e9,
    dataclasses.replace(
        ModelShape(12, 704, 16, 16, 64, 1800, 32000, gated=True, tied=False),
        latent=Latent(96, 64, 32, 48),
        experts=ExpertShape(32, 4, 200, 2, 3, 2, 1.25, slots=True),
    ),
    StepLayout(2, True, 8, 1, expert=4),
    1024,
    2,
    MIXED,
    ADAM,
    "naive",
    fused=True,
)
DROPOUT = Question(
    1e9,
    gpt(24, 2048, 16, 50304),
    StepLayout(tensor=4, sequence=True, data=2, zero=1),
    1024,
    4,
    PRECISIONS["mixed_fp32_grads"],
    OPTIMIZERS["adamw_8bit"],
)


def run(capsys, *arguments):
    """(exit code, standard output, standard error) of the command."""
    code = main(["estimate", *arguments])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("question", [LLAMA_8B, DROPOUT], ids=["llama", "gpt"])
def test_the_total_is_the_sum_of_its_parts(question):
    found = estimate(question)
    for policy, row in plain(found.result())["policies"].items():
        parts = ("params", "gradients", "optimizer", "kept", "recomputed", "outside")
        assert row["total"] == pytest.approx(sum(row[part] for part in parts)) == found.total(policy)
    none, selective, full = (found.activations[policy] for policy in ("none", "selective", "full"))
    assert none.recomputed == 0 and full.kept < selective.kept <= none.kept
    layer = none.kept / question.model.layers
    assert full.recomputed + full.kept / question.model.layers == pytest.approx(layer)
    assert (selective == none) == (question.attention == "flash")


def test_llama_8b_by_hand():
    """ZeRO-3 over 8: 16 bytes a parameter by 8. Full recomputation: 2 D a token and layer, and one whole layer."""
    found = estimate(LLAMA_8B)
    assert sum(found.state.values()) == 16 * LLAMA_8B.parameters / 8
    block = 8192 * (2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336) + 4 * 32)
    full = found.activations["full"]
    assert full.kept == 32 * 2 * 4096 * 8192 and full.recomputed == block - 2 * 4096 * 8192
    assert full.outside == 2 * 2 * 4096 * 8192 + 4 * 128256 * 1024


def test_the_shipped_config_asks_that_question():
    config = load_flat
    asked = question_of(config("llama_8b", [("mesh.fsdp", "8")]))
    assert asked == LLAMA_8B
    assert question_of(config("tiny", [("precision.preset", "fp32")])).attention == "naive"
    spread = [("mesh.tensor", "2"), ("mesh.sequence_parallel", "true"), ("mesh.fsdp", "4"), ("mesh.strategy", "zero2")]
    assert question_of(config("llama_8b", spread)).layout == StepLayout(2, True, 4, 2)
    assert question_of(config("tiny", [("model.vocab_size", "50257")])).model.vocabulary == 50304


def test_parameters_alone(capsys, tmp_path):
    code, out, err = run(capsys, "gpt:7e9", f"--json={tmp_path / 'a.json'}")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 100
    document = read_result(tmp_path / "a.json")
    row = document["policies"]["none"]
    assert row["params"] + row["gradients"] + row["optimizer"] == 112e9
    for number in ("14.00", "84.00", "7,000,000,000 parameters", "assumed"):
        assert number in out
    assert document["per_parameter"] == {"params": 2, "gradients": 2, "optimizer": 12}


@pytest.mark.parametrize("count, unit", [("1m", "MB"), ("7b", "GB"), ("405b", "GB"), ("1t", "TB")])
def test_a_screen_is_100_columns_at_every_size(capsys, count, unit):
    _, out, _ = run(capsys, f"gpt:{count}", "precision.preset=mixed_fp32_grads")
    assert max(map(len, out.splitlines())) <= 100 and f"none, {unit}" in out
    assert next(line for line in out.splitlines() if line.startswith("total")).count(".") == 6


def test_keys_spread_the_state(capsys, tmp_path):
    run(capsys, "gpt:7b", "mesh.strategy=zero2", "mesh.fsdp=64", f"--json={tmp_path / 'a.json'}")
    document = read_result(tmp_path / "a.json")
    assert sum(document["per_parameter"].values()) == 2 + 14 / 64
    run(
        capsys,
        "llama_8b",
        "--config.optimizer.b1=0.8",
        "h100:2x8",
        "mesh.strategy=ddp",
        "optimizer.name=lion",
        "precision.preset=fp32",
        f"--json={tmp_path / 'a.json'}",
    )
    document = read_result(tmp_path / "a.json")
    assert sum(document["per_parameter"].values()) == 12 and document["question"]["layout"]["data"] == 16


def test_a_target_gives_devices_and_memory(capsys):
    out = " ".join(run(capsys, "llama_8b", "h100:8")[1].split())
    assert "ZeRO 3 over 8" in out and "h100:8 has 72.78 GiB for a program on each device: the estimates for none" in out
    out = " ".join(run(capsys, "gpt:7b", "h100:8", "mesh.tensor=1", "mesh.strategy=zero1")[1].split())
    assert "ZeRO 1 over 8" in out and "the estimates for" in out
    out = " ".join(run(capsys, "gpt:70b", "h100:8")[1].split())
    assert "h100:8 has 72.78 GiB for a program on each device: no estimate fits" in out


def test_a_config_of_unknown_devices_says_so(capsys):
    assert "mesh.fsdp=-1 counts as 1 device" in run(capsys, "llama_8b")[1]
    assert "counts as" not in run(capsys, "llama_8b", "h100:8")[1]
    ring = run(capsys, "llama_8b", "--config.mesh.fsdp=4", "--config.mesh.context=2")[1]
    assert "mesh.context=2 is ignored" in ring and "counts as" not in ring


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["gpt:lots"], "gpt:lots has no number of parameters: write gpt:7e9"),
        (["gpt:0"], "gpt:0 is out of range: give at least 1"),
        (["gpt:7b", "model.n_heads=0"], "model.n_heads=0 is out of range: give at least 1"),
        (["gpt:7b", "mesh.tensor=7"], "7 tensor-parallel devices do not divide"),
        (["gpt:7b", "h100:8", "mesh.tensor=3"], "the mesh of gpt:7b has 6 devices, but h100:8 has 8: give as many"),
        (["gpt:7b", "h101:8"], "did you mean h100"),
        (["gpt:7b", "model.n_heads=32", "model.n_kv_heads=5"], "5 key/value heads do not divide the 32 heads"),
        (["gpt:7b", "model.d_ff=0"], "model.d_ff=0 is out of range: give at least 1"),
        (["gpt:7b", "model.layers=3"], "model.layers is an unknown key: did you mean model.n_layers?"),
        (["tiny", "loss.chunk=-1"], "tokens per chunk of logits: -1 is out of range: give 1 or more"),
        (["tiny", "model.mlp_chunk=-4"], "out of range: give 1 or more"),
        (["tiny", "--layers=3"], "estimate has no --layers: write model.n_layers=N"),
        (["tinny"], "did you mean tiny"),
        (["gpt:7b", "mesh.strategy=zero4"], "formulas exist for ddp, zero1, zero2, zero3"),
        ([], "or gpt:7e9"),
        (["gpt:7b", "model.experts=8", "mesh.expert=3"], "3 expert-parallel devices do not divide the 8 experts"),
        (["gpt:7b", "mesh.expert=4"], "4 expert-parallel devices need a model with experts"),
        (["gpt:7b", "model.experts=8", "model.dense_layers=99"], "give model.n_layers and model.d_model too"),
        (["gpt:7b", "--html=/no/such/place.html"], "cannot write /no/such/place.html"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and words in err and err.startswith("error: ") and err.count("\n") == 1
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    "text, count", [("7e9", 7e9), ("7B", 7e9), ("1.5b", 1.5e9), ("350m", 350e6), ("1t", 1e12), ("7_000", 7000)]
)
def test_counts_as_people_write_them(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("parameters", [20e6, 124e6, 7e9, 70e9, 175e9, 1e12])
def test_a_shape_of_about_as_many_parameters(parameters):
    model = shape_for(parameters)
    in_layers = transformer_formulas.parameter_count(model) - model.vocabulary * model.width
    assert in_layers == pytest.approx(parameters, rel=0.1) and model.heads * model.head_width == model.width
    assert shape_for(parameters, layers=48).layers == 48 and shape_for(parameters, width=4096).width == 4096


# ---- the page ----------------------------------------------------------------------------------------------


def computed(tmp_path, question, fragment="", script=""):
    """What the page's own script computed, and the whole document."""
    document = browse(tmp_path, estimate_page.render(question), fragment, script, options=["--dump-dom"])
    assert "<title>ERROR" not in document and 'data-ready="yes"' in document
    return json.loads(entities.unescape(re.search(r'data-estimate="([^"]*)"', document)[1])), document


def same(found, question):
    """Every number of the page is Python's."""
    expected = plain(estimate(check(question)).result())
    assert found["model_flops"] == pytest.approx(expected["model_flops"], rel=1e-12)
    assert found["parameters"] == pytest.approx(expected["parameters"], rel=1e-12)
    assert found["per_parameter"] == pytest.approx(expected["per_parameter"], rel=1e-12)
    for policy, row in found["policies"].items():
        assert row == pytest.approx({name: expected["policies"][policy][name] for name in row}, rel=1e-12)
    return True


def test_the_page_is_one_file_and_says_what_it_was_asked():
    page = one_file(estimate_page.render(DROPOUT))
    assert page.data["inputs"]["precision"] == "mixed_fp32_grads"
    ids = {value for name, value in page.attributes if name == "id"}
    assert {name if name != "data" else "data_ranks" for name in estimate_page.inputs(DROPOUT)} <= ids


QLORA = dataclasses.replace(
    LLAMA_8B,
    model=dataclasses.replace(LLAMA_8B.model, adapters=Adapters(16, ("q", "v", "up"), "int8")),
    fused=True,
    layout=StepLayout(data=2, zero=3),
)
LEVERS = dataclasses.replace(LLAMA_8B, precision=PRECISIONS["fp8"], mlp_tokens=1000, offload="both", fused=True)


def test_levers_by_hand():
    """Masters and moments on the host, gradients of head and token table on the device, a tile of the MLP."""
    found, plain = estimate(LEVERS), estimate(LLAMA_8B)
    assert found.state == {"params": 0, "gradients": 4 * 2 * 128256 * 4096 / 8, "optimizer": 0}
    assert found.host == 12 * LLAMA_8B.parameters / 8
    none = found.activations["none"]
    tokens, mlp = 8192, 1.03125 * 4096 + 2 * 2 * 14336 + 1.03125 * 14336
    assert plain.activations["none"].kept - none.kept == 32 * tokens * ((2 - 1.03125) * 4096 + 2 * 4096 + 6 * 14336)
    assert none.recomputed == 1000 * mlp
    assert found.hardware_flops["none"] - found.model_flops == 32 * 8 * tokens * 2 * 2 * 4096 * 14336
    assert found.hardware_flops["full"] == plain.hardware_flops["full"]
    moments = estimate(dataclasses.replace(DROPOUT, offload="optimizer"))
    assert moments.host == 2 * (1 + 4 / 128) * 1e9 / 4 / 2 and moments.state["optimizer"] == 4e9 / 4 / 2  # master stays
    masters = estimate(dataclasses.replace(DROPOUT, offload="params", fused=True))
    assert masters.host == 4e9 / 4 / 2 and masters.state["params"] == 2e9 / 4  # the copy that is computed with stays


def test_a_config_says_its_levers(capsys):
    keys = [
        ("precision.preset", "fp8"),
        ("model.mlp_chunk", "1000"),
        ("offload.optimizer", "true"),
        ("offload.params", "true"),
        ("optimizer.fused_backward", "true"),
        ("mesh.fsdp", "8"),
    ]
    keys += [("optimizer.clip", "layer")]
    assert question_of(load_flat("llama_8b", keys)) == LEVERS
    _, out, _ = run(
        capsys,
        "gpt:7b",
        "offload.optimizer=True",
        "offload.params=1",
        "optimizer.fused_backward=1",
        "precision.preset=fp8",
    )
    assert next(line for line in out.splitlines() if line.startswith("in host memory")).split()[3] == "84.00"


@pytest.mark.parametrize(
    "question",
    [LLAMA_8B, DROPOUT, LEVERS, QLORA, MIXTRAL, UNPADDED, DEEPSEEK],
    ids=["llama", "gpt", "levers", "qlora", "mixtral", "unpadded", "deepseek"],
)
def test_the_page_computes_what_python_does(tmp_path, question):
    found, document = computed(tmp_path, question)
    assert same(found, question) and list(found["policies"]) == list(transformer_formulas.RECOMPUTE)
    assert f"{estimate(question).total('none') / 2**30:,.2f} GiB" in document and 'class="plot chart"' in document


def test_the_address_holds_the_inputs(tmp_path):
    fragment = (
        "#parameters=3e9&layers=20&width=1024&heads=16&kv_heads=4&head_width=64&mlp_width=3000&"
        "vocabulary=32000&gated=false&tied=true&dropout=true&sequence=512&batch=3&logit_tokens=0&attention=naive&"
        "precision=fp32&optimizer=momentum&tensor=2&sequence_parallel=true&data=5&zero=2&recompute=full&memory=40"
    )
    found, document = computed(tmp_path, LLAMA_8B, fragment)
    model = ModelShape(20, 1024, 16, 4, 64, 3000, 32000, dropout=True)
    assert same(
        found,
        Question(3e9, model, StepLayout(2, True, 5, 2), 512, 3, PRECISIONS["fp32"], OPTIMIZERS["momentum"], "naive"),
    )
    assert "fits 40 GiB" in document and "total, full recomputation" in document


TYPE = """const type = (id, value) => { const node = document.getElementById(id); node.value = value;
  node.dispatchEvent(new Event("input", { bubbles: true })); };"""


def test_the_shape_follows_the_count_and_the_count_the_shape(tmp_path):
    found, _ = computed(tmp_path, DROPOUT, script=TYPE + 'type("parameters", "13b");')
    model = dataclasses.replace(shape_for(13e9), dropout=True)
    assert same(found, dataclasses.replace(DROPOUT, parameters=13e9, model=model))
    found, _ = computed(tmp_path, DROPOUT, script=TYPE + 'type("layers", "30");')
    model = dataclasses.replace(DROPOUT.model, layers=30)
    assert same(
        found, dataclasses.replace(DROPOUT, parameters=transformer_formulas.parameter_count(model), model=model)
    )


CHOICES = """
const settle = (id, value) => { const node = document.getElementById(id);
  if (node.type === "checkbox") node.checked = value; else node.value = value;
  node.dispatchEvent(new Event("input", { bubbles: true })); };
const seen = [], note = () => seen.push([document.getElementById("command").textContent,
  document.documentElement.dataset.estimate, document.getElementById("memory").value,
  document.getElementById("total").textContent]);
note();
settle("data_ranks", 4); settle("sequence", 512); settle("logit_tokens", 0); settle("fused", true); note();
settle("model", "gpt2_xl"); settle("card", "h200"); settle("tensor", 5); settle("sequence_parallel", true); note();
settle("layers", 7); settle("lora_rank", 8); settle("lora_base", "nf4"); settle("lora_targets", "q, o");
settle("tied", false); settle("gated", true); settle("head_width", 32); settle("dropout", true);
settle("offload", "both"); settle("mlp_tokens", 128); settle("precision", "fp8"); settle("zero", 1); note();
settle("parameters", "13b"); settle("memory", 7); note();
settle("lora_rank", 0); settle("mlp_tokens", 0); settle("experts", 8); settle("d_expert", 512); settle("moe_every", 2);
settle("data_ranks", 4); settle("expert_parallel", 2);
settle("capacity", 1.5); settle("mla_kv_rank", 64); settle("qk_norm", true); note();
document.title = JSON.stringify(seen);"""


def test_a_copied_command_gives_the_figures_that_are_shown(tmp_path, capsys):
    """Of a shipped config, of one that was changed, of presets for model and card, and of a shape of its own."""
    presets = {name: estimate_page.Preset(question_of(load_flat(name, ())), "full") for name in ("llama_8b", "gpt2_xl")}
    page = estimate_page.render(presets["llama_8b"].question, "llama_8b", presets)
    document = browse(tmp_path, page, script=CHOICES, options=["--dump-dom"])
    seen = json.loads(entities.unescape(re.search("<title>(.*?)</title>", document, re.S)[1]))
    subjects = [command.split()[2].partition(":")[0] for command, *_ in seen]
    assert subjects == ["llama_8b", "llama_8b", "gpt2_xl", "gpt", "gpt", "gpt"]
    assert seen[0][0] == "bytescope estimate llama_8b"
    h200 = str(estimate_page.cards()["h200"]["memory"])
    assert [memory for _, _, memory, _ in seen] == ["72.78", "72.78", h200, h200, "7", "7"]
    assert ["tokens/s, at most" in header for *_, header in seen] == [True, True, True, True, False, False]
    for command, shown, *_ in seen:
        words = shlex.split(command)
        code, _, err = run(capsys, *words[2:], f"--json={tmp_path / 'copied.json'}")
        assert (code, err) == (0, ""), command
        document, shown = read_result(tmp_path / "copied.json"), json.loads(shown)
        assert shown["model_flops"] == pytest.approx(document["model_flops"], rel=1e-12)
        for policy, row in shown["policies"].items():
            assert row == pytest.approx({name: document["policies"][policy][name] for name in row}, rel=1e-12), command


def test_the_presets_are_the_shipped_configs_and_the_chips(tmp_path, capsys):
    path = tmp_path / "e.html"
    assert run(capsys, "llama_1b", "mesh.fsdp=4", f"--html={path}")[0] == 0
    page = one_file(path.read_text())
    assert set(page.data["models"]) == set(purposes()) and set(page.data["cards"]) == set(CHIPS)
    assert page.data["cards"]["h100"]["memory"] == round(limits.limit_bytes(targets.parse("h100@0.92")) / 2**30, 2)
    assert page.data["inputs"]["recompute"] == load_flat("llama_1b", ())["remat.policy"] == "full"
    assert "llama_1b · training memory by formula" in path.read_text() and page.data["inputs"]["data"] == 4


def test_what_cannot_be_is_marked_and_not_computed(tmp_path):
    _, document = computed(
        tmp_path,
        DROPOUT,
        script=TYPE + 'type("tensor", "3"); type("batch", "-1"); type("lora_rank", "2"); type("lora_targets", "q,x");',
    )
    assert 'data-wrong="batch tensor lora_targets"' in document
    assert "batch, tensor, lora targets: not possible" in document
