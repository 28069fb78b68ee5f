import errno
import os
import re
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescope.train.data import documents
from bytescope.train.data.corpus import ShardFiles, find
from bytescope.train.data.documents import Document, TextDocuments
from bytescope.train.user_errors import UserError
from support.text_data import write

pytestmark = pytest.mark.quick


def names(text):
    return [document.name for document in text.documents]


def content(text):
    return "".join(piece for piece in text.stream() if piece is not None).encode()


def test_stdlib_is_the_library_without_tests_and_additions():
    text = find("stdlib")
    found = names(text)
    assert found == sorted(found) and len(set(found)) == len(found) > 400
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(found)
    parts = {part for name in found for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip"}
    assert not any("_sysconfigdata" in name or not name.endswith(".py") for name in found)
    train, heldout = text.split()
    assert sorted(names(train) + names(heldout)) == found and not set(names(train)) & set(names(heldout))
    assert 0.02 < len(heldout.documents) / len(found) < 0.1
    source = Path(sysconfig.get_path("stdlib"))
    assert all(document.stop == (source / document.name).stat().st_size for document in text.documents)


def test_stdlib_absent_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match=r"has no source files of its standard library.*: give your own text"):
        find("stdlib")


def test_folder_is_read_in_order_without_hidden_empty_and_binary_files(tmp_path):
    write(
        tmp_path,
        {
            "b.md": "b",
            "a/z.txt": "z",
            "a.txt": "a",
            "a/nothing": "",
            ".hidden": "h",
            ".git/x": "x",
            "__pycache__/y.py": "y",
            "picture.png": b"\x89PNG\0\xff",
            "sub/deep/c.py": "c",
        },
    )
    text = find(str(tmp_path))
    assert names(text) == ["a.txt", "a/z.txt", "b.md", "sub/deep/c.py"]
    assert text.skipped == 1
    assert list(text.stream()) == ["a", None, "z", None, "b", None, "c", None]


def test_glob_names_are_taken_from_its_fixed_part(tmp_path, monkeypatch):
    write(tmp_path, {"x/a.txt": "a", "x/y/b.txt": "b", "x/c.md": "c"})
    assert names(find(str(tmp_path / "x/**/*.txt"))) == ["a.txt", "y/b.txt"]
    assert names(find(str(tmp_path / "*/*.txt"))) == ["x/a.txt"]
    monkeypatch.chdir(tmp_path)
    assert names(find("x/*.*")) == ["a.txt", "c.md"]


def test_held_out_files_do_not_move_when_others_are_added(tmp_path):
    write(tmp_path, {f"{i}.txt": "text" for i in range(200)})
    before = names(find(str(tmp_path)).split()[1])
    assert 2 <= len(before) <= 30
    write(tmp_path, {f"more/{i}.txt": "text" for i in range(100)})
    after = names(find(str(tmp_path)).split()[1])
    assert [name for name in after if not name.startswith("more/")] == before


@settings(deadline=None)
@given(st.sets(st.text("abcdefgh", min_size=1), min_size=2, max_size=8))
def test_few_files_still_have_both_parts(stems):
    text = TextDocuments("t", tuple(Document(Path(stem), stem, 0, size) for size, stem in enumerate(sorted(stems), 1)))
    train, heldout = text.split()
    assert train.documents and heldout.documents
    assert sorted(names(train) + names(heldout)) == sorted(stems)


