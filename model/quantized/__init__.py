"""Frozen weights in 4 or 8 bits. They are quantized when they are created or loaded, and dequantized one layer at a
time.

Start with `quantized_formats.py`: the rows of `lora.base`, each with the arrays that store a weight, and the 8-bit
format. `nf4.py` is 4-bit NormalFloat with its scales in 8 bits. `groups.py` is the 4-bit format of quantized Hugging
Face folders. `weight.py` replaces a parameter by a quantized weight.
"""
