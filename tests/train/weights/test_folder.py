"""Folders that are damaged, hostile or something else: one line with the file's name, and nothing is unpickled."""

import json
import os

import numpy as np
import pytest

from bytescope.train.source import CONFIG, INDEX, SINGLE
from bytescope.train.user_errors import UserError
from bytescope.train.weights.folder import Folder
from support.models import weights

pytestmark = pytest.mark.quick

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path):
    return weights.llama(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    return weights.llama(tmp_path / "model", shards=2)


def refused(path):
    with pytest.raises(UserError) as caught:
        Folder.open(path)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def changed(path, change):
    """Writes the JSON of a file after a change."""
    value = json.loads(path.read_text())
    path.write_text(json.dumps(change(value) or value))


def headed(folder, header):
    """Writes the folder's file with another header."""
    (folder / SINGLE).write_bytes(
        weights.encode({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}, header=header)
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "adapter_model.safetensors", "notes.txt"])
def test_what_is_read_is_said_if_there_are_no_weights(folder, name):
    (folder / SINGLE).rename(folder / name)
    assert "download the safetensors of the model (pickle files, which may run code," in refused(folder)


def test_no_folder_no_config_and_a_file(folder, tmp_path):
    assert "no folder" in refused(tmp_path / "none") and "is empty" in refused("")
    assert "is a file" in refused(folder / CONFIG)
    (folder / CONFIG).unlink()
    assert "has no 'config.json'" in refused(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe{}", b'{"a": ' * 50_000, b""])
def test_json_that_is_damaged(folder, content):
    for name in (CONFIG, INDEX):
        (folder / name).write_bytes(content)
        assert f"{name} is damaged" in refused(folder)
        (folder / CONFIG).write_text(json.dumps(weights.LLAMA))


def test_files_that_are_cut_or_longer(folder):
    path = folder / SINGLE
    whole = path.read_bytes()
    for content in (whole[:-1], whole + b"\0", whole[:4], b"", whole[:100]):
        path.write_bytes(content)
        assert "truncated or damaged" in refused(folder)


@pytest.mark.parametrize(
    "header",
    [
        lambda e: {**e, "a": {**e["a"], "data_offsets": [4, 28]}},  # a hole, then an overlap
        lambda e: {**e, "b": {**e["b"], "data_offsets": [24, 2**62]}},
        lambda e: {**e, "b": {**e["b"], "data_offsets": [-16, 0]}},
        lambda e: {**e, "a": {**e["a"], "shape": [2, 4]}},
        lambda e: {**e, "a": {**e["a"], "dtype": "F128"}},
        lambda e: {**e, "a": None},
        lambda e: {"a": e["a"]},
        lambda e: [],
        lambda e: b"\xff" * 40,
    ],
)
def test_headers_that_lie(folder, header):
    headed(folder, header)
    assert refused(folder).startswith(f"{folder / SINGLE} is truncated or damaged (")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x\0y", "a\nb"])
def test_an_index_may_name_files_of_the_folder_alone(sharded, name):
    first = next(iter(json.loads((sharded / INDEX).read_text())["weight_map"]))
    changed(sharded / INDEX, lambda index: index["weight_map"].update({first: name}))
    assert INDEX in refused(sharded) or "has no" in refused(sharded)


def test_links_may_not_leave_the_folder_but_for_the_cache_of_snapshots(sharded, tmp_path):
    outside = tmp_path / "outside.safetensors"
    (sharded / SHARD).rename(outside)
    (sharded / SHARD).symlink_to(outside)
    assert "outside the folder: replace the link" in refused(sharded)
    (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    outside.rename(tmp_path / "models--a--b" / "blobs" / "digest")
    for path in sharded.iterdir():
        if path.name != SHARD:
            path.rename(snapshot / path.name)
    (snapshot / SHARD).symlink_to("../../blobs/digest")
    assert Folder.open(snapshot).tensors


def test_an_index_and_its_files_have_to_agree(sharded):
    original = (sharded / INDEX).read_text()
    changed(sharded / INDEX, lambda index: index["weight_map"].update(extra=SHARD))
    assert f"{SHARD} does not contain the tensor 'extra'" in refused(sharded)
    (sharded / INDEX).write_text(original)
    last = list(json.loads(original)["weight_map"])[-1]
    changed(sharded / INDEX, lambda index: index["weight_map"].pop(last) and index)
    assert f"has the tensor {last!r}, which {INDEX} does not list" in refused(sharded)
    (sharded / INDEX).write_text(original)
    (sharded / SHARD).write_bytes((sharded / SHARD.replace("00002-", "00001-")).read_bytes())
    assert "download the folder again" in refused(sharded)  # a tensor is in two files
    (sharded / SHARD).unlink()
    assert f"has no {SHARD!r}" in refused(sharded)
    changed(sharded / INDEX, lambda index: {"weight_map": ["x"]})
    assert "weight_map is not an object" in refused(sharded)


def test_what_is_no_regular_file_is_not_opened(folder):
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)
    assert "not a regular file" in refused(folder)  # opening a pipe would wait for ever


def test_the_fingerprint_is_of_the_content(folder, tmp_path):
    same = weights.llama(tmp_path / "same")
    assert Folder.open(same).fingerprint == Folder.open(folder).fingerprint
    for other in (weights.llama(tmp_path / "a", seed=1), weights.llama(tmp_path / "b", rms_norm_eps=1e-6)):
        assert Folder.open(other).fingerprint != Folder.open(folder).fingerprint


def test_a_slice_is_read_and_no_more(folder, monkeypatch):
    opened = Folder.open(folder)
    name = "model.layers.1.mlp.down_proj.weight"
    whole = opened.read(name, [(0, 32), (0, 48)])
    assert np.array_equal(opened.read(name, [(3, 7), (40, 48)]), whole[3:7, 40:48]) and whole.dtype == np.float32
    expected = weights.numbers(weights.llama_shapes())[name]
    assert np.array_equal(whole, expected)


def test_a_file_that_changes_after_it_was_verified(folder):
    from bytescope.train.weights import folder as folders

    opened = Folder.open(folder)
    folders.close()
    (folder / SINGLE).write_bytes(b"\0" * 8)
    with pytest.raises(UserError, match="has changed"):
        opened.read("model.norm.weight", [(0, 32)])


def cut(path):
    os.truncate(path, 200)


def rewritten(path):
    path.write_bytes(path.read_bytes())


def replaced(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.rename(path)


@pytest.mark.parametrize("change", [rewritten, replaced, os.unlink, cut])
def test_a_file_that_changes_while_it_is_read(folder, change):
    """It is mapped by then: without the check, to read a file that was cut ends the process."""
    opened = Folder.open(folder)
    opened.read("model.norm.weight", [(0, 32)])
    change(folder / SINGLE)
    with pytest.raises(UserError, match="has changed since it was verified|No such file") as caught:
        opened.read("model.embed_tokens.weight", [(0, 250), (0, 32)])
    assert str(folder / SINGLE) in str(caught.value) and len(str(caught.value).splitlines()) == 1
