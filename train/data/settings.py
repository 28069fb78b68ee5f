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
    """The config group `data`, whose keys the comments beside the fields and configs/base.py explain. Raises UserError
    if a value is out of range or not known.
    """

    source: str  # "stdlib", or a file, folder or glob: text, records, or token shards (.bin, .npy)
    eval_source: str  # held-out data; "": a part of the source is held out
    format: str  # format of documents or records, one of FORMATS
    field: str  # field of records with the document, for the format "text"
    skip_bad: int  # maximum number of malformed records
    tokenizer: str  # "bytes" (prepared folders use their own tokenizer), or the path of a tokenizer.json
    special_tokens: str  # how special tokens written in a text are encoded: as ordinary "text", or "parse"
    chat_template: str  # path of a Jinja template; "": the tokenizer's own template
    loss_on: str  # "assistant": train on answers and completions; "all": on prompts too
    packing: bool  # whether to put several examples into a row, with segment ids
    too_long: str  # examples longer than seq_len: "cut" them at the end, or "drop" them
    dtype: str  # dtype of .bin shards without an index.json
    seq_len: int  # tokens per sequence
    prefetch: int  # number of batches to read ahead
    workers: int  # number of reader threads

    def __post_init__(self):
        for key, table in CHOICES.items():
            if (value := getattr(self, key)) not in table:
                raise UserError(f"data.{key}={value!r} is not known: {remedy_for(value, table)}")
        for key, minimum in _MINIMUMS.items():
            if getattr(self, key) < minimum:
                raise UserError(f"data.{key}={getattr(self, key)} is too small: give {minimum} or more")
