"""Causal attention, one row of a table per kernel: rotated queries, keys and values in, the context [B, L, H, K] out.

Start with `attention_kernels.py`: the table, the naive and the cuDNN kernel, and how `model.attention=auto` chooses.
`chunked.py` is attention with its own gradient, linear in memory, and has the scale and cap of scores; `ring.py` walks
the same blocks over a sharded sequence. `grouped_query.py` and `latent.py` make queries, keys and values: the rows of
`KINDS` in model/block.py.
"""
