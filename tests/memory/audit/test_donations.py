"""Donations: reused, and each reason for which the donated memory is not reused, with the corrected program.

The programs follow jax#9675 (a donation that silently frees nothing) and jax#34789 (`jax_debug_nans`). jax 0.10.2 and
0.12 still behave as in these threads.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bytescope import memory
from bytescope.memory.program.compilation import compiled_for

ARRAY = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
SIZE = 4 * 1024 * 512


def donation_rows(report):
    return {row.subject: row for row in report.audit if row.kind == "donation"}


def analyze(step, *arguments, donate=0, **options):
    jitted = jax.jit(step, donate_argnums=donate, **options)
    return memory.analyze(jitted.trace(*arguments), target="cpu")


def test_a_reused_donation_and_an_unused_argument():
    """jax#9675: jax drops an unused argument, and its memory stays with the caller. jax does not warn."""

    def step(state, x, scratch):
        return state - x

    rows = donation_rows(analyze(step, ARRAY, ARRAY, ARRAY, donate=(0, 2)))
    state, scratch = rows["state"], rows["scratch"]
    assert (state.asked, state.done, state.bytes, state.honored, state.message) == ("donate", "reused", SIZE, True, "")
    assert (scratch.done, scratch.bytes, scratch.honored, scratch.undone_by) == ("ignored", SIZE, False, "tracing")
    assert "does not use the argument" in scratch.message
    assert state.source == f"{__file__}:{step.__code__.co_firstlineno}"


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda state, x: (state - x).sum(0), "no result has the shape and dtype float32[1024, 512]"),
        (lambda state, x: (state - x).astype(jnp.bfloat16), "no result has the shape and dtype float32[1024, 512]"),
        (lambda state, x: (state - x, x.sum()), ""),
    ],
    ids=["shape", "dtype", "corrected"],
)
def test_no_result_of_the_type(step, reason):
    """jax#9675: jax warns only of the other shape, not of the other dtype."""
    row = donation_rows(analyze(step, ARRAY, ARRAY))["state"]
    assert (row.done, row.undone_by) == (("copied", "lowering") if reason else ("reused", ""))
    assert row.message.startswith(reason) and bool(row.message) == bool(reason)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_another_donated_argument_takes_the_result():
    rows = donation_rows(analyze(lambda state, x: state - x, ARRAY, ARRAY, donate=(0, 1)))
    assert sorted(row.done for row in rows.values()) == ["copied", "reused"]
    lost = next(row for row in rows.values() if row.done == "copied")
    assert f"such as {({'state', 'x'} - {lost.subject}).pop()}: do not donate this array" in lost.message


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_result_with_another_sharding(devices):
    mesh = Mesh(np.array(devices[:2]), ("data",))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    state = jax.ShapeDtypeStruct(ARRAY.shape, ARRAY.dtype, sharding=rows)

    def step(state):
        return 2 * state

    for out, done in ((whole, "copied"), (rows, "reused")):
        jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
        row = donation_rows(memory.analyze(jitted.trace(state), target="local"))["state"]
        assert (row.done, row.bytes) == (done, SIZE // 2)
        assert ("are sharded as P(" in row.message) == (done == "copied")


@pytest.mark.parametrize(
    "step",
    [
        lambda state, x: (state - x, (state * jnp.tanh((state - x) @ x.T @ x)).sum()),
        lambda state, x: (state - x, state),
    ],
    ids=["read", "returned"],
)
def test_an_array_that_is_needed_after_its_update_is_copied(step):
    row = donation_rows(analyze(step, ARRAY, ARRAY))["state"]
    assert (row.done, row.bytes, row.undone_by, row.honored) == ("copied", SIZE, "copies", False)
    assert "in a separate call of jax.jit" in row.message
    corrected = donation_rows(analyze(lambda state, x: step(state, x)[0], ARRAY, ARRAY))["state"]
    assert corrected.honored


def graph_step(nan):
    model = nnx.eval_shape(lambda: nnx.Linear(512, 1024, rngs=nnx.Rngs(0)))

    def step(model, x):
        gradients = nnx.grad(lambda model: model(x).sum())(model)
        nnx.update(model, jax.tree.map(lambda w, g: w - g, nnx.state(model, nnx.Param), gradients))

    return nnx.jit(step, donate_argnums=0 if nan else ()), (model, jax.ShapeDtypeStruct((2, 512), jnp.float32))


def test_the_setting_jax_debug_nans_switches_donation_off():
    """jax#34789: the row and the finding name the setting, whose effect jax does not mention."""

    def step(state, x):
        return state - jax.grad(lambda state: jnp.sum((x @ state) ** 2))(state)

    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    jitted = jax.jit(step, donate_argnums=0)
    with jax.debug_nans(True):
        report = memory.analyze(jitted, ARRAY, x, target="cpu")
        plain = memory.analyze(step, ARRAY, x, donate_argnums=0, target="cpu")
        not_asked = memory.analyze(jax.jit(lambda state, x: step(state, x)), ARRAY, x, target="cpu")
        nnx_step, arguments = graph_step(True)
        of_nnx = memory.analyze(nnx_step, *arguments, target="cpu")
    for found in (report, plain, of_nnx):
        row = max(donation_rows(found).values(), key=lambda row: row.bytes)
        assert (row.asked, row.done, row.bytes, row.undone_by) == ("donate", "copied", row.bytes, "tracing")
        assert "jax_debug_nans" in row.message and row.bytes >= SIZE
        (finding,) = (each for each in found.findings if each.kind == "not_donated")
        assert "jax_debug_nans" in finding.remedy
    assert donation_rows(not_asked) == {}


def test_the_remedy_names_the_function_that_compiles_the_step():
    step, arguments = graph_step(False)
    linear = eqx.nn.Linear(512, 1024, key=jax.random.key(0))

    @eqx.filter_jit
    def equinox_step(model, x):
        gradients = eqx.filter_grad(lambda model: model(x).sum())(model)
        return eqx.apply_updates(model, gradients)

    x = jax.ShapeDtypeStruct((512,), jnp.float32)
    for report, words in (
        (memory.analyze(step, *arguments, target="cpu"), "donate_argnums for the state to nnx.jit"),
        (memory.analyze(equinox_step, linear, x, target="cpu"), "donate='all' to eqx.filter_jit"),
    ):
        (finding,) = (each for each in report.findings if each.kind == "not_donated")
        assert words in finding.remedy


def test_a_dump_lists_the_reused_arrays():
    compilation, _ = compiled_for(jax.jit(lambda state: 2 * state, donate_argnums=0).trace(ARRAY), target="cpu")
    (row,) = donation_rows(memory.analyze(compilation.proto)).values()
    assert (row.asked, row.done, row.bytes, row.honored) == ("unknown", "reused", SIZE, None)


@pytest.mark.exhaustive
@pytest.mark.oracle("tpu")
@pytest.mark.parametrize(
    ("step", "done"),
    [(lambda state, x: (state - x.sum(), state), "copied"), (lambda state, x: state - x, "reused")],
    ids=["returned", "updated"],
)
def test_a_tpu_copies_a_donated_array_through_its_on_chip_memory(step, done):
    array = jax.ShapeDtypeStruct((2048, 1024), jnp.float32)
    report = memory.analyze(step, array, array, target="v5e:1x1", donate_argnums=0)
    assert donation_rows(report)["state"].done == done
