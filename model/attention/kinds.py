"""The kinds of attention: what queries, keys and values are made from."""

from bytescope.model.attention.grouped_query import Attention
from bytescope.model.attention.latent import LatentAttention

KINDS = {"gqa": Attention, "mla": LatentAttention}
