"""Data of a run: `config.data` in; batches of int32 token windows out, on the host.

Start with `batches.py`: from a source to numbered windows and batches. `corpus.py` finds its files: text documents
(`documents.py`), records (`records.py`, with documents in them: `record_texts.py`) or prepared token files
(`shards.py`), which `prepare.py` (`bytescope prepare`) writes. `tokenizer.py` makes token ids, `long_texts.py` those
of documents too long for one call. `first_row.py` prints the first row.

Examples for fine-tuning are records of messages, or of a prompt and its completion. Start with `open_examples.py`: from
`config.data` to rows that train and rows that are held out. `example_reader.py` makes tokens of records and says which
of them are learned, `example_content.py` has the shapes of records, `chat_template.py` the chat template, which
`chat_renderer.py` renders in a process of its own; `special_tokens.py` keeps special tokens in messages text.
`packing.py` puts examples into rows.
"""
