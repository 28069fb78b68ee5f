import errno
import json
import os
import re

import numpy as np
import pytest

from bytescope.memory.host.host_ledger import ledger
from bytescope.train.data import prepare
from bytescope.train.data.batches import open_data
from bytescope.train.export.model_folder import disk_errors_explained
from bytescope.train.user_errors import UserError
from support.command_line import prepare as main
from support.text_data import config, save_tokenizer, write

pytestmark = pytest.mark.quick


@pytest.fixture
def text(tmp_path):
    return write(tmp_path / "text", {f"{i:02d}.txt": f"def x return y {i}\n" * (i + 1) for i in range(30)})


def windows(source):
    return np.stack([source[i] for i in range(len(source))])


def assert_same(data, other):
    assert (data.train.tokens, data.heldout.tokens) == (other.train.tokens, other.heldout.tokens)
    assert np.array_equal(windows(data.train), windows(other.train))
    assert np.array_equal(windows(data.heldout), windows(other.heldout))
    assert data.vocab_size == other.vocab_size


@pytest.mark.parametrize("shard_tokens", [7, 1000, 10**8])
def test_shards_give_the_windows_of_the_text(text, tmp_path, shard_tokens, capsys):
    out = tmp_path / "out"
    assert main([f"--source={text}", f"--out={out}", f"--shard-tokens={shard_tokens}"]) == 0
    data = open_data(config(source=str(out)))
    assert_same(data, open_data(config(source=str(text))))
    printed = capsys.readouterr()
    assert f"{data.train.tokens:,} tokens to train on and {data.heldout.tokens:,} held out" in printed.out
    assert printed.err == ""
    index = json.loads((out / "index.json").read_text())
    assert sorted(os.listdir(out)) == sorted(["index.json", *(shard["file"] for shard in index["shards"])])
    assert all(shard["tokens"] <= shard_tokens for shard in index["shards"])
    assert (index["dtype"], index["vocab_size"], index["separator"], index["tokenizer"]) == ("uint16", 256, 0, "bytes")


def test_a_single_file_is_cut_at_the_same_place(tmp_path):
    path = write(tmp_path, {"one.txt": "".join(f"line {i}\n" for i in range(500))}) / "one.txt"
    assert main([f"--source={path}", f"--out={tmp_path / 'out'}"]) == 0
    assert_same(open_data(config(source=str(tmp_path / "out"))), open_data(config(source=str(path))))


def test_a_prepared_folder_brings_its_tokenizer_along(text, tmp_path):
    save_tokenizer(tmp_path / "tokenizer.json")
    out = tmp_path / "out"
    assert main([f"--source={text}", f"--out={out}", f"--tokenizer={tmp_path / 'tokenizer.json'}"]) == 0
    plain = open_data(config(source=str(text), tokenizer=str(tmp_path / "tokenizer.json")))
    os.rename(out, tmp_path / "moved")
    data = open_data(config(source=str(tmp_path / "moved")))
    assert_same(data, plain)
    assert data.decode(data.encode("def x")) == "def x"
    save_tokenizer(tmp_path / "other.json", words=("other",))
    with pytest.raises(UserError, match=r"prepared with .*tokenizer.json .*, but the tokenizer of this run is other"):
        open_data(config(source=str(tmp_path / "moved"), tokenizer=str(tmp_path / "other.json")))


