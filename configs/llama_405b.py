"""Llama 3.1 405B (Grattafiori et al. 2024, arXiv 2407.21783), fully sharded and recomputed.

    python -m train --config=configs/llama_405b.py --config.data.source=SHARDS
"""

from configs import llama_8b


def get_config():
    config = llama_8b.get_config()
    config.model.update(d_model=16384, n_layers=126, n_heads=128, d_ff=53248)
    config.optimizer.update(learning_rate=8e-5, warmup_steps=8000)
    return config
