"""Llama 3.2 1B: the shape of the 8B scaled down, embeddings tied.

    bytescope train --config=configs/llama_1b.py --config.data.source=SHARDS

Hardware: one H200 (described).
Memory: 20.83 GiB allocated of 128.17 GiB
  (`bytescope report --config=llama_1b --target=h200`, jax 0.10.2, nothing measured on a card yet).
Loss: no run recorded yet.
"""

from bytescope.configs import llama_8b


def get_config():
    config = llama_8b.get_config()
    config.model.update(d_model=2048, n_layers=16, n_heads=32, n_kv_heads=8, d_head=64, d_ff=8192,
                        tie_embeddings=True, rope_scaling=(32.0, 1.0, 4.0, 8192.0))
    config.batch.micro = 2
    return config
