"""The losses whose layers get a remat policy: a loss function of the caller, or the loss inside a training step.

`Loss` is traced once and differentiated per policy, as a training step of its own. `StepLoss` is found inside a step.
The step stays the user's own: its optimizer, its accumulation of gradients, its shardings and its donation are traced
as they are. Two places of jax are intercepted while the step is traced:

- `StepLoss.find`: the function that the step differentiates. It is traced as one call without a derivative, so that
  its jaxpr stands in the jaxpr of the step, where the shardings of its inputs are known.
- `remat_policy` and `without_remat`: the primitives of `jax.checkpoint`, of loops and of jitted functions. A layer
  under `jax.checkpoint` gets the policy in place of its own, as if the policy were written in the source. This covers
  flax.linen.remat, nnx.remat and equinox.filter_checkpoint, which call `jax.checkpoint`. Other layers are put under
  `jax.checkpoint`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from bytescope.memory.cost import flops
from bytescope.memory.errors import ReportError, type_phrase
from bytescope.memory.jaxprs import distinct_jaxprs
from bytescope.memory.remat.jaxpr_sharding import JaxprSharding
from bytescope.memory.remat.layer_discovery import CHECKPOINT, LOOP, Layer, mark, under_policy, with_policy
from bytescope.memory.remat.recognition import type_of

# The name of the jitted call that runs the loss while the loss is searched, followed by the number of its inputs that
# are differentiated.
_CALL = "bytescope_loss_"


# ---- a loss of the caller ----------------------------------------------------------------------------------------

_CALLED = "plan_remat(loss, (params, batch), ...)"


class Loss:
    """A loss function as a jaxpr, in which the remat policies of the layers can be changed. Its first argument is the
    parameters.

    Attributes:
        args, kwargs: the positional and keyword arguments with which the loss was traced.
        jaxpr: the ClosedJaxpr of the loss.
        tree: the pytree structure of its result.

    Raises ReportError if the function is not a loss function.
    """

    def __init__(self, loss: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        import jax

        if not callable(loss):
            raise ReportError(f"{type_phrase(loss)} is not a loss function: give a function, as in {_CALLED}")
        if not isinstance(args, tuple | list) or not args:
            raise ReportError(
                "the arguments of the loss must be a tuple whose first item is differentiated: "
                f"give them as in {_CALLED}"
            )
        _check_leaves(args)
        traced = (loss if hasattr(loss, "trace") else jax.jit(loss)).trace(*args, **kwargs)
        self.args, self.kwargs, self.jaxpr = tuple(args), dict(kwargs), traced.jaxpr
        self.tree: Any = jax.tree.structure(traced.out_info)
        avals = self.jaxpr.out_avals
        params = self.jaxpr.in_avals[: sum(self.active)]
        if len(avals) > 1 and [aval.shape for aval in avals[1:]] == [aval.shape for aval in params]:
            raise ReportError(f"this function returns a gradient: give the loss function itself, as in {_CALLED}")
        if not avals or avals[0].shape or (len(avals) > 1 and not self.has_aux):
            raise ReportError(
                "the loss must return a scalar or (scalar, auxiliary result), but it returns "
                f"{', '.join(map(type_of, avals[:4])) or 'nothing'}"
            )

    @property
    def has_aux(self) -> bool:
        """True if the loss returns a pair (scalar, auxiliary result)."""
        children = self.tree.children()
        return len(children) == 2 and children[0].num_leaves == 1

    @property
    def active(self) -> list[bool]:
        """One bool per leaf of the arguments: True for the leaves with respect to which the loss is differentiated,
        which are those of the first argument."""
        import jax

        count = len(jax.tree.leaves(self.args[0]))
        return [number < count for number in range(len(self.jaxpr.in_avals))]

    @property
    def shards(self) -> JaxprSharding:
        """The shardings of all values in the loss, derived from the shardings of its arguments."""
        import jax

        leaves = jax.tree.leaves((self.args, self.kwargs))
        return JaxprSharding.from_arguments(self.jaxpr, [getattr(leaf, "sharding", None) for leaf in leaves])

    def under(self, layers: Sequence[Layer], policy: Any) -> Callable[..., Any]:
        """Returns the loss as a function in which these layers are checkpointed with a remat policy."""
        import jax
        from jax.extend import core

        changed = with_policy(self.jaxpr, layers, policy)

        def loss(*args: Any, **kwargs: Any) -> Any:
            flat = core.jaxpr_as_fun(changed)(*jax.tree.leaves((args, kwargs)))
            return jax.tree.unflatten(self.tree, flat)

        return loss

    def step(self, layers: Sequence[Layer], policy: Any, optimizer: Any = None) -> Any:
        """Traces the loss and its gradient with respect to the first argument, with a remat policy for these layers.
        Returns a `jax.stages.Traced`.

        If an optimizer (an object with `init` and `update`) is given, traces a whole update, to which params and
        optimizer state are donated.
        """
        import jax

        gradient, params = jax.value_and_grad(self.under(layers, policy), has_aux=self.has_aux), self.args[0]

        def differentiate(params: Any, *rest: Any, **kwargs: Any) -> Any:
            value, grads = gradient(params, *rest, **kwargs)
            return value, jax.tree.map(_constrain_like, grads, self.args[0])

        def step(params: Any, opt_state: Any, *rest: Any, **kwargs: Any) -> Any:
            value, grads = differentiate(params, *rest, **kwargs)
            with jax.named_scope("optimizer"):
                updates, opt_state = optimizer.update(grads, opt_state, params)
                params = jax.tree.map(lambda own, update: (own + update).astype(own.dtype), params, updates)
            return params, opt_state, value

        if optimizer is None:
            return jax.jit(differentiate).trace(*self.args, **self.kwargs)
        state = _optimizer_state_specs(optimizer, params)
        return jax.jit(step, donate_argnums=(0, 1)).trace(params, state, *self.args[1:], **self.kwargs)


def _check_leaves(args: Sequence[Any]) -> None:
    import jax
    import jax.numpy as jnp

    for path, leaf in jax.tree_util.tree_flatten_with_path(tuple(args))[0]:
        if not hasattr(leaf, "shape") and not isinstance(leaf, int | float | complex):
            raise ReportError(
                f"args{jax.tree_util.keystr(path)} is {type_phrase(leaf)}: give arrays, and let "
                "the loss capture all other values (equinox.partition, flax.nnx.split)"
            )
        kind = jax.dtypes.result_type(leaf)
        if path[0].idx == 0 and not jnp.issubdtype(kind, jnp.inexact):
            raise ReportError(
                f"args{jax.tree_util.keystr(path)} is {kind} and cannot be differentiated: give the "
                "parameters as the first argument, and all other values after it"
            )


def _constrain_like(gradient: Any, param: Any) -> Any:
    import jax

    sharding = getattr(param, "sharding", None)
    given = isinstance(sharding, jax.sharding.NamedSharding) and len(sharding.device_set) > 1
    return jax.lax.with_sharding_constraint(gradient, sharding) if given else gradient


def _optimizer_state_specs(optimizer: Any, params: Any) -> Any:
    import jax

    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        raise ReportError(
            f"optimizer={optimizer!r:.60} needs the methods init and update: give one such as optax.adamw(1e-3)"
        )
    # A leaf with the shape of a parameter gets the sharding of the parameter.
    like = {
        tuple(leaf.shape): leaf.sharding
        for leaf in jax.tree.leaves(params)
        if getattr(leaf, "sharding", None) is not None
    }

    def placed(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.get(tuple(leaf.shape)))

    return jax.tree.map(placed, jax.eval_shape(optimizer.init, params))


# ---- the loss of a step ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StepLoss:
    """The loss that a training step differentiates.

    Fields:
        jaxpr: the loss as a ClosedJaxpr.
        active: for each input of the loss, whether the step differentiates the loss with respect to it.
        shards: the shardings of all values in the loss, derived from the shardings of the step's arguments.
    """

    jaxpr: Any
    active: tuple[bool, ...]
    shards: JaxprSharding

    @classmethod
    def find(cls, trace: Callable[[], Any], shardings: Callable[[Any], Sequence[Any]]) -> StepLoss:
        """Finds the loss of a step. If the step differentiates several functions, finds the one with the most FLOPs.

        Args:
            trace: function that traces the step and returns a `jax.stages.Traced`.
            shardings: function that returns the shardings of the arguments of a `Traced`, None for unknown ones.

        Raises ReportError if the step differentiates nothing.
        """
        with _undifferentiated():
            traced = trace()
        calls = []
        for jaxpr in distinct_jaxprs(traced.jaxpr):
            calls += [each for each in jaxpr.eqns if str(each.params.get("name", "")).startswith(_CALL)]
        if not calls:
            raise ReportError(
                "the step differentiates no function with jax.grad, jax.value_and_grad or jax.vjp, so there is nothing "
                "to recompute: give a training step, or compare other arguments with bytescope compare SUBJECT TARGET "
                "--grid=KEY=V1,V2, and options of XLA with --what-if"
            )
        shards = JaxprSharding.from_arguments(traced.jaxpr, shardings(traced))
        call = max(calls, key=lambda each: flops.count_equation(each).total)
        inputs, differentiated = len(call.invars), int(call.params["name"].removeprefix(_CALL))
        active = tuple(number >= inputs - differentiated for number in range(inputs))
        return cls(call.params["jaxpr"], active, shards)


@contextlib.contextmanager
def _undifferentiated() -> Iterator[None]:
    """Context manager in which jax does not differentiate: a function that code differentiates inside it is traced as
    one jitted call whose name begins with `_CALL`, and its gradients are zeros."""
    import jax
    from jax._src.interpreters import ad

    linearize: Any = ad.linearize
    inside = False

    def linearize_call(fun: Callable[..., Any], primals: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:  # the loss itself contains a derivative
            return linearize(fun, primals, *args, **kwargs)

        def call(*values: Any) -> Any:
            nonlocal inside
            values = jax.lax.stop_gradient(values)
            inside = True
            try:
                return _jitted(fun, len(jax.tree.leaves(values)))(*values)
            finally:
                inside = False

        return linearize(call, primals, *args, **kwargs)

    with mock.patch.object(ad, "linearize", linearize_call):
        jax.clear_caches()  # jaxprs that were traced before contain the derivatives
        try:
            yield
        finally:
            jax.clear_caches()


def _jitted(fun: Callable[..., Any], differentiated: int) -> Callable[..., Any]:
    """Returns `fun`, jitted. The result of `fun` may contain leaves that are not arrays, such as text among the
    auxiliary results of a loss; the jitted function returns them unchanged. differentiated: number of inputs of `fun`
    that are differentiated; it becomes a part of the function's name in the jaxpr."""
    import jax

    def run(*values: Any) -> Any:
        results: list[Any] = []  # the pytree structure, and the leaves that are not arrays

        def arrays(*values: Any) -> list[Any]:
            leaves, tree = jax.tree.flatten(fun(*values))
            results.extend((tree, [None if hasattr(leaf, "aval") else leaf for leaf in leaves]))
            return [leaf for leaf in leaves if hasattr(leaf, "aval")]

        arrays.__name__ = arrays.__qualname__ = f"{_CALL}{differentiated}"
        left = iter(jax.jit(arrays)(*values))
        tree, others = results
        return jax.tree.unflatten(tree, [next(left) if other is None else other for other in others])

    return run


