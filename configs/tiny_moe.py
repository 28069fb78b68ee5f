"""A mixture of eight experts that learns the Python standard library on a laptop's CPU.

    bytescope train tiny_moe
    bytescope report tiny_moe cpu

Hardware: any CPU.
Memory: peak 137.05 MiB, allocated 137.06 MiB, predicted in use 137.07 MiB per device;
  CPU, jax 0.10.2, jaxlib 0.10.2, 2026-11-23. The process peaked at 0.99 GiB, compiler included.
Loss: 1.70 nats per byte on 473,854 held-out bytes of Python 3.11's library after 300 updates of 2,048 tokens;
  two CPU cores, 2 min 7 s without other programs, compile and evaluations included; jax 0.10.2, 2026-11-23.
  In the least balanced layer, the busiest expert got 4.0 times the mean number of tokens of an expert at update 20, and
  1.7 times at the end.
"""

from bytescope.configs import base


def get_config():
    config = base.get_config()
    config.model.update(
        d_model=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=4,
        d_head=32,
        d_ff=384,
        max_seq_len=256,
        experts=8,
        experts_per_token=2,
        d_expert=192,
    )
    config.precision.preset = "fp32"
    config.remat.policy = "dots_no_batch"
    config.data.seq_len = 128
    config.batch.micro = 16
    config.optimizer.update(learning_rate=3e-3, warmup_steps=50)
    config.train.update(steps=300, log_every=10, eval_every=150, checkpoint_every=150)
    return config
