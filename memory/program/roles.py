"""What an argument of the step is, by what the step does with it; by its path where that leaves a choice. Pure.

State comes back: among the results is its update. The model reads parameters, and their updates are made of gradients;
moments mirror parameters, and only the update reads them; what comes back and has no gradient is carried state;
parameters that a training step reads and never updates are frozen, such as the weights under LoRA adapters. Names are
whole keys of a path, from outside in: `kv_proj.kernel` is no KV cache, and a `positional_embedding` no position. A
caller whose arguments neither tells passes `memory.analyze(..., roles=...)`, which is tried before all else.
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
# Those of the model's parameters, trained or not.
WEIGHTS = ("params", "frozen")
# An argument of which nothing is known: data that the caller brings.
UNKNOWN = "batch"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What is known of one leaf of the arguments.

    Fields:
        path, shape, dtype: as the program was called.
        trained: the program has a backward pass.
        state: an update of it is among the results; returned: an array of its shape and dtype is.
        gradient: a gradient of it is among the results; learns: its update is made of gradients.
        read: the forward or the backward pass reads it; forward: the former does; products: a product, a convolution
        or a lookup does.
        random: random bits are drawn from it.
        mirrors: it has the last keys and the shape of a parameter; sharded as a batch is: `batch_dim`, its first
            dimension is that of a result, or of data that are whole numbers.
        weights: of the argument that it is a leaf of, most bytes are weights by these signs; shaped: most bytes have
            dimensions of what learns; alone: no parameter is
        known, as where a loss is linear and nothing but the update reads them.
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
        """The role that a container in the path is named for, "" for none."""
        return by_container(self.path)

    @property
    def name(self) -> str:
        """The role that any word of the path stands for, "" for none."""
        return by_name(self.path)

    @property
    def floats(self) -> bool:
        """Whether it holds numbers that a gradient could have, quantized ones and complex ones included."""
        return any(kind in self.dtype for kind in ("float", "complex", "int4", "int8"))

    @property
    def weight(self) -> bool:
        """Whether it is read as weights are, and has not the batch's dimension."""
        return self.floats and bool(self.shape) and self.products and not self.batch_dim


# (role, rule), first match wins.
RULES: tuple[tuple[str, Callable[[Evidence], bool]], ...] = (
    ("rng", lambda e: e.dtype.startswith("key<")),
    ("rng", lambda e: e.dtype == "uint32" and e.shape[-1:] in ((2,), (4,)) and (e.random or e.name == "rng")),
    ("rng", lambda e: e.name == "rng" and "int" in e.dtype and len(e.shape) < 2 and not e.container),
    ("rng", lambda e: "rngs" in keys_of(e.path) and "int" in e.dtype and not e.container),  # Flax counts its draws
    # Some optimizers keep the parameters themselves with their moments.
    ("params", lambda e: e.container == "optimizer" and e.state and e.floats and e.learns and e.forward),
    # A container says what everything in it is; only data never comes back.
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
    # What a step trains against; `frozen` below finds those that are known for parameters.
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
    # Other state: what a step carries on.
    ("optimizer", lambda e: e.state and e.name == "optimizer" and not e.shape),
    ("cache", lambda e: e.state or (e.name == "cache" and e.returned)),
    # What does not come back.
    ("params", lambda e: e.gradient and e.name != "batch"),
    ("params", lambda e: e.mirrors and e.read and e.floats),
    ("batch", lambda e: e.container == "batch"),
    ("optimizer", lambda e: e.name == "optimizer" and not e.batch_dim),
    ("params", lambda e: e.name == "cache" and e.weight and not e.trained),
    ("cache", lambda e: e.name == "cache"),
    ("params", lambda e: e.name == "params" and e.floats and not (e.batch_dim and len(e.shape) == 1)),
    ("batch", lambda e: e.name == "batch"),
    # In a step with a backward pass what has no gradient and no name is data: a product reads both.
    ("params", lambda e: not e.trained and (e.weight or (e.weights and e.floats and not (e.batch_dim and e.products)))),
)

# (pattern of a whole key, role). The first key of a path that has a row decides, but sums of gradients within the
# optimizer's state are told apart.
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
# (pattern of a whole key, role): words that name a leaf; the innermost counts. Those of `_ROOTS` are asked of the
# argument's own name only: a `k` inside of a model is no data.
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
    """The role of each leaf; rows of `RULES`, UNKNOWN where none matches."""
    return [next((role for role, rule in RULES if rule(one)), UNKNOWN) for one in evidence]


def frozen(evidence: Sequence[Evidence], found: Sequence[str]) -> list[str]:
    """The roles `found`, with parameters that a training step never updates as what they are: where something learns,
    what neither comes back changed nor has a gradient among the results is frozen."""
    learn = any(role == "params" and (one.learns or one.gradient) for one, role in zip(evidence, found))
    return [
        "frozen" if learn and role == "params" and not (one.state or one.gradient) else role
        for one, role in zip(evidence, found)
    ]


def role(path: str, extra: Iterable[tuple[str, str]] = ()) -> str:
    """The role of an argument by its path alone, as in `state.params['blocks']['wq']`; UNKNOWN when nothing matches.

    `extra` are (regular expression, role) pairs that go first. Raises as `given` does.
    """
    return given(path, extra) or by_container(path) or by_name(path) or UNKNOWN


def given(path: str, extra: Iterable[tuple[str, str]]) -> str:
    """The role that a caller's (regular expression, role) pairs give to a path, "" for none.

    Raises ReportError as `checked_roles` does.
    """
    for pattern, name in checked_roles(extra):
        if _compiled(pattern).search(path):
            return name
    return ""


def checked_roles(extra: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """A caller's pairs as they are. Raises ReportError for what is no pairs, a role that is not one of the breakdown's
    rows, and a pattern that is not a regular expression; a program is compiled after that."""
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
    """The role that the outmost container of a path is named for, "" for none."""
    keys = _words_of(path)
    found = next(filter(None, (_match(key, _CONTAINERS) for key in keys)), "")
    if found == "optimizer" and any(_match(key, _CONTAINERS[:1]) for key in keys):
        return "accumulator"
    return found


@functools.lru_cache(maxsize=65536)
def by_name(path: str) -> str:
    """The role that a word of a path stands for, the innermost first; "" for none."""
    words = _words_of(path)
    return next(filter(None, (_match(word, _WORDS) for word in reversed(words))), "") or _match(
        next(iter(words), ""), _ROOTS
    )


def _words_of(path: str) -> Keys:
    """Root and keys of a path in lower case, places in tuples and attributes without a meaning left out."""
    words = (re.sub(r"\W.*", "", root_of(path)), *keys_of(path))
    return tuple(word.lower() for word in words if word and not word.isdigit() and word not in ("args", "value"))


def _match(word: str, table: Iterable[tuple[str, str]]) -> str:
    return next((name for pattern, name in table if _compiled(pattern).fullmatch(word)), "")


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
