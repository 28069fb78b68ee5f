"""Rematerialization: turns `config.remat` into a `jax.checkpoint` around each block or its parts.

Start with `policies.py`: the table of policies and the plan of one policy per range of layers. `offload.py` fetches
parameters from host memory, and orders copies and weight gradients in unrolled layers. `tile.py` runs the MLP in tiles
of the sequence.
"""
