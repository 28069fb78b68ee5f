"""The audit of jax.checkpoint and checkpoint_name: each undone request is found in its program, and its correction has
no such row."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from bytescope.memory.analysis import report_of
from bytescope.memory.audit.checkpoint_names_audit import _is_misspelling
from bytescope.memory.audit.checkpoint_requests import find_regions, mentioned_names, request_for
from bytescope.memory.devices import targets
from bytescope.memory.program.compilation import compiled_for
from support import checkpoint_programs as programs
from support.checkpoint_programs import HIDDEN_BYTES, LAYERS, POLICIES
from support.described import WIDE_GPU, compile_described
from support.oracles import require

KINDS = ("checkpoint", "name")


def rows_of(program, target="h100", with_jaxpr=True):
    """The rows of checkpoints and names in the report of a program: (kind, subject) -> row."""
    require("cuda")
    step, arguments = program
    compilation, found = compiled_for(step, arguments, target=target)
    if not with_jaxpr:
        compilation = dataclasses.replace(compilation, jaxpr=None)
    rows = [row for row in report_of(compilation, target=found).audit if row.kind in KINDS]
    return {(row.kind, row.subject): row for row in rows}


def unhonored(rows):
    return [row for row in rows.values() if row.honored is False]


def line_of(function, text):
    """The end of "file.py:line" of the first line of a function with this text."""
    import inspect

    lines, start = inspect.getsourcelines(function)
    return f"checkpoint_programs.py:{next(start + at for at, line in enumerate(lines) if text in line)}"


def test_unrolled_layers_without_prevent_cse_are_merged():
    rows = rows_of(programs.unrolled(prevent_cse=False))
    row = rows["checkpoint", "mlp"]
    assert (row.asked, row.done, row.undone_by, row.count) == ("recompute", "kept", "cse", LAYERS)
    # at least the input and the result of GELU in all layers but the last, whose backward pass comes first
    assert row.bytes > (LAYERS - 1) * 2 * HIDDEN_BYTES
    assert row.source.endswith(line_of(programs.unrolled, "x = block(x, weights)"))
    assert "prevent_cse=False" in row.message
    assert rows["name", "hidden"].undone_by == "cse"


def test_a_matrix_product_in_a_fusion_is_counted_once():
    """XLA merges the layers except the last one, whose two products stay in fusions: 2 of 12 are computed again."""

    def layer(x, w):
        return jnp.sin(jnp.tanh(x @ w[0]) @ w[1]) * x

    def loss(weights, x):
        block = jax.checkpoint(layer, prevent_cse=False)
        for number in range(6):
            x = block(x, weights[number])
        return jnp.mean(x.astype(jnp.float32))

    def step(weights, x):
        return weights - jax.grad(loss)(weights, x)

    arrays = jax.ShapeDtypeStruct((6, 2, 4096, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    row = rows_of((step, arrays))["checkpoint", "layer"]
    assert (row.done, row.undone_by, row.count) == ("kept", "cse", 6)


def test_unrolled_layers_with_prevent_cse_are_recomputed():
    rows = rows_of(programs.unrolled(prevent_cse=True))
    assert not unhonored(rows)
    row = rows["checkpoint", "mlp"]
    assert row.honored and row.bytes == 0
    assert row.flops == LAYERS * 2 * programs.ROWS * programs.WIDTH * programs.HIDDEN
    assert rows["name", "hidden"].done == "recomputed"


def test_no_policy_in_a_scan_recomputes_everything():
    rows = rows_of(programs.scanned())
    assert not unhonored(rows)
    assert rows["checkpoint", "mlp"].done == rows["name", "hidden"].done == "recomputed"
    assert rows["checkpoint", "mlp"].count == LAYERS


def test_misspelt_name_of_a_policy():
    wrong = rows_of(programs.scanned(POLICIES.save_only_these_names("hiden", "out")))
    (row,) = unhonored(wrong)
    assert (row.subject, row.asked, row.done, row.undone_by) == ("hiden", "save", "ignored", "tracing")
    assert row.source.endswith(line_of(programs.mlp, '"hidden"'))
    assert "did you mean hidden?" in row.message
    assert wrong["name", "hidden"].done == "recomputed"

    right = rows_of(programs.scanned(POLICIES.save_only_these_names("hidden", "out", "context")))
    assert not unhonored(right)  # a policy may list the names of other models
    assert (right["name", "hidden"].done, right["name", "hidden"].bytes) == ("kept", LAYERS * HIDDEN_BYTES)


def test_dropout_masks_with_a_constant_key_are_kept():
    (row,) = unhonored(rows_of(programs.dropout(key_as_argument=False)))
    assert (row.kind, row.done, row.undone_by) == ("checkpoint", "kept", "cse")
    assert "random bits" in row.subject
    assert row.source.endswith(line_of(programs.mlp_with_dropout, "bernoulli"))
    # a byte for each element of the masks, of all layers but the last, whose backward pass comes first
    assert row.bytes == (LAYERS - 1) * programs.ROWS * programs.HIDDEN
    assert not unhonored(rows_of(programs.dropout(key_as_argument=True)))


def test_policy_that_saves_everything():
    (row,) = unhonored(rows_of(programs.scanned(POLICIES.everything_saveable)))
    assert (row.subject, row.done, row.undone_by) == ("mlp", "kept", "autodiff")
    assert "everything_saveable" in row.message


def test_program_without_jaxpr():
    rows = rows_of(programs.scanned(POLICIES.save_only_these_names("hidden")), with_jaxpr=False)
    row = rows["checkpoint", "mlp"]
    assert (row.asked, row.done, row.honored) == ("unknown", "recomputed", None)
    assert rows["name", "hidden"].done == "kept"


@pytest.mark.exhaustive
@pytest.mark.parametrize("library", ["linen", "nnx", "equinox"])
@pytest.mark.parametrize("prevent_cse", [False, True])
def test_libraries(library, prevent_cse):
    pytest.importorskip("equinox" if library == "equinox" else "flax")
    rows = rows_of(getattr(programs, library)(prevent_cse))
    checkpoints = [row for row in rows.values() if row.kind == "checkpoint"]
    assert len(checkpoints) == 1
    assert "Block" in checkpoints[0].subject or checkpoints[0].subject == "run"
    assert checkpoints[0].undone_by == ("" if prevent_cse else "cse")
    assert "checkpoint_programs.py" in checkpoints[0].source


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="XLA's CPU compiler keeps the optimization barriers")
def test_cpu_merges_unrolled_layers():
    (row, *_) = unhonored(rows_of(programs.unrolled(prevent_cse=True), target="cpu:1"))
    assert row.undone_by == "cse" and "CPU" in row.message
    assert not unhonored(rows_of(programs.scanned(), target="cpu:1"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["full", "megatron"])
def test_masks_outside_of_regions_are_no_rows(policy):
    """The dropout after the embedding is not under jax.checkpoint, and its mask has the size of constants that are."""
    compilation = compile_described("h100", {**WIDE_GPU, "remat.policy": policy, "model.dropout": 0.1})
    rows = [row for row in report_of(compilation, target=targets.parse("h100")).audit if row.kind in KINDS]
    assert rows and not [row for row in rows if row.honored is False]


# ---- without a compiler -------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_names_of_policies():
    offload = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"],
        names_which_can_be_offloaded=["b"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    both = POLICIES.save_from_both_policies(POLICIES.save_only_these_names("a"), POLICIES.dots_saveable)
    assert mentioned_names(offload) == {"a": "save", "b": "offload"}
    assert mentioned_names(both) == {"a": "save"}
    assert mentioned_names(POLICIES.save_only_these_names("a", "b")) == {"a": "save", "b": "save"}
    assert mentioned_names(POLICIES.save_any_names_but_these("a")) == {"a": "recompute"}
    assert mentioned_names(POLICIES.everything_saveable) == mentioned_names(None) == {}
    assert request_for(None, "a") == "recompute"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "other", "expected"),
    [
        ("hiden", "hidden", True),
        ("mlpwi0", "mlp_wi_0", True),
        ("Attn_Out", "attn_out", True),
        ("q_rot", "k_rot", False),
        ("wi_0", "wi_1", False),
        ("query_proj", "key_proj", False),
    ],
)
def test_misspelling(name, other, expected):
    assert _is_misspelling(name, other) is expected


@pytest.mark.quick
def test_regions_of_a_jaxpr():
    def layer(x, scale):
        mask = jnp.arange(4.0) > 1  # depends on no argument
        return jnp.where(mask, jnp.sin(checkpoint_name(jnp.cos(x), "cosine")), 0) * scale

    def loss(x, scale):
        x = jax.checkpoint(layer)(x, scale)
        x, _ = jax.lax.scan(lambda x, _: (jax.checkpoint(layer)(x, scale), None), x, length=3)
        return x.sum()

    plain = find_regions(jax.make_jaxpr(loss)(jnp.ones(4), 1.0))
    assert plain == []  # nothing is differentiated
    regions = find_regions(jax.make_jaxpr(jax.grad(loss))(jnp.ones(4), 1.0))
    assert [(region.title, region.count, region.unrolled) for region in regions] == [("layer", 3, 0), ("layer", 1, 1)]
    for region in regions:
        assert region.names == {"cosine"}
        assert {each.equation.primitive.name for each in region.constant} >= {"iota", "gt"}
        assert "cos" not in {each.equation.primitive.name for each in region.constant}
        assert {each.equation.primitive.name for each in region.recomputed} >= {"cos", "iota"}
