"""Finds the layers of any loss in its jaxpr, and puts a remat policy into them.

A layer is a function under `jax.checkpoint`. In a loss without checkpoints, the layers are the body of its largest
loop, or a jitted function that is called several times. These are put under a checkpoint.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from bytescope.memory.cost import flops
from bytescope.memory.errors import ReportError
from bytescope.memory.jaxprs import checkpoint_name_of, checkpoint_of, parameters, with_parameters

# Primitives of calls that only run their body.
INLINED = frozenset(("jit", "pjit", "closed_call", "core_call"))
# Equations with a custom derivative rule, so that their bodies are not differentiated.
_OWN_RULE = ("custom_jvp_call", "custom_vjp_call")
_STOPS = ("stop_gradient",)
_OF_LIBRARIES = re.compile(r"/(jax|jaxlib|flax|equinox|haiku)/|<frozen|/contextlib.py|/memory/remat(_plan)?/")
_ADDRESS = re.compile(r"0x[0-9a-f]+")
CHECKPOINT, LOOP, CALL = "checkpoint", "scan", "call"


@dataclasses.dataclass(frozen=True)
class Layer:
    """A kind of layer: all layers of the model that run the same jaxpr.

    Fields:
        body: the ClosedJaxpr of the layer.
        times: number of runs in one evaluation of the loss.
        active: for each input of the layer, whether it depends on a differentiated input of the loss.
        mark: text by which layers are grouped; layers of one kind have equal texts.
        how: CHECKPOINT if the layer is under `jax.checkpoint`; LOOP if it is the body of a loop; CALL if it is a
            repeated call.
        name: the name of the layer's function.
        where: "file:line" of the call, or of the function if a library calls it.
        policy: the remat policy of the layer's checkpoint.
        constants: number of inputs that are the same for all layers; used only for a LOOP.
        carried: number of inputs, after the constants, that one layer passes to the next; used only for a LOOP.
    """

    body: Any
    times: int
    active: tuple[bool, ...]
    mark: str
    how: str
    name: str = ""
    where: str = dataclasses.field(default="", compare=False)
    policy: Any = dataclasses.field(default=None, compare=False)
    constants: int = 0
    carried: int = 0

    @property
    def flops(self) -> int:
        """FLOPs of one forward pass through all layers of this kind."""
        return self.times * sum(flops.count_equation(equation).total for equation in self.body.jaxpr.eqns)


def find_layers(jaxpr: Any, active: Sequence[bool], only: Collection[str] = ()) -> list[Layer]:
    """Finds the layers of a loss function and returns their kinds, the kind with the most FLOPs first.

    Only kinds with the same remat policy as the first kind are returned.

    Args:
        jaxpr: the loss as a ClosedJaxpr.
        active: for each input of the loss, whether the loss is differentiated with respect to it.
        only: names of the checkpointed functions to consider, () for all.

    Raises ReportError if there are no layers.
    """
    finder = _LayerFinder()
    finder.visit(jaxpr.jaxpr, active, 1)
    layers = finder.layers()
    if only:
        names = sorted({layer.name for layer in layers})
        layers = [layer for layer in layers if layer.name in only]
        if not layers:
            raise ReportError(
                f"no layer is named {', '.join(only)}: the loss has {', '.join(names) or 'no named layers'}; "
                "give one of these names, or leave out the names"
            )
    if not layers:
        raise ReportError(
            "no layers found: put jax.checkpoint around the block that repeats, or run the layers in a jax.lax.scan"
        )
    layers.sort(key=lambda layer: -layer.flops)
    return [layer for layer in layers if layer.how == layers[0].how and layer.policy is layers[0].policy]


def named_loop(jaxpr: Any, active: Sequence[bool]) -> Layer:
    """Finds a loop in the loss whose body names values with `checkpoint_name`, and returns the body as a kind of layer.
    If there are several such loops, returns the one with the most FLOPs.

    Args:
        jaxpr: the loss as a ClosedJaxpr.
        active: for each input of the loss, whether the loss is differentiated with respect to it.

    Raises ReportError if no loop names a value.
    """
    finder = _LayerFinder(by_names=True)
    finder.visit(jaxpr.jaxpr, active, 1)
    loops = [layer for layer in finder.seen if layer.how == LOOP and _names_a_value(layer.body.jaxpr)]
    if not loops:
        raise ReportError(
            "the loss has no loop over layers in which checkpoint_name names a tensor: set model.scan=true"
        )
    return max(loops, key=lambda layer: layer.flops)


def _names_a_value(jaxpr: Any) -> bool:
    for equation in jaxpr.eqns:
        body = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        inlined = equation.primitive.name in INLINED and body is not None
        if checkpoint_name_of(equation) or (inlined and _names_a_value(body.jaxpr)):
            return True
    return False


@dataclasses.dataclass
class _LayerFinder:
    """Searches a loss function for layers.

    Fields:
        by_names: whether every loop whose body names values with `checkpoint_name` is a layer.
        seen: the layers found so far, including candidates that are not used later.
    """

    by_names: bool = False
    seen: list[Layer] = dataclasses.field(default_factory=list)

    def layers(self) -> list[Layer]:
        """Returns the kinds of layers. Layers are the checkpointed functions; if there are none, the body of the
        largest loop; if there are no loops, the largest repeated call.
        """
        groups: dict[tuple[str, str], list[Layer]] = {}
        for one in self.seen:
            groups.setdefault((one.how, one.mark), []).append(one)
        kinds: dict[str, list[Layer]] = {CHECKPOINT: [], LOOP: [], CALL: []}
        for group in groups.values():
            times = sum(one.times for one in group)
            active = tuple(map(any, zip(*(one.active for one in group))))
            kinds[group[0].how].append(dataclasses.replace(group[0], times=times, active=active))
        if kinds[CHECKPOINT]:
            return kinds[CHECKPOINT]
        for how in (LOOP, CALL):
            largest = max((kind for kind in kinds[how] if kind.times > 1), key=lambda kind: kind.flops, default=None)
            if largest is not None and largest.flops:
                return [largest]
        return []

    def visit(self, jaxpr: Any, active: Sequence[bool], times: int) -> list[bool]:
        """Searches a Jaxpr for layers and adds them to `seen`. `active` says for each input whether it depends on a
        differentiated input of the loss. The returned list says the same for each output.

        times: number of runs of the Jaxpr in one evaluation of the loss.
        """
        env = dict(zip(jaxpr.invars, active))

        def read(atom: Any) -> bool:
            return not hasattr(atom, "val") and env.get(atom, False)

        for equation in jaxpr.eqns:
            inside = self._equation(equation, [read(atom) for atom in equation.invars], times)
            for variable, flag in zip(equation.outvars, inside):
                env[variable] = flag and _is_float(variable.aval)
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, active: list[bool], times: int) -> list[bool]:
        name = equation.primitive.name
        every = [any(active)] * len(equation.outvars)
        if name in _STOPS:
            return [False] * len(every)
        checkpoint = checkpoint_of(equation)
        if checkpoint:
            self._note(equation, CHECKPOINT, checkpoint.jaxpr, active, times)
            return every
        if name == "scan":
            return self._loop(equation, active, times)
        body = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if name in INLINED and body is not None:
            self._note(equation, CALL, body, active, times)
            return self.visit(body.jaxpr, active, times)
        return every

    def _loop(self, equation: Any, active: list[bool], times: int) -> list[bool]:
        body = equation.params["jaxpr"]
        # Counted from the shapes, because versions of jax store these numbers under different parameters.
        carried = _count_same_rank(equation.outvars, body.jaxpr.outvars)
        first, trips = _count_same_rank(equation.invars, body.jaxpr.invars) - carried, times * equation.params["length"]
        while True:  # a value that one iteration makes active is active in the next
            seen_before = len(self.seen)
            out = self.visit(body.jaxpr, active, trips)
            after = [before or flag for before, flag in zip(active[first:], out[:carried])]
            more = [*active[:first], *after, *active[first + carried :]]
            if more == active:
                break
            active = more
            del self.seen[seen_before:]
        named = self.by_names and _names_a_value(body.jaxpr)
        if named or not any(layer.how in (CHECKPOINT, LOOP) for layer in self.seen[seen_before:]):
            del self.seen[seen_before:]
            self._note(equation, LOOP, body, active, trips, (first, carried))
        return out

    def _note(
        self, equation: Any, how: str, body: Any, active: Sequence[bool], times: int, loop: tuple[int, int] = (0, 0)
    ) -> None:
        from jax.extend import core

        closed = body if hasattr(body, "consts") and hasattr(body, "jaxpr") else core.ClosedJaxpr(body, ())
        info = closed.jaxpr.debug_info
        defined = f"{info.func_filename}:{info.func_lineno}" if getattr(info, "func_filename", None) else ""
        self.seen.append(
            Layer(
                closed,
                times,
                tuple(active),
                mark(body),
                how,
                str(equation.params.get("name") or getattr(info, "func_name", "") or ""),
                where_of(equation) or defined,
                parameters(equation).get("policy"),
                *loop,
            )
        )


def _count_same_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """Returns the number of values that have the same rank (number of dimensions) outside of a loop and in its body.
    They are constants or carried values, because values that the loop slices or stacks have one more dimension outside.

    outside, inside: the variables of the loop and of its body, in the same order.
    """
    return sum(len(out.aval.shape) == len(own.aval.shape) for out, own in zip(outside, inside))


def mark(body: Any) -> str:
    """Returns the text of a jaxpr without memory addresses. Equal texts mean that two jaxprs compute the same."""
    return _ADDRESS.sub("", str(getattr(body, "jaxpr", body)))


def with_policy(jaxpr: Any, layers: Sequence[Layer], policy: Any) -> Any:
    """Returns the ClosedJaxpr with a remat policy applied to these layers. Layers that are not under `jax.checkpoint`
    are put under it.
    """
    return _PolicyRewriter({layer.mark for layer in layers}, layers[0].how, policy).closed(jaxpr)


class _PolicyRewriter:
    """Replaces the remat policy of some checkpoints in a jaxpr. An inner jaxpr that occurs several times remains one
    object.
    """

    def __init__(self, marks: Collection[str], how: str, policy: Any):
        self._marks, self._how, self._policy = marks, how, policy
        self._done: dict[int, tuple[Any, Any]] = {}

    def closed(self, closed: Any) -> Any:
        return closed.replace(jaxpr=self.jaxpr(closed.jaxpr))

    def jaxpr(self, jaxpr: Any) -> Any:
        return self._once(jaxpr, lambda: jaxpr.replace(eqns=[self._equation(equation) for equation in jaxpr.eqns]))

    def _once(self, old: Any, make: Callable[[], Any]) -> Any:
        if id(old) not in self._done:
            self._done[id(old)] = (
                old,
                make(),
            )  # holds a reference to the old jaxpr, so that Python does not reuse its id
        return self._done[id(old)][1]

    def _equation(self, equation: Any) -> Any:
        name, how = equation.primitive.name, self._how
        checkpoint = checkpoint_of(equation)
        if checkpoint:
            if how != CHECKPOINT or mark(checkpoint.jaxpr) not in self._marks:
                return equation
            params = with_parameters(equation, lambda key, value: self._policy if key == "policy" else value)
            return equation.replace(params=params)
        if name in _OWN_RULE:
            return equation
        body = equation.params.get("jaxpr")
        if (how, name) == (LOOP, "scan") and mark(body) in self._marks:
            under = self._once(body, lambda: under_policy(body, self._policy, loop=True))
            return equation.replace(params={**equation.params, "jaxpr": under})
        if how == CALL and name in INLINED and body is not None and mark(body) in self._marks:
            under = self._once(body, lambda: under_policy(body, self._policy, loop=False))
            return equation.replace(params={**equation.params, "jaxpr": under})
        return equation.replace(params={key: self._param(value) for key, value in equation.params.items()})

    def _param(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(self._param, value))
        if hasattr(value, "jaxpr") and hasattr(value, "consts") and hasattr(value, "replace"):
            return self.closed(value)
        return self.jaxpr(value) if hasattr(value, "eqns") else value


def under_policy(body: Any, policy: Any, loop: bool) -> Any:
    """Returns a ClosedJaxpr that runs another one under `jax.checkpoint` with a remat policy.

    loop: whether `body` is the body of a loop.
    """
    import jax
    from jax.extend import core

    # In a loop, jax.checkpoint needs no protection against common subexpression elimination.
    under = jax.checkpoint(core.jaxpr_as_fun(body), policy=policy, prevent_cse=not loop)
    return jax.make_jaxpr(under)(*input_specs(body.jaxpr))


def input_specs(jaxpr: Any) -> list[Any]:
    """Returns the shapes and dtypes of the inputs of a Jaxpr as `jax.ShapeDtypeStruct`s."""
    import jax

    return [
        jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype, weak_type=variable.aval.weak_type)
        for variable in jaxpr.invars
    ]


def _is_float(aval: Any) -> bool:
    import jax.numpy as jnp

    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def where_of(equation: Any) -> str:
    """Returns "file:line" of the innermost stack frame outside of libraries, "" if there is none."""
    traceback = equation.source_info.traceback
    frames = list(traceback.frames) if traceback is not None else []
    frame = next((f for f in frames if not _OF_LIBRARIES.search(f.file_name)), None)
    return f"{frame.file_name}:{frame.line_num}" if frame else ""
