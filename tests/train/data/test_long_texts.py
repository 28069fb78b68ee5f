"""Long texts have the ids of encoding them whole, whatever the tokenizer does at the start of a text."""

import random

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from bytescope.train.data import documents, long_texts, tokenizer
from bytescope.train.data.batches import open_data
from bytescope.train.data.corpus import find
from bytescope.train.data.tokenizer import load_tokenizer, tokenize
from bytescope.train.user_errors import UserError
from support.command_line import prepare as main
from support.text_data import config, write

pytestmark = pytest.mark.quick

WORDS = [
    "def",
    "return",
    "the",
    "longest",
    "agreement",
    "naïve",
    "größer",
    "語彙",
    "числа",
    "\U0001f600\U0001f601",
    "12345678901234567890",
    "x",
    "=",
    "(",
    ")",
    "==",
    "don't",
    "  ",
    "    ",
    "\t",
]


def prose(seed, count, separator=" ", line=9):
    rng = random.Random(seed)
    words = [rng.choice(WORDS) for _ in range(count)]
    return "".join(
        word + ("\n" * rng.randint(1, 3) if line and i % line == line - 1 else separator)
        for i, word in enumerate(words)
    )


TRAINING = [prose(seed, 300) for seed in range(3)]
TEXTS = {
    "lines": prose(10, 1500),
    "one line": prose(11, 1500, line=0),
    "no space": prose(12, 1500, "", line=0),
    "blanks": (" " * 700 + "\n" + "x " * 300 + "\t" * 400 + "7" * 900) * 2,
    "one word": "語" * 3000,
    "emoji": "\U0001f600é" * 1500,
}


def byte_level(made, special):
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )


def without_words(made, special):  # as in Llama 2: all of the text is one word
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)


def metaspace(made, special):
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="[UNK]", show_progress=False)


def bert(made, special):
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)


KINDS = {
    "byte-level BPE": (models.BPE(), byte_level),
    "BPE without words": (models.BPE(unk_token="[UNK]"), without_words),
    "Unigram": (models.Unigram(), metaspace),
    "WordPiece": (models.WordPiece(unk_token="[UNK]"), bert),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Kind of tokenizer -> the path of one."""
    folder, found = tmp_path_factory.mktemp("tokenizers"), {}
    for kind, (model, build) in KINDS.items():
        one = Tokenizer(model)
        one.train_from_iterator(TRAINING, build(one, ["[UNK]", "<|endoftext|>"]))
        one.save(str(folder / f"{kind}.json"))
        found[kind] = str(folder / f"{kind}.json")
    return found


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(long_texts, "OVERLAP", 150)
    monkeypatch.setattr(long_texts, "AGREED", 12)
    monkeypatch.setattr(documents, "PIECE_BYTES", 400)


def ids(tokenizer, *documents):
    return np.concatenate(list(tokenize([*documents, None], tokenizer)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [97, 400])
def test_pieces_have_the_ids_of_the_whole(made, small, kind, text, size):
    one, text = load_tokenizer(made[kind]), TEXTS[text]
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = ids(one, *pieces)
    assert found[-1] == one.separator and np.array_equal(found[:-1], one.encode(text))


def test_apart_they_would_have_others(made):
    """What the windows are for: each of these tokenizers gives other ids to parts of the text."""
    for kind in ("byte-level BPE", "BPE without words", "Unigram"):
        one, text = load_tokenizer(made[kind]), TEXTS["one line"]
        apart = one.encode_many([text[at : at + 97] for at in range(0, len(text), 97)])
        assert not np.array_equal(np.concatenate(apart), one.encode(text))


def test_short_and_long_documents_keep_their_order(made, small):
    one = load_tokenizer(made["byte-level BPE"])
    long = [TEXTS["lines"][:500], TEXTS["lines"][500:900]]
    found = ids(one, "def x", None, *long, None, "x", None, *long)
    parts = [one.encode(text) for text in ("def x", "".join(long), "x", "".join(long))]
    assert found.tolist() == [i for part in parts for i in (*part.tolist(), one.separator)]


def test_work_and_windows_stay_in_proportion_to_the_text(made, small, monkeypatch):
    one, encoded = load_tokenizer(made["byte-level BPE"]), []
    real = one.encode_spans
    monkeypatch.setattr(one, "encode_spans", lambda batch: encoded.extend(map(len, batch)) or real(batch))
    text = TEXTS["lines"] * 4
    pieces = [text[at : at + 400] for at in range(0, len(text), 400)]
    ids(one, *pieces)
    assert max(encoded) <= 550 and sum(encoded) < 1.5 * len(text)
    encoded.clear()
    unknown = load_tokenizer(made["WordPiece"])
    real_unknown = unknown.encode_spans
    monkeypatch.setattr(unknown, "encode_spans", lambda batch: encoded.extend(map(len, batch)) or real_unknown(batch))
    word = "x" * 40_000  # nowhere two windows agree
    assert ids(unknown, *(word[at : at + 400] for at in range(0, len(word), 400))).tolist()[:-1] == [0]
    assert max(encoded) == len(word) and sum(encoded) < 4 * len(word)


def test_a_tokenizer_that_looks_far_ahead_is_refused():
    def encode(batch):  # one id for all of a text, by whether it has a mark anywhere
        return [(np.full(len(text), "!" in text), np.arange(len(text))[:, None] + [0, 1]) for text in batch]

    with pytest.raises(UserError, match="of a text depend on text more than .*: divide the text into shorter"):
        list(long_texts.encode_long(["a" * 9000] * 3 + ["!" * 9000] * 3, encode))


def test_files_and_shards_have_the_ids_of_the_whole(made, small, tmp_path):
    text = prose(20, 4000, line=400)
    path = write(tmp_path, {"one.txt": text}) / "one.txt"
    one = load_tokenizer(made["BPE without words"])
    train, held_out = find(str(path)).split()
    whole = ["".join(piece for piece in part.stream() if piece) for part in (train, held_out)]
    assert main([f"--source={path}", f"--out={tmp_path / 'out'}", f"--tokenizer={one.path}"]) == 0
    for source in (str(path), str(tmp_path / "out")):
        data = open_data(config(source=source, tokenizer=str(one.path), seq_len=1))
        for tokens, part in zip((data.train, data.heldout), whole, strict=True):
            found = np.concatenate([tokens[0][:1], tokens.windows(range(len(tokens)))[:, 1]])
            assert np.array_equal(found, [*one.encode(part), one.separator])


def test_a_group_of_texts_is_bounded(made, monkeypatch):
    monkeypatch.setattr(tokenizer, "GROUP_CHARS", 20)
    one, sizes = load_tokenizer(made["Unigram"]), []
    real = one.encode_many
    monkeypatch.setattr(one, "encode_many", lambda batch: sizes.append(sum(map(len, batch))) or real(batch))
    list(tokenize([part for _ in range(30) for part in ("the x def", None)], one))
    assert sum(sizes) == 270 and max(sizes) <= 29
