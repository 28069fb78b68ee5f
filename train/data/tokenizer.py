"""Text to token ids and back: plain bytes, or a Hugging Face `tokenizer.json`.

A tokenizer has `name`, `identity` (for the fingerprint of the data), `vocab_size`, `separator` (the id that ends a
document, or None), `special` (special token -> id), `around` (the ids that the tokenizer itself would add before and
after a text, which are left out here), `encode`, `encode_many`, `encode_spans` and `decode`.
"""

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bytescope.memory.errors import one_line
from bytescope.train.data.long_texts import encode_long
from bytescope.train.user_errors import UserError

# Names of the token that ends a text in published tokenizers. A token that begins a text can also separate documents,
# so these names come last in SEPARATORS.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
SEPARATORS = (
    *ENDS, "<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]",
)  # fmt: skip

# Marks before and after the number of a special token in its new name; see `JsonTokenizer.renamed`. These Unicode
# noncharacters do not occur in text.
NAME = ("\ufdd4", "\ufdd5")
# Characters that are tokenized at a time: enough to use all cores, and few enough to limit the memory.
GROUP_CHARS = 1 << 22


class ByteTokenizer:
    """A tokenizer with one token per UTF-8 byte. Byte 0, which does not occur in text, separates documents.

    Attributes:
      separator: id of the token that ends a document.
      special: special token -> id; there are none.
      around: the ids that a tokenizer adds before and after a text; there are none.
    """

    name = identity = "bytes"
    vocab_size = 256
    separator: int | None = 0
    special_tokens = "text"
    special: Mapping[str, int] = {}
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    cuts_anywhere = True  # the ids of a text are the concatenated ids of its parts

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (token ids, uint8 [n]; span [from, to) of each token in characters, int64 [n, 2]) for each text."""
        return [(self.encode(text), _byte_spans(text)) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the token ids. Bytes that are not UTF-8, and ids above 255, become U+FFFD."""
        # 255 does not occur in UTF-8, so it replaces ids that are not bytes.
        return bytes(i if 0 <= i < 256 else 255 for i in map(int, ids)).decode("utf-8", errors="replace")


def _byte_spans(text: str) -> np.ndarray:
    """Returns the span [from, to) of the character to which each UTF-8 byte of the text belongs, int64 [n, 2]."""
    content = np.frombuffer(text.encode("utf-8"), np.uint8)
    number = np.cumsum(content & 0xC0 != 0x80)  # all but 10xxxxxx begin a character
    return np.stack([number - 1, number], axis=1).astype(np.int64)


