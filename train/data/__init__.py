"""Data of a run: `config.data` in; batches of int32 token windows out, on the host and then on the devices.

Start with `batches.py`: from a source to numbered windows and batches. `corpus.py` finds its files: text documents
(`documents.py`), records (`records.py`, with documents in them: `record_texts.py`) or prepared token files
(`shards.py`), which `prepare.py` (`bytescope prepare`) writes. `tokenizer.py` makes token ids, `long_texts.py` those
of documents too long for one call. `feed.py` puts batches on the devices; `first_row.py` prints the first row.
"""
