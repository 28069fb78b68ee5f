"""bytescope export --awq: folders of both layouts, their perplexity, going on after a cut, and what is refused."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from bytescope.memory import cli
from bytescope.memory.records.host_record import HostMemory
from bytescope.memory.records.result import read
from bytescope.train.generate.request import Request
from bytescope.train.quantize import quantize_work
from bytescope.train.quantize.output import Output
from bytescope.train.weights.folder import Folder
from support.exhaustive import exhaustive
from support.json_results import read_result
from support.models import weights
from support.models.generating import alone, engine_of

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SHORT = ["--group=32", "--length=16", "--samples=8", "--awq=text.jsonl"]
WIDTHS = {"F16": 2, "I32": 4, "I64": 8}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder of weights with outlying channels and a text, as rows of tokens."""
    home = tmp_path_factory.mktemp("quantize")
    config = weights.LLAMA | SIZES
    tensors = weights.numbers(weights.llama_shapes(config))
    rng = np.random.default_rng(1)
    for name, array in tensors.items():
        if array.ndim == 1:
            tensors[name] = np.exp(rng.standard_normal(array.shape)).astype(np.float32)
    weights.write(home / "wide", config, tensors)
    for name in ("text", "held"):
        rows = [{"tokens": rng.integers(0, 250, 64).tolist()} for _ in range(4)]
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


@pytest.fixture(autouse=True)
def here(home, monkeypatch):
    monkeypatch.chdir(home)


def quantize(capsys, *words):
    awq = [] if any(str(word).startswith("--awq") for word in words) else ["--awq"]
    code = cli.main(["export", *map(str, words), *awq])
    found = capsys.readouterr()
    return code, found.out, found.err


