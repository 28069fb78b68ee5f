"""Finds the calls of jax.checkpoint in the jaxpr of a step, and what their remat policies ask for.

After differentiation, a call of `jax.checkpoint` is an equation of the backward pass. The equations that the backward
pass recomputes have "rematted_computation" in their name stacks.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bytescope.memory.cost import flops
from bytescope.memory.findings.user_functions import Function, frames_of, line_of
from bytescope.memory.hlo.module import Frame
from bytescope.memory.hlo.sources import OWN, kind_of
from bytescope.memory.jaxprs import bodies, checkpoint_name_of, checkpoint_of, inner_jaxpr, parameters

# Primitives that draw random bits.
RANDOM = frozenset(("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"))
# Primitives of kernels: XLA does not copy them into the fusions of their users, as it does elementwise operations.
KERNELS = frozenset((*flops.KERNELS, *flops.OPAQUE, "pallas_call"))
# (source line "file.py:line", primitive) by which an equation is found in the compiled module.
Key = tuple[str, str]
_MAX_SAMPLE = 24
_MAX_DEPTH = 6


class Recomputed(NamedTuple):
    """An equation that the backward pass recomputes.

    Fields:
        line: "file.py:line" of the user's code that made the equation; "" if unknown. jax traces its own functions,
            such as jax.nn.silu, only once, so an equation inside such a function has the line of the function's call.
        equation: the equation of the jaxpr.
    """

    line: str
    equation: Any

    @property
    def key(self) -> Key:
        return self.line, self.equation.primitive.name


@dataclasses.dataclass
class CheckpointRegion:
    """All calls of `jax.checkpoint` in one source line, with one function and one remat policy.

    Fields:
        title: name of the checkpointed function, such as "Block".
        source: "file.py:line" of the call in the user's code; "" if unknown.
        policy: the remat policy; None if the call has no policy.
        prevent_cse: whether optimization barriers keep XLA from merging the recomputation with the forward pass.
        count: number of calls in one step; a call in a loop counts once for each iteration.
        unrolled: number of these calls that are not in a compiled loop, such as the layers of a Python loop.
        recomputed: the equations that the backward pass recomputes, of all calls, including the equations inside other
            equations.
        constant: the equations of `recomputed` whose results depend on no argument of the checkpointed function.
        flops: FLOPs of `recomputed` in one step on all devices together, loop iterations included.
    """

    title: str
    source: str
    policy: Any
    prevent_cse: bool
    count: int = 0
    unrolled: int = 0
    recomputed: list[Recomputed] = dataclasses.field(default_factory=list)
    constant: list[Recomputed] = dataclasses.field(default_factory=list)
    flops: int = 0

    @functools.cached_property
    def keys(self) -> frozenset[Key]:
        """The pair ("file.py:line", primitive name) of each equation that the backward pass recomputes. Equations with
        an unknown source line are left out."""
        return frozenset(each.key for each in self.recomputed if each.line)

    @functools.cached_property
    def lines(self) -> frozenset[str]:
        """The source lines, as "file.py:line", of the equations that the backward pass recomputes."""
        return frozenset(line for line, _ in self.keys) - {""}

    @functools.cached_property
    def kernels(self) -> list[Key]:
        """The pair ("file.py:line", primitive name) of each recomputed equation that XLA does not copy into the fusions
        of its users: matrix products, convolutions, custom calls, Pallas kernels (`KERNELS`). Each equation gives one
        pair, so a pair may occur several times."""
        return [each.key for each in self.recomputed if each.equation.primitive.name in KERNELS]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The checkpoint names of the values that the backward pass recomputes."""
        return frozenset(checkpoint_name_of(each.equation) for each in self.recomputed) - {""}

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass has something to recompute; False if the remat policy saves every value."""
        return bool(self.recomputed) or not saves_every_value(self.policy)

    def saves(self, name: str) -> bool:
        """Returns whether the remat policy saves or offloads a value. `name`: the checkpoint name of the value; if it
        has several names, they are separated by ", ", and one name that the policy saves or offloads is enough. For "",
        a value without a name, returns False."""
        names = name.split(", ") if name else ()
        return any(request_for(self.policy, each) in ("save", "offload") for each in names)


def find_regions(jaxpr: Any) -> list[CheckpointRegion]:
    """Returns the differentiated calls of `jax.checkpoint` in a ClosedJaxpr, one CheckpointRegion for all calls with
    the same function, policy and source line. Calls that are not differentiated recompute nothing and are left out."""
    finder = _RegionFinder()
    finder.visit(inner_jaxpr(jaxpr), 1, looped=False)
    return list(finder.regions.values())


class _RegionFinder:
    """Collects the calls of jax.checkpoint in a jaxpr and in the jaxprs inside it, in the dict `regions`. A jaxpr that
    contains no such call is visited only once, even if many equations use it."""

    def __init__(self) -> None:
        self.regions: dict[Any, CheckpointRegion] = {}
        self._empty: dict[int, Any] = {}

    def visit(self, jaxpr: Any, times: int, looped: bool, inside: bool = False) -> bool:
        """Adds the jax.checkpoint calls of a Jaxpr, and of the jaxprs inside it, to `regions`. Returns True if there is
        at least one such call.

        Args:
            jaxpr: the Jaxpr.
            times: how often one step runs the Jaxpr.
            looped: True if a scan or while loop runs the Jaxpr.
            inside: True if the Jaxpr is the body of a jax.checkpoint call that is already in `regions`. Then only the
                jax.checkpoint calls inside the Jaxpr are added, and its recomputed equations are not added again.
        """
        if id(jaxpr) in self._empty:
            return False
        found = False
        for equation in jaxpr.eqns:
            checkpoint = checkpoint_of(equation)
            if _is_rematted(equation):
                if checkpoint is not None and not inside:  # jax_remat3: the equation contains what is computed again
                    self._add(equation, inner_jaxpr(checkpoint.jaxpr).eqns, times, looped)
                    found = True
            elif checkpoint is not None and parameters(equation).get("differentiated"):
                body = inner_jaxpr(checkpoint.jaxpr)
                rematted = [each for each in body.eqns if _is_rematted(each)]
                self._add(equation, rematted, times, looped)
                self.visit(body, times, looped, inside=True)
                found = True
            elif equation.primitive.name != "pallas_call":
                trips = equation.params["length"] if equation.primitive.name == "scan" else 1
                in_loop = looped or equation.primitive.name in ("scan", "while")
                for body in bodies(equation):
                    found |= self.visit(body, times * trips, in_loop)
        if not found:
            self._empty[id(jaxpr)] = jaxpr
        return found

    def _add(self, equation: Any, rematted: Sequence[Any], times: int, looped: bool) -> None:
        given = parameters(equation)
        body, prevent_cse = inner_jaxpr(given["jaxpr"]), given["prevent_cse"]
        protected = all(prevent_cse) if isinstance(prevent_cse, tuple) else bool(prevent_cse)
        if "differentiated" not in given:  # jax_remat3 loses the parameter when it differentiates
            protected = False
        title, source = _title_of(body, equation), _line_of_call(equation, body)
        policy = given["policy"]
        key = title, source, id(policy), protected
        region = self.regions.setdefault(key, CheckpointRegion(title, source, policy, protected))
        region.count += times
        region.unrolled += 0 if looped else times
        region.recomputed += _with_inner(rematted)
        region.constant += _independent_of_inputs(rematted)
        region.flops += times * sum(flops.count_equation(each).total for each in rematted)


def _is_rematted(equation: Any) -> bool:
    # The text of a name stack is not made, because that takes most of the time of a visit.
    return any(item.name == "rematted_computation" for item in equation.source_info.name_stack.stack)


def _with_inner(equations: Iterable[Any], line: str = "") -> Iterator[Recomputed]:
    for equation in equations:
        own = line_of(equation) or line
        yield Recomputed(own, equation)
        if equation.primitive.name != "pallas_call":
            for body in bodies(equation):
                yield from _with_inner(body.eqns, own)


def _independent_of_inputs(equations: Sequence[Any]) -> list[Recomputed]:
    """Returns the equations whose results depend only on literals and on each other, not on variables that are defined
    outside of `equations`. Equations inside the returned equations are included."""
    constant: set[Any] = set()
    found = []
    for equation in equations:
        if all(hasattr(atom, "val") or atom in constant for atom in equation.invars):
            constant.update(equation.outvars)
            found.append(equation)
    return list(_with_inner(found))


# ---- source positions --------------------------------------------------------------------------------------------


def _sample(equations: Sequence[Any]) -> Sequence[Any]:
    return [*equations[:_MAX_SAMPLE], *equations[-_MAX_SAMPLE:]]


def _title_of(body: Any, call: Any) -> str:
    """Returns a name for a checkpointed function. If the user wrote the function, this is its own name. If a library
    wrote the function, it is the innermost user function in which all equations of the function were made; if there is
    none, the user's function that calls `jax.checkpoint`.

    Args:
        body: the Jaxpr of the checkpointed function.
        call: the jax.checkpoint equation.
    """
    info = getattr(body, "debug_info", None)
    name, file = getattr(info, "func_name", "") or "", getattr(info, "func_filename", "") or ""
    if name and not name.endswith(">") and file and kind_of(file) == OWN:
        return Function(name, file).title
    title = common_function(frames_of(each) for each in _sample(body.eqns))
    return title or common_function([frames_of(call)]) or name


def _line_of_call(call: Any, body: Any) -> str:
    """Returns "file.py:line" of the user's code that calls `jax.checkpoint`. If a library calls `jax.checkpoint`,
    returns the first line of the user's code that the checkpointed function runs.

    Args:
        call: the jax.checkpoint equation.
        body: the Jaxpr of the checkpointed function.
    """
    lines = [line_of(each) for each in (call, *_sample(body.eqns))]
    return next((line for line in lines if kind_of(line.rpartition(":")[0]) == OWN), lines[0])


def common_function(stacks: Iterable[Iterable[Frame]]) -> str:
    """Returns the name of the innermost user function that occurs in every stack; "" if no function does. `stacks`:
    stacks of frames, each innermost frame first; stacks without a function of the user are ignored."""
    functions = [_functions(frames) for frames in stacks]
    functions = [each for each in functions if each]
    common = set.intersection(*map(set, functions)) if functions else set()
    return next((function.title for function in functions[0] if function in common), "") if common else ""


def _functions(frames: Iterable[Frame]) -> list[Function]:
    called = [Function(frame.function, frame.file) for frame in frames if frame.function and kind_of(frame.file) == OWN]
    return [function for function in called if not function.nameless]


# ---- remat policies ----------------------------------------------------------------------------------------------


def mentioned_names(policy: Any) -> dict[str, str]:
    """Returns the checkpoint names that a remat policy lists: name -> "save", "offload" or "recompute".

    The candidates are all strings in the policy's fields and closure, and in the policies that it combines. The policy
    function is called with each string as a name, and its answer is the value. If the answer is the same as for an
    arbitrary name, the string is not a name (it may be a memory kind, such as "pinned_host") and is left out.
    """
    requests = {}
    for name in sorted(_strings_of(policy, _MAX_DEPTH)):
        request = request_for(policy, name)
        if request and request != request_for(policy, "any other name"):
            requests[name] = request
    return requests


def request_for(policy: Any, name: str) -> str:
    """Returns what a remat policy does with a value that has this checkpoint name: "save", "offload" or "recompute".
    Returns "" if the policy function raises an error when it gets only the name and not the type of the value.
    `policy`: the policy function; None, which is jax's default, recomputes everything."""
    if policy is None:
        return "recompute"
    planned = _planned_names(policy)
    if planned is not None:
        return "save" if name in planned else "recompute"
    try:
        from jax._src.ad_checkpoint import name_p

        answer = policy(name_p, name=name)
    except Exception:  # a policy of the user may need the type of the value, which is unknown
        return ""
    if isinstance(answer, bool):
        return "save" if answer else "recompute"
    # jax's markers: the objects or classes Saveable, Recompute and Offloadable
    kind = answer.__name__ if isinstance(answer, type) else type(answer).__name__
    return {"Offloadable": "offload", "RecomputeType": "recompute", "SaveableType": "save"}.get(kind, "")


