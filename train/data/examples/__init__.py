"""Examples for fine-tuning: records of messages, or of a prompt and its completion; rows of int32 tokens out.

Start with `reader.py`: from records to tokens, and which of them are learned. `content.py` has the shapes of records,
`template.py` the chat template, which `renderer.py` renders in a process of its own. `packing.py` puts examples into
rows.
"""