@contextlib.contextmanager
def remat_policy(layers: Sequence[Layer], policy: Any) -> Iterator[None]:
    """Context manager: in a step that is traced inside it, the layers `layers` get the remat policy `policy`. Layers
    that are not under `jax.checkpoint` are put under it.

    Raises ReportError at the end if none of the layers was traced.
    """
    import jax

    swap = _Swap({layer.mark for layer in layers}, policy)
    with contextlib.ExitStack() as stack:
        for owner, name, hook in swap.hooks(layers[0].how):
            stack.enter_context(mock.patch.object(owner, name, hook))
        stack.callback(jax.clear_caches)
        jax.clear_caches()  # jaxprs that were traced before have other policies
        yield
    if not swap.swapped:
        raise ReportError(
            f"the layer {layers[0].name or layers[0].where} was not traced again in the step: the step must run the "
            "same layers each time it is traced"
        )


@contextlib.contextmanager
def without_remat() -> Iterator[None]:
    """Context manager: in a step that is traced inside it, every `jax.checkpoint` saves all values, as if the function
    were not checkpointed."""
    import jax

    with contextlib.ExitStack() as stack:
        for owner, name, hook in _Swap(None, jax.checkpoint_policies.everything_saveable).hooks(CHECKPOINT):
            stack.enter_context(mock.patch.object(owner, name, hook))
        stack.callback(jax.clear_caches)
        jax.clear_caches()  # jaxprs that were traced before recompute values
        yield


