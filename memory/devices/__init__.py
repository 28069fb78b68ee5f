"""What a program is compiled for: devices at hand, simulated ones, and chips that are not here.

In: a name such as `local`, `cpu:8`, `h100:2x8` or `v5e:4x4`. Out: a `targets.Target` with jax devices to compile for,
memory, bandwidths, peak FLOP/s and the bytes that are available on one device; `compiler` compiles for it and keeps
the buffer assignment. Start at `targets.parse`; `limits` has the available bytes, `live` what a device holds right
now.

To add a GPU or a TPU: a row of `_CHIPS` in `chips`, each figure with its source; `targets` and the listings find it.
Check it with `bytescope report llama_1b NAME`, which compiles for it without the card.
"""
