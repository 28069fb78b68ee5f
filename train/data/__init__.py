"""Data of a run: `config.data` in; batches of int32 token windows out, on the host.

Start with `batches.py`: from a source to numbered windows and batches. `corpus.py` finds the files of a source: text
documents or records (`documents.py`, `records.py`), or prepared token files (`shards.py`), which `prepare.py`
(`bytescope prepare`) writes. `tokenizer.py` makes token ids; `long_texts.py` makes those of documents that are too long
for one call. `first_row.py` prints the first row.

Examples for fine-tuning are records of messages, or of a prompt and its completion. Start with `examples.py`: from
`config.data` to rows of tokens, those that are learned, and what is held out. `example_content.py` has the shapes of
records; `chat_template.py` finds the chat template, which `chat_renderer.py` renders in a process of its own;
`packing.py` puts examples into rows.
"""
