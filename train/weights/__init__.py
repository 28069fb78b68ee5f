"""Published weights: a folder as Hugging Face publishes it, read into the trainer's parameters.

`families.py` is the table of architectures, `patterns.py` the layout of one tensor as one line, `folder.py` a verified
view of the files, `hf_config.py` what config.json asks for, `leaves.py` our parameters as lazy views of theirs,
`load.py` from files to shardings.
"""
