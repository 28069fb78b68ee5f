"""Frozen weights in 4 or 8 bits: quantized when they are made or loaded, read in the compute dtype one layer at a time.

Start with `quantized_formats.py`: the rows of `lora.base`, and for each the arrays that a weight is stored as. `nf4.py`
and `int8.py` are the formats; `absmax.py` is the quantization of NF4's own scales. `groups.py` is the format of folders
in 4 bits.
"""
