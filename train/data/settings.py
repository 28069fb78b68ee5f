"""The config's keys `data.*` as a dataclass, and the values that they may have."""

from dataclasses import dataclass

from bytescope.memory.errors import remedy_for
from bytescope.train.data.shards import DTYPES
from bytescope.train.user_errors import UserError

FORMATS = ("text", "chat", "pairs")
LOSS_ON = ("assistant", "all")
TOO_LONG = ("cut", "drop")
SPECIAL_TOKENS = ("text", "parse")
# Key of the group `data` -> its values.
CHOICES = {
    "format": FORMATS,
    "loss_on": LOSS_ON,
    "too_long": TOO_LONG,
    "special_tokens": SPECIAL_TOKENS,
    "dtype": tuple(DTYPES),
}
_LEAST = {"seq_len": 1, "prefetch": 0, "workers": 0, "skip_bad": 0}


@dataclass(frozen=True)
class DataConfig:
    """The config's keys `data.*`. Raises UserError if a value is out of range."""

    source: str  # "stdlib", or a file, folder or glob: text, records, or token shards (.bin, .npy)
    eval_source: str  # held-out data; "": a part of the source
    format: str  # a row of FORMATS: what a document or record is
    field: str  # of records, for the format text: the name of what holds the document
    skip_bad: int  # records that may be unreadable
    tokenizer: str  # "bytes" (but a prepared folder brings its own), or the path of a tokenizer.json
    special_tokens: str  # written in a text: "text", encoded as any other, or "parse"
    chat_template: str  # the path of a Jinja template; "": the tokenizer's own
    loss_on: str  # "assistant": answers and completions; "all": prompts too
    packing: bool  # several examples in a row, with segment ids
    too_long: str  # examples above seq_len: "cut" at their end, or "drop"
    dtype: str  # of .bin shards that come without an index.json
    seq_len: int  # tokens
    prefetch: int  # batches read ahead
    workers: int  # reader threads

    def __post_init__(self):
        for key, table in CHOICES.items():
            if (value := getattr(self, key)) not in table:
                raise UserError(f"data.{key}={value!r} is not known: {remedy_for(value, table)}")
        for key, least in _LEAST.items():
            if getattr(self, key) < least:
                raise UserError(f"data.{key}={getattr(self, key)} is too small: give {least} or more")
