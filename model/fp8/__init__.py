"""Products of 8-bit operands with block scales: activations and weights in the compute dtype in, the product out.

Start with `fp8_products.py`: quantization, the product forward and backward, and the choice between the native and the
emulated product. `fp8_kernel.py` is the native product, a Pallas kernel for NVIDIA GPUs.
"""
