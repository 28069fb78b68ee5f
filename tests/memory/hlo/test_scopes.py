"""What names say: phases, scopes and components from op_names, roles from argument paths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescope.memory.hlo.module import Frame, Metadata
from bytescope.memory.hlo.scopes import first_of_merged, is_operation, locate, parse
from bytescope.memory.hlo.sources import component_of_code, modules_of_code, short_place, source_line
from bytescope.memory.peak.checkpoint_names import NamedPlace, Names
from bytescope.memory.program.roles import role

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("op_name", "phase", "path", "component", "operation"),
    [
        (
            "jit(step)/jvp(blocks)/while/body/closed_call/attention/norm/mul",
            "forward",
            ("blocks", "attention", "norm"),
            "attention",
            "mul",
        ),
        (
            "jit(step)/transpose(jvp(blocks))/while/body/closed_call/checkpoint/mlp/dot_general",
            "backward",
            ("blocks", "mlp"),
            "mlp",
            "dot_general",
        ),
        (
            "jit(step)/transpose(jvp(blocks))/while/body/checkpoint/rematted_computation/mlp/tanh",
            "recompute",
            ("blocks", "mlp"),
            "mlp",
            "tanh",
        ),
        ("jit(step)/optimizer/sqrt", "", ("optimizer",), "optimizer", "sqrt"),
        ("jit(step)/jvp(final_norm)/norm/rsqrt", "forward", ("final_norm", "norm"), "norm", "rsqrt"),
        ("jit(f)/jvp(Mlp)/Dense_0/dot_general", "forward", ("Mlp", "Dense_0"), "mlp", "dot_general"),
        (
            "jit(step)/transpose(jvp(a))/while/body/(rematted_computation/attention/dot:mlp/transpose)",
            "recompute",
            ("a", "attention"),
            "attention",
            "dot",
        ),
        ("jit(f)/add", "", (), "", "add"),
        ("", "", (), "", ""),
    ],
)
def test_op_names(op_name, phase, path, component, operation):
    scope = parse(op_name)
    assert (scope.phase, scope.path, scope.component, scope.operation) == (phase, path, component, operation)


@given(st.text(alphabet="ab/()jvp:_.\n", max_size=60))
def test_any_op_name(text):
    assert isinstance(parse(text).component, str)


SITE = "/venv/lib/python3.11/site-packages/"


def frames(*places):
    """Frames of "file:line function", inmost first."""
    return tuple(
        Frame(place.partition(":")[0], int(place.partition(":")[2].split()[0]), function=place.split()[1])
        for place in places
    )


@pytest.mark.parametrize(
    ("path", "expected", "depth"),
    [
        (("TransformerDo", "blocks_3", "CausalAttn_0", "query"), "CausalAttn", 3),
        (("TransformerDo", "blocks", "CausalAttn_0"), "CausalAttn", 3),
        (("TransformerDo", "blocks_3", "attn", "query"), "attention", 3),
        (("transformer", "multi_head_attention_2", "query"), "attention", 2),
        (("TransformerDo", "blocks_3", "LayerNorm_1"), "norm", 3),
        (("TransformerDo", "out_ln"), "norm", 2),
        (("TransformerDo", "embed.attend"), "embed", 2),
        (("M", "RNN_0", "LSTMCell_0.scan_fn", "LSTMCell_0"), "LSTMCell", 4),
        (("TransformerDo", "blocks_3"), "blocks", 2),
        (("Gpt", "ScanCheckpointDecoderLayer_0", "Dense_1"), "DecoderLayer", 2),
        (("CNN", "Conv_1"), "Conv", 2),
        (("eqx.nn.Linear",), "Linear", 1),
        (("eqx.nn.MultiheadAttention", "eqx.nn.Linear"), "attention", 1),
        (("first",), "first", 1),
        (("loss", "blocks", "mlp"), "mlp", 3),
        (("loss", "logits"), "loss", 1),
        (("guide", "Normal_0"), "Normal", 2),
        ((), "", 0),
    ],
)
def test_the_inmost_module_that_means_something(path, expected, depth):
    assert locate(path) == (expected, depth)


MERGED = "jit(f)/transpose(jvp(Net))/mlp/mul;jit(f)/transpose(jvp(Net))/head/broadcast_in_dim"


@pytest.mark.parametrize(
    ("op_name", "part", "expected"),
    [
        ("jit(f)/jvp(Net)/attn/bthd,bshd->bhts/dot_general", "path", ("Net", "attn")),
        ("jit(f)/jvp(vmap(BTNH,BSNH->BNTS))/dot_general", "component", ""),
        ("jit(f)/jvp(Net)/bld,df->blf", "operation", "einsum"),
        ("jit(f)/jit(_split)/hmc.<locals>.kernel/add", "path", ()),
        ("jit(f)/Dropout_0/Dropout.__call__/while/body/add", "path", ("Dropout_0",)),
        (MERGED, "phase", "backward"),
        (MERGED, "path", ("Net", "mlp")),
        (MERGED, "operation", "mul"),
        ("jit(f)/(transpose(jvp(a))/mlp/dot:jvp(b)/head/mul)", "component", "mlp"),
        ("jit(f)/jvp(Net)/transpose", "phase", "forward"),  # an array that is transposed, not a function
        ("jit(f)/transpose(jvp(Net))/transpose", "phase", "backward"),
    ],
)
def test_einsums_functions_and_merged_names_are_no_scopes(op_name, part, expected):
    assert getattr(parse(op_name), part) == expected


def test_operations_and_the_first_of_merged_ones():
    assert first_of_merged("jit(f)/(jvp(a)/mlp/dot:jvp(b)/head/mul)") == "jit(f)/jvp(a)/mlp/dot"
    assert first_of_merged("jit(f)/a/mul;jit(f)/b/add") == "jit(f)/a/mul"
    assert not is_operation("params['transformer/linear']['w']") and is_operation("jit(f)/mul")


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        (("/x/optax/losses/_classification.py:1 softmax_cross_entropy",), "loss"),
        (("/x/optax/_src/transform.py:3 update_fn", "mine.py:9 train_step"), "optimizer"),
        (("/home/me/optax/examples/mnist.py:3 predict",), "predict()"),
        (("mine.py:3 main",), "main()"),
        (("mine.py:3 gpt.<locals>.attend", "mine.py:9 gpt.<locals>.layer", "mine.py:20 gpt.<locals>.loss"), "attend()"),
        (("mine.py:3 gelu", "mine.py:9 Block.mlp", "mine.py:20 train"), "mlp"),
        (("mine.py:3 ln", "mine.py:20 train"), "norm"),
        # A loss, or a step, around a whole model is not what that model's operations are.
        (("mine.py:3 predict", "mine.py:20 cross_entropy_loss"), "predict()"),
        (("mine.py:3 predict", "mine.py:20 train_embedding_model"), "predict()"),
        (("mine.py:20 cross_entropy_loss",), "loss"),
        (("mine.py:4 run.<locals>.<lambda>", "mine.py:9 step"), "run()"),
        (("/x/mine.py:4 <lambda>", "mine.py:9 lower_it"), "mine.py:4"),
        # In a framework: a known part; what was called there; through single layers to the user's own class.
        ((SITE + "flax/nnx/nn/attention.py:1 dot_product_attention", "mine.py:9 Block.__call__"), "attention"),
        (
            (SITE + "mctx/_src/tree.py:1 update", SITE + "mctx/_src/policies.py:2 muzero_policy", "mine.py:9 act"),
            "muzero_policy()",
        ),
        (
            (SITE + "numpyro/handlers.py:1 seed.__call__", SITE + "numpyro/infer/svi.py:2 SVI.update", "mine.py:9 act"),
            "SVI.update()",
        ),
        ((SITE + "flax/nnx/nn/linear.py:1 Linear.__call__", "mine.py:9 gpt.<locals>.Block.__call__"), "Block"),
        ((SITE + "haiku/_src/module.py:1 wrap_method.<locals>.wrapped", "mine.py:9 Torso.__call__"), "Torso"),
        # What compiles a step is not of the step.
        (
            (
                "/usr/lib/python3.11/functools.py:3 wrapped",
                "/x/bytescope/memory/program/compilation.py:9 _lowered",
                "mine.py:1 report",
            ),
            "",
        ),
    ],
)
def test_components_from_code(chain, expected):
    assert component_of_code(frames(*chain)) == expected


def test_modules_from_code():
    chain = frames(
        SITE + "flax/nnx/nn/attention.py:7 MultiHeadAttention.__call__",
        "mine.py:3 gpt.<locals>.Block.__call__",
        "mine.py:9 GPT.__call__",
        SITE + "flax/nnx/graph.py:7 Context.__call__",
        "mine.py:12 step",
    )
    assert modules_of_code(chain) == ("GPT", "Block", "MultiHeadAttention")


def test_names_by_vocabulary():
    names = Names({"q", "embed"}, places=[])
    assert names.find([Metadata("jit(f)/jvp(blocks)/attention/q/reduce_precision")]) == "q"
    assert names.find([Metadata("jit(f)/jvp(embed)/gather"), Metadata("")]) == ""


CALL = NamedPlace((("block.py", 3, 8), ("train.py", 9, 0)), (3, 20), "mlp/reduce_precision", "up")
MAKER = NamedPlace((("block.py", 3, 8),), (3, 20), "mlp/dot_general", "up")
OTHER = NamedPlace((("block.py", 3, 8), ("train.py", 11, 0)), (3, 20), "mlp/reduce_precision", "gate")
HERE = Frame("block.py", 3, 8, 3, 20)


@pytest.mark.parametrize(
    ("places", "op_name", "frames", "name"),
    [
        ([CALL, MAKER], "jit(f)/mlp/reduce_precision", (HERE,), "up"),
        ([CALL, MAKER], "jit(f)/mlp/dot_general", (HERE,), "up"),
        ([CALL, MAKER], "jit(f)/mlp/mul", (HERE,), ""),
        ([CALL, MAKER], "jit(f)/mlp/dot_general", (HERE._replace(end_column=30),), ""),
        ([CALL, MAKER], "jit(f)/mlp/dot_general", (Frame("block.py", 3, 8),), "up"),
        ([CALL, OTHER], "mlp/reduce_precision", (HERE, Frame("train.py", 11)), "gate"),
        ([CALL, OTHER], "mlp/reduce_precision", (HERE,), ""),
    ],
)
def test_names_by_place(places, op_name, frames, name):
    """Two values of one expression are told apart by where it ends, and by what made them."""
    assert Names(places=places).find([Metadata(op_name, frames)]) == name


def test_a_line_of_a_notebook_is_a_line_of_its_cell():
    assert short_place("/tmp/ipykernel_12/3456.py:7") == "cell:7"
    assert short_place("/home/me/model.py:7") == short_place("model.py:7") == "model.py:7"


def test_source_lines_skip_libraries():
    inner = Frame(SITE + "optax/_src/base.py", 3)
    assert source_line(Metadata("a", (inner, Frame("train.py", 7)))) == "train.py:7"
    assert source_line(Metadata("a", (inner,))).endswith("base.py:3")
    assert source_line(Metadata()) == ""


def test_source_lines_are_of_model_libraries_too_but_not_of_what_compiles():
    """A model that is installed is code to open; the line that asks for the report comes last, jax's own never."""
    asking = (Frame("/x/bytescope/memory/program/compilation.py", 9), Frame("report.py", 1, function="<module>"))
    model = Frame(SITE + "maxtext/layers/attentions.py", 5, function="Attention.__call__")
    framework = Frame(SITE + "numpyro/infer/svi.py", 5, function="SVI.update")
    own = Frame("train.py", 7, function="train_step")
    assert source_line(Metadata("a", (model, own, *asking))).endswith("attentions.py:5")
    assert source_line(Metadata("a", (framework, own, *asking))) == "train.py:7"
    assert source_line(Metadata("a", (framework, *asking))).endswith("svi.py:5")
    assert source_line(Metadata("a", asking[1:])) == "report.py:1"
    assert source_line(Metadata("a", (Frame(SITE + "jax/_src/core.py", 1), Frame("<string>", 1)))) == ""


def test_the_command_that_asks_for_a_report_is_no_line_of_the_program():
    """An operation of jax alone, as of `jax.grad(jnp.linalg.norm)`: only the command's own frames are left."""
    numpy = Frame(SITE + "jax/_src/numpy/linalg.py", 1, function="norm")
    asking = (
        Frame("/x/bytescope/memory/program/compilation.py", 9, function="trace"),
        Frame("/x/bytescope/train/commands/report_config.py", 77, function="run"),
        Frame("/x/bin/bytescope", 8, function="<module>"),
    )
    assert source_line(Metadata("a", (numpy, *asking))) == component_of_code((numpy, *asking)) == ""
    assert source_line(Metadata("a", (numpy, Frame("train.py", 7, function="<module>"), *asking))) == "train.py:7"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
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
        ("kv_cache[0]", "cache"),
        ("x", "batch"),
        ("", "batch"),
        ("something_else", "batch"),
    ],
)
def test_roles(path, expected):
    assert role(path) == expected