def test_a_large_vocabulary_takes_four_bytes(text, tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    save_tokenizer(tokenizer, first_id=70_000)
    assert main([f"--source={text}", f"--out={tmp_path / 'out'}", f"--tokenizer={tokenizer}"]) == 0
    data = open_data(config(source=str(tmp_path / "out")))
    assert json.loads((tmp_path / "out/index.json").read_text())["dtype"] == "uint32"
    assert data.vocab_size > 70_000 and windows(data.train).min() >= 70_000


def test_the_whole_text_is_never_held(text, tmp_path, monkeypatch):
    waiting = []
    write(text, {"99.txt": "some more text\n" * 20_000})
    for module in ("documents", "prepare"):
        monkeypatch.setattr(f"bytescope.train.data.{module}.PIECE_BYTES", 5000)
    monkeypatch.setattr("bytescope.train.data.tokenizer.GROUP_CHARS", 9000)
    many = prepare.load_tokenizer("bytes").encode_many
    monkeypatch.setattr(
        "bytescope.train.data.tokenizer.ByteTokenizer.encode_many",
        lambda self, texts: waiting.append(sum(map(len, texts))) or many(texts),
    )
    assert main([f"--source={text}", f"--out={tmp_path / 'out'}"]) == 0
    assert sum(waiting) > 300_000 and max(waiting) <= 6_000  # one piece
    counted = {term.name: term.bytes for term in ledger().terms if term.phase == "prepare"}
    assert counted["text"] == 55_000 and counted["tokens"] == 20_000 and ledger().measured["prepare"] > 2**20


@pytest.mark.parametrize(("first_id", "size"), [(0, 1), (300, 2), (70_000, 4)])
def test_tokens_of_a_group_of_texts_are_counted(tmp_path, first_id, size):
    path = tmp_path / "tokenizer.json"
    save_tokenizer(path, first_id=first_id)
    counted = {term.name: term.bytes for term in prepare.host_terms(prepare.load_tokenizer(str(path)))}
    assert counted["tokens"] == prepare.GROUP_CHARS // 3 * (2 * size + max(size, 2))
    assert counted["encodings of the tokenizer"] > 50 * prepare.GROUP_CHARS


@pytest.mark.parametrize(
    "names, held_out",
    [
        (("train_0.bin", "my-val-0.bin"), ["my-val-0.bin"]),
        (("a.bin", "b.bin", "eval_01.bin", "test.bin"), ["eval_01.bin", "test.bin"]),
        (("a.bin", "latest.bin", "z.bin"), ["z.bin"]),
    ],
)
def test_shards_without_an_index_are_held_out_by_name(tmp_path, names, held_out):
    for mark, name in enumerate(names):
        np.full(20, mark, np.uint16).tofile(tmp_path / name)
    data = open_data(config(source=str(tmp_path)))
    held_out_marks = {names.index(name) for name in held_out}
    assert set(windows(data.heldout).ravel()) - {-1} == held_out_marks
    assert set(windows(data.train).ravel()) == set(range(len(names))) - held_out_marks
    assert data.vocab_size == len(names)


def test_a_single_shard_holds_out_its_end(tmp_path):
    for path, array in (
        (tmp_path / "a.bin", np.arange(200, dtype=np.uint32)),
        (tmp_path / "b.npy", np.arange(200, dtype=np.int64)),
    ):
        array.tofile(path) if path.suffix == ".bin" else np.save(path, array)
        data = open_data(config(source=str(path), dtype="uint32"))
        assert (data.train.tokens, data.heldout.tokens) == (190, 10)
        assert data.heldout[0].tolist() == [190, 191, 192, 193, 194]
        assert data.vocab_size == 200


def test_ids_of_nobody_knows_what_are_shown_as_numbers(tmp_path):
    np.arange(60_000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    data = open_data(config(source=str(tmp_path)))
    assert data.vocab_size == 60_000 and data.decode([5, 50_000]) == "5 50000" and "ids" in data.description


def damage_index(**changes):
    def damage(out):
        index = json.loads((out / "index.json").read_text()) | changes
        kept = {key: value for key, value in index.items() if value is not None}
        (out / "index.json").write_text(json.dumps(kept))

    return damage


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda out: os.truncate(out / "train_00000.bin", 101), "101 bytes are not a whole number of uint16"),
        (lambda out: os.truncate(out / "train_00000.bin", 100), "has 50 tokens, but index.json lists"),
        (lambda out: os.truncate(out / "train_00000.bin", 0), "train_00000.bin is empty: leave it out"),
        (lambda out: os.remove(out / "heldout_00000.bin"), "heldout_00000.bin cannot be read (No such file"),
        (lambda out: (out / "index.json").write_text("{"), "index.json cannot be used (Expecting"),
        (lambda out: (out / "index.json").write_text("[]"), "index.json cannot be used (list indices"),
        (damage_index(dtype=None), "index.json cannot be used (it has no key 'dtype'): prepare the folder again"),
        (damage_index(dtype="int8"), "index.json cannot be used (it has no shards, or an unknown dtype)"),
        (damage_index(vocab_size="256"), "index.json cannot be used ('vocab_size' has a wrong type or value)"),
        (damage_index(shards=[]), "index.json cannot be used (it has no shards"),
        (
            damage_index(shards=[{"file": "a.txt", "tokens": 1, "split": "train"}]),
            "('a.txt' has a wrong type or value)",
        ),
        (
            damage_index(shards=[{"file": "a.bin", "tokens": 1, "split": "x"}]),
            "cannot be used ('x' has a wrong type or value)",
        ),
        (damage_index(tokenizer="gone.json"), "gone.json' is not a file: give 'bytes'"),
        (damage_index(tokenizer_hash="0"), "prepared with bytes (0), but the tokenizer of this run is bytes (bytes)"),
    ],
)
def test_a_damaged_folder_is_refused(text, tmp_path, damage, message):
    out = tmp_path / "out"
    assert main([f"--source={text}", f"--out={out}"]) == 0
    damage(out)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        open_data(config(source=str(out)))
    assert "\n" not in str(error.value)


def truncated_npy(path):
    np.save(path, np.arange(1000, dtype=np.uint16))
    os.truncate(path, 500)


