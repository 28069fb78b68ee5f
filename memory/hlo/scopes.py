"""Reads JAX's op_name: the phase of the step, the named scopes around an operation, and its component.

An op_name is a path like `jit(step)/transpose(jvp(blocks))/while/body/checkpoint/attention/dot_general`.
Transformations wrap scopes, control flow and calls add words of their own, and the last word is the operation. Module
libraries add the names of modules: `jit(step)/jvp(Transformer)/blocks_3/Attention_0/query/dot_general`.
"""

from __future__ import annotations

import dataclasses
import functools
import re

_WRAPPED = re.compile(r"^([A-Za-z_0-9]+)\((.*)\)$")

# Words of transformations, calls and control flow, which do not name a scope. The last rows are words of Equinox's
# loops.
NOISE = frozenset(
    (
        "while",
        "body",
        "cond",
        "scan",
        "closed_call",
        "checkpoint",
        "remat",
        "remat2",
        "remat3",
        "rematted_computation",
        "core_call",
        "pjit",
        "jit",
        "shard_map",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_jvp",
        "custom_vjp",
        "xla_call",
        "named_call",
        "vmap",
        "pmap",
        "jvp",
        "transpose",
        "main",
        "",
        "empty2",
        "<lambda>",
        "call",
        "fun",
        "eval_jaxpr",
        "linearize",
        "switch",
        "body_pred",
        "cond_pred",
        "outer-loop",
        "inner-loop",
        "checkpointed-fwd",
        "checkpointed-bwd",
        "checkpointed-no-vjp",
    )
)
# Words of branches, and of annotations of trip counts (loops.py).
_BRANCH = re.compile(r"^(branch_\d+(_fun)?|turns_\d+_mean_\d+_\d+|ticks_full_\d+)$")
# Names of functions and products that JAX writes: `attend.<locals>.body`, `Dropout.__call__`, the letters of an einsum.
_WRITTEN = re.compile(r"<locals>|<lambda>|\.__\w+__$|->|,|\['")
_EINSUM = re.compile(r"->|,")
# Calls whose argument is the name of a function, not a scope.
_CALLS = frozenset(("jit", "pjit", "pmap", "xla_call", "custom_jvp", "custom_vjp", "named_call"))

# Word -> component. A scope matches if it is the word, or the word and a number ("attn_3").
COMPONENTS = {
    "attention": "attention",
    "attn": "attention",
    "self_attention": "attention",
    "selfattention": "attention",
    "multiheaddotproductattention": "attention",
    "multiheadattention": "attention",
    "multi_head_attention": "attention",
    "sdpa": "attention",
    "mlp": "mlp",
    "ffn": "mlp",
    "feed_forward": "mlp",
    "feedforward": "mlp",
    "mlpblock": "mlp",
    "moe": "moe",
    "router": "moe",
    "experts": "moe",
    "embed": "embed",
    "embedding": "embed",
    "embedder": "embed",
    "wte": "embed",
    "token_embedder": "embed",
    "head": "head",
    "lm_head": "head",
    "unembed": "head",
    "logits": "head",
    "logits_dense": "head",
    "loss": "loss",
    "cross_entropy": "loss",
    "xent": "loss",
    "loss_fn": "loss",
    "optimizer": "optimizer",
    "opt": "optimizer",
    "grad_norm": "grad_norm",
    "clip": "grad_norm",
}
EQUINOX = "eqx."  # prefix of the scopes that Equinox opens around its layers
KNOWN = frozenset((*COMPONENTS.values(), "norm"))
NORMS = re.compile(r"^(rms|layer|batch|group|ln|pre|post)?_?(norm(?!al(?!i[sz]))|ln)(_?\w+)?$|(norm|_ln)_?\d*$")
CONTAINERS = frozenset(
    (
        "blocks",
        "block",
        "layers",
        "layer",
        "transformer",
        "decoder",
        "encoder",
        "model",
        "body",
        "stack",
        "trunk",
        "backbone",
    )
)
# Names of single layers. The name of the module that contains a layer is more specific.
LAYERS = re.compile(
    r"^(\w+_)?(dense|linear|conv|proj|projection|einsum|dropout)(_?general|_?transpose|_?\dd|\d+)?$"
    r"|^(fc|w|wi|wo|w[qkvo])\d*$|^(q|k|v|o|qkv|kv|query|key|value|out|kernel|bias)$"
)
# Prefixes that Flax Linen puts before the class of a transformed module.
_TRANSFORMED = re.compile(r"^(Scan|Checkpoint|Remat|Vmap|Jit)+(?=[A-Z])")
LOSS_COMPONENTS = frozenset(("head", "loss"))


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """The parts of an op_name, such as "jit(step)/jvp(Block)/mlp/dot_general", by which JAX names an operation.

    Fields:
        phase: phase of the step, such as forward or backward; "" if unknown.
        path: the named scopes around the operation, outermost first.
        component: the part of the model, such as "attention"; "" if unknown.
        operation: the last word of the name, such as "dot_general".
    """

    phase: str = ""
    path: tuple[str, ...] = ()
    component: str = ""
    operation: str = ""


