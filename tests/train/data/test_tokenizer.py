import json
import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from bytescope.train.data import tokenizer as module
from bytescope.train.data.batches import open_data
from bytescope.train.data.tokenizer import ByteTokenizer, IdTokenizer, load_tokenizer, tokenize
from bytescope.train.user_errors import UserError
from support.command_line import prepare as main
from support.text_data import config, save_tokenizer, write

pytestmark = pytest.mark.quick


@given(st.text())
def test_bytes_come_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint8 and ids.tobytes() == text.encode()
    assert tokenizer.decode(ids) == text


@given(st.lists(st.integers(-5, 1000)))
def test_bytes_decode_anything(ids):
    assert isinstance(ByteTokenizer().decode(ids), str)


def test_bytes_decode_keeps_what_is_valid():
    assert ByteTokenizer().decode([104, 0xC3, 105, 300]) == "h\ufffdi\ufffd"


def test_ids_are_shown_as_numbers():
    tokenizer = IdTokenizer(50257)
    assert tokenizer.decode(np.array([464, 2068])) == "464 2068"
    assert tokenizer.encode("464 2068").tolist() == [464, 2068]
    assert tokenizer.encode("no number").tolist() == [0]


def test_json_gives_plain_ids(tmp_path):
    path = tmp_path / "tokenizer.json"
    vocab = save_tokenizer(path)
    tokenizer = load_tokenizer(str(path))
    words = "def x return y x"
    # Neither the leading special token, nor the truncation to 2, nor the padding to 7 that the file asks for.
    assert tokenizer.encode(words).tolist() == [vocab[word] for word in words.split()]
    assert tokenizer.vocab_size == len(vocab)
    assert tokenizer.separator == vocab["<|endoftext|>"]
    assert tokenizer.decode([vocab["x"], 10_000, vocab["y"]]) == "x\ufffdy"
    assert load_tokenizer(str(tmp_path)).identity == tokenizer.identity


def test_json_vocabulary_with_gaps_counts_to_the_largest_id(tmp_path):
    path = tmp_path / "tokenizer.json"
    vocab = save_tokenizer(path, first_id=1000)
    assert load_tokenizer(str(path)).vocab_size == max(vocab.values()) + 1


def test_json_without_an_end_has_no_separator(tmp_path):
    path = tmp_path / "tokenizer.json"
    save_tokenizer(path, special=())
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.separator is None
    assert np.concatenate(list(tokenize(["x", None, "y", None], tokenizer))).tolist() == [
        *tokenizer.encode("x"),
        *tokenizer.encode("y"),
    ]


@pytest.mark.parametrize("group_chars", [1, 5, 1 << 20])
def test_tokenize_ends_documents_and_keeps_order(monkeypatch, group_chars):
    monkeypatch.setattr(module, "GROUP_CHARS", group_chars)
    tokens = np.concatenate(list(tokenize(["ab", "c", None, None, "de", None], ByteTokenizer())))
    assert tokens.tobytes() == b"abc\0\0de\0" and tokens.dtype == np.uint8


def test_unreadable_tokenizers_are_refused(tmp_path, monkeypatch):
    broken = tmp_path / "broken.json"
    for content in (b"{", b"{}", b"\xff\xfe", b""):
        broken.write_bytes(content)
        with pytest.raises(UserError, match=r"broken.json.*cannot be read as.*\): g") as error:
            load_tokenizer(str(broken))
        assert "\n" not in str(error.value)
    for missing in (str(tmp_path / "none.json"), "", "byte"):
        with pytest.raises(UserError, match=re.escape(f"data.tokenizer={missing!r} is not a file: give")):
            load_tokenizer(missing)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"broken.json' needs the tokenizers package, which is not installed: run pip"):
        load_tokenizer(str(broken))


def save_with_pattern(path, pattern):
    """A tokenizer that cuts texts at a regular expression first."""
    made = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    made.save(str(path))
    return load_tokenizer(str(path))


def test_a_panic_of_the_library_is_one_line(tmp_path):
    found = save_with_pattern(tmp_path / "tokenizer.json", r"(a+)+$(?!.)z")
    with pytest.raises(UserError, match="tokenizer.json cannot encode the text .*retry-limit.*: give") as error:
        found.encode("a" * 40 + "c")
    assert "\n" not in str(error.value)


