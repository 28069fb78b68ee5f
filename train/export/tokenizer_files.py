"""Writes the files that a model needs for text: tokenizer, chat template, and the ids that begin and end a text."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bytescope.train.data.corpus import INDEX
from bytescope.train.data.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer
from bytescope.train.user_errors import UserError
from bytescope.train.weights.finetune import TOKENIZER

TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
# Files next to a tokenizer.json that configure its use.
COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    TEMPLATE,
)


@dataclasses.dataclass(frozen=True)
class RunTokenizer:
    """The tokenizer of a run.

    Attributes:
      tokenizer: path of its tokenizer.json, "bytes", or "" if it is not available.
      end: id of the token that ends a document; None if there is none.
      note: one line that describes the tokenizer.
    """

    tokenizer: str
    end: int | None
    note: str


def text_of(config: ConfigDict) -> RunTokenizer:
    """Returns the tokenizer of a run with this config. If the data are token shards, their index.json names it."""
    name, index = config.data.tokenizer, Path(os.path.expanduser(config.data.source)) / INDEX
    if name == ByteTokenizer.name and index.is_file():
        name = _recorded_tokenizer(index)
    if name == ByteTokenizer.name and config.model.vocab_size < ByteTokenizer.vocab_size:
        name = ""
    if not name:
        return RunTokenizer("", None, "no tokenizer: the run read token ids")
    try:
        loaded = load_tokenizer(name)
    except UserError as error:
        return RunTokenizer("", None, f"no tokenizer: {error}")
    path = str(loaded.path) if isinstance(loaded, JsonTokenizer) else name
    return RunTokenizer(path, loaded.separator, f"tokenizer {path}")


def _recorded_tokenizer(index: Path) -> str:
    try:
        name = json.loads(index.read_text()).get("tokenizer")
    except (OSError, ValueError, AttributeError):
        return ""
    if name == ByteTokenizer.name:
        return name
    beside = index.parent / TOKENIZER
    return str(beside) if beside.is_file() else ""


def write_text_files(out: Path, text: RunTokenizer, config: ConfigDict, folder: Path | None) -> None:
    """Writes the tokenizer, its configuration files and the chat template into the folder `out`.

    Args:
      text: the tokenizer of the run.
      config: config of the run.
      folder: the folder of weights that the run started from, or None.
    """
    if text.tokenizer == ByteTokenizer.name:
        byte_tokenizer().save(str(out / TOKENIZER))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.model.max_seq_len,
        }
        (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    elif text.tokenizer:
        beside = Path(text.tokenizer).parent
        shutil.copyfile(text.tokenizer, out / TOKENIZER)
        if folder is not None and not (beside / COMPANIONS[0]).is_file():
            beside = folder  # token shards contain a copy of tokenizer.json without the other files
        for name in COMPANIONS:
            if (beside / name).is_file():
                shutil.copyfile(beside / name, out / name)
    if config.data.chat_template:
        shutil.copyfile(os.path.expanduser(config.data.chat_template), out / TEMPLATE)


def byte_tokenizer() -> Tokenizer:
    """Returns a Hugging Face tokenizer whose token ids are the UTF-8 bytes of the text, like the training tokenizer
    "bytes".
    """
    # The byte-level alphabet: printable bytes are written as themselves, other bytes as the characters from 256 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    ids = {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def special_ids(text: RunTokenizer) -> dict[str, int | None]:
    """Returns the ids of special tokens for config.json: key, such as "eos_token_id" -> id. Missing tokens have the
    value None, so that transformers does not use the defaults of the model family.

    `text`: the tokenizer of the run.
    """
    return {"bos_token_id": None, "eos_token_id": text.end, "pad_token_id": None}


def write_generation_config(out: Path, raw: Mapping[str, Any], folder: Path | None) -> None:
    """Writes generation_config.json. It is a copy of the file in `folder`; if there is none, it has the ids of the
    special tokens in the config.json `raw`.
    """
    if folder is not None and (folder / GENERATION).is_file():
        shutil.copyfile(folder / GENERATION, out / GENERATION)
        return
    ids = {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if raw.get(key) is not None}
    (out / GENERATION).write_text(json.dumps(ids, indent=2) + "\n")
