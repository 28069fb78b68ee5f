"""Decides the role of each argument of a step by what the step does with it, and by its path if needed. Pure.

State is returned: its update is among the results. The model reads parameters, and their updates depend on gradients;
moments mirror parameters, and only the update reads them; state without a gradient is carried state; parameters that a
training step reads and never updates are frozen, such as the weights under LoRA adapters. Names are whole keys of a
path, from outside in: `kv_proj.kernel` is no KV cache, and a `positional_embedding` no position. If neither decides, a
caller passes `memory.analyze(..., roles=...)`, which is tried first.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from bytescope.memory.errors import ReportError, remedy_for
from bytescope.memory.program.pairing import Keys, keys_of, root_of

# Roles of arguments are rows of the breakdown.
ROLES = ("params", "frozen", "optimizer", "accumulator", "cache", "rng", "gradients", "batch")
# Roles of the model's parameters, trained or not.
WEIGHTS = ("params", "frozen")
# The role of an argument without evidence: the caller's data.
UNKNOWN = "batch"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The evidence for the role of one leaf of the arguments.

    Fields:
        path, shape, dtype: as the program was called.
        trained: the program has a backward pass.
        state: an update of it is among the results; returned: an array of its shape and dtype is among them.
        gradient: a gradient of it is among the results; learns: its update depends on gradients.
        read: the forward or the backward pass reads it; forward: the forward pass reads it; products: a product, a
            convolution or a lookup reads it.
        random: random bits are drawn from it.
        mirrors: it has the last keys and the shape of a parameter.
        batch_dim: its first dimension is that of a result, or of integer data.
        weights: most bytes of the argument that contains it are weights by these signs; shaped: most of these bytes
            have dimensions of learned parameters.
        alone: no parameter is known, as in a linear loss, in which only the update reads parameters.
    """

    path: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    trained: bool = False
    state: bool = False
    returned: bool = False
    gradient: bool = False
    learns: bool = False
    read: bool = False
    forward: bool = False
    products: bool = False
    random: bool = False
    mirrors: bool = False
    batch_dim: bool = False
    weights: bool = False
    shaped: bool = False
    alone: bool = False

    @property
    def container(self) -> str:
        """The role of a container in the path by its name, "" for none."""
        return by_container(self.path)

    @property
    def name(self) -> str:
        """The role of a word in the path, "" for none."""
        return by_name(self.path)

    @property
    def floats(self) -> bool:
        """Whether its dtype may have a gradient, including quantized and complex ones."""
        return any(kind in self.dtype for kind in ("float", "complex", "int4", "int8"))

    @property
    def weight(self) -> bool:
        """Whether it is read like weights and has no batch dimension."""
        return self.floats and bool(self.shape) and self.products and not self.batch_dim


