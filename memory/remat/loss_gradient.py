"""Turns any loss into a training step with an exchangeable remat policy. The loss is traced once and differentiated
per policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bytescope.memory.errors import ReportError, type_phrase
from bytescope.memory.remat.jaxpr_sharding import JaxprSharding
from bytescope.memory.remat.layer_discovery import Layer, with_policy
from bytescope.memory.remat.recognition import type_of

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

        return JaxprSharding.from_arguments(self.jaxpr, jax.tree.leaves((self.args, self.kwargs)))

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
