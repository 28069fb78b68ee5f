"""bytescope generate: prompts, files of them, scores, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from bytescope.memory import cli
from bytescope.memory.host.host_ledger import ledger
from bytescope.train.checkpoints.saved_run import SavedRun
from bytescope.train.export.tensors import Parameters
from support.json_results import read_result
from support.models import checkpoints
from support.oracles import require

ROWS = [
    {"text": "the model is"},
    {"tokens": [5, 6, 7, 8]},
    {"messages": [{"role": "user", "content": "train"}]},
    {"text": "def x", "seed": 7},
    {"text": "return the model of the train"},
]
SHORT = ["--max-tokens=12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    require("transformers")  # which makes it
    made = checkpoints.model("llama", max_position_embeddings=128)
    folder = checkpoints.save(made, tmp_path_factory.mktemp("generate") / "llama")
    config = json.loads((folder / "config.json").read_text())  # no token ends an answer
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    return folder


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def generate(capsys, *words):
    code = cli.main(["generate", *map(str, words)])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_a_prompt_is_answered_as_transformers_answers_it(folder, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code, out, _ = generate(capsys, folder, "--prompt=the model is", "--temperature=0", *SHORT)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("the model is", return_tensors="pt", add_special_tokens=False).input_ids
    theirs = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
    assert code == 0 and out == tokenizer.decode(theirs[ids.shape[1] :]) + "\n"


def test_a_file_is_answered_row_by_row(folder, prompts, tmp_path, capsys):
    """In a file, and as lines; a row with a seed of its own and a row of tokens are what they are alone."""
    command = [folder, "--prompts=prompts.jsonl", "--temperature=0.8", "--seed=3", *SHORT]
    code, out, _ = generate(capsys, *command, "--out=out.jsonl")
    assert code == 0 and "5 rows answered" in out
    rows = {row["row"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert sorted(rows) == [0, 1, 2, 3, 4] and all(len(row["tokens"]) == 12 for row in rows.values())
    assert rows[0]["prompt"] == "the model is" and rows[1]["prompt"] == [5, 6, 7, 8]
    assert {row["ended"] for row in rows.values()} == {"length"}
    printed = generate(capsys, *command)[1]
    assert all(f"[{number}] {row['text']}" in printed for number, row in rows.items())
    alone = generate(capsys, folder, "--prompt=def x", "--temperature=0.8", "--seed=7", *SHORT)[1]
    assert alone == rows[3]["text"] + "\n"
    code, out, _ = generate(capsys, *command, "--out=out.jsonl")
    assert code == 0 and "5 rows answered already" in out
    lines = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_text("".join(lines[:2]) + lines[2][:9])  # the command was killed while it wrote
    assert generate(capsys, *command, "--out=out.jsonl")[0] == 0
    again = list(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()))
    assert len(again) == 5 and {row["row"]: row for row in again} == rows
    for other in ('{"row": 0, "prompt": "another"}\n', "notes\n", '{"row": 9, "prompt": ""}\n'):
        (tmp_path / "other.jsonl").write_text(other)
        code, _, err = generate(capsys, *command, "--out=other.jsonl")
        assert code == 2 and "--out=other.jsonl has other lines than answers to these prompts" in err
        assert (tmp_path / "other.jsonl").read_text() == other
    code, _, err = generate(capsys, *command, "--out=/dev/full")
    assert (
        code == 2
        and err
        == "error: --out=/dev/full cannot be written (No space left on device): make room, or give another file\n"
    )


def test_without_flags_an_answer_is_sampled_and_fits_the_model(folder, capsys):
    """Greedy text of a model that was trained for minutes is one token again and again."""
    command = [folder, "--prompt=the model is"]
    code, out, err = generate(capsys, *command)
    assert code == 0, err
    assert generate(capsys, *command, "--temperature=0.8", "--max-tokens=121") == (0, out, "")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--prompt="], 2, "an empty prompt"),
        ([], 2, "one of the arguments --prompt --prompts is required"),
        (["--prompt=x", "--prompts=ids.jsonl"], 2, "not allowed with argument --prompt"),
        (["--prompt=x", "--out=x.jsonl"], 2, "is only valid with --prompts=FILE"),
        (["--prompt=x", "--max-tokens=200"], 2, "128 positions"),
        (["--prompt=x", "--budget=100KiB"], 3, "for a page of keys and values"),
        (["--prompt=x", "--step=3"], 2, "is a folder of weights"),
        (["--prompt=x", "--length=500"], 2, "--length=500"),
        (["--prompt=x", "--tensor=16"], 2, "--fsdp=1 --tensor=16 need 16 devices"),
        (["--prompt=x", "--tensor=3"], 2, "--tensor=3"),
        (["--prompts=bad.jsonl"], 2, "no text, tokens or messages"),
        (["--prompts=ids.jsonl"], 2, "a list of ids from 0 to 96"),
        (["--prompts=missing.jsonl"], 2, "missing.jsonl cannot be read"),
        (["--score=missing.txt"], 2, "cannot be read"),
        (["--score=/dev/zero"], 2, "It is a device"),
        (["--score=one.txt"], 2, "fewer than two tokens"),
        (["--score=two.txt", "--length=999"], 2, "--length=999"),
        (["--score=two.txt", "--budget=100KiB"], 3, "a shorter --length"),
    ],
)
def test_what_is_refused(folder, prompts, tmp_path, capsys, words, code, message):
    (tmp_path / "one.txt").write_text("x")
    (tmp_path / "two.txt").write_text("x y")
    (tmp_path / "bad.jsonl").write_text('{"txt": "x"}\n')
    (tmp_path / "ids.jsonl").write_text('{"tokens": [97]}\n')
    found, _, err = generate(capsys, folder, *words)
    assert found == code and message in err and len(err.splitlines()) == 1


def test_a_run_generates_what_its_export_generates(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {
        "model.n_layers": 2,
        "model.d_model": 32,
        "model.d_ff": 64,
        "model.n_heads": 4,
        "model.n_kv_heads": 2,
        "model.d_head": 8,
        "optimizer.learning_rate": 0.02,
        "data.seq_len": 32,
        "model.max_seq_len": 64,
        "batch.micro": 8,
        "train.steps": 2,
        "train.eval_every": 0,
        "train.checkpoint_every": 2,
        "train.sample_tokens": 0,
        "train.cache_dir": "none",
    }
    assert cli.main(["train", "--workdir=run", *(f"--config.{key}={value}" for key, value in settings.items())]) == 0
    assert cli.main(["export", "run", "folder"]) == 0
    capsys.readouterr()
    command = ["--prompt=def train(", "--max-tokens=20"]
    decoded, read = [], Parameters.read

    def watched(parameters, name):
        values = read(parameters, name)
        decoded.append(len(parameters._open))
        return values

    monkeypatch.setattr(Parameters, "read", watched)
    ours = generate(capsys, "run", *command)
    assert max(decoded) == 1 < len(decoded)  # one stack of layers is in memory at a time
    terms = {term.name: term.bytes for term in ledger().terms if term.phase == "load"}
    assert terms["largest stack of layers, decoded"] == 256 * 32 * 4  # the table of tokens
    assert terms["parameters"] == sum(array.nbytes for array in SavedRun.open(Path("run")).arrays.values())
    assert ledger().measured.keys() >= {"load", "sample"}
    assert ours[0] == 0 and len(ours[1]) > 5 and ours == generate(capsys, "folder", *command)
    for path in (tmp_path / "folder").glob("tokenizer*"):  # of a vocabulary of 256: bytes, as in training
        path.unlink()
    assert generate(capsys, "folder", *command) == ours


def test_scores_are_those_of_transformers(folder, tmp_path, capsys, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    texts = [rng.integers(2, 97, length).tolist() for length in (2, 9, 17, 100, 64, 30)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"tokens": text}) + "\n" for text in texts))
    words = ["generate", str(folder), "--score=texts.jsonl", "--json=scores.json"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(folder)
    every = []
    for text, row in zip(texts, read_result("scores.json")["texts"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, :-1]
        theirs = torch.log_softmax(logits, -1).gather(1, torch.tensor(text[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose(row["logprobs"], theirs, rtol=0, atol=2e-5)
        assert row["tokens"] == text and abs(np.log(row["perplexity"]) + theirs.mean()) < 1e-5
        every.extend(theirs)
    assert f"{np.exp(-np.mean(every)):,.4f}"[:5] in shown.splitlines()[-1]
    # A text longer than the windows: each from its own beginning.
    assert cli.main([*words, "--length=48"]) == 0
    assert [len(row["logprobs"]) for row in read_result("scores.json")["texts"]] == [1, 8, 16, 97, 62, 29]
