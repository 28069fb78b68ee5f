"""`bytescope export --awq`: writes a model with 4-bit, activation-aware weights, with one layer in memory at a time.

In: a run or a folder of weights, and a calibration text. Out: a folder that transformers, vLLM and our own engine
load. Start at `quantize_work.py`, which goes through the layers. `folds.py` lists the inputs that are scaled and the
parameters that take the inverse scales, `scale_search.py` finds the scales. `weights/packed.py` reads the
folders.
"""
