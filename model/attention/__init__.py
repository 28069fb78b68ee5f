"""Causal attention kernels and the modules that compute queries, keys and values.

Start with `attention_kernels.py`: the table of kernels, the naive and the cuDNN kernel, and how `model.attention=auto`
chooses. `chunked.py` is blockwise attention with a custom gradient and memory linear in the sequence length; it also
defines the scale and cap of scores. `ring.py` runs the same blocks over a sequence that is sharded over devices.
`grouped_query.py` and `latent.py` compute queries, keys and values: the rows of `KINDS` in model/block.py.
"""
