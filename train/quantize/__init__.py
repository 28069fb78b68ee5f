"""`bytescope quantize`: a model's products in 4 bits, with activation-aware scales, one layer in memory at a time.

In: a run or a folder of weights, and a text to calibrate on. Out: a folder that transformers, vLLM and our own engine
read. Start at `quantize_work.py`, which goes through the layers; `folds.py` says which inputs are scaled and where the
inverse goes, `scale_search.py` finds the scales. `weights/packed_folder.py` reads such a folder.
"""
