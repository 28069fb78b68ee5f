"""Reads published weights: a folder in Hugging Face's format, into the trainer's parameters.

`families.py` is the table of architectures, `patterns.py` describes the layout of a tensor in one line, `folder.py` is
a verified view of the files, `hf_config.py` reads config.json, `leaves.py` has our parameters as lazy views of tensors
on disk, `load.py` fills sharded arrays from them.
"""