def test_special_tokens_in_a_text_are_text_unless_parsed(tmp_path):
    path = tmp_path / "tokenizer.json"
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        ["x y"],
        trainers.BpeTrainer(
            special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    made.save(str(path))
    text, end = "x<|endoftext|>y", made.token_to_id("<|endoftext|>")
    plain, parsed = load_tokenizer(str(path)), load_tokenizer(str(path), special_tokens="parse")
    assert plain.separator == parsed.separator == end
    for one in (plain, parsed):
        assert one.decode(one.encode(text)) == text
    assert end not in plain.encode(text)
    assert parsed.encode(text).tolist() == [*plain.encode("x"), end, *plain.encode("y")]
    for ids, one in zip(((0, 15), (1, 3)), (plain, parsed)):
        tokens = np.concatenate(list(tokenize([text, None], one)))
        assert (int((tokens[:-1] == end).sum()), len(tokens) - 1) == ids and tokens[-1] == end


@pytest.mark.parametrize("kind", ["Unigram", "WordPiece", "WordLevel"])
def test_a_model_that_knows_special_tokens_as_words_writes_none(tmp_path, kind):
    """These find `</s>` in their own vocabulary, whatever is said of special tokens."""
    path, special = tmp_path / "tokenizer.json", ["<unk>", "</s>"]
    known = {"unk_token": "<unk>"}
    made = Tokenizer(
        {
            "Unigram": models.Unigram(),
            "WordPiece": models.WordPiece({"<unk>": 0}, **known),
            "WordLevel": models.WordLevel({"<unk>": 0}, **known),
        }[kind]
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = {
        "Unigram": trainers.UnigramTrainer(vocab_size=40, special_tokens=special, show_progress=False, **known),
        "WordPiece": trainers.WordPieceTrainer(vocab_size=60, special_tokens=special, show_progress=False),
        "WordLevel": trainers.WordLevelTrainer(special_tokens=special, show_progress=False),
    }[kind]
    made.train_from_iterator(["hello there you are </s>"] * 5, trainer)
    made.save(str(path))
    plain, parsed = load_tokenizer(str(path)), load_tokenizer(str(path), special_tokens="parse")
    assert made.token_to_id("</s>") in parsed.encode("hello </s> there")
    assert made.token_to_id("</s>") not in plain.encode("hello </s> there")
    assert (
        plain.encode("hello there").tolist()
        == parsed.encode("hello there").tolist()
        == (made.encode("hello there").ids)
    )
    assert plain.decode([made.token_to_id("</s>")]) == "</s>"


def test_special_tokens_are_part_of_the_data(tmp_path):
    save_tokenizer(tmp_path / "tokenizer.json")
    write(tmp_path / "files", {f"{i}.txt": f"def x return y <|endoftext|> {i}" * 5 for i in range(9)})
    both = {"source": str(tmp_path / "files"), "tokenizer": str(tmp_path / "tokenizer.json")}
    plain, parsed = open_data(config(**both)), open_data(config(**both, special_tokens="parse"))
    assert plain.fingerprint != parsed.fingerprint
    assert "parsed" in parsed.description and "parsed" not in plain.description
    for value in ("text", "parse"):
        out = tmp_path / value
        assert (
            main(
                [
                    f"--source={both['source']}",
                    f"--tokenizer={both['tokenizer']}",
                    f"--out={out}",
                    f"--special-tokens={value}",
                ]
            )
            == 0
        )
        assert json.loads((out / "index.json").read_text())["special_tokens"] == value
        assert open_data(config(source=str(out))).train.tokens == {"text": plain, "parse": parsed}[value].train.tokens
    assert main(["--source=a", "--out=b", "--special-tokens=pars"]) == 2


@given(st.text())
def test_spans_of_bytes_are_their_characters(text):
    ((ids, spans),) = ByteTokenizer().encode_spans([text])
    assert ids.tobytes() == text.encode()
    assert spans.tolist() == [[i, i + 1] for i, character in enumerate(text) for _ in character.encode()]
