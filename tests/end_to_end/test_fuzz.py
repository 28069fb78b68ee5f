"""Damaged files and words, the same at every run: an answer or one line of error, in bounded time and memory.

`python tests/support/fuzz/run.py --minutes=10 --seed=3` goes on for longer, with other damage.
"""

import resource

import pytest

from support.fuzz import harness
from support.fuzz.readers import READERS, prepare

CORPUS = sorted(path for path in harness.CORPUS.rglob("*") if path.is_file())


@pytest.fixture(scope="module", autouse=True)
def prepared():
    prepare()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", READERS)
def test_damage_is_answered_or_refused(name, tmp_path):
    found, failures = harness.run(READERS[name], tmp_path, seed=16, count=READERS[name].count)
    assert not failures, "\n".join(f"case {failure.case}: {failure.error}" for failure in failures[:5])
    assert found["answer"] and found.total() == READERS[name].count  # the good input is one, and little damage is none
    assert found["refused"] or not READERS[name].refuses


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_once_failed(path, tmp_path):
    assert harness.outcome(READERS[path.parent.name], path.read_bytes(), tmp_path) in ("answer", "refused")


def test_every_reader_has_an_answer_to_its_good_inputs(tmp_path):
    for name, reader in READERS.items():
        for number, data in enumerate(reader.seeds()):
            assert harness.outcome(reader, data, tmp_path / f"{name}{number}") == "answer", name


def reader_of(read):
    return harness.Reader("x", list, lambda data, rng: data, read, (ValueError,), 1)


def fall_down(data, folder):
    raise ValueError("refused") if data else KeyError("no")


def fill(data, folder):
    assert not bytearray(2**60)


def turn(data, folder):
    while True:
        pass


def test_the_harness_sees_what_is_no_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "CPU_S", 0.05)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    assert harness.outcome(reader_of(fall_down), b"x", tmp_path) == "refused"
    assert harness.outcome(reader_of(fall_down), b"", tmp_path) == "KeyError: 'no'"
    assert harness.outcome(reader_of(fill), b"", tmp_path).startswith("MemoryError")
    assert harness.outcome(reader_of(turn), b"", tmp_path).startswith("TooLong")
    assert harness.outcome(reader_of(lambda data, folder: None), b"", tmp_path) == "answer"
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
