"""Data of a run: `config.data` in; batches of int32 token windows out, on the host and then on the devices.

Start with `source.py`: from a source to numbered windows and batches. `corpus.py` finds documents and what is held out,
`tokenizer.py` makes token ids of them, `shards.py` maps prepared token files, which `prepare.py` (`bytescope prepare`)
writes; `long_texts.py` keeps the ids of long documents those of the whole. `feed.py` puts batches on the devices.
"""
