"""The data of a run: from the config group `data` to batches of int32 token windows on the host.

Start with `batches.py`, which turns a source into numbered windows and batches. `corpus.py` finds the files of a
source: text documents (`documents.py`), records (`records.py`), or prepared token files (`shards.py`), which
`prepare.py` (`bytescope prepare`) writes. `tokenizer.py` turns text into token ids; `long_texts.py` does so for
documents that are too long for one call. `first_row.py` prints the first row.

Examples for fine-tuning are records of messages, or of a prompt and its completion. Start with `examples.py`, which
turns them into rows of tokens, with the tokens to train on, and splits off held-out examples. `records.py` has
the shapes of records; `chat_template.py` finds and renders the chat template; `packing.py` puts examples into rows.
"""
