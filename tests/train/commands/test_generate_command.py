"""bytescope generate: prompts, files of them, what is left after a stop, and what is refused."""

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bytescope.memory import cli
from bytescope.memory.host.host_ledger import ledger
from bytescope.train.checkpoints.saved_run import SavedRun
from bytescope.train.export.tensors import Parameters
from bytescope.train.generate import answers
from bytescope.train.generate.request import Request
from bytescope.train.generate.text import Growing
from bytescope.train.user_errors import UserError
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


def test_a_file_is_answered_row_by_row_and_goes_on_where_it_was(folder, prompts, tmp_path, capsys, monkeypatch):
    command = [folder, "--prompts=prompts.jsonl", "--out=out.jsonl", "--temperature=0.8", "--seed=3", *SHORT]
    code, out, _ = generate(capsys, *command)
    assert code == 0 and "5 rows answered" in out
    file = tmp_path / "out.jsonl"
    rows = {row["row"]: row for row in map(json.loads, file.read_text().splitlines())}
    assert sorted(rows) == [0, 1, 2, 3, 4] and all(len(row["tokens"]) == 12 for row in rows.values())
    assert rows[0]["prompt"] == "the model is" and rows[1]["prompt"] == [5, 6, 7, 8]
    code, out, _ = generate(capsys, *command)
    assert code == 0 and "all 5 rows answered" in out

    lines = file.read_bytes().splitlines(keepends=True)
    # Killed while it wrote the third, which was longer than all that is left.
    file.write_bytes(b"".join(lines[:2]) + lines[2][:-2] + b"x" * sum(map(len, lines)))
    assert generate(capsys, *command)[0] == 0
    assert file.read_bytes().splitlines(keepends=True)[:2] == lines[:2]
    again = {row["row"]: row for row in map(json.loads, file.read_text().splitlines())}
    assert again == rows

    code, _, err = generate(capsys, *command[:-1], "--top-k=3")
    assert code == 2 and "is the answer to another prompt" in err and len(err.splitlines()) == 1


@pytest.mark.quick
def test_a_full_disk_is_one_line(tmp_path):
    row = answers.PromptRow(0, "a", Request((1, 2), 3), ())
    with answers.Answers(tmp_path / "out.jsonl", [row]) as out, open("/dev/full", "wb") as full:
        out._file.close()
        out._file = full
        with pytest.raises(UserError) as caught:
            out.add(row, SimpleNamespace(answer=[3], ended="length"), "b")
    assert str(caught.value) == (
        f"--out={tmp_path / 'out.jsonl'} cannot be written (No space left on device): make "
        "room, or copy the file to another disk, and run the same command with it to answer the rest"
    )


@pytest.mark.exhaustive
def test_ctrl_c_keeps_what_is_done(folder, prompts, tmp_path, capsys, monkeypatch):
    kept = answers.Answers.add

    def add(self, row, answer, text):
        kept(self, row, answer, text)
        if len((tmp_path / "out.jsonl").read_text().splitlines()) == 2:
            raise KeyboardInterrupt

    command = [folder, "--prompts=prompts.jsonl", "--out=out.jsonl", *SHORT]
    monkeypatch.setattr(answers.Answers, "add", add)
    code, _, err = generate(capsys, *command)
    assert code == 130 and "of 5 rows answered in out.jsonl" in err
    monkeypatch.setattr(answers.Answers, "add", kept)
    assert generate(capsys, *command)[0] == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 5


