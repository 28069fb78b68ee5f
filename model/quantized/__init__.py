"""Frozen weights in 4 or 8 bits: quantized when they are made or loaded, read in the compute dtype one layer at a time.

Start with `quantized_formats.py`: the rows of `lora.base`, for each the arrays that a weight is stored as, and the
8-bit format. `nf4.py` is 4-bit NormalFloat with its scales in 8 bits; `groups.py` is the format of folders in 4 bits.
`weight.py` puts a quantized weight in the place of a parameter.
"""