@pytest.mark.parametrize(
    "make, message",
    [
        (truncated_npy, "a.npy of 500 bytes is truncated or not a .npy file ("),
        (lambda path: path.write_bytes(b"no array"), "a.npy of 8 bytes is truncated or not a .npy file ("),
        (lambda path: path.write_bytes(b""), "a.npy is empty: leave it out"),
        (lambda path: np.save(path, np.array([], np.uint16)), "a.npy is empty: leave it out"),
        (
            lambda path: np.save(path, np.zeros(9, np.float32)),
            "a.npy contains an array of float32 [9], which is not supported for tokens: save a one-dimensional array",
        ),
        (
            lambda path: np.save(path, np.zeros((3, 3), np.uint16)),
            "a.npy contains an array of uint16 [3, 3], which is not supported for tokens: save a one-dimensional array",
        ),
        (lambda path: np.save(path, np.array([None] * 9)), "not a .npy file (Array can't be memory-mapped"),
        (lambda path: np.save(path, np.arange(-1, 99)), "a.npy has the token -1: token ids start at 0"),
    ],
)
def test_a_damaged_npy_is_refused(tmp_path, make, message):
    make(tmp_path / "a.npy")
    with pytest.raises(UserError, match=re.escape(message)):
        open_data(config(source=str(tmp_path)))


def test_a_bin_of_half_a_token_is_refused(tmp_path):
    write(tmp_path, {"a.bin": b"\1\0\0\0\1\0"})
    with pytest.raises(UserError, match="truncated: its 6 bytes are not a whole number of uint32 tokens; copy"):
        open_data(config(source=str(tmp_path), dtype="uint32"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "arguments are required: --source, --out"),
        (["--source={text}"], "the following arguments are required: --out"),
        (["--source={text}", "--out={tmp}/o", "--shard=3"], "unrecognized arguments: --shard=3"),
        (["--source={text}", "--out={tmp}/o", "--shard-tokens=x"], "--shard-tokens: invalid int value: 'x'"),
        (["--source={text}", "--out={tmp}/o", "--shard-tokens=0"], "--shard-tokens=0 is too small: give 1 or more"),
        (["--source={tmp}/none", "--out={tmp}/o"], "none' is not a file or folder: give one that exists"),
        (["--source={text}", "--out={tmp}/o", "--tokenizer=none"], "--tokenizer='none' is not a file: give 'bytes'"),
        (["--source={text}", "--out={text}/o"], "is inside the source: give a folder outside"),
        (["--source={text}", "--out={tmp}/file"], "file is a file: give a folder"),
        (["--source={tmp}/file", "--out={tmp}/file/o"], " cannot be written (Not a directory): choose another --out"),
        (["--source={tmp}/file", "--out={tmp}/o"], "has too little text to train on one part and hold out another"),
        (["--source={tmp}/shards", "--out={tmp}/o"], "contains token shards already: give text, or train on these"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(text, tmp_path, arguments, message, capsys):
    write(tmp_path, {"file": "x", "shards/a.bin": "aa"})
    assert main([argument.format(text=text, tmp=tmp_path) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_nothing_that_exists_is_overwritten(text, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([f"--source={text}", f"--out={out}"]) == 0
    before = {path: path.read_bytes() for path in out.iterdir() if path.suffix == ".bin"}
    for removed in (None, "index.json"):
        if removed:
            (out / removed).unlink()
        assert main([f"--source={text}", f"--out={out}"]) == 2
        assert "already contains" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in out.iterdir()}
    other = write(tmp_path / "other", {"mine.txt": "mine"})
    assert main([f"--source={text}", f"--out={other}"]) == 2
    assert "already contains mine.txt: give a new or empty folder" in capsys.readouterr().err
    assert os.listdir(other) == ["mine.txt"]


@pytest.mark.parametrize("fails", [OSError(errno.ENOSPC, "No space left on device"), UserError("not UTF-8")])
def test_a_failure_leaves_nothing_behind(text, tmp_path, monkeypatch, fails, capsys):
    out = tmp_path / "out"
    out.mkdir()
    real = prepare.tokenize

    def tokenize(*args):
        yield next(real(*args))
        raise fails

    monkeypatch.setattr(prepare, "tokenize", tokenize)
    assert main([f"--source={text}", f"--out={out}"]) == 2
    assert os.listdir(out) == []
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(prepare, "tokenize", real)
    write(tmp_path, {".out.partial/train_00000.bin": "left by a run that was killed"})
    assert main([f"--source={text}", f"--out={out}"]) == 0
    assert not (tmp_path / ".out.partial").exists() and open_data(config(source=str(out))).train.tokens


def test_a_read_only_folder_is_no_full_disk(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "o"))

    write(tmp_path, {"text.txt": "some text\n" * 50})
    monkeypatch.setattr(prepare, "write_shards", refuse)
    assert main([f"--source={tmp_path / 'text.txt'}", f"--out={tmp_path / 'o'}"]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'o'} cannot be written (Permission denied): make that writable, or choose another --out\n"
    )
    message = "Permission denied.: make that writable, or choose another folder; nothing was"
    with pytest.raises(UserError, match=message), disk_errors_explained(tmp_path / "o"):
        refuse()