@pytest.fixture(scope="module")
def sampled(folder):
    """What is printed for a prompt without flags of sampling."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main(["generate", str(folder), "--prompt=the model is", *SHORT]) == 0
    return printed.getvalue()


def test_a_text_ends_an_answer(folder, sampled, capsys):
    whole = sampled.rstrip("\n")
    stop = whole[3:5]
    code, out, _ = generate(capsys, folder, "--prompt=the model is", f"--stop={stop}", *SHORT)
    assert code == 0 and out == whole[: whole.index(stop)] + "\n"


def test_text_is_shown_as_soon_as_it_is_certain():
    class Letters:
        def decode(self, tokens):
            return bytes(tokens).decode("utf-8", "replace")

    growing = Growing(Letters(), ("END", "é!"))
    shown = [growing.add(token) for token in "aé EN, é!x".encode()]
    assert "".join(shown) == growing.text == "aé EN, " and growing.stopped
    assert shown[1:3] == ["", ""]  # half of a letter, and a letter with which a stop may begin
    held = Growing(Letters(), ("END",))
    assert "".join(held.add(token) for token in b"xEN") == "x" and held.finish() == "EN" and held.text == "xEN"


def test_a_run_without_a_prompt_file_reads_what_is_piped(folder, sampled, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the model is"))
    assert generate(capsys, folder, *SHORT) == (0, sampled, "")


def test_without_flags_an_answer_is_sampled_and_fits_the_model(folder, capsys):
    """Greedy text of a model that was trained for minutes is one token again and again."""
    command = [folder, "--prompt=the model is"]
    code, out, err = generate(capsys, *command)
    assert code == 0, err
    assert generate(capsys, *command, "--temperature=0.8", "--max-tokens=121") == (0, out, "")


def test_a_conversation(folder, capsys, monkeypatch):
    lines = iter(["the model", "x" * 500, "is"])

    def line(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", line)
    code, out, err = generate(capsys, folder, "--chat", "--length=128", *SHORT)
    assert code == 0 and len(out.splitlines()) >= 2 and "shorten the prompt or" in err


def test_ctrl_c_at_the_prompt_of_a_conversation(folder, capsys, monkeypatch):
    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", interrupted)
    monkeypatch.setattr("bytescope.train.generate.open_engine.open_engine", lambda *_: None)
    assert generate(capsys, folder)[0] == 130


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--prompt="], 2, "an empty prompt"),
        ([], 2, "give --prompt=TEXT or --prompts=FILE"),
        (["--prompt=x", "--max-tokens=200"], 2, "128 positions"),
        (["--prompt=x", "--budget=100KiB"], 3, "for a page of keys and values"),
        (["--prompt=x", "--step=3"], 2, "is a folder of weights"),
        (["--prompt=x", "--length=500"], 2, "--length=500"),
        (["--prompt=x", "--tensor=16"], 2, "--fsdp=1 --tensor=16 need 16 devices"),
        (["--prompt=x", "--tensor=3"], 2, "--tensor=3"),
        (["--prompts=bad.jsonl"], 2, "no text, tokens or messages"),
        (["--prompts=ids.jsonl"], 2, "a list of ids from 0 to 96"),
    ],
)
def test_what_is_refused(folder, prompts, tmp_path, capsys, monkeypatch, words, code, message):
    monkeypatch.setattr("sys.stdin", io.StringIO())
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
    monkeypatch.setattr("sys.stdin", io.StringIO("def"))
    assert cli.main(["generate", "folder", "--score=-"]) == 0 and "'e'" in capsys.readouterr().out


def test_scores_are_those_of_transformers(folder, tmp_path, capsys, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    texts = [rng.integers(2, 97, length).tolist() for length in (2, 9, 17, 100, 64, 30)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"tokens": text}) + "\n" for text in texts))
    words = ["generate", str(folder), "--score=texts.jsonl", "--out=scores.jsonl", "--json=scores.json"]
    assert cli.main(words) == 0
    lines = (tmp_path / "scores.jsonl").read_text().splitlines()
    assert read_result("scores.json")["texts"] == list(map(json.loads, lines))
    shown = capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(folder)
    every = []
    for text, row in zip(texts, map(json.loads, (tmp_path / "scores.jsonl").read_text().splitlines()), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, :-1]
        theirs = torch.log_softmax(logits, -1).gather(1, torch.tensor(text[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose(row["logprobs"], theirs, rtol=0, atol=2e-5)
        assert row["tokens"] == text and abs(np.log(row["perplexity"]) + theirs.mean()) < 1e-5
        every.extend(theirs)
    assert f"{np.exp(-np.mean(every)):,.4f}"[:5] in shown.splitlines()[-1]
    # A text longer than the windows: each from its own beginning.
    assert cli.main(["generate", str(folder), "--score=texts.jsonl", "--out=windows.jsonl", "--length=48"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "windows.jsonl").read_text().splitlines()]
    assert [len(row["logprobs"]) for row in rows] == [1, 8, 16, 97, 62, 29]


def test_a_text_is_scored_token_by_token(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the model is"))
    assert cli.main(["generate", str(folder), "--score=-", "--out=/dev/full"]) == 2
    shown = capsys.readouterr()
    assert shown.err == "error: cannot write /dev/full: No space left on device; make room, or give another file\n"
    lines = shown.out.splitlines()
    assert [line.split()[1] for line in lines[2:5]] == ["'mo'", "'de'", "'l'"] and lines[-1].split()[:2] == ["all", "6"]
    for text, words, message in (
        ("", ["--score=-"], "an empty prompt"),
        ("x", ["--score=-"], "fewer than two tokens"),
        ("", ["--score=missing.txt"], "cannot be read"),
        ("", ["--score=/dev/zero"], "It is a device"),
        ("x y", ["--score=-", "--out=no/such/folder"], "there is no folder no/such"),
        ("xy", ["--score=-", "--length=999"], "--length=999"),
        ("x y", ["--score=-", "--budget=100KiB"], "a shorter --length"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert cli.main(["generate", str(folder), *words]) in (2, 3)
        assert message in capsys.readouterr().err
