"""Documents from .jsonl, .jsonl.gz, .parquet and saved data sets: the same tokens, parted by content."""

import gzip
import json
import os
import re
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bytescope.train.data import records
from bytescope.train.data.batches import open_data
from bytescope.train.data.corpus import find
from bytescope.train.data.records import RecordFiles
from bytescope.train.user_errors import UserError
from support.command_line import prepare as main
from support.text_data import config, write

pytestmark = pytest.mark.quick

TEXTS = [f"document {i:03d} é" + " and more" * (i % 7) for i in range(80)]


def lines(texts, field="text"):
    return "".join(json.dumps({"id": i, field: text}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(texts))


def save_arrow(folder, texts, splits=("",)):
    """As `datasets.save_to_disk` does: streams of Arrow beside their list, splits in folders of their own."""
    for number, split in enumerate(splits):
        place = folder / split
        place.mkdir(parents=True, exist_ok=True)
        names = []
        for part in range(2):
            table = pa.table({"text": texts[number :: len(splits)][part::2]})
            names.append(f"data-0000{part}-of-00002.arrow")
            with pa.OSFile(str(place / names[-1]), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=7)
        (place / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
        (place / "dataset_info.json").write_text("{}")
    if splits != ("",):
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Kind of source -> a path that holds TEXTS."""
    folder = tmp_path_factory.mktemp("sources")
    write(
        folder,
        {
            "lines.jsonl": lines(TEXTS),
            "folder/a.jsonl": lines(TEXTS[:50]),
            "folder/README.md": "about",
            "folder/b.jsonl.gz": gzip.compress(lines(TEXTS[50:]).encode()),
            "folder/sub/c.jsonl": "\n \n",
        },
    )
    pq.write_table(pa.table({"text": TEXTS, "other": list(range(80))}), folder / "rows.parquet", row_group_size=9)
    save_arrow(folder / "saved", TEXTS)
    return {
        "jsonl": folder / "lines.jsonl",
        "folder": folder / "folder",
        "parquet": folder / "rows.parquet",
        "saved": folder / "saved",
        "glob": folder / "folder/*.jsonl*",
    }


def documents(source):
    """The documents of a stream of byte tokens, in order."""
    windows = source.windows(range(len(source)))
    stream = np.concatenate([windows[0][:1], windows[:, 1:].ravel()])
    return bytes(stream[stream != -1].tolist()).decode().split("\0")[:-1]


@pytest.mark.parametrize("kind", ["jsonl", "folder", "parquet", "saved", "glob"])
def test_every_kind_gives_the_same_documents(sources, kind):
    data = open_data(config(source=str(sources[kind]), seq_len=1))
    train, held_out = documents(data.train), documents(data.heldout)
    assert sorted(train + held_out) == TEXTS and not set(train) & set(held_out)
    if kind != "saved":  # whose files take turns here
        assert train == [text for text in TEXTS if text in set(train)]
    assert set(held_out) == set(documents(open_data(config(source=str(sources["jsonl"]), seq_len=1)).heldout))
    assert f"{len(train)} documents" in data.description and f"held out {len(held_out)} document" in data.description


def test_prepared_shards_have_the_same_tokens(sources, tmp_path):
    assert main([f"--source={sources['parquet']}", f"--out={tmp_path / 'out'}"]) == 0
    shards, plain = (open_data(config(source=str(source))) for source in (tmp_path / "out", sources["parquet"]))
    assert np.array_equal(shards.train.windows(range(len(shards.train))), plain.train.windows(range(len(plain.train))))
    assert shards.heldout.tokens == plain.heldout.tokens


def test_copies_fall_on_one_side_and_what_is_added_moves_nothing(tmp_path):
    path = write(tmp_path, {"a.jsonl": lines(TEXTS * 3)}) / "a.jsonl"
    data = open_data(config(source=str(path), seq_len=1))
    train, held_out = documents(data.train), documents(data.heldout)
    assert not set(train) & set(held_out) and len(train) + len(held_out) == 240 and len(held_out) % 3 == 0
    path.write_text(lines([f"new {i}" for i in range(40)] + TEXTS))
    after = set(documents(open_data(config(source=str(path), seq_len=1)).heldout))
    assert after & set(TEXTS) == set(held_out)
    other = write(tmp_path, {"b.jsonl": lines(["one", "two", TEXTS[0], TEXTS[1]])}) / "b.jsonl"
    data = open_data(config(source=str(path), eval_source=str(other), seq_len=1))
    assert documents(data.heldout) == ["one", "two", *TEXTS[:2]] and not set(documents(data.train)) & set(TEXTS[:2])
    assert "2 copies of held-out content left out" in data.description


def test_identical_files_fall_on_one_side(tmp_path):
    files = {f"{i}.txt": f"text {i}" for i in range(40)}
    write(tmp_path / "plain", files)
    held_out = find(str(tmp_path / "plain")).split()[1]
    copied = held_out.documents[0].name
    write(tmp_path / "plain", {f"copy of {copied}": files[copied], "same size": files[copied].replace("t", "s")})
    train, again = find(str(tmp_path / "plain")).split()
    assert [d.name for d in again.documents] == [d.name for d in held_out.documents]
    assert f"copy of {copied}" not in {d.name for d in train.documents} and train.copies == 1
    assert "same size" in {d.name for d in train.documents}
    data = open_data(config(source=str(tmp_path / "plain"), seq_len=1))
    assert data.description.endswith("1 copy of held-out content left out")
    write(tmp_path / "same", {f"{i}.txt": "text" for i in range(9)})
    with pytest.raises(UserError, match=r"has 0 tokens to train on \(\d copies of held-out content left out\)"):
        open_data(config(source=str(tmp_path / "same")))


def test_splits_and_names_say_what_is_held_out(tmp_path):
    save_arrow(tmp_path / "saved", TEXTS, ("train", "test"))
    data = open_data(config(source=str(tmp_path / "saved"), seq_len=1))
    assert sorted(documents(data.train)) == TEXTS[::2] and sorted(documents(data.heldout)) == TEXTS[1::2]
    write(tmp_path, {"two/train.jsonl": lines(TEXTS[:60]), "two/validation.jsonl": lines(TEXTS[50:])})
    data = open_data(config(source=str(tmp_path / "two"), seq_len=1))
    assert documents(data.train) == TEXTS[:50] and documents(data.heldout) == TEXTS[50:]


def test_malformed_lines_are_named_and_some_may_be_skipped(tmp_path, capsys):
    good = [json.dumps({"text": text}) for text in TEXTS]
    bad = ['{"text": "cut', "[1, 2]", '{"txt": "x"}', '{"text": 3}', '{"text": "\\ud800"}', "\xff"]
    content = "\n".join([*good[:3], *bad, *good[3:]]).encode("latin-1")
    path = write(tmp_path, {"a.jsonl": content}) / "a.jsonl"
    with pytest.raises(
        UserError, match=r"a.jsonl line 4: not a line of JSON \(Unterminated string.*fix the record, set data.format"
    ):
        open_data(config(source=str(path)))
    with pytest.raises(UserError, match=r"a.jsonl line 9: not a line of JSON .*\(5 before it were left out\)"):
        open_data(config(source=str(path), skip_bad=5))
    data = open_data(config(source=str(path), skip_bad=6, seq_len=1))
    assert sorted(documents(data.train) + documents(data.heldout)) == TEXTS
    assert data.description.endswith("6 malformed records left out (data.skip_bad)")
    assert main([f"--source={path}", f"--out={tmp_path / 'out'}", "--skip-bad=6"]) == 0
    assert main([f"--source={path}", f"--out={tmp_path / 'no'}"]) == 2
    assert main([f"--source={path}", f"--out={tmp_path / 'no'}", "--skip-bad=-1"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize(
    ("form", "record", "why"),
    [
        ("text", {"body": "x"}, "the field 'text'"),
        ("chat", {"txt": "x"}, 'the record has no list of "messages"'),
        ("pairs", {"txt": "x"}, '"prompt" is missing'),
    ],
)
def test_where_all_records_are_malformed_that_is_what_is_said(tmp_path, form, record, why):
    path = write(tmp_path, {"a.jsonl": (json.dumps(record) + "\n") * 60}) / "a.jsonl"
    message = rf"all 60 records are malformed, the first in .*line 1: {why}.*; fix them"
    with pytest.raises(UserError, match=message) as found:
        open_data(config(source=str(path), format=form, skip_bad=60))
    assert "seq_len" not in str(found.value)


@pytest.mark.parametrize(
    "line, why",
    [
        ("[1, 2]", "the line is not a JSON object"),
        ('{"txt": "x"}', "the field 'text' (data.field) is missing"),
        ('{"text": 3}', "(data.field) is int, not text"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, "not a line of JSON"),
        ("1" * 5000, "not a line of JSON"),
    ],
)
def test_what_is_wrong_with_a_line(tmp_path, line, why):
    write(tmp_path, {"a.jsonl": line})
    with pytest.raises(UserError, match="a.jsonl line 1: .*" + re.escape(why)) as error:
        find_texts(tmp_path / "a.jsonl")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def find_texts(path):
    return open_data(config(source=str(path)))


def truncated(path, size):
    os.truncate(path, size)
    return path


def listed(folder, names):
    save_arrow(folder, TEXTS)
    (folder / "state.json").write_text(json.dumps({"_data_files": names}))
    return folder


DAMAGED = {
    r"b.jsonl.gz cannot be read after line \d+ \(Compressed file ended": lambda folder, sources: truncated(
        write(folder, {"b.jsonl.gz": (sources["folder"] / "b.jsonl.gz").read_bytes()}) / "b.jsonl.gz", 200
    ),
    r"b.jsonl.gz cannot be read after line 0 \(Not a gzipped file": lambda folder, sources: (
        write(folder, {"b.jsonl.gz": "text"}) / "b.jsonl.gz"
    ),
    "a.parquet cannot be read": lambda folder, sources: truncated(
        write(folder, {"a.parquet": sources["parquet"].read_bytes()}) / "a.parquet", 500
    ),
    "has the columns x, but none named text": lambda folder, sources: (
        pq.write_table(pa.table({"x": [1]}), folder / "a.parquet"),
        folder / "a.parquet",
    )[1],
    r"state.json cannot be used \(the file lists '../../passwd', which is not": lambda folder, sources: listed(
        folder, [{"filename": "../../passwd"}]
    ),
    "state.json cannot be used": lambda folder, sources: listed(folder, ["x"]),
    "none.arrow cannot be read": lambda folder, sources: listed(folder, [{"filename": "none.arrow"}]),
    "has the splits test, but no split named train": lambda folder, sources: (
        save_arrow(folder, TEXTS, ("test",)),
        folder,
    )[1],
    r"records \(a.jsonl\) and other files \(b.txt\): give a glob": lambda folder, sources: write(
        folder, {"a.jsonl": "{}", "b.txt": "x"}
    ),
    "is longer than 0 MiB": lambda folder, sources: write(folder, {"a.jsonl": '{"text": "' + "x" * 2000}) / "a.jsonl",
}


@pytest.mark.parametrize("message", DAMAGED)
def test_a_damaged_source_is_refused(sources, tmp_path, monkeypatch, message):
    if "longer" in message:
        monkeypatch.setattr(records, "LONGEST_LINE", 1000)
    with pytest.raises(UserError, match=message) as error:
        find_texts(DAMAGED[message](tmp_path, sources))
    assert "\n" not in str(error.value)


def test_without_pyarrow_the_command_is_named(sources, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"rows.parquet needs pyarrow, .*: run pip install -e '\.\[data\]' in"):
        find_texts(sources["parquet"])
    assert find_texts(sources["jsonl"]).train.tokens


def test_fingerprints_follow_the_content(sources, tmp_path):
    paths = [
        sources["jsonl"],
        write(tmp_path, {"x.jsonl": lines(TEXTS)}) / "x.jsonl",
        write(tmp_path, {"y.jsonl": lines([*TEXTS[1:], "other"])}) / "y.jsonl",
    ]
    prints = [open_data(config(source=str(path))).fingerprint for path in paths]
    assert prints[0] == prints[1] != prints[2]
    renamed = write(tmp_path, {"z.jsonl": lines(TEXTS, "body")}) / "z.jsonl"
    assert open_data(config(source=str(renamed), field="body")).fingerprint == prints[0]


def test_records_are_found(sources):
    assert isinstance(find(str(sources["saved"])), RecordFiles)
    assert [file.name for file in find(str(sources["folder"])).files] == ["a.jsonl", "b.jsonl.gz", "sub/c.jsonl"]


@pytest.mark.oracle("datasets")
def test_a_data_set_saved_by_datasets(tmp_path):
    import datasets

    whole = datasets.Dataset.from_dict({"text": TEXTS}, features=datasets.Features({"text": datasets.Value("string")}))
    whole.train_test_split(test_size=0.25, seed=0, writer_batch_size=5).save_to_disk(tmp_path / "both", num_shards=None)
    data = open_data(config(source=str(tmp_path / "both"), seq_len=1))
    assert sorted(documents(data.train) + documents(data.heldout)) == TEXTS and len(documents(data.heldout)) == 20
