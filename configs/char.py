"""A small character-level model that is often used for comparisons, in float32.

    bytescope train char
    bytescope report char cpu

Hardware: any CPU. On two cores a step takes 0.8 to 1.5 times as long as with eager PyTorch 2.13, depending on the CPU,
  at 0.77x the peak memory of the process (jax 0.12.0.1; python tests/bench/throughput.py --same-start).
Memory: peak 453.64 MiB, allocated 471.64 MiB, predicted in use 471.66 MiB per device;
  CPU, jax 0.10.2, jaxlib 0.10.2, 2026-11-22.
Loss: 2.11 nats per byte on 473,854 held-out bytes of Python 3.11's library after 300 updates of 3,072 tokens;
  two CPU cores, 41 min while other programs ran, compile and evaluations included; jax 0.10.2, 2026-11-22. The full
  2,000 updates have not been run yet.

    bytescope train char --config.train.steps=300
"""

from bytescope.configs import base


def get_config():
    config = base.get_config()
    config.model.update(base.GPT2)
    config.model.update(d_model=384, n_layers=6, n_heads=6, n_kv_heads=6, d_head=64, d_ff=1536, max_seq_len=256)
    config.precision.preset = "fp32"
    # A CPU recomputes everything but the inputs and output of attention faster than it allocates memory pages for it.
    config.remat.update(policy="custom", save=("q_rot", "k_rot", "v", "attn_out"))
    config.data.seq_len = 256
    config.batch.micro = 12
    config.optimizer.update(learning_rate=1e-3, b2=0.99)
    config.train.update(steps=2000)
    return config