# (role, rule), first match wins.
RULES: tuple[tuple[str, Callable[[Evidence], bool]], ...] = (
    ("rng", lambda e: e.dtype.startswith("key<")),
    ("rng", lambda e: e.dtype == "uint32" and e.shape[-1:] in ((2,), (4,)) and (e.random or e.name == "rng")),
    ("rng", lambda e: e.name == "rng" and "int" in e.dtype and len(e.shape) < 2 and not e.container),
    ("rng", lambda e: "rngs" in keys_of(e.path) and "int" in e.dtype and not e.container),  # Flax counts its draws
    # Some optimizers keep the parameters themselves with their moments.
    ("params", lambda e: e.container == "optimizer" and e.state and e.floats and e.learns and e.forward),
    # A container gives its role to everything in it, except that data are never returned.
    ("accumulator", lambda e: e.container == "accumulator"),
    ("optimizer", lambda e: e.container == "optimizer"),
    ("params", lambda e: e.container == "params" or (e.container == "frozen" and (e.state or not e.trained))),
    ("frozen", lambda e: e.container == "frozen"),
    ("gradients", lambda e: e.container == "gradients"),
    ("cache", lambda e: e.container == "cache"),
    # State of a step with a backward pass.
    ("optimizer", lambda e: e.state and e.trained and e.mirrors and not e.read),
    ("params", lambda e: e.state and e.floats and e.learns and e.alone),
    ("params", lambda e: e.state and e.trained and e.floats and e.read and (e.learns or e.mirrors)),
    ("cache", lambda e: e.state and e.trained and bool(e.shape) and not e.learns),
    ("optimizer", lambda e: e.state and e.trained),
    # Parameters that a step reads and does not train; `frozen` below finds those that are known as parameters.
    (
        "frozen",
        lambda e: (
            e.shaped
            and e.trained
            and not e.state
            and e.floats
            and e.forward
            and not e.batch_dim
            and "batch" not in (e.container, e.name)
        ),
    ),
    # Other state that a step carries.
    ("optimizer", lambda e: e.state and e.name == "optimizer" and not e.shape),
    ("cache", lambda e: e.state or (e.name == "cache" and e.returned)),
    # Arguments that are not returned.
    ("params", lambda e: e.gradient and e.name != "batch"),
    ("params", lambda e: e.mirrors and e.read and e.floats),
    ("batch", lambda e: e.container == "batch"),
    ("optimizer", lambda e: e.name == "optimizer" and not e.batch_dim),
    ("params", lambda e: e.name == "cache" and e.weight and not e.trained),
    ("cache", lambda e: e.name == "cache"),
    ("params", lambda e: e.name == "params" and e.floats and not (e.batch_dim and len(e.shape) == 1)),
    ("batch", lambda e: e.name == "batch"),
    # In a step with a backward pass, leaves without gradient and name are data, even if a product reads them.
    ("params", lambda e: not e.trained and (e.weight or (e.weights and e.floats and not (e.batch_dim and e.products)))),
)

# (pattern of a whole key, role). The first key of a path that matches decides, except that sums of gradients inside the
# optimizer's state keep their own role.
_CONTAINERS = (
    (
        r"(acc|accumulated|accumulator|sum|summed)_?(grads?|gradients?)|grads?_?acc\w*|gradients?_accumulator",
        "accumulator",
    ),
    (r"(\w+_)?(opt|optim|optimizer|optimiser)_?states?|opt_vars", "optimizer"),
    (r"frozen(_\w+)?|(\w+_)?frozen", "frozen"),
    (r"(\w+_)?params?|(\w+_)?parameters|theta|phi", "params"),
    (r"(\w+_)?grads?|(\w+_)?gradients?", "gradients"),
    (
        r"(\w+_)?(kv|key_value|k|v)_?caches?|(\w+_)?caches?|past_key_values|batch_stats|moving_(mean|average|var)\w*"
        r"|running_(mean|var)|carry|carries|hidden_states?",
        "cache",
    ),
    (r"(\w+_)?batch|batches|inputs?|targets?|labels?|examples?|minibatch|input_ids|attention_mask", "batch"),
)
# (pattern of a whole key, role): words that name a leaf; the innermost counts. `_ROOTS` are matched only with the
# argument's own name: a `k` inside a model is no data.
_WORDS = (
    (r"(\w+_)?(rngs?|prng|prng_key|keys?|seeds?|rng_state|rng_key)", "rng"),
    (
        r"mu|nu|trace|momentum|velocity|moments?|second_moment|[vs]_(row|col)|master\w*|ema\w*|opt|optim|counts?|steps?"
        r"|mini_step|gradient_step|loss_scale|learning_rate|lr|optimizer",
        "optimizer",
    ),
    (
        r"p|w|b|ws|bs|w_?\d+|b_?\d+|weights?|(\w+_)?kernel|bias|biases|scale|(\w+_)?embeddings?(_table)?|embed|table"
        r"|variables|model|net|network|w[qkvo]|w_\w+|w(te|pe)",
        "params",
    ),
    (r"kv|hidden|memory|states?", "cache"),
)
_ROOTS = (
    (r"h|c", "cache"),
    (
        r"x|xs|y|ys|z|data|(\w+_)?tokens?|(\w+_)?mask|(\w+_)?segments?(_ids)?|(\w+_)?positions?(_ids)?|images?|text"
        r"|obs|observations?|actions?|rewards?|(\w+_)?ids|(\w+_)?inputs?|(\w+_)?targets?|(\w+_)?labels?|q|k|v|query|key"
        r"|value|logits|prompt",
        "batch",
    ),
)


