"""A Flax NNX transformer in which every tensor that may be saved for the backward pass has a name.

Shape letters, the same in every file and einsum string:

    B  sequences in the micro-batch      H  query heads                   F  MLP width
    L  query positions                   G  key/value heads               V  vocabulary size
    S  key positions                     R  query heads per key head      N  layers
    D  model width                       K  width of one head
    r  rank of adapters                  E  experts
    c  width of a latent in multi-head latent attention
    T  tokens on one device              X  expert rows on one device: one row per pair of a token and its expert

Start with `block.py`, whose forward pass fits one screen. `transformer.py` stacks N blocks into the model.
"""

from bytescope.model.model_config import ModelConfig
from bytescope.model.precision import PRECISIONS, Precision
from bytescope.model.remat.policies import POLICIES, LayerPolicies
from bytescope.model.transformer import Transformer

__all__ = ["POLICIES", "PRECISIONS", "LayerPolicies", "ModelConfig", "Precision", "Transformer"]
