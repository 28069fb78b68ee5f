"""One fact, one table: rows of the trainer's tables have a row of the formulas that says the same."""

import jax.numpy as jnp
import pytest

from bytescope.memory.formulas import config_formulas, rematerialized, training_state
from bytescope.memory.formulas.reconcile import NAMED_POLICIES, PRODUCT_POLICIES
from bytescope.memory.formulas.transformer_formulas import ATTENTION
from bytescope.model import precision
from bytescope.model.attention.attention_kernels import KERNELS
from bytescope.model.layers import MLPS
from bytescope.model.remat import policies
from bytescope.train.parallel.axes import STRATEGIES

# Policies that no formula covers: what they keep is XLA's products, or tensors that the papers do not list.
LEFT_OUT = {*policies.QUANTIZED, *policies.ADAPTER_MASKS}
WITHOUT_FORMULA = {"megatron", "dots"}


@pytest.mark.parametrize("name", sorted({*STRATEGIES, *training_state.STRATEGIES}))
def test_strategies(name):
    """Sharded by the trainer: masters and optimizer state, gradients, parameters gathered layer by layer."""
    row = STRATEGIES[name]
    sharded = {"optimizer": row.stored, "gradients": row.gradients, "params": row.by_layer}
    assert {role for role, held in sharded.items() if held} == set(training_state.STRATEGIES[name].sharded)


def test_stages_are_in_the_order_of_the_paper():
    rows = training_state.STRATEGIES.values()
    assert [row.stage for row in rows] == [0, 1, 2, 3]
    assert {row.stage: row.sharded for row in rows} == training_state.ZERO


def test_policies():
    """Every policy has a formula or is known to have none; those by name keep names that the formulas know."""
    assert set(policies.POLICIES) == {"none", *NAMED_POLICIES, *PRODUCT_POLICIES} | WITHOUT_FORMULA
    assert rematerialized.WEIGHT_PRODUCTS == policies.PRODUCTS
    for name in NAMED_POLICIES:
        row = policies.POLICIES[name]
        if row is not None:  # `custom` has the names of its config
            assert set(row.names) - LEFT_OUT <= set(rematerialized.NAMED)
    assert not any(policies.POLICIES[name].names for name in PRODUCT_POLICIES)
    for name, kept in rematerialized.SAVED.items():
        assert kept == tuple(word for word in policies.POLICIES[name].names if word not in LEFT_OUT)


@pytest.mark.parametrize("preset", precision.PRECISIONS)
def test_precisions(preset):
    """Bytes of the parameters that are kept, of the copy that is computed with, and of an activation."""
    row, formula = precision.PRECISIONS[preset], training_state.PRECISIONS[preset]
    kept, computed = (jnp.dtype(dtype).itemsize for dtype in (row.param, row.compute))
    assert (formula.master or formula.params, formula.activation) == (kept, computed)
    assert bool(formula.master) == row.copied and (not row.copied or formula.params == computed)


def test_gated_mlps():
    assert set(config_formulas.GATED) == {name for name, (gated, _) in MLPS.items() if gated}


def test_attention_kernels():
    assert set(config_formulas.KERNELS) == {*KERNELS, "auto"}
    assert {core for core in config_formulas.KERNELS.values() if core} == set(ATTENTION)
