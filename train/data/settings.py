"""The config group `data` as a dataclass."""

from dataclasses import dataclass

from bytescope.train.config_fields import FIELDS
from bytescope.train.user_errors import UserError


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
        for name, value in vars(self).items():
            try:
                FIELDS[f"data.{name}"].check(value)
            except ValueError as error:
                raise UserError(str(error)) from error
