"""bytescope export --awq: folders of both layouts, what they hold, and what is refused."""

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
    rows = [{"tokens": rng.integers(0, 250, 64).tolist()} for _ in range(4)]
    (home / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


@pytest.fixture(autouse=True)
def here(home, monkeypatch):
    monkeypatch.chdir(home)


def quantize(capsys, *words):
    code = cli.main(["export", *map(str, words)])
    found = capsys.readouterr()
    return code, found.out, found.err


@pytest.fixture(scope="module")
def made(home):
    """Layout -> the folder of it and what was told."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for name in ("awq", "compressed-tensors"):
            assert cli.main(["export", "wide", name, *SHORT, f"--format={name}", f"--json={name}.json"]) == 0
            found[name] = read_result(home / f"{name}.json")
    return found


def test_host_memory_is_predicted_and_measured(made):
    for result in made.values():
        host = read(HostMemory, result["host_memory"])
        counted = {term.name: term.bytes for term in host.terms_of("quantize")}
        assert counted["activations between two layers"] == result["tokens"] * 64 * 4 == 8 * 16 * 64 * 4
        assert counted["the largest program"] == max(result["memory"]["device"].values())
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
    for name in made:
        config = json.loads((home / name / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == name
        assert config["dtype" if "dtype" in config else "torch_dtype"] == "float16"
        assert {key: config[key] for key in SIZES} == SIZES
        folder = Folder.open(home / name)
        kinds = {one.dtype for one in folder.tensors.values()}
        assert kinds <= {"F16", "I32", "I64"} and "model.embed_tokens.weight" in folder.tensors
        held = sum(math.prod(one.shape) * WIDTHS[one.dtype] for one in folder.tensors.values())
        assert sum(here for _, here in made[name]["components"].values()) == held == made[name]["memory"]["folder"]


def test_what_is_cut_off_leaves_nothing_and_one_copy_of_what_the_search_reads_is_on_the_device(
    made, home, capsys, monkeypatch
):
    """A full disk in the last layer."""
    write, held = Output.write, []

    def full(self, layer, params, codes):
        held.append(sum(one.shape in ((64, 64), (96, 96)) and one.dtype == np.float32 for one in jax.live_arrays()))
        if layer == 1:
            raise OSError(28, "No space left on device")
        write(self, layer, params, codes)

    monkeypatch.setattr(Output, "write", full)
    code, _, err = quantize(capsys, "wide", "cut", *SHORT)
    assert code == 2 and "No space left" in err and "nothing was left" in err and len(err.splitlines()) == 1
    assert not (home / "cut").exists() and not (home / ".cut.partial").exists()
    # Inputs of q, k, v, of attention's output, of gate and up, and of down: the bytes that were told.
    assert [count - held[0] for count in held] == [0, 4, 4]


@pytest.mark.parametrize(
    "words, message",
    [
        (["wide", "out", "--group=64", *SHORT[1:]], "does not divide the 96 inputs of mlp.w_down: give --g"),
        (["awq", "out", *SHORT], "is quantized already"),
        (["wide", "awq", *SHORT], "awq is not empty"),
        (["wide", "wide", *SHORT, "--force"], "the folder to quantize"),
        (["wide", "out", "--group=32", "--length=64", "--awq=short.jsonl"], "has 48 tokens, and at least 64 are"),
        (["gpt2", "out", *SHORT], "but gpt2 stores"),
        *exhaustive((["wide", "out", *SHORT, "--budget=10KiB"], ": give a shorter --length")),
        (["nothing", "out", *SHORT], "nothing"),
        (["wide", "out", "--awq"], "--awq has no text"),
        (["wide", "out", "--group=32", "--awq=missing.txt"], "missing.txt cannot be read"),
    ],
)
def test_mistakes_are_told_in_a_line(made, home, capsys, words, message):
    (home / "short.jsonl").write_text(json.dumps({"tokens": [7] * 48}) + "\n")
    if not (home / "gpt2").exists():
        weights.gpt2(home / "gpt2")
    code, _, err = quantize(capsys, *words)
    assert code in (2, 3) and message in err and len(err.splitlines()) == 1
    assert not (home / "out").exists() and not (home / ".out.partial").exists()
