"""Reads the requests to recompute values from the jaxpr of a step: calls of jax.checkpoint with their remat policies.

After differentiation, a call of `jax.checkpoint` is an equation of the backward pass. The equations that it computes
again have "rematted_computation" in their name stacks. With the flag `jax_remat3`, these equations stand in the jaxpr
of the backward pass itself, and the policy is no longer known.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from bytescope.memory.cost import flops
from bytescope.memory.findings import user_functions
from bytescope.memory.hlo.module import Frame, Metadata
from bytescope.memory.hlo.sources import OWN, kind_of, source_line
from bytescope.memory.jaxprs import bodies, checkpoint_name_of, checkpoint_of, inner_jaxpr, parameters

# Primitives that draw random bits.
RANDOM = frozenset(("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"))
# Primitives of kernels: XLA does not copy them into the fusions of their users, as it does elementwise operations.
KERNELS = frozenset((*flops.KERNELS, *flops.OPAQUE, "pallas_call"))
# (source line "file.py:line", primitive) by which an equation is found in the compiled module.
Key = tuple[str, str]
_MAX_SAMPLE = 24
_MAX_DEPTH = 6


@dataclasses.dataclass
class CheckpointRegion:
    """The calls of `jax.checkpoint` in one source line, with one function and one remat policy.

    Fields:
        title: name of the checkpointed function, such as "Block".
        source: "file.py:line" of the call in the user's code; "" if unknown.
        policy: the remat policy; None if there is none, or if it is unknown.
        has_policy: whether `policy` is known. It is unknown with the flag `jax_remat3`.
        prevent_cse: whether XLA's optimization barriers protect the recomputation; True if unknown.
        count: number of calls in one step, including the iterations of loops.
        unrolled: number of these calls outside of the loop over layers, such as the calls of a Python loop.
        recomputed: the equations that the backward pass computes again, in all calls, with inner equations.
        constant: the equations among `recomputed` whose results depend on no argument of the function.
        flops: FLOPs of `recomputed` in one step, on all devices, including the iterations of loops.
        body: an equation list of one call, for reading its stack frames.
    """

    title: str
    source: str
    policy: Any
    has_policy: bool
    prevent_cse: bool
    count: int = 0
    unrolled: int = 0
    recomputed: list[Any] = dataclasses.field(default_factory=list)
    constant: list[Any] = dataclasses.field(default_factory=list)
    flops: int = 0
    body: Sequence[Any] = ()

    @functools.cached_property
    def keys(self) -> frozenset[Key]:
        """The keys of all equations that are computed again."""
        return frozenset(key_of(equation) for equation in self.recomputed)

    @functools.cached_property
    def lines(self) -> frozenset[str]:
        """The source lines ("file.py:line") of all equations that are computed again."""
        return frozenset(line for line, _ in self.keys) - {""}

    @functools.cached_property
    def kernels(self) -> list[Any]:
        """The kernels, such as matrix products, among the equations that are computed again."""
        return [equation for equation in self.recomputed if equation.primitive.name in KERNELS]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The checkpoint names of the values that are computed again."""
        return frozenset(checkpoint_name_of(equation) for equation in self.recomputed) - {""}


def find_regions(jaxpr: Any) -> list[CheckpointRegion]:
    """Returns the differentiated calls of `jax.checkpoint` in a ClosedJaxpr, grouped by function, policy and line. Calls
    that are not differentiated recompute nothing and are left out."""
    finder = _RegionFinder()
    finder.visit(inner_jaxpr(jaxpr), 1, looped=False)
    return list(finder.regions.values())


class _RegionFinder:
    """Collects the regions of a jaxpr. A jaxpr without regions is visited only once, however often it is used."""

    def __init__(self) -> None:
        self.regions: dict[Any, CheckpointRegion] = {}
        self._empty: dict[int, Any] = {}
        self._rematted: dict[Any, bool] = {}

    def visit(self, jaxpr: Any, times: int, looped: bool, inside: bool = False) -> bool:
        """Adds the regions of a Jaxpr that runs `times` times in one step, and returns whether there were any.

        looped: whether a compiled loop runs the jaxpr. inside: whether the jaxpr is the body of a region, whose own
        recomputed equations were added before.
        """
        if id(jaxpr) in self._empty:
            return False
        found = False
        run: list[Any] = []
        for equation in jaxpr.eqns:
            if self._is_rematted(equation):
                run.append(equation)
                continue
            if run and not inside:
                found |= self._add(None, run, run, times, looped)
            run = []
            checkpoint = checkpoint_of(equation)
            if checkpoint is not None and parameters(equation).get("differentiated"):
                body = inner_jaxpr(checkpoint.jaxpr)
                rematted = [each for each in body.eqns if self._is_rematted(each)]
                found |= self._add(equation, rematted, body.eqns, times, looped)
                found |= self.visit(body, times, looped, inside=True)
            elif equation.primitive.name != "pallas_call":
                trips = equation.params["length"] if equation.primitive.name == "scan" else 1
                in_loop = looped or equation.primitive.name in ("scan", "while")
                for body in bodies(equation):
                    found |= self.visit(body, times * trips, in_loop)
        if run and not inside:
            found |= self._add(None, run, run, times, looped)
        if not found:
            self._empty[id(jaxpr)] = jaxpr
        return found

    def _is_rematted(self, equation: Any) -> bool:
        stack = equation.source_info.name_stack
        if stack not in self._rematted:
            self._rematted[stack] = bool(flops.RECOMPUTED.search(str(stack)))
        return self._rematted[stack]

    def _add(self, equation: Any, rematted: Sequence[Any], body: Sequence[Any], times: int, looped: bool) -> bool:
        if equation is None:  # with jax_remat3, the recomputed equations have no equation around them
            given: dict[str, Any] = {}
            frames = [frames_of(each) for each in _sample(body)]
            title, source = _common_function(frames)
        else:
            given = dict(parameters(equation))
            title, source = _title_of(given["jaxpr"], body), source_line(Metadata("", frames_of(equation)))
        policy, has_policy, prevent_cse = given.get("policy"), equation is not None, given.get("prevent_cse", True)
        key = (title, source, id(policy), has_policy, str(prevent_cse))
        if key not in self.regions:
            protected = all(prevent_cse) if isinstance(prevent_cse, tuple) else bool(prevent_cse)
            self.regions[key] = CheckpointRegion(title, source, policy, has_policy, protected, body=body)
        region = self.regions[key]
        region.count += times
        region.unrolled += 0 if looped else times
        region.recomputed += _with_inner(rematted)
        region.constant += _independent_of_inputs(rematted)
        region.flops += times * sum(flops.count_equation(each).total for each in rematted)
        return True


