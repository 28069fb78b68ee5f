"""`bytescope quantize`: a model's products in 4 bits, with activation-aware scales, one layer in memory at a time.

In: a run or a folder of weights, and a text to calibrate on. Out: a folder that transformers, vLLM and our own engine
read. Start at `work.py`, which goes through the layers; `folds.py` says which inputs are scaled and where the inverse
goes, `search.py` finds the scales. `read.py` is the way back, for `bytescope generate`.
"""
