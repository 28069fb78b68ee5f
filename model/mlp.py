"""The feed-forward layer of a block."""

import math

import jax
from flax import nnx

from bytescope.model.adapters import Lora, add_adapter_outputs
from bytescope.model.layers import ACTIVATIONS, MLPS, enter, fold, leave, param, read
from bytescope.model.model_config import ModelConfig
from bytescope.model.names import tag
from bytescope.model.placement import Placement
from bytescope.model.precision import Precision


class Mlp(nnx.Module):
    """Feed-forward layer [B, L, D] -> [B, L, D]. `config.mlp` selects the activation and whether there is a gate.
    `width`: F, the hidden size; 0 means `config.d_ff`."""

    def __init__(self, config: ModelConfig, precision: Precision, place: Placement, *, width: int = 0, rngs: nnx.Rngs):
        self.config, self.precision, self.place, self.regather = config, precision, place, False
        self.lora: Lora | None = None
        self.gated, self.activation = MLPS[config.mlp]
        D, F, std, dtype = config.d_model, width or config.d_ff, config.init_std, precision.param
        if self.gated:
            self.w_gate = param(rngs.params(), (D, F), ("d_model", "d_ff"), dtype, std=std, contracted=True)
        self.w_up = param(rngs.params(), (D, F), ("d_model", "d_ff"), dtype, std=std, contracted=True)
        self.w_down = param(
            rngs.params(), (F, D), ("d_ff", "d_model"), dtype, std=std / math.sqrt(2 * config.n_layers), contracted=True
        )
        if config.bias:
            self.b_up = param(None, (F,), ("d_ff",), dtype)
            self.b_down = param(None, (D,), ("d_model",), dtype)

    def __call__(self, x_BLD: jax.Array, key_B: jax.Array | None = None) -> jax.Array:
        dtype, act = self.precision.compute, ACTIVATIONS[self.activation]
        weights = {"up": self.w_up, **({"gate": self.w_gate} if self.gated else {})}
        up_BLF, *gate = enter(
            "bld,df->blf",
            x_BLD,
            weights,
            self.place,
            regather=self.regather,
            matmul=self.precision.matmul,
            name="mlp_norm",
        )
        up_BLF, *gate = add_adapter_outputs(
            self, "bld,df->blf", x_BLD, (up_BLF, *gate), tuple(weights), fold(key_B, 2), "mlp_norm_mask"
        )
        if self.config.bias:
            up_BLF = up_BLF + read(self.b_up, dtype, self.place)[None, None]
        up_BLF = tag(self.place(up_BLF, ("batch", "length", "d_ff")), "up")
        if self.gated:
            gate_BLF = tag(self.place(gate[0], ("batch", "length", "d_ff")), "gate")
            act_BLF = act(gate_BLF) * up_BLF
        else:
            act_BLF = act(up_BLF)
        act_BLF = tag(act_BLF, "act")
        y_BLD = leave(
            "blf,fd->bld",
            act_BLF,
            self.w_down,
            self.place,
            regather=self.regather,
            matmul=self.precision.matmul,
            name="act",
            out="mlp_out",
        )
        (y_BLD,) = add_adapter_outputs(self, "blf,fd->bld", act_BLF, (y_BLD,), ("down",), fold(key_B, 3), "act_mask")
        if self.config.bias:
            y_BLD = y_BLD + read(self.b_down, dtype, self.place)[None, None]
        return tag(self.place(y_BLD, ("batch", "stream", None)), "mlp_out")