def is_operation(op_name: str) -> bool:
    """Returns whether an op_name is JAX's name of an operation. Returns False for names that the compiler gives (they
    contain no path) and for names of arguments (they contain keys such as "['w']").
    """
    return "/" in op_name and "['" not in op_name


@functools.lru_cache(maxsize=65536)
def parse(op_name: str) -> Scope:
    """Splits an op_name into its parts. Any string is accepted, and "" gives an empty Scope."""
    if not op_name:
        return Scope()
    words = _split_op_name(op_name)
    path: list[str] = []
    seen: set[str] = set()
    for word in words:
        for _ in range(16):
            match = _WRAPPED.match(word)
            if not match:
                break
            seen.add(match[1])
            word = "" if match[1] in _CALLS else match[2]
        if word != "transpose":  # `transpose` is also an operation, which does not belong to a backward pass
            seen.add(word)
        if word not in NOISE and not _BRANCH.match(word):
            path.append(word)
    last = words[-1]
    operation = path.pop() if path and path[-1] == last else last
    scopes = tuple(word for word in path if not _WRITTEN.search(word))
    return Scope(
        _phase_of_transformations(seen), scopes, locate(scopes)[0], "einsum" if _EINSUM.search(operation) else operation
    )


# Phase -> words of which the op_name of every operation of the phase contains one.
PHASE_MARKS = {"forward": (b"jvp",), "backward": (b"jvp",), "recompute": (b"rematted_computation",)}


def _phase_of_transformations(seen: set[str]) -> str:
    if "rematted_computation" in seen:
        return "recompute"
    if "jvp" not in seen:
        return ""
    return "backward" if "transpose" in seen else "forward"


@functools.lru_cache(maxsize=65536)
def locate(path: tuple[str, ...]) -> tuple[str, int]:
    """Returns (component of the model that the scopes `path` name, number of leading scopes up to it). For ("blocks_3",
    "Attention_0", "query") the result is ("attention", 2). The first 2 scopes distinguish this attention from the
    attention of other blocks.

    The component is the outermost scope with a known name. A loss that contains other components does not count. If no
    name is known, the component is the first of these that exists: a norm, the innermost module, a single layer, a
    container of blocks. A number at the end of a name is dropped, so that `Attention_0` of every block is one
    component.
    """
    words = [plain(word) for word in path]
    bare = [re.sub(r"[._]?\d+$", "", word).lower() for word in words]
    known = [at for at, word in enumerate(bare) if word in COMPONENTS]
    if len(known) > 1 and COMPONENTS[bare[known[0]]] == "loss":
        known = [at for at in known if COMPONENTS[bare[at]] not in LOSS_COMPONENTS] or known
    if known:
        return COMPONENTS[bare[known[0]]], known[0] + 1
    norm = next((at for at, word in enumerate(bare) if NORMS.search(word)), None)
    if norm is not None:
        return "norm", norm + 1
    inner = [at for at in range(len(path)) if at or len(path) == 1]  # the outermost module contains all others
    modules = [at for at in inner if bare[at] not in CONTAINERS and not is_layer(words[at])]
    layers = [at for at in inner if is_layer(words[at])]
    innermost = (modules or layers or inner or [0])[-1]
    return (re.sub(r"_\d+$", "", words[innermost]), innermost + 1) if path else ("", 0)


def is_layer(word: str) -> bool:
    """Returns whether the name of a scope or class is the name of a single layer, such as `Dense_0`."""
    return bool(LAYERS.match(re.sub(r"_\d+$", "", word).lower()))


def plain(word: str) -> str:
    """Returns the name of a scope without library, method and transformations: `eqx.nn.Linear` becomes Linear,
    `embed.attend` becomes embed, and `ScanCheckpointBlock_0` becomes Block_0.
    """
    if word.startswith(EQUINOX):
        return word.rpartition(".")[2]
    return _TRANSFORMED.sub("", word.partition(".")[0]) or word


def first_of_merged(op_name: str) -> str:
    """Returns the op_name of the first operation if the compiler merged several: "a/b" for "a/b;c/d" and for
    "a/(b:c/d)".
    """
    return "/".join(_split_op_name(op_name))


def _split_op_name(op_name: str) -> list[str]:
    # If the compiler merged several operations, the words of the first.
    words = []
    for word in _split_outside_parentheses(op_name.partition(";")[0], "/"):
        inside = _split_outside_parentheses(word[1:-1], ":") if word.startswith("(") and word.endswith(")") else ()
        words += _split_op_name(inside[0]) if len(inside) > 1 else [word]
    return words


def _split_outside_parentheses(text: str, separator: str) -> list[str]:
    if "(" not in text:
        return text.split(separator)
    words, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == separator and depth <= 0:
            words.append(text[start:at])
            start = at + 1
    words.append(text[start:])
    return words