class _Swap:
    """Gives layers of a step a remat policy while jax traces the step.

    Args:
        marks: the marks (`mark`) of the jaxprs of these layers; None for all.
        policy: the remat policy.

    Attributes:
        swapped: number of layers that have got the policy.
    """

    def __init__(self, marks: set[str] | None, policy: Any):
        self._marks, self._policy, self.swapped = marks, policy, 0
        self._bodies: dict[int, tuple[Any, Any]] = {}

    def hooks(self, how: str) -> list[tuple[Any, str, Any]]:
        """Returns the attributes of jax to replace, as (object, name of the attribute, new value).

        how: how the layers run: under `jax.checkpoint` (`CHECKPOINT`), in a loop (`LOOP`) or as functions (`CALL`).
        """
        from jax.extend.core import primitives

        if how != CHECKPOINT:
            primitive = primitives.scan_p if how == LOOP else primitives.jit_p
            return [(primitive, "bind", self._call_hook(primitive.bind, loop=how == LOOP))]
        bind = self._checkpoint_hook(primitives.remat_p.bind)
        hooks: list[tuple[Any, str, Any]] = [(primitives.remat_p, "bind", bind)]
        with contextlib.suppress(ImportError):
            from jax._src.ad_checkpoint import RematTraced  # jax.checkpoint with the flag jax_remat3

            hooks.append((RematTraced, "__init__", self._traced_hook(RematTraced.__init__)))
        return hooks

    def _is_layer(self, jaxpr: Any) -> bool:
        found = self._marks is None or mark(jaxpr) in self._marks
        self.swapped += found
        return found

    def _checkpoint_hook(self, bind: Any) -> Any:
        def hooked(*args: Any, **params: Any) -> Any:
            # The derivative of a layer already has its policy.
            if not params["differentiated"] and self._is_layer(params["jaxpr"]):
                params["policy"] = self._policy
            return bind(*args, **params)

        return hooked

    def _traced_hook(self, init: Any) -> Any:
        def hooked(prim: Any, jaxpr: Any, policy: Any, *args: Any, **kwargs: Any) -> None:
            init(prim, jaxpr, self._policy if self._is_layer(jaxpr) else policy, *args, **kwargs)

        return hooked

    def _call_hook(self, bind: Any, loop: bool) -> Any:
        def hooked(*args: Any, **params: Any) -> Any:
            body = params["jaxpr"]
            if id(body) not in self._bodies and self._is_layer(body):
                self._bodies[id(body)] = body, under_policy(body, self._policy, loop)
            _, params["jaxpr"] = self._bodies.get(id(body), (None, body))
            return bind(*args, **params)

        return hooked
