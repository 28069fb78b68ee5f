"""Decides the role of each argument of a step by its use in the step, and by its path if the use is not enough. Pure.

State is an argument whose update is among the results. Parameters are state that the model reads and whose update
depends on gradients. Optimizer moments mirror parameters, and only the update reads them. The path of a moment often
repeats the path of its parameter, so a `params` inside the optimizer's state does not name parameters. State that does
not depend on gradients is carried state. Parameters that a training step reads but never updates are frozen, such as
the weights under LoRA adapters. Names are whole keys of a path, so `kv_proj.kernel` is not a KV cache and
`positional_embedding` is not a position; the outermost key comes first. If neither use nor path decides, a caller can
pass `memory.analyze(..., roles=...)`, which takes precedence.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from bytescope.memory.errors import ReportError, remedy_for
from bytescope.memory.program.pairing import Keys, keys_of, root_of
from bytescope.memory.records.buffer_records import RowName

# The roles of arguments, which are rows of the breakdown.
ROLES: tuple[RowName, ...] = ("params", "frozen", "optimizer", "accumulator", "cache", "rng", "gradients", "batch")
# Roles of the model's parameters, trained or not.
WEIGHTS: tuple[RowName, ...] = ("params", "frozen")
# The role of an argument without evidence: input data.
UNKNOWN: RowName = "batch"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The evidence from which the role of an array among the program's arguments, such as "params", is decided.

    Fields:
        path, shape, dtype: pytree path, shape and dtype of the array in the caller's arguments.
        trained: whether the program has a backward pass.
        state: whether the array's updated value is among the results.
        returned: whether a result has the array's shape and dtype.
        gradient: whether the array's gradient is among the results.
        learns: whether the array's updated value depends on gradients.
        read: whether the forward or backward pass reads the array, not only the optimizer update.
        forward: whether the forward pass reads the array.
        products: whether a matrix product, a convolution or a lookup reads the array.
        random: whether the array is a random key from which random bits are generated.
        mirrors: whether the array has the shape and the last keys of a parameter, as optimizer moments have.
        repeats: whether the array is state that only the optimizer update reads, and its path ends like the path of a
            parameter that the model reads, from a group key such as `params` on. An example is `m['params']['w']` with
            the parameter `variables['params']['w']`. False for copies of parameters, such as moving averages.
        batch_dim: whether the array's first dimension has the size of a batch: the first dimension of integer data, or
            of a result that is not state.
        weights: whether most elements of the function argument that contains the array belong to weights.
        shaped: whether most elements of the function argument that contains the array are in arrays with the dimensions
            of trained parameters.
        no_params: whether no parameter was recognized. This happens with a linear loss, where only the optimizer reads
            the parameters.
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
    repeats: bool = False
    batch_dim: bool = False
    weights: bool = False
    shaped: bool = False
    no_params: bool = False

    @property
    def container(self) -> RowName | Literal[""]:
        """The role named by the outermost key of the path that is a known name of a group of arrays: "optimizer" for
        `state.opt_state[0].mu`, because of `opt_state`. "" if no key is known."""
        return by_container(self.path)

    @property
    def name(self) -> RowName | Literal[""]:
        """The role named by the innermost key of the path that is a known name of an array: "optimizer" for
        `state.inner.mu`, because of `mu`. "" if no key is known."""
        return by_name(self.path)

    @property
    def floats(self) -> bool:
        """True if the array has a dtype that weights can have: floats, complex numbers, and the integers of quantized
        weights (int4, int8)."""
        return any(kind in self.dtype for kind in ("float", "complex", "int4", "int8"))

    @property
    def weight(self) -> bool:
        """True if the program reads the array as it reads a weight: in matrix products, and without a batch
        dimension."""
        return self.floats and bool(self.shape) and self.products and not self.batch_dim


# (role, rule): the first rule that matches decides.
RULES: tuple[tuple[RowName, Callable[[Evidence], bool]], ...] = (
    ("rng", lambda e: e.dtype.startswith("key<")),
    ("rng", lambda e: e.dtype == "uint32" and e.shape[-1:] in ((2,), (4,)) and (e.random or e.name == "rng")),
    ("rng", lambda e: e.name == "rng" and "int" in e.dtype and len(e.shape) < 2 and not e.container),
    ("rng", lambda e: "rngs" in keys_of(e.path) and "int" in e.dtype and not e.container),  # Flax counts its draws
    # Some optimizers keep the parameters themselves with their moments.
    ("params", lambda e: e.container == "optimizer" and e.state and e.floats and e.learns and e.forward),
    # A container gives its role to everything in it.
    ("accumulator", lambda e: e.container == "accumulator"),
    ("optimizer", lambda e: e.container == "optimizer" or e.repeats),
    ("params", lambda e: e.container == "params" or (e.container == "frozen" and (e.state or not e.trained))),
    ("frozen", lambda e: e.container == "frozen"),
    ("gradients", lambda e: e.container == "gradients"),
    ("cache", lambda e: e.container == "cache"),
    # State of a step with a backward pass.
    ("optimizer", lambda e: e.state and e.trained and e.mirrors and not e.read),
    ("params", lambda e: e.state and e.floats and e.learns and e.no_params),
    ("params", lambda e: e.state and e.trained and e.floats and e.read and (e.learns or e.mirrors)),
    ("cache", lambda e: e.state and e.trained and bool(e.shape) and not e.learns),
    ("optimizer", lambda e: e.state and e.trained),
    # Parameters that a step reads and does not train. `mark_frozen` finds the ones that another rule called params.
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
    # In a step with a backward pass, leaves without gradient and name are data, even if a matrix product reads them.
    ("params", lambda e: not e.trained and (e.weight or (e.weights and e.floats and not (e.batch_dim and e.products)))),
)

# Names of moments in optimizer states, such as the fields of optax.ScaleByAdamState.
_MOMENTS = r"mu|nu|trace|momentum|velocity|moments?|second_moment|[vs]_(row|col)"
_MOMENT_FIELD = re.compile(rf"\.({_MOMENTS})(?=[.\[])")

# (pattern of a whole key, role). The first matching key of a path decides, with two exceptions: gradient sums inside
# the optimizer state are accumulators, and groups of variables inside a field of moments are optimizer state.
_CONTAINERS: tuple[tuple[str, RowName], ...] = (
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
# (pattern of a whole key, role): words that name a leaf; the innermost word decides. `_ROOTS` are matched only with the
# name of the whole argument: a `k` inside a model is not data.
_WORDS: tuple[tuple[str, RowName], ...] = (
    (r"(\w+_)?(rngs?|prng|prng_key|keys?|seeds?|rng_state|rng_key)", "rng"),
    (
        rf"{_MOMENTS}|master\w*|ema\w*|opt|optim|counts?|steps?|mini_step|gradient_step|loss_scale|learning_rate|lr"
        r"|optimizer",
        "optimizer",
    ),
    (
        r"p|w|b|ws|bs|w_?\d+|b_?\d+|weights?|(\w+_)?kernel|bias|biases|scale|(\w+_)?embeddings?(_table)?|embed|table"
        r"|variables|model|net|network|w[qkvo]|w_\w+|w(te|pe)",
        "params",
    ),
    (r"kv|hidden|memory|states?", "cache"),
)
_ROOTS: tuple[tuple[str, RowName], ...] = (
    (r"h|c", "cache"),
    (
        r"x|xs|y|ys|z|data|(\w+_)?tokens?|(\w+_)?mask|(\w+_)?segments?(_ids)?|(\w+_)?positions?(_ids)?|images?|text"
        r"|obs|observations?|actions?|rewards?|(\w+_)?ids|(\w+_)?inputs?|(\w+_)?targets?|(\w+_)?labels?|q|k|v|query|key"
        r"|value|logits|prompt",
        "batch",
    ),
)


def decide(evidence: Sequence[Evidence]) -> list[RowName]:
    """Returns the role of each array, such as "params". It is the role of the first matching rule in `RULES`, or
    UNKNOWN ("batch") if no rule matches.
    """
    decided = []
    for one in evidence:
        matching = (role for role, rule in RULES if rule(one))
        decided.append(next(matching, UNKNOWN))
    return decided


def mark_frozen(evidence: Sequence[Evidence], decided: Sequence[RowName]) -> list[RowName]:
    """Returns the roles, with "frozen" instead of "params" for parameters that a training step never updates.

    evidence, decided: for each array, its evidence and its role so far. A parameter is frozen if other parameters are
    updated from gradients, but neither its updated value nor its gradient is among the results.
    """
    learn = any(role == "params" and (one.learns or one.gradient) for one, role in zip(evidence, decided))
    return [
        "frozen" if learn and role == "params" and not (one.state or one.gradient) else role
        for one, role in zip(evidence, decided)
    ]


def role(path: str, extra: Iterable[tuple[str, str]] = ()) -> RowName:
    """Returns the role of an array according to its pytree path, such as "params" for `state.params['blocks']['wq']`.
    Returns UNKNOWN ("batch") if no word in the path is known.

    extra: the caller's pairs (regular expression for pytree paths, role), which take precedence. Raises ReportError for
    an invalid pair.
    """
    return given(path, extra) or by_container(path) or by_name(path) or UNKNOWN


def given(path: str, extra: Iterable[tuple[str, str]]) -> RowName | Literal[""]:
    """Returns the role that the caller's (regular expression, role) pairs give to a pytree path, "" if no pair
    matches.

    Raises ReportError for an invalid pair.
    """
    for pattern, name in checked_roles(extra):
        if _compiled(pattern).search(path):
            return name
    return ""


def checked_roles(extra: Iterable[tuple[str, str]]) -> tuple[tuple[str, RowName], ...]:
    """Checks the caller's (regular expression, role) pairs and returns them, before a program is compiled.

    Raises ReportError if `extra` is not a list of pairs, a role is unknown, or a pattern is not a regular expression.
    """
    pairs = () if isinstance(extra, (str, Mapping)) and extra else tuple(extra)
    if (extra and not pairs) or not all(isinstance(each, (tuple, list)) and len(each) == 2 for each in pairs):
        raise ReportError(
            f"roles={repr(extra)[:60]} is not a list of pairs: give (regular expression, role) pairs, such as "
            "[('weights', 'params')]"
        )
    for pattern, name in pairs:
        if name not in ROLES:
            raise ReportError(f"the role {name!r} for {pattern!r} is unknown: {remedy_for(str(name), sorted(ROLES))}")
        try:
            _compiled(pattern)
        except (re.error, TypeError) as error:
            raise ReportError(
                f"roles: {pattern!r} is not a regular expression: {error}; give one that re.compile accepts"
            ) from error
    return pairs


@functools.lru_cache(maxsize=65536)
def by_container(path: str) -> RowName | Literal[""]:
    """Returns the role named by the outermost key of a pytree path that is a known name of a group of arrays:
    "optimizer" for `state.opt_state[0].mu`, because of `opt_state`. Returns "" if no key is known.

    Optimizer moments repeat the keys of the parameters, so the role is also "optimizer" if `params` or another group of
    variables is inside a field of moments: `state[1][0].mu['params']['w']`. If a key names accumulated gradients, the
    role is "accumulator" instead of "optimizer": `opt_state.acc_grads`."""
    keys = _words_of(path)
    role: RowName | Literal[""] = next(filter(None, (_match(key, _CONTAINERS) for key in keys)), "")
    if role in ("params", "frozen", "cache"):
        field = _MOMENT_FIELD.search(path)
        if field is not None and not names_group(_words_of(path[: field.start()])):
            role = "optimizer"
    if role == "optimizer" and any(_match(key, _CONTAINERS[:1]) for key in keys):
        return "accumulator"
    return role


def names_group(keys: Iterable[str]) -> bool:
    """Returns whether one of the keys of a pytree path is a known name of a group of arrays, such as `params`."""
    return any(_match(key.lower(), _CONTAINERS) for key in keys)


@functools.lru_cache(maxsize=65536)
def by_name(path: str) -> RowName | Literal[""]:
    """Returns the role named by the innermost key of a pytree path that is a known name of an array: "optimizer" for
    `state.inner.mu`, because of `mu`. If no key is known, the name of the function's argument decides: "batch" for
    `tokens[0]`. Returns "" if neither is known."""
    words = _words_of(path)
    for word in reversed(words):
        name = _match(word, _WORDS)
        if name:
            return name
    return _match(words[0], _ROOTS) if words else ""


def _words_of(path: str) -> Keys:
    words = (re.sub(r"\W.*", "", root_of(path)), *keys_of(path))
    return tuple(word.lower() for word in words if word and not word.isdigit() and word not in ("args", "value"))


def _match(word: str, table: Iterable[tuple[str, RowName]]) -> RowName | Literal[""]:
    return next((name for pattern, name in table if _compiled(pattern).fullmatch(word)), "")


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
