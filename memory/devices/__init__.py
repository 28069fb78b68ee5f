"""The devices that programs are compiled for: of this process, simulated CPU devices, and chips that are not present.

In: a name such as `local`, `cpu:8`, `h100:2x8` or `v5e:4x4`. Out: a `targets.Target` with jax devices to compile for,
memory sizes, bandwidths, peak FLOP/s and the available bytes of one device. `compiler` compiles programs for the
target and keeps their buffer assignment. Start at `targets.parse`. `limits` computes the available bytes, and `live`
samples the memory that a device holds now.

To add a GPU or a TPU, add a row to `_CHIPS` in `chips`, with a source for each figure; `targets` and the listings read
that table. Check it with `bytescope report llama_1b NAME`, which compiles for the chip without having one.
"""
