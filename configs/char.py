"""The small character-model shape everyone compares on, in float32.

    bytescope train --config=configs/char.py

Hardware: CPU, two cores: 0.82x the step time of eager PyTorch 2.13 (jax 0.12.0.1, tests/bench/throughput.py).
Memory: 453 MiB allocated by the step; the process peaked at 804 MiB, 0.77x PyTorch's.
Loss: equal to PyTorch's from the same parameters to 1.7e-7 over the benchmark; no full run recorded yet.
"""

from bytescope.configs import base


def get_config():
    config = base.get_config()
    config.model.update(base.GPT2)
    config.model.update(d_model=384, n_layers=6, n_heads=6, n_kv_heads=6, d_head=64, d_ff=1536, max_seq_len=256)
    config.precision.preset = "fp32"
    # What a CPU recomputes faster than it takes fresh pages: everything but the attention's inputs and output.
    config.remat.update(policy="custom", save=("q_rot", "k_rot", "v", "attn_out"))
    config.data.seq_len = 256
    config.batch.micro = 12
    config.optimizer.update(learning_rate=1e-3, b2=0.99)
    config.train.update(steps=2000)
    return config
