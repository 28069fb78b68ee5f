"""`model.unroll`, and what the group `xla` tells the compiler: the same results, and an option that is really taken."""

import re

import numpy as np
import pytest
from toy import run_losses, small_program

LAYERS = {"model.n_layers": 4}
# Ways to walk through the layers, with the unroll that is tried.
WALKS = {
    "remat": ({"remat.policy": "full"}, 2),
    "no loop": ({"remat.policy": "minimal", "remat.granularity": "parts"}, 4),
    "ranges": ({"remat.policy": "full", "remat.layers": "0-2:none"}, 2),
    "sqrt": ({"remat.policy": "sqrt"}, 2),
    "fused": ({"optimizer.fused_backward": True, "optimizer.clip": "layer", "remat.policy": "full"}, 4),
}


@pytest.mark.parametrize("walk", WALKS)
def test_turns_of_several_layers_train_alike(walk):
    keys, unroll = {**LAYERS, **WALKS[walk][0]}, WALKS[walk][1]
    plain, turns = (run_losses(small_program({**keys, "model.unroll": size}), 2) for size in (1, unroll))
    np.testing.assert_allclose(turns, plain, rtol=2e-6)


def recomputed(**keys):
    """Matrix products of the compiled step that are recomputed, a loop's counted once."""
    program = small_program({**LAYERS, **{key.replace("__", "."): value for key, value in keys.items()}})
    lines = program.compile().as_text().splitlines()
    return sum(bool(re.search(r" dot\(|__onednn\$matmul", line)) and "rematted_computation" in line for line in lines)


def test_what_is_recomputed_stays_recomputed():
    """A loop of one turn has both passes in one computation, where XLA would merge what is equal."""
    layer = recomputed(remat__policy="full")
    for unroll in (2, 4):
        assert recomputed(remat__policy="full", model__unroll=unroll) == unroll * layer
    groups = recomputed(remat__policy="sqrt")  # of 2 layers, whose loop is gone then; the last needs no first recompute
    assert recomputed(remat__policy="sqrt", model__unroll=2) == groups + layer


@pytest.mark.parametrize(("overrides", "message"), [
    ({"model.unroll": 3}, "model.unroll=3 does not divide the 4 layers .*: 2 does"),
    ({"model.unroll": 2, "remat.layers": "0-3:full"}, "does not divide the 3 layers .*remat.policy=full.*: 1 does"),
    ({"model.unroll": 0}, "model.unroll=0: give 1 or more"),
    ({"model.unroll": 2, "model.scan": False}, "model.unroll=2 with model.scan=false, which has no loop"),
    ({"xla.gemm": "cutlass"}, "xla.gemm='cutlass': choose one of cublas, triton, or leave it empty"),
    ({"xla.command_buffers": "off"}, "xla.command_buffers=off is for XLA's GPU compiler, and this is cpu"),
])
def test_mistakes_in_one_line(overrides, message):
    with pytest.raises(ValueError, match=message):
        small_program({**LAYERS, **overrides})
