"""Examples for fine-tuning: records of messages, or of a prompt and its completion; rows of int32 tokens out.

Start with `open_examples.py`: from `config.data` to rows that train and rows that are held out. `reader.py` makes
tokens of records, and decides which of them are learned; `content.py` has the shapes of records, `template.py` the chat
template, which `renderer.py` renders in a process of its own, `special_tokens.py` what keeps those in messages text.
`packing.py` puts examples into rows.
"""