@settings(max_examples=60, deadline=None)
@given(st.text("ab\né\U0001f600", min_size=1, max_size=400), st.integers(1, 40))
def test_pieces_and_parts_add_up_to_the_file(tmp_path_factory, text, piece_bytes):
    path = tmp_path_factory.mktemp("corpus") / "one.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_BYTES", piece_bytes)
        found = find(str(path))
        assert content(found) == text.encode()
        train, heldout = found.split()
        # Cut between characters, or decoding either part would fail.
        assert content(train) + content(heldout) == text.encode()
    assert 0 < len(content(heldout)) <= max(len(text.encode()) // 20, 1) + 3


def test_single_file_holds_out_its_end_from_a_line_start(tmp_path):
    lines = [f"line {i}\n" for i in range(1000)]
    train, heldout = find(str(write(tmp_path, {"one.txt": "".join(lines)}) / "one.txt")).split()
    kept = content(heldout).decode().splitlines(keepends=True)
    assert kept == lines[-len(kept) :] and 40 <= len(kept) <= 55
    assert content(train).decode() == "".join(lines[: -len(kept)])


def test_what_is_not_utf8_is_named_with_its_place(tmp_path, monkeypatch):
    path = write(tmp_path, {"latin.txt": b"abcd\n" * 10 + b"caf\xe9 au lait"}) / "latin.txt"
    for piece_bytes in (3, 7, 1 << 20):
        monkeypatch.setattr(documents, "PIECE_BYTES", piece_bytes)
        with pytest.raises(UserError, match=r"latin.txt is not UTF-8 text \(byte 53\): convert it, or give a glob"):
            content(find(str(path)))


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = write(tmp_path, {"a.txt": "0123456789"}) / "a.txt"
    text = find(str(path))
    path.write_text("012345")
    with pytest.raises(UserError, match="ends at byte 6 instead of 10: it changed while it was read"):
        content(text)
    path.unlink()
    with pytest.raises(UserError, match=r"a.txt cannot be read \(No such file or directory\): repair it"):
        content(text)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    """The system's refusal is raised here, since root may read everything."""

    def refuse(path, mode):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    write(tmp_path, {"a.txt": "text"})
    monkeypatch.setattr(documents, "open", refuse, raising=False)
    with pytest.raises(UserError, match=r"a.txt cannot be read \(Permission denied\)"):
        find(str(tmp_path))


def test_shards_are_told_from_text(tmp_path):
    write(
        tmp_path,
        {
            "s/b.bin": "bb",
            "s/a.npy": "aa",
            "s/README.txt": "r",
            "i/index.json": "{}",
            "mixed/a.bin": "aa",
            "mixed/b.txt": "b",
        },
    )
    found = find(str(tmp_path / "s"))
    assert isinstance(found, ShardFiles) and [p.name for p in found.files] == ["a.npy", "b.bin"]
    assert found.folder is None and find(str(tmp_path / "i")).folder == tmp_path / "i"
    assert find(str(tmp_path / "s/b.bin")).files == (tmp_path / "s/b.bin",)
    assert find(str(tmp_path / "s/*.bin")).files == (tmp_path / "s/b.bin",)
    with pytest.raises(UserError, match=r"token shards \(a.bin\) and other files \(b.txt\): give a glob"):
        find(str(tmp_path / "mixed/*"))


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("none.txt", "is not a file or folder: give one that exists, a glob, or 'stdlib'"),
        ("empty", "has no text: give UTF-8 text files, or .bin or .npy shards"),
        ("empty.txt", "has no text: give UTF-8 text files"),
        ("*.rst", "has no text: give UTF-8 text files"),
        ("binary", "has no text, only 1 binary files: give UTF-8 text files"),
    ],
)
def test_nothing_to_read(tmp_path, name, remedy):
    write(tmp_path, {"empty.txt": "", "binary/a.png": b"\0\1"})
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=re.escape(f"data.eval_source={str(tmp_path / name)!r} {remedy}")):
        find(str(tmp_path / name), "data.eval_source")


def test_an_empty_name_is_not_the_current_folder():
    with pytest.raises(UserError, match=r"data.source='' is not a file or folder"):
        find("")


def test_names_need_not_be_utf8(tmp_path):
    """Names of files are bytes; a text is held out by them whatever they are."""
    for number in range(4):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff%d.txt" % number)).write_text(f"text {number}\n")
    train, held_out = find(str(tmp_path)).split()
    assert len(train.documents) == 3 and len(held_out.documents) == 1
    assert train.identity([]) != held_out.identity([])


@pytest.mark.parametrize("source", ["~nobody-here/texts", "x" * 5000, "a\0b", "\udcff"])
def test_a_source_that_no_system_can_have(source):
    with pytest.raises(UserError, match="is not a file or folder"):
        find(source)
