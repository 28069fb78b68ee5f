"""The same transformer in PyTorch: what a good trainer on the same machine does without us.

    python tests/bench/torch_peer.py --d-model=384 --n-layers=6    # a child of throughput.py: JSON lines

GPT-2 and Llama shapes by flags: tied or untied head, learned or rotary positions, biases, LayerNorm or
RMSNorm, GELU or SwiGLU, grouped-query attention. The same batches, AdamW with the same betas, decay mask
and schedule, the same clipping. It is given the best it has: fused QKV (and gate/up) products, the fused
optimizer, scaled_dot_product_attention (cuDNN or flash on a GPU), bf16 by autocast, TF32 products for
float32 as jax uses them, and the compiler with --compile. With --precision=bf16_params the parameters and
both moments are bfloat16 and there is no float32 master, rounded to nearest.
"""

import argparse
import contextlib
import dataclasses
import math
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from interleave import forget_peak, peak_resident, random_tokens, serve, timed, versions
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

WARM_UP = 2  # updates before the first that is timed, as on our side
ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Every flag that is a size or a setting, named as in our config; the defaults are configs/char.py."""

    d_model: int = 384
    n_layers: int = 6
    n_heads: int = 6
    n_kv_heads: int = 6
    d_head: int = 64
    d_ff: int = 1536
    vocab_size: int = 256
    max_seq_len: int = 256
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    mlp: str = "gelu"
    position: str = "learned"
    rope_theta: float = 10_000.0
    bias: int = 1
    tie_embeddings: int = 1
    init_std: float = 0.02
    seq_len: int = 256
    micro: int = 12
    accumulation: int = 1
    train_steps: int = 2000
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    end_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape, bias = shape, bool(shape.bias)
        self.heads = (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads)
        queries = shape.n_heads * shape.d_head
        self.norm_attention, self.norm_mlp = make_norm(shape), make_norm(shape)
        self.qkv = nn.Linear(shape.d_model, sum(self.heads) * shape.d_head, bias=bias)
        self.out = nn.Linear(queries, shape.d_model, bias=bias)
        self.gated = shape.mlp == "swiglu"
        self.up = nn.Linear(shape.d_model, shape.d_ff * (2 if self.gated else 1), bias=bias)
        self.down = nn.Linear(shape.d_ff, shape.d_model, bias=bias)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, -1, self.shape.d_head)
        q, k, v = (part.transpose(1, 2) for part in qkv.split(self.heads, dim=2))
        if turns is not None:
            q, k = rotate(q, turns), rotate(k, turns)
        grouped = self.shape.n_heads != self.shape.n_kv_heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, -1))
        h = self.up(self.norm_mlp(x))
        if self.gated:
            gate, h = h.chunk(2, dim=-1)
            h = F.silu(gate) * h
        else:
            h = F.gelu(h, approximate="tanh")
        return x + self.down(h)


class Peer(nn.Module):
    """The decoder; returns the mean negative log-likelihood of the targets in nats."""

    def __init__(self, shape: Shape, recompute: bool):
        super().__init__()
        self.shape, self.recompute = shape, recompute
        self.token = nn.Embedding(shape.vocab_size, shape.d_model)
        learned = shape.position == "learned"
        self.position = nn.Embedding(shape.max_seq_len, shape.d_model) if learned else None
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.n_layers)])
        self.norm = make_norm(shape)
        self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                branch = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=shape.init_std / math.sqrt(2 * shape.n_layers if branch else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        if shape.tie_embeddings:
            self.head.weight = self.token.weight
        if shape.position == "rope":
            self.register_buffer("turns", rope(shape), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, turns = self.token(tokens), None
        if self.position is not None:
            x = x + self.position.weight[: tokens.shape[1]]
        elif self.shape.position == "rope":
            turns = self.turns[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, turns, use_reentrant=False) if self.recompute else block(x, turns)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_norm(shape: Shape) -> nn.Module:
    if shape.norm == "rmsnorm":
        return nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
    return nn.LayerNorm(shape.d_model, eps=shape.norm_eps, bias=bool(shape.bias))


def rope(shape: Shape) -> Tensor:
    """Cosines and sines [length, 2, d_head / 2]. Llama 3.1's stretching changes these numbers and no time."""
    frequency = shape.rope_theta ** -(torch.arange(0, shape.d_head, 2, dtype=torch.float32) / shape.d_head)
    angle = torch.arange(shape.seq_len, dtype=torch.float32)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Halves paired, in float32."""
    cos, sin = turns.unbind(1)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def learning_rate(shape: Shape, step: int) -> float:
    """Linear warm-up from peak/warm-up, then a cosine to the end fraction."""
    peak, warmup = shape.learning_rate, min(shape.warmup_steps, max(shape.train_steps - 1, 0))
    start = peak / max(warmup, 1)
    if step < warmup:
        return start + (peak - start) * step / warmup
    done = min((step - warmup) / max(shape.train_steps - warmup, 1), 1.0)
    return peak * (shape.end_fraction + (1 - shape.end_fraction) * 0.5 * (1 + math.cos(math.pi * done)))


def load_ours(model: Peer, path: str) -> None:
    """Sets the parameters from those `ours.py --save` wrote of a scanned model: layers are stacked."""
    ours = {name: torch.from_numpy(np.array(value)) for name, value in np.load(path).items()}
    if "blocks/attention/w_q" not in ours:
        raise SystemExit(f"{path} is not of a scanned model: save it with --config.model.scan=True")

    def flat(name: str, layer: int, inputs: int) -> Tensor:
        """Weight [in..., out...] or bias [out...] of ours as PyTorch's [out, in] or [out]."""
        value = ours[f"blocks/{name}"][layer]
        return value.reshape(-1) if inputs == 0 else value.reshape(math.prod(value.shape[:inputs]), -1).T

    def fill(linear: nn.Linear, names: list[tuple[str, str]], layer: int, inputs: int) -> None:
        linear.weight.copy_(torch.cat([flat(f"{part}/w_{name}", layer, inputs) for part, name in names]))
        if linear.bias is not None:
            linear.bias.copy_(torch.cat([flat(f"{part}/b_{name}", layer, 0) for part, name in names]))

    with torch.no_grad():
        model.token.weight.copy_(ours["w_token"])
        if model.position is not None:
            model.position.weight.copy_(ours["w_position"])
        if not model.shape.tie_embeddings:
            model.head.weight.copy_(ours["w_head"].T)
        for layer, block in enumerate(model.blocks):
            fill(block.qkv, [("attention", name) for name in "qkv"], layer, 1)
            fill(block.out, [("attention", "o")], layer, 2)
            fill(block.up, [("mlp", name) for name in (("gate", "up") if block.gated else ("up",))], layer, 1)
            fill(block.down, [("mlp", "down")], layer, 1)


