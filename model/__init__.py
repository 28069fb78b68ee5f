"""A Flax NNX transformer whose every tensor worth saving has a name.

Shape letters, the same in every file and einsum string:

    B  sequences in the micro-batch      H  query heads           F  MLP width
    L  positions of the queries          G  key/value heads       V  vocabulary
    S  positions of the keys             R  query heads per G     N  layers
    D  model width                       K  width of one head
    r  rank of adapters                  E  experts
    c  width of a latent of attention
    T  tokens of a device                X  rows of experts on a device: a token and one of its experts each

Start with `block.py`, whose forward pass fits one screen; `transformer.py` puts N of them into the model.
"""

from bytescope.model.model_config import ModelConfig
from bytescope.model.precision import PRECISIONS, Precision
from bytescope.model.remat.policies import POLICIES, LayerPolicies
from bytescope.model.transformer import Transformer

__all__ = ["POLICIES", "PRECISIONS", "LayerPolicies", "ModelConfig", "Precision", "Transformer"]
