"""What JAX's op_name says: the phase of the step, the named scopes around an operation, and its component.

An op_name is a path like `jit(step)/transpose(jvp(blocks))/while/body/checkpoint/attention/dot_general`:
transformations wrap scopes, control flow and calls add words of their own, the last word is the operation.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable

from bytescope.memory.hlo.module import Frame

_WRAPPED = re.compile(r"^([A-Za-z_0-9]+)\((.*)\)$")

# Words that tell how a thing is called, not what it is.
NOISE = frozenset((
    "while", "body", "cond", "scan", "closed_call", "checkpoint", "remat", "remat2", "remat3",
    "rematted_computation", "core_call", "pjit", "jit", "shard_map", "custom_jvp_call", "custom_vjp_call",
    "custom_jvp", "custom_vjp", "xla_call", "named_call", "vmap", "pmap", "jvp", "transpose", "main", "",
    "empty2", "<lambda>", "call", "fun", "eval_jaxpr", "linearize", "switch"))
# XLA writes a merged operation as "a/(b/c:d/e)": the first one stands for it.
_MERGED = re.compile(r"(?<=/)\(([^():]*):[^()]*\)")
_BRANCH = re.compile(r"^branch_\d+(_fun)?$")
# Calls whose argument is a function's name, not a scope.
_CALLS = frozenset(("jit", "pjit", "pmap", "xla_call", "custom_jvp", "custom_vjp", "named_call"))

# Scope -> component. A scope counts when it equals a word or a word and a number ("attn_3").
COMPONENTS = {
    "attention": "attention", "attn": "attention", "self_attention": "attention",
    "selfattention": "attention", "multiheaddotproductattention": "attention",
    "multiheadattention": "attention", "sdpa": "attention",
    "mlp": "mlp", "ffn": "mlp", "feed_forward": "mlp", "feedforward": "mlp", "mlpblock": "mlp",
    "moe": "moe", "router": "moe", "experts": "moe",
    "embed": "embed", "embedding": "embed", "embedder": "embed", "wte": "embed", "token_embedder": "embed",
    "head": "head", "lm_head": "head", "unembed": "head", "logits": "head", "logits_dense": "head",
    "loss": "loss", "cross_entropy": "loss", "xent": "loss", "loss_fn": "loss",
    "optimizer": "optimizer", "opt": "optimizer", "grad_norm": "grad_norm", "clip": "grad_norm",
}
_NORMS = re.compile(r"^(rms|layer|batch|group|ln|pre|post)?_?(norm|ln)(_?\w+)?$|norm_?\d*$")
CONTAINERS = frozenset(("blocks", "block", "layers", "layer", "transformer", "decoder", "encoder", "model",
                        "body", "stack", "trunk", "backbone"))
LOSS_COMPONENTS = frozenset(("head", "loss"))
# The same by function name, for programs without scopes.
FUNCTIONS = (
    (re.compile(r"cross_entropy|xent", re.I), "loss"),
    (re.compile(r"attention|attn", re.I), "attention"),
    (re.compile(r"\bmlp\b|ffn|feed_?forward", re.I), "mlp"),
    (re.compile(r"embed", re.I), "embed"),
)
_OPTIMIZER_FILES = re.compile(r"/optax/(?!.*losses)")


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """What an op_name says: phase ("" when no transformation tells), scopes from outside in, component, operation."""

    phase: str = ""
    path: tuple[str, ...] = ()
    component: str = ""
    operation: str = ""


@functools.lru_cache(maxsize=65536)
def parse(op_name: str) -> Scope:
    """Reads an op_name. Anything at all can be given; an empty one gives an empty Scope."""
    if not op_name:
        return Scope()
    words = _split(_MERGED.sub(_first, op_name))
    path: list[str] = []
    seen: set[str] = set()
    for word in words:
        for _ in range(16):
            match = _WRAPPED.match(word)
            if not match:
                break
            seen.add(match[1])
            word = "" if match[1] in _CALLS else match[2]
        seen.add(word)
        if word not in NOISE and not _BRANCH.match(word):
            path.append(word)
    operation = path.pop() if path and path[-1] == words[-1] else words[-1]
    if "rematted_computation" in seen:
        phase = "recompute"
    elif "transpose" in seen and "jvp" in seen:
        phase = "backward"
    elif "jvp" in seen:
        phase = "forward"
    else:
        phase = ""
    return Scope(phase, tuple(path), component(tuple(path)), operation)


def component(path: tuple[str, ...]) -> str:
    """The component that scopes name: a known one, else a norm, else the first scope that is not a container."""
    words = [re.sub(r"[._]?\d+$", "", word).lower() for word in path]
    for word in words:
        if word in COMPONENTS:
            return COMPONENTS[word]
    if any(_NORMS.search(word) for word in words):
        return "norm"
    plain = [original for original, word in zip(path, words) if word not in CONTAINERS]
    if plain:
        return plain[0]
    return path[0] if path else ""


def component_of_code(frames: Iterable[Frame]) -> str:
    """The component by the functions and files an operation was written in; "" when they tell nothing."""
    for frame in frames:
        for pattern, name in FUNCTIONS:
            if pattern.search(frame.function.rsplit(".", 1)[-1]):
                return name
        if _OPTIMIZER_FILES.search(frame.file):
            return "optimizer"
    return ""


def _first(match: re.Match[str]) -> str:
    return match[1]


def _split(op_name: str) -> list[str]:
    """The words between slashes that are in no parentheses."""
    if "(" not in op_name:
        return op_name.split("/")
    words, depth, start = [], 0, 0
    for at, char in enumerate(op_name):
        if char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "/" and depth <= 0:
            words.append(op_name[start:at])
            start = at + 1
    words.append(op_name[start:])
    return words
