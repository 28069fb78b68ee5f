"""Names of values whose equations have one source position, because a loop or a function repeats them."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from bytescope.memory.peak.checkpoint_names import named_places

pytestmark = pytest.mark.quick

X = jnp.ones((8, 8))


def names_of(function, operation):
    """The names at the places whose operation is `operation`."""
    places = named_places(jax.make_jaxpr(function)(X))
    return {place.name for place in places if place.suffix.endswith(f"/{operation}")}


def test_unrolled_layers_share_a_name():
    def layers(x):
        for _ in range(3):
            x = checkpoint_name(x @ x, "out")
        return x

    assert names_of(layers, "dot_general") == {"out"}


def test_a_loop_over_names_has_all_of_them():
    def gates(x):
        return sum(checkpoint_name(x @ x, f"wi_{number}") for number in (1, 0))

    assert names_of(gates, "dot_general") == {"wi_0, wi_1"}


def test_equations_of_which_only_some_are_named_have_no_name():
    def some(x):
        for number in range(2):
            x = x @ x
            if number:
                x = checkpoint_name(x, "last")
        return x

    assert names_of(some, "dot_general") == set()
    assert names_of(some, "name") == {"last"}


def test_a_kernel_that_partitions_itself_has_the_name_of_its_result():
    # Its op_name ends with the operation that partitions it, not with the primitive of the equation.
    assert names_of(lambda x: checkpoint_name(x @ x, "context"), "custom_partitioning") == {"context"}