@pytest.fixture(scope="module")
def made(home):
    """Layout -> the folder of it and what was told."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for name, words in {
            "awq": [],
            "compressed-tensors": ["--format=compressed-tensors"],
        }.items():
            assert (
                cli.main(
                    [
                        "export",
                        "wide",
                        name,
                        *SHORT,
                        *words,
                        "--held-out=held.jsonl",
                        f"--json={name}.json",
                    ]
                )
                == 0
            )
            found[name] = read_result(home / f"{name}.json")
    return found


def perplexity(capsys, folder):
    """That of our scorer, which reads the folder and runs the whole model."""
    assert cli.main(["generate", str(folder), "--score=held.jsonl", "--length=16", f"--out={folder}.scores"]) == 0
    capsys.readouterr()
    rows = map(json.loads, Path(f"{folder}.scores").read_text().splitlines())
    logprobs = [value for row in rows for value in row["logprobs"]]
    return math.exp(-sum(logprobs) / len(logprobs))


def test_perplexities_are_those_of_the_folders(made, capsys):
    wide = perplexity(capsys, "wide")
    for name, found in made.items():
        assert found["before"] == pytest.approx(wide, rel=1e-5)
        assert found["after"] == pytest.approx(perplexity(capsys, name), rel=1e-4)
        assert found["after"] != pytest.approx(wide, rel=1e-4)


def test_host_memory_is_predicted_and_measured(made):
    for result in made.values():
        host = read(HostMemory, result["host_memory"])
        counted = {term.name: term.bytes for term in host.terms_of("quantize")}
        assert counted["activations between two layers"] == result["memory"]["streams"]
        assert counted["a layer, or the tables"] == result["memory"]["layer"]
        assert max(result["memory"]["device"].values()) in counted.values()  # a CPU's memory is the host's
        assert host.measured["quantize"] >= counted["Python, jax and libraries"] > 2**20


def test_scales_make_less_error_than_rounding_and_both_layouts_hold_the_same(made):
    weights_of = [one for row in made["awq"]["layers"] for one in row["weights"]]
    assert len(weights_of) == 2 * 7
    assert sum(one["error"] for one in weights_of) < 0.8 * sum(one["rounding"] for one in weights_of)
    assert max(one["power"] for one in weights_of) > 0
    assert made["awq"]["layers"] == made["compressed-tensors"]["layers"]


def test_both_layouts_generate_the_same_tokens_here(made):
    asked = [Request((5, 9, 200), 12), Request((7,), 12)]
    found = [alone(engine_of(Path(name)), asked) for name in ("awq", "compressed-tensors")]
    assert found[0] == found[1] and len(found[0][0]) == 12


def test_weights_on_the_device_are_the_codes(made):
    engine = engine_of(Path("awq"))
    layer = engine._params["blocks"][0]["attention"]["w_o"]
    assert layer["codes"].dtype == np.uint8 and layer["codes"].shape == (32, 64)
    assert layer["scales"].shape == (2, 64) and layer["scales"].dtype == np.float16
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._params))
    assert engine._steps.weight_bytes == held
    wide = engine_of(Path("wide"))
    assert held < 0.55 * wide._steps.weight_bytes  # tables stay wide, and are much of a model so small


def test_the_folder_says_all_that_others_read(made, home):
    for name, method in (("awq", "awq"), ("compressed-tensors", "compressed-tensors")):
        config = json.loads((home / name / "config.json").read_text())
        assert (
            config["quantization_config"]["quant_method"] == method
            and config["dtype" if "dtype" in config else "torch_dtype"] == "float16"
        )
        assert {key: config[key] for key in SIZES} == SIZES
        folder = Folder.open(home / name)
        kinds = {one.dtype for one in folder.tensors.values()}
        assert kinds <= {"F16", "I32", "I64"} and "model.embed_tokens.weight" in folder.tensors
        assert not any(part.name.startswith(".") or part.name == "progress.json" for part in (home / name).iterdir())
    held = sum(math.prod(one.shape) * WIDTHS[one.dtype] for one in Folder.open(home / "awq").tensors.values())
    assert sum(here for _, here in made["awq"]["components"].values()) == held


@pytest.mark.exhaustive
def test_what_was_cut_off_goes_on_and_ends_alike(made, home, capsys, monkeypatch):
    """A full disk after the first layer, then Ctrl-C in the second: the first one is kept."""
    note = Output.note

    def full(self, row):
        note(self, row)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Output, "note", full)
    code, _, err = quantize(capsys, "wide", "again", *SHORT, "--held-out=held.jsonl")
    assert code == 2 and "No space left" in err and "the same command resumes" in err and len(err.splitlines()) == 1
    monkeypatch.setattr(Output, "note", note)

    whole = quantize_work.Quantization._quantize_weight
    calls = []

    def cut(self, *args):
        calls.append(args)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return whole(self, *args)

    monkeypatch.setattr(quantize_work.Quantization, "_quantize_weight", cut)
    assert quantize(capsys, "wide", "again", *SHORT, "--held-out=held.jsonl")[0] == 130
    assert not (home / "again").exists()
    monkeypatch.setattr(quantize_work.Quantization, "_quantize_weight", whole)
    code, _, err = quantize(capsys, "wide", "again", *SHORT, "--held-out=held.jsonl", "--format=compressed-tensors")
    assert code == 2 and "1 layers that were quantized with format=awq" in err
    code, _, err = quantize(capsys, "wide", "again", *SHORT)
    assert code == 2 and "quantized with text=" in err  # perplexity would be of another text
    calls.clear()
    monkeypatch.setattr(
        quantize_work.Quantization, "_quantize_weight", lambda self, *args: calls.append(args) or whole(self, *args)
    )
    code, _, _ = quantize(capsys, "wide", "again", *SHORT, "--held-out=held.jsonl", "--json=again.json")
    assert code == 0 and len(calls) == 7  # the first layer was written
    for file in ("model.safetensors", "config.json"):
        assert (home / "again" / file).read_bytes() == (home / "awq" / file).read_bytes()
    again = read_result(home / "again.json")
    assert again["layers"] == made["awq"]["layers"] and again["after"] == made["awq"]["after"]


@pytest.mark.exhaustive
def test_a_partial_folder_whose_files_are_damaged_starts_over(made, home, capsys, monkeypatch):
    whole = quantize_work.Quantization._quantize_weight
    calls = []
    monkeypatch.setattr(
        quantize_work.Quantization,
        "_quantize_weight",
        lambda self, *args: calls.append(args) or (whole(self, *args) if len(calls) <= 10 else 1 / 0),
    )
    with pytest.raises(ZeroDivisionError):
        quantize(capsys, "wide", "torn", *SHORT, "--held-out=held.jsonl")
    file = home / ".torn.partial" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    calls.clear()
    monkeypatch.setattr(
        quantize_work.Quantization, "_quantize_weight", lambda self, *args: calls.append(args) or whole(self, *args)
    )
    assert quantize(capsys, "wide", "torn", *SHORT, "--held-out=held.jsonl")[0] == 0 and len(calls) == 2 * 7
    assert (home / "torn" / "model.safetensors").read_bytes() == (home / "awq" / "model.safetensors").read_bytes()


def test_one_copy_of_what_the_search_reads_is_on_the_device(made, capsys, monkeypatch):
    whole, held = quantize_work.Quantization._quantize_weight, []

    def square():
        return [
            array.shape[0]
            for array in jax.live_arrays()
            if array.shape in ((64, 64), (96, 96)) and array.dtype == np.float32
        ]

    def look(self, *args):
        held.append(len(square()))
        return whole(self, *args)

    monkeypatch.setattr(quantize_work.Quantization, "_quantize_weight", look)
    before = len(square())
    assert quantize(capsys, "wide", "looked", *SHORT, "--held-out=held.jsonl")[0] == 0
    # Inputs of q, k, v, of attention's output, of gate and up, and of down: the bytes that were told.
    assert [count - before for count in held] == [4] * 2 * 7


@pytest.mark.parametrize(
    "words, message",
    [
        (["wide", "out", "--group=64", *SHORT[1:]], "does not divide the 96 inputs of mlp.w_down: give --g"),
        (["awq", "out", *SHORT], "is quantized already"),
        (["wide", "awq", *SHORT], "awq is not empty"),
        (["wide", "wide", *SHORT, "--force"], "the folder to quantize"),
        (
            ["wide", "out", "--group=32", "--length=64", "--awq=one.jsonl"],
            "has 1 windows of 64 tokens, and at least",
        ),
        (["gpt2", "out", *SHORT], "but gpt2 stores"),
        *exhaustive((["wide", "out", *SHORT, "--budget=10KiB"], ": give a shorter --length")),
        (["nothing", "out", *SHORT], "nothing"),
    ],
)
def test_mistakes_are_told_in_a_line(made, home, capsys, words, message):
    row = (home / "text.jsonl").read_text().splitlines()[0]
    (home / "one.jsonl").write_text(row + "\n")
    if not (home / "gpt2").exists():
        weights.gpt2(home / "gpt2")
    code, _, err = quantize(capsys, *words)
    assert code in (2, 3) and message in err and len(err.splitlines()) == 1
    assert not (home / "out").exists() and not (home / ".out.partial").exists()
