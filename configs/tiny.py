"""The first thing to run: a byte model learns the Python standard library on a laptop's CPU.

    bytescope train tiny
    bytescope report tiny cpu

Hardware: any CPU.
Memory: peak 87.35 MiB, allocated 87.35 MiB, predicted in use 87.37 MiB per device;
  CPU, jax 0.10.2, jaxlib 0.10.2, 2026-11-22. The process peaked at 0.92 GiB, compiler included.
Loss: 1.58 nats per byte on 473,854 held-out bytes of Python 3.11's library after 400 updates of 2,048 tokens;
  two CPU cores, 1 min 40 s without other programs, compile and evaluations included; jax 0.10.2, 2026-11-22.
"""

from bytescope.configs import base


def get_config():
    config = base.get_config()
    config.model.update(d_model=128, n_layers=4, n_heads=4, n_kv_heads=4, d_head=32, d_ff=384, max_seq_len=256)
    config.precision.preset = "fp32"
    config.remat.policy = "dots_no_batch"  # a CPU recomputes faster than it allocates memory pages
    config.data.seq_len = 128
    config.batch.micro = 16
    config.optimizer.update(learning_rate=3e-3, warmup_steps=50)
    config.train.update(steps=400, log_every=10, eval_every=200, checkpoint_every=200)
    return config