class Trainer:
    """Model, optimizer and batches of `shape`; `update` is one optimizer update."""

    def __init__(self, shape: Shape, options: argparse.Namespace):
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        self.shape, self.device = shape, torch.device(options.device)
        self.model = Peer(shape, bool(options.recompute))
        if options.load:
            load_ours(self.model, options.load)
        self.model.to(self.device)
        if options.precision == "bf16_params":  # buffers stay: the angles of rotary positions are float32
            for weight in self.model.parameters():
                weight.data = weight.data.to(torch.bfloat16)
        self.parameters = sum(weight.numel() for weight in self.model.parameters())
        # The decay mask of train/step/optimizer/rules.py: matrices and embeddings, never norms and biases.
        matrices = [weight for weight in self.model.parameters() if weight.ndim == 2]
        others = [weight for weight in self.model.parameters() if weight.ndim != 2]
        groups = [{"params": matrices, "weight_decay": shape.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(shape.b1, shape.b2), eps=shape.eps, fused=bool(options.fused))
        self.forward = torch.compile(self.model) if options.compile else self.model
        self.autocast = options.precision == "bf16"
        self.backends = [ATTENTION[name] for name in options.attention.split(",")]
        self.tokens = random_tokens(shape.micro * shape.accumulation, shape.seq_len, shape.vocab_size)
        self.step, self.loss = 0, None

    def _attention(self) -> contextlib.AbstractContextManager:
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        return sdpa_kernel(self.backends, set_priority=True)

    def _batch(self) -> Tensor:
        tokens = torch.from_numpy(next(self.tokens)).long()
        if self.device.type == "cuda":
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        return tokens

    def update(self) -> Tensor:
        """Gradients of every micro-batch, clipping, AdamW; the mean loss, perhaps still being computed."""
        total = 0.0
        for tokens in self._batch().chunk(self.shape.accumulation):
            with self._attention(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                loss = self.forward(tokens[:, :-1], tokens[:, 1:]) / self.shape.accumulation
            loss.backward()
            total = total + loss.detach()
        if self.shape.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.shape.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.shape, self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step, self.loss = self.step + 1, total
        return total

    def peak_bytes(self) -> int:
        """Most bytes: that PyTorch's allocator held of the device, or of this process on a CPU."""
        return torch.cuda.max_memory_reserved() if self.device.type == "cuda" else peak_resident()

    def live_bytes(self) -> int | None:
        """Most bytes in use of what the allocator held; None on a CPU."""
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None


def options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    for field in dataclasses.fields(Shape):
        parser.add_argument("--" + field.name.replace("_", "-"), type=field.type, default=field.default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16", "bf16_params"), default="fp32")
    parser.add_argument("--attention", default="cudnn,flash", help=f"by priority: {', '.join(ATTENTION)}")
    parser.add_argument("--compile", type=int, default=0, help="1: torch.compile")
    parser.add_argument("--fused", type=int, default=1, help="0: the default AdamW instead of the fused one")
    parser.add_argument("--recompute", type=int, default=0, help="1: activation checkpointing of every block")
    parser.add_argument("--load", metavar="FILE", help="start from the parameters that ours.py --save wrote")
    return parser.parse_args()


def main() -> None:
    asked = options()
    shape = Shape(**{field.name: getattr(asked, field.name) for field in dataclasses.fields(Shape)})
    trainer = Trainer(shape, asked)
    each = trainer.device.type == "cpu"
    warm = []
    for _ in range(WARM_UP):
        began = time.perf_counter()
        float(trainer.update())
        warm.append(time.perf_counter() - began)
    began_bytes = trainer.peak_bytes()
    forget_peak()

    def turn(steps: int) -> dict[str, Any]:
        began_cpu = time.process_time()
        seconds = timed(trainer.update, float, steps, each=each)
        return {
            "seconds": seconds,
            "cpu_s": (time.process_time() - began_cpu) / steps,
            "peak_bytes": max(began_bytes, trainer.peak_bytes()),
            "step_peak_bytes": trainer.live_bytes() or trainer.peak_bytes(),
            "loss": float(trainer.loss),
        }

    serve(
        {
            "parameters": trainer.parameters,
            "compile_s": max(warm[0] - warm[-1], 0.0),
            "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "versions": versions(),
        },
        turn,
    )


if __name__ == "__main__":
    main()