def _with_inner(equations: Iterable[Any]) -> Iterator[Any]:
    for equation in equations:
        yield equation
        if equation.primitive.name != "pallas_call":
            for body in bodies(equation):
                yield from _with_inner(body.eqns)


def _independent_of_inputs(equations: Sequence[Any]) -> list[Any]:
    """Returns the equations, and inner equations, whose results depend on no variable from outside of `equations`."""
    constant: set[Any] = set()
    found = []
    for equation in equations:
        if all(hasattr(atom, "val") or atom in constant for atom in equation.invars):
            constant.update(equation.outvars)
            found.append(equation)
    return list(_with_inner(found))


# ---- source positions --------------------------------------------------------------------------------------------


def frames_of(equation: Any) -> tuple[Frame, ...]:
    """Returns the stack frames of the user's and the libraries' code that made an equation, innermost first."""
    return _frames_of_traceback(equation.source_info.traceback)


@functools.lru_cache(maxsize=16384)
def _frames_of_traceback(traceback: Any) -> tuple[Frame, ...]:
    from jax._src import source_info_util

    frames = source_info_util.user_frames(traceback)
    return tuple(
        Frame(each.file_name, each.start_line, each.start_column, each.end_line, each.end_column, each.function_name)
        for each in frames
    )


def key_of(equation: Any) -> Key:
    """Returns (source line, primitive) of an equation; the line is "" if it is unknown."""
    return line_of(equation), equation.primitive.name


def line_of(equation: Any) -> str:
    """Returns "file.py:line" of the user's code that made an equation, "" if it is unknown."""
    return _line_of_frames(frames_of(equation))


@functools.lru_cache(maxsize=16384)
def _line_of_frames(frames: tuple[Frame, ...]) -> str:
    return source_line(Metadata("", frames))


def _sample(equations: Sequence[Any]) -> Sequence[Any]:
    return [*equations[:_MAX_SAMPLE], *equations[-_MAX_SAMPLE:]]


def _title_of(jaxpr: Any, body: Sequence[Any]) -> str:
    info = getattr(inner_jaxpr(jaxpr), "debug_info", None)
    name, file = getattr(info, "func_name", "") or "", getattr(info, "func_filename", "") or ""
    if name and not name.endswith(">") and file and kind_of(file) == OWN:
        return user_functions.Function(name, file).title
    return _common_function([frames_of(each) for each in _sample(body)])[0] or name


def _common_function(stacks: Iterable[Iterable[Frame]]) -> tuple[str, str]:
    """Returns (name, "file.py:line" of the call) of the innermost function of the user that all stacks are inside of;
    ("", "") if there is none."""
    calls = [user_functions.calls(frames) for frames in stacks]
    calls = [each for each in calls if each]
    if not calls:
        return "", ""
    common = set.intersection(*({call.function for call in each} for each in calls))
    for call in calls[0]:
        if call.function in common and not call.function.nameless:
            file, line = call.around[0] if call.around else ("", 0)
            return call.function.title, f"{file}:{line}" if file else ""
    return "", ""


def common_function(stacks: Iterable[Iterable[Frame]]) -> str:
    """Returns the name of the innermost function of the user that all of these stacks of frames are inside of, "" if
    there is none."""
    return _common_function(stacks)[0]


# ---- remat policies ----------------------------------------------------------------------------------------------


def mentioned_names(policy: Any) -> dict[str, str]:
    """Returns the names that a remat policy mentions: name -> what the policy asks for it, "save", "offload" or
    "recompute".

    The names are the strings in the policy's fields and closure, and in the policies that it combines. The policy is
    called with each name, so that the request is the policy's own answer. Strings for which the policy answers as for
    any other name, such as the kind of a memory, are left out.
    """
    requests = {}
    for name in sorted(_strings_of(policy, _MAX_DEPTH)):
        request = request_for(policy, name)
        if request and request != request_for(policy, "any other name"):
            requests[name] = request
    return requests


def request_for(policy: Any, name: str) -> str:
    """Returns what a remat policy asks for a value with a checkpoint name: "save", "offload" or "recompute"; "" if the
    policy cannot be asked. Without a policy, jax recomputes the value."""
    if policy is None:
        return "recompute"
    wanted = getattr(policy, "wanted", None)  # bytescope's RematPolicy, which records the calls of jax
    if hasattr(wanted, "names"):
        return "save" if name in wanted.names else "recompute"
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
    """Returns whether a remat policy saves values without a name that no kernel computes, so that nothing is left to
    recompute. Returns False without a policy, and if the policy cannot be asked."""
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
    elif hasattr(getattr(value, "wanted", None), "names"):
        inside = value.wanted.names
    return set().union(*(_strings_of(each, depth - 1) for each in inside))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # an empty cell
        return False