class IdTokenizer(ByteTokenizer):
    """The tokenizer of shards whose own tokenizer is unknown. A token is written as the decimal number of its id."""

    name = identity = "ids"
    separator = None

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> np.ndarray:
        """Returns the decimal numbers in `text` as token ids, uint32 [n]. Returns the id 0 if there are none."""
        ids = [int(word) for word in text.split() if word.isdecimal()]
        return np.array(ids or [0], np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the ids as decimal numbers, separated by spaces."""
        return " ".join(str(int(i)) for i in ids)


class JsonTokenizer:
    """A Hugging Face `tokenizer.json`. Special tokens, truncation and padding that the file asks for are not applied.

    `special_tokens` says how to encode special tokens that are written in a text: "text" as ordinary text, "parse" as
    special tokens.
    """

    cuts_anywhere = False

    def __init__(self, path: Path, setting: str, special_tokens: str = "text"):
        """Reads the file `path`. `setting` is the name of the config value in error messages.

        Raises UserError if the file cannot be read, or if the tokenizers package is not installed.
        """
        try:
            from tokenizers import Tokenizer, processors
        except ImportError:
            raise UserError(
                f"{setting} needs the tokenizers package, which is not installed: run pip install tokenizers"
            ) from None
        with _as_user_error(f"{setting} cannot be read as a tokenizer.json"):
            content = path.read_bytes()
            self._tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        # A file made for inference may truncate or pad every text; documents must stay complete.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special_tokens = special_tokens
        self.name = path.name
        self.path = path
        self.identity = hashlib.sha256(content).hexdigest()[:16]
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{setting} has an empty vocabulary: give a trained tokenizer.json")
        # Ids may have gaps, so the number of ids would be too small.
        self.vocab_size = max(vocabulary.values()) + 1
        self.separator = next((vocabulary[token] for token in SEPARATORS if token in vocabulary), None)
        self._dtype = np.min_scalar_type(self.vocab_size - 1)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        self.around = self._around()
        # Replaces the processor that would add tokens around a text, and keeps spaces in the spans of tokens.
        self._tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        self._encoder = self._tokenizer
        if special_tokens == "text":
            self._tokenizer.encode_special_tokens = True
            # A model that looks up whole words would find special tokens in its vocabulary. Merges of BPE do not.
            looks_up = type(self._tokenizer.model).__name__ != "BPE" or self._tokenizer.model.ignore_merges
            if looks_up and self.special.keys() & self._tokenizer.get_vocab(with_added_tokens=False).keys():
                self._encoder = self.renamed()[0]._encoder

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        try:
            with _as_user_error(f"{self.path} cannot encode a letter"):
                encoding = self._tokenizer.encode("a")
        except UserError:  # it has neither a token for this letter nor an unknown token
            return (), ()
        plain = [i for i, mask in enumerate(encoding.special_tokens_mask) if not mask] or [0]
        return tuple(encoding.ids[: plain[0]]), tuple(encoding.ids[plain[-1] + 1 :])

    def parsing(self) -> "JsonTokenizer":
        """Returns this tokenizer with special_tokens="parse", which encodes special tokens in a text as special
        tokens.
        """
        return self._varied(self._tokenizer.to_str())

    def renamed(self) -> tuple["JsonTokenizer", dict[str, str]]:
        """Returns a copy of this tokenizer in which special tokens such as <|im_end|> have new names, and a mapping
        special token -> new name.

        For the copy, the old names are ordinary text, and the new names are special tokens. The new names do not occur
        in text.

        Raises UserError if a new name has another token id than the old one.
        """
        content = json.loads(self._tokenizer.to_str())
        names = {token: f"{NAME[0]}{number}{NAME[1]}" for number, token in enumerate(self.special)}
        for token in content["added_tokens"]:
            if token["special"]:
                token |= {"content": names[token["content"]], "normalized": False}
        model, pieces = content["model"], content["model"]["vocab"]
        if isinstance(pieces, dict):
            model["vocab"] = {names.get(piece, piece): i for piece, i in pieces.items()}
        else:  # Unigram: pieces with their scores
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in pieces]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        renamed = self._varied(json.dumps(content))
        if wrong := [token for token, name in names.items() if renamed.id_of(name) != self.special[token]]:
            raise UserError(
                f"{self.path} cannot encode the special token {wrong[0]} as ordinary text: "
                "set data.special_tokens=parse"
            )
        return renamed, names

    def _varied(self, content: str) -> "JsonTokenizer":
        from tokenizers import Tokenizer

        variant = copy.copy(self)
        with _as_user_error(f"{self.path} cannot be read as a tokenizer.json"):
            variant._tokenizer = variant._encoder = Tokenizer.from_str(content)
        variant.special_tokens = "parse"
        return variant

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token, or None if the vocabulary does not contain it."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of `text`, [n], in the smallest unsigned integer dtype that can hold them."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the token ids of each text. Texts are tokenized in parallel.

        Raises UserError if a text cannot be tokenized.
        """
        encodings = self._encode(self._encoder.encode_batch_fast, texts)
        return [np.array(encoding.ids, self._dtype) for encoding in encodings]

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (token ids [n]; span [from, to) of the characters of each token, int64 [n, 2]) for each text."""
        encodings = self._encode(self._encoder.encode_batch, texts)
        return [
            (np.array(encoding.ids, self._dtype), np.array(encoding.offsets, np.int64).reshape(-1, 2))
            for encoding in encodings
        ]

    def _encode(self, encode: Callable[..., list[Any]], texts: Sequence[str]) -> list[Any]:
        with _as_user_error(f"{self.path} cannot encode the text"):
            return encode(list(texts), add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the token ids, including special tokens. Ids outside the vocabulary become U+FFFD."""
        pieces, known = [], []
        for i in map(int, ids):
            if 0 <= i < self.vocab_size:
                known.append(i)
                continue
            pieces += [self._decode(known), "\ufffd"]
            known = []
        return "".join([*pieces, self._decode(known)])

    def _decode(self, ids: list[int]) -> str:
        with _as_user_error(f"{self.path} cannot decode tokens"):
            return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


@contextmanager
def _as_user_error(what: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        # The tokenizers package raises plain Exception, and a BaseException of this name if its Rust code panics.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = one_line(error) or type(error).__name__
        raise UserError(
            f"{what} ({reason}): give a tokenizer.json saved by Hugging Face tokenizers, or 'bytes'"
        ) from None


Tokenizer = ByteTokenizer | JsonTokenizer


def load_tokenizer(name: str, key: str = "data.tokenizer", special_tokens: str = "text") -> Tokenizer:
    """Returns a tokenizer: `name` is "bytes" or the path of a tokenizer.json.

    Args:
      key: the config key or flag that error messages name.
      special_tokens: how to encode special tokens in a text: "text" as ordinary text, "parse" as special tokens.

    Raises UserError if the file is missing or damaged, or if the tokenizers package is not installed.
    """
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    path, setting = Path(os.path.expanduser(name)), f"{key}={name!r}"
    if os.path.isdir(path):
        path = path / "tokenizer.json"
    if not name or not os.path.isfile(path):
        raise UserError(f"{setting} is not a file: give 'bytes' or the path of a tokenizer.json")
    return JsonTokenizer(path, setting, special_tokens)


def tokenize(texts: Iterable[str | None], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yields the token ids of `texts`, in order, as arrays of unsigned integers [n]. None in `texts` marks the end of
    a document.

    A document may consist of several texts; they are tokenized as one text. At the end of a document, the tokenizer's
    separator is added, if it has one. About `GROUP_CHARS` characters at most are kept in memory, or one text if the
    tokenizer cuts a document anywhere.
    """
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    end = np.array([] if tokenizer.separator is None else [tokenizer.separator], dtype)
    group: list[str | None] = []
    chars = 0
    texts = iter(texts)
    for text in texts:
        group.append(text)
        chars += len(text or "")
        if text is not None and not tokenizer.cuts_anywhere:
            if (more := next(texts, None)) is None:
                group.append(None)
            else:
                yield from _tokenize_group(group[:-1], tokenizer, end)
                group, chars = [None], 0
                rest = iter(lambda: next(texts, None), None)  # the pieces up to the end of the document
                yield from encode_long(chain([text, more], rest), tokenizer.encode_spans)
        if chars >= GROUP_CHARS or tokenizer.cuts_anywhere:  # bytes are not tokenized in parallel
            yield from _tokenize_group(group, tokenizer, end)
            group, chars = [], 0
    yield from _tokenize_group(group, tokenizer, end)


def _tokenize_group(group, tokenizer, end) -> Iterator[np.ndarray]:
    encoded = iter(tokenizer.encode_many([text for text in group if text is not None]))
    for text in group:
        yield end if text is None else next(encoded)
