"""Causal attention, one row of a table per kernel: rotated queries, keys and values in, the context [B, L, H, K] out.

Start with `attention_kernels.py`: the table, the naive and the cuDNN kernel, and how `model.attention=auto` chooses.
`chunked.py` is attention with its own gradient, linear in memory; `ring.py` walks the same blocks over a sharded
sequence. `scoring.py`: scale and cap of the scores. What the core's inputs are made from is a row of `kinds.py`:
`grouped_query.py`, or `latent.py`.
"""