def saves_every_value(policy: Any) -> bool:
    """Returns whether a remat policy, such as everything_saveable, saves every value, so that nothing is recomputed. As
    a test, the policy function is called for an elementwise product without a checkpoint name. Returns False if the
    policy is None or if the call fails."""
    if policy is None:
        return False
    import jax

    try:
        return policy(jax.lax.mul_p) is True
    except Exception:  # a policy of the user may need the types of the operands
        return False


def _strings_of(value: Any, depth: int) -> set[str]:
    if isinstance(value, str):
        return {value}
    if depth == 0 or value is None or isinstance(value, types.ModuleType):
        return set()
    inside: Collection[Any] = ()
    if isinstance(value, (set, frozenset, tuple, list)):
        inside = value
    elif isinstance(value, functools.partial):
        inside = (value.func, *value.args, *value.keywords.values())
    elif inspect.isfunction(value):
        inside = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        inside = _planned_names(value) or ()
    return set().union(*(_strings_of(each, depth - 1) for each in inside))


def _planned_names(policy: Any) -> frozenset[str] | None:
    """Returns the checkpoint names that a `memory.remat.recognition.RematPolicy` saves; None for any other policy. The
    names are read from an attribute, because a RematPolicy records each call and so must not be called here."""
    return getattr(getattr(policy, "wanted", None), "names", None)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # an empty cell
        return False
