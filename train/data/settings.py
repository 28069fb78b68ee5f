"""The config group `data` as a dataclass, and the allowed values of its keys."""

from dataclasses import dataclass

from bytescope.memory.errors import remedy_for
from bytescope.train.data.shards import DTYPES
from bytescope.train.user_errors import UserError

FORMATS = ("text", "chat", "pairs")
LOSS_ON = ("assistant", "all")
TOO_LONG = ("cut", "drop")
SPECIAL_TOKENS = ("text", "parse")
# Key of the group `data` -> its allowed values.
CHOICES = {
    "format": FORMATS,
    "loss_on": LOSS_ON,
    "too_long": TOO_LONG,
    "special_tokens": SPECIAL_TOKENS,
    "dtype": tuple(DTYPES),
}
_MINIMUMS = {"seq_len": 1, "prefetch": 0, "workers": 0, "skip_bad": 0}


@dataclass(frozen=True)
class DataConfig:
    """The config group `data`. configs/base.py explains its keys in more detail.

    Attributes:
      source: "stdlib", or a file, folder or glob: text, records, or token shards (.bin, .npy).
      eval_source: held-out data, in the same form as `source`; "" if a part of the source is held out.
      format: format of documents or records: "text", "chat" or "pairs".
      field: field of records that contains the document, for the format "text".
      skip_bad: maximum number of malformed records.
      tokenizer: "bytes" (prepared folders use their own tokenizer), or the path of a tokenizer.json.
      special_tokens: how special tokens written in a text are encoded: as ordinary "text", or "parse" as special
        tokens.
      chat_template: path of a Jinja template; "" for the tokenizer's own template.
      loss_on: "assistant" to train on answers and completions, "all" to train on prompts too.
      packing: True to put several examples into a row, with segment ids.
      too_long: what to do with examples longer than seq_len: "cut" them at the end, or "drop" them.
      dtype: dtype of .bin shards without an index.json.
      seq_len: tokens per sequence.
      prefetch: number of batches to read ahead.
      workers: number of reader threads.

    Raises:
      UserError: a value is out of range or not known.
    """

    source: str
    eval_source: str
    format: str
    field: str
    skip_bad: int
    tokenizer: str
    special_tokens: str
    chat_template: str
    loss_on: str
    packing: bool
    too_long: str
    dtype: str
    seq_len: int
    prefetch: int
    workers: int

    def __post_init__(self):
        for key, table in CHOICES.items():
            if (value := getattr(self, key)) not in table:
                raise UserError(f"data.{key}={value!r} is not known: {remedy_for(value, table)}")
        for key, minimum in _MINIMUMS.items():
            if getattr(self, key) < minimum:
                raise UserError(f"data.{key}={getattr(self, key)} is too small: give {minimum} or more")