def decide(evidence: Sequence[Evidence]) -> list[str]:
    """The role of each leaf by the first matching rule of `RULES`; UNKNOWN if none matches."""
    found = []
    for one in evidence:
        matching = (role for role, rule in RULES if rule(one))
        found.append(next(matching, UNKNOWN))
    return found


def frozen(evidence: Sequence[Evidence], found: Sequence[str]) -> list[str]:
    """The roles `found`, with `frozen` for parameters that a training step never updates: if any parameter learns,
    parameters without an update and without a gradient among the results are frozen."""
    learn = any(role == "params" and (one.learns or one.gradient) for one, role in zip(evidence, found))
    return [
        "frozen" if learn and role == "params" and not (one.state or one.gradient) else role
        for one, role in zip(evidence, found)
    ]


def role(path: str, extra: Iterable[tuple[str, str]] = ()) -> str:
    """The role of an argument by its path only, such as `state.params['blocks']['wq']`; UNKNOWN if nothing matches.

    `extra`: (regular expression, role) pairs that are tried first. Raises ReportError as `given` does.
    """
    return given(path, extra) or by_container(path) or by_name(path) or UNKNOWN


def given(path: str, extra: Iterable[tuple[str, str]]) -> str:
    """The role of a path by a caller's (regular expression, role) pairs, "" for none.

    Raises ReportError as `checked_roles` does.
    """
    for pattern, name in checked_roles(extra):
        if _compiled(pattern).search(path):
            return name
    return ""


def checked_roles(extra: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Returns a caller's pairs unchanged. Raises ReportError for an object that is no pairs, an unknown role, and a
    pattern that is no regular expression, so that errors come before a program is compiled."""
    pairs = () if isinstance(extra, (str, Mapping)) and extra else tuple(extra)
    if (extra and not pairs) or not all(isinstance(each, (tuple, list)) and len(each) == 2 for each in pairs):
        raise ReportError(
            f"roles={repr(extra)[:60]}: give (regular expression, role) pairs, such as [('weights', 'params')]"
        )
    for pattern, name in pairs:
        if name not in ROLES:
            raise ReportError(f"role {name!r} for {pattern!r}: {remedy_for(str(name), sorted(ROLES))}")
        try:
            _compiled(pattern)
        except (re.error, TypeError) as error:
            raise ReportError(f"roles: {pattern!r} is not a regular expression: {error}") from error
    return pairs


@functools.lru_cache(maxsize=65536)
def by_container(path: str) -> str:
    """The role of the outmost container in a path by its name, "" for none."""
    keys = _words_of(path)
    found = next(filter(None, (_match(key, _CONTAINERS) for key in keys)), "")
    if found == "optimizer" and any(_match(key, _CONTAINERS[:1]) for key in keys):
        return "accumulator"
    return found


@functools.lru_cache(maxsize=65536)
def by_name(path: str) -> str:
    """The role of the innermost word in a path that has one, otherwise of the argument's name; "" for none."""
    words = _words_of(path)
    for word in reversed(words):
        name = _match(word, _WORDS)
        if name:
            return name
    return _match(words[0], _ROOTS) if words else ""


def _words_of(path: str) -> Keys:
    """Root and keys of a path in lower case, without positions in tuples and attributes without meaning."""
    words = (re.sub(r"\W.*", "", root_of(path)), *keys_of(path))
    return tuple(word.lower() for word in words if word and not word.isdigit() and word not in ("args", "value"))


def _match(word: str, table: Iterable[tuple[str, str]]) -> str:
    return next((name for pattern, name in table if _compiled(pattern).fullmatch(word)), "")


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
