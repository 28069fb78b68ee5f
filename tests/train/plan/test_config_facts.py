"""Rows by which the formulas count a config say what the trainer's own tables do."""

import jax.numpy as jnp
import pytest

from bytescope.memory.formulas import rematerialized, training_state
from bytescope.memory.formulas.transformer_formulas import ATTENTION
from bytescope.model import precision
from bytescope.model.attention.attention_kernels import KERNELS
from bytescope.model.layers import MLPS
from bytescope.model.remat import policies
from bytescope.train.parallel.axes import AXES, BATCH, STRATEGIES
from bytescope.train.plan import config_facts
from bytescope.train.step.optimizer.rules import OPTIMIZERS

pytestmark = pytest.mark.quick

# Policies that no formula covers: what they keep is XLA's products, or tensors that the papers do not list.
LEFT_OUT = {*policies.QUANTIZED, *policies.ADAPTER_MASKS}
WITHOUT_FORMULA = {"megatron", "dots"}


@pytest.mark.parametrize("name", sorted({*STRATEGIES, *config_facts.ZERO_STAGES}))
def test_strategies(name):
    """Sharded by the trainer: masters and optimizer state, gradients, parameters gathered layer by layer."""
    row = STRATEGIES[name]
    sharded = {"optimizer": row.stored, "gradients": row.gradients, "params": row.by_layer}
    assert {role for role, held in sharded.items() if held} == set(training_state.ZERO[config_facts.ZERO_STAGES[name]])


def test_axes():
    assert tuple(config_facts.ROLES) == AXES and config_facts.BATCH_AXES == BATCH


def test_optimizers():
    assert set(config_facts.OPTIMIZERS) == {*OPTIMIZERS, "sgd"}


def test_policies():
    """Every policy has a formula or is known to have none; those by name keep names that the formulas know."""
    named, products = config_facts.NAMED_POLICIES, config_facts.PRODUCT_POLICIES
    assert set(policies.POLICIES) == {"none", *named, *products} | WITHOUT_FORMULA
    for name in named:
        row = policies.POLICIES[name]
        if row is not None:  # `custom` has the names of its config
            assert set(row.names) - LEFT_OUT <= set(rematerialized.NAMED)
            assert row.nested == (name in config_facts.NESTED_POLICIES)
    assert not any(policies.POLICIES[name].names for name in products)


@pytest.mark.parametrize("preset", precision.PRECISIONS)
def test_precisions(preset):
    """Bytes of the parameters that are kept, of the copy that is computed with, and of an activation."""
    row, formula = precision.PRECISIONS[preset], config_facts.PRECISIONS[preset]
    kept, computed = (jnp.dtype(dtype).itemsize for dtype in (row.param, row.compute))
    assert (formula.master or formula.params, formula.activation) == (kept, computed)
    assert bool(formula.master) == row.copied and (not row.copied or formula.params == computed)


def test_gated_mlps():
    assert set(config_facts.GATED) == {name for name, (gated, _) in MLPS.items() if gated}


def test_attention_kernels():
    assert set(config_facts.KERNELS) == {*KERNELS, "auto"}
    assert {core for core in config_facts.KERNELS.values() if core} == set(ATTENTION)
