"""What names say: phases, scopes and components from op_names, roles from argument paths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescope.memory.attribution.checkpoint_names import NamedPlace, Names
from bytescope.memory.attribution.roles import role
from bytescope.memory.attribution.rules import source_line
from bytescope.memory.hlo.module import Frame, Metadata
from bytescope.memory.hlo.scopes import component_of_code, parse

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("op_name", "phase", "path", "component", "operation"), [
    ("jit(step)/jvp(blocks)/while/body/closed_call/attention/norm/mul",
     "forward", ("blocks", "attention", "norm"), "attention", "mul"),
    ("jit(step)/transpose(jvp(blocks))/while/body/closed_call/checkpoint/mlp/dot_general",
     "backward", ("blocks", "mlp"), "mlp", "dot_general"),
    ("jit(step)/transpose(jvp(blocks))/while/body/checkpoint/rematted_computation/mlp/tanh",
     "recompute", ("blocks", "mlp"), "mlp", "tanh"),
    ("jit(step)/optimizer/sqrt", "", ("optimizer",), "optimizer", "sqrt"),
    ("jit(step)/jvp(final_norm)/norm/rsqrt", "forward", ("final_norm", "norm"), "norm", "rsqrt"),
    ("jit(f)/jvp(Mlp)/Dense_0/dot_general", "forward", ("Mlp", "Dense_0"), "mlp", "dot_general"),
    ("jit(step)/transpose(jvp(a))/while/body/(rematted_computation/attention/dot:mlp/transpose)",
     "recompute", ("a", "attention"), "attention", "dot"),
    ("jit(f)/add", "", (), "", "add"),
    ("", "", (), "", ""),
])
def test_op_names(op_name, phase, path, component, operation):
    scope = parse(op_name)
    assert (scope.phase, scope.path, scope.component, scope.operation) == (phase, path, component, operation)


@given(st.text(alphabet="ab/()jvp:_.\n", max_size=60))
def test_any_op_name(text):
    assert isinstance(parse(text).component, str)


def test_components_from_code():
    frames = (Frame("/x/optax/losses/_classification.py", 1, function="softmax_cross_entropy"),)
    assert component_of_code(frames) == "loss"
    assert component_of_code((Frame("/x/optax/_src/transform.py", 3, function="update_fn"),)) == "optimizer"
    assert component_of_code((Frame("mine.py", 3, function="main"),)) == ""


def test_names_by_vocabulary():
    names = Names({"q", "embed"}, places=[])
    assert names.of([Metadata("jit(f)/jvp(blocks)/attention/q/reduce_precision")]) == "q"
    assert names.of([Metadata("jit(f)/jvp(embed)/gather"), Metadata("")]) == ""


def test_names_by_place():
    """Two values of one expression are told apart by where it ends, and by what made them."""
    call = NamedPlace((("block.py", 3, 8), ("train.py", 9, 0)), (3, 20), "mlp/reduce_precision", "up")
    maker = NamedPlace((("block.py", 3, 8),), (3, 20), "mlp/dot_general", "up")
    names = Names(places=[call, maker])
    here = Frame("block.py", 3, 8, 3, 20)
    assert names.of([Metadata("jit(f)/mlp/reduce_precision", (here,))]) == "up"
    assert names.of([Metadata("jit(f)/mlp/dot_general", (here,))]) == "up"
    assert names.of([Metadata("jit(f)/mlp/mul", (here,))]) == ""
    assert names.of([Metadata("jit(f)/mlp/dot_general", (here._replace(end_column=30),))]) == ""
    assert names.of([Metadata("jit(f)/mlp/dot_general", (Frame("block.py", 3, 8),))]) == "up"
    other = NamedPlace((("block.py", 3, 8), ("train.py", 11, 0)), (3, 20), "mlp/reduce_precision", "gate")
    both = Names(places=[call, other])
    assert both.of([Metadata("mlp/reduce_precision", (here, Frame("train.py", 11)))]) == "gate"
    assert both.of([Metadata("mlp/reduce_precision", (here,))]) == ""


def test_source_lines_skip_libraries():
    inner = Frame("/venv/lib/python3.11/site-packages/optax/_src/base.py", 3)
    assert source_line(Metadata("a", (inner, Frame("train.py", 7)))) == "train.py:7"
    assert source_line(Metadata("a", (inner,))).endswith("base.py:3")
    assert source_line(Metadata()) == ""


@pytest.mark.parametrize(("path", "expected"), [
    ("state.params['blocks']['w_q']", "params"),
    ("state['params']['opt_head']", "params"),
    ("params['batch_norm']['scale']", "params"),
    ("state.opt_state[1][0].mu['blocks']['w_q']", "optimizer"),
    ("state.opt_state.acc_grads['embed']", "accumulator"),
    ("state.opt_state.inner_opt_state[0].nu['w']", "optimizer"),
    ("state.opt_state.mini_step", "optimizer"),
    ("state.step", "optimizer"),
    ("opt_state[0].trace['w']", "optimizer"),
    ("batch['inputs']", "batch"),
    ("variables['params']['Dense_0']['kernel']", "params"),
    ("kv_cache[0]", "batch"),
    ("x", "batch"),
    ("", "batch"),
    ("something_else", "batch"),
])
def test_roles(path, expected):
    assert role(path) == expected


def test_roles_of_ones_own_go_first():
    assert role("state.ema['w']", [("ema", "params")]) == "params"
    with pytest.raises(ValueError, match="regular expression"):
        role("w", [("(", "params")])
