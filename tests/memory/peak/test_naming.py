"""Every value has a place: what compilers and loops add is named for what it copies, what nobody named for its code."""

import pytest

from bytescope.memory.hlo.dataflow import Flow
from bytescope.memory.hlo.module import Computation, Frame, Instruction, Metadata, Module
from bytescope.memory.hlo.shapes import HloShape
from bytescope.memory.hlo.sources import source_line
from bytescope.memory.peak.naming import Naming, fold_labels, label
from bytescope.memory.records.report_record import Buffer, ReportRecord

pytestmark = pytest.mark.quick

ATTEND = "jit(step)/jvp(Net)/blocks_0/CausalAttn_0/dot_general", "net.py:7"
LOOP = "jit(step)/transpose(jvp(Net))/while/body/jit(dynamic_index_in_dim)/dynamic_slice", "net.py:30"


def naming(entry, **others):
    """The names of a module by hand: computation -> rows of (name, opcode, operands, (op_name, "file:line"), options).

    The last row of a computation is its root; operands are names of its rows, options `called` and `tuple_index`.
    """
    module, ids = Module(entry=1), {}
    for number, (computation, rows) in enumerate({"entry": entry, **others}.items(), 1):
        record = module.computations[number] = Computation(number, computation)
        ids[computation] = number
        for name, opcode, operands, said, *options in rows:
            id = ids[computation, name] = len(module.instructions) + 1
            extra = dict(*options)
            one = Instruction(
                id,
                name,
                opcode,
                [ids[computation, operand] for operand in operands],
                computation=number,
                parameter=len(record.parameters),
                tuple_index=extra.get("tuple_index", 0),
            )
            one.called = list(extra.get("called", ()))
            module.instructions[id] = one
            record.instructions.append(id)
            record.root = id
            if opcode == "parameter":
                record.parameters[one.parameter] = id
            module._metadata[id] = Metadata(said[0], (Frame(*_place(said[1])),) if said[1] else ())
            module._shapes[id] = HloShape("float32", (8, 8))
    for one in module.instructions.values():
        one.called = [ids[computation] for computation in one.called]
    found = Naming(Flow(module))

    def of(name, computation="entry"):
        instruction = module.instructions[ids[computation, name]]
        _, metadata, scope = found.best(instruction, ())
        return scope.component, "/".join(scope.path), source_line(metadata)

    return of


def _place(line):
    file, _, number = line.partition(":")
    number, _, function = number.partition(" ")
    return file, int(number), 0, 0, 0, function


NOTHING = "", ""
PLACE = "CausalAttn", "Net/blocks_0/CausalAttn_0", "net.py:7"


@pytest.mark.parametrize("opcode", ["all-gather", "copy", "custom-call", "all-reduce", "slice"])
def test_what_the_compiler_adds_belongs_to_what_it_is_made_from(opcode):
    of = naming(
        [
            ("x", "parameter", [], ("x", "")),
            ("dot", "dot", ["x"], ATTEND),
            ("new", opcode, ["dot"], NOTHING),
            ("out", "add", ["new"], ("jit(step)/optimizer/add", "opt.py:1")),
        ]
    )
    assert of("new") == PLACE


def test_zeros_belong_to_what_reads_them():
    of = naming(
        [
            ("zero", "constant", [], ("jit(step)/init/zeros", "init.py:1")),
            ("fill", "broadcast", ["zero"], NOTHING),
            ("dot", "dot", ["fill"], ATTEND),
        ]
    )
    assert of("fill") == PLACE


def test_zeros_that_a_loop_fills_belong_to_what_it_writes():
    of = naming(
        [
            ("zero", "constant", [], ("jit(step)/jvp(Net)/while", "net.py:30")),
            ("fill", "broadcast", ["zero"], ("jit(step)/jvp(Net)/while", "net.py:30")),
            ("copy", "copy", ["fill"], NOTHING),
            ("start", "tuple", ["zero", "copy"], NOTHING),
            ("loop", "while", ["start"], ("jit(step)/jvp(Net)/while", "net.py:30"), {"called": ["body"]}),
        ],
        body=[
            ("state", "parameter", [], NOTHING),
            ("count", "get-tuple-element", ["state"], NOTHING, {"tuple_index": 0}),
            ("stack", "get-tuple-element", ["state"], NOTHING, {"tuple_index": 1}),
            ("dot", "dot", ["count"], ATTEND),
            ("write", "dynamic-update-slice", ["stack", "dot", "count"], LOOP),
            ("root", "tuple", ["count", "write"], NOTHING),
        ],
    )
    assert of("fill") == of("copy") == PLACE
    assert of("zero")[2] == "net.py:30"


def test_a_fusion_without_a_name_has_that_of_what_is_in_it():
    of = naming(
        [("x", "parameter", [], ("x", "")), ("fusion", "fusion", ["x"], NOTHING, {"called": ["inside"]})],
        inside=[
            ("p", "parameter", [], NOTHING),
            ("dot", "dot", ["p"], ATTEND),
            ("shrink", "reduce-precision", ["dot"], NOTHING),
        ],
    )
    assert of("fusion") == PLACE


def test_a_slice_that_a_loop_reads_belongs_to_what_was_stacked():
    rows = [("x", "parameter", [], ("x", "")), ("dot", "dot", ["x"], ATTEND), ("part", "dynamic-slice", ["dot"], LOOP)]
    assert naming(rows)("part") == PLACE
    # A slice that the user takes is their own, and one within a known component belongs to that.
    own = "jit(step)/jvp(Net)/blocks_0/Pool_0/slice", "net.py:9"
    assert naming([*rows[:2], ("part", "dynamic-slice", ["dot"], own)])("part")[0] == "Pool"
    loss = LOOP[0].replace("jvp(Net)", "jvp(loss)"), LOOP[1]
    assert naming([*rows[:2], ("part", "dynamic-slice", ["dot"], loss)])("part")[0] == "loss"


def test_a_merged_name_without_a_line_has_the_nearest():
    merged = "jit(step)/transpose(jvp())/mul;jit(step)/transpose(jvp())/broadcast_in_dim", ""
    of = naming(
        [
            ("x", "parameter", [], ("x", "")),
            ("dot", "dot", ["x"], ("jit(step)/jvp()/dot", "net.py:7 attend")),
            ("new", "multiply", ["dot"], merged),
        ]
    )
    assert of("new") == ("attend()", "", "net.py:7")


def test_what_only_a_line_tells():
    line = "/site-packages/numpyro/handlers.py:7 seed.__call__"
    of = naming([("x", "parameter", [], ("x", "")), ("dot", "dot", ["x"], ("jit(<lambda>)/dot", line))])
    assert of("dot") == ("handlers.py:7", "", "/site-packages/numpyro/handlers.py:7")


def test_the_scopes_of_a_librarys_own_layers_go_into_the_users_modules():
    said = "jit(step)/jvp(vmap(eqx.nn.{}))/sd,Sd->sS/dot_general", "net.py:7 gpt.<locals>.Block.__call__"

    def of(layer):
        rows = [("x", "parameter", [], ("x", "")), ("dot", "dot", ["x"], (said[0].format(layer), said[1]))]
        return naming(rows)("dot")

    assert of("MultiheadAttention") == ("attention", "Block", "net.py:7")
    assert of("Linear") == ("Block", "Block", "net.py:7")


def test_the_path_of_an_argument_is_no_name_of_an_operation():
    of = naming(
        [
            ("x", "parameter", [], ("p['net/linear']['w']", "")),
            ("wide", "convert", ["x"], ("p['net/linear']['w']", "")),
            ("dot", "dot", ["wide"], ATTEND),
        ]
    )
    assert of("wide") == PLACE


# ---- labels ----


def buffer(module, component, size=1, category="workspace", **fields):
    return Buffer(
        "fusion",
        size,
        category=category,
        phase="backward",
        component=component,
        module=module,
        op_name=f"jit(f)/{module}/div",
        at_peak=True,
        **fields,
    )


def test_siblings_fold():
    found = fold_labels(
        [
            *(buffer(f"Net/blocks_{n}/CausalAttn_0/query", "CausalAttn") for n in range(6)),
            buffer("Net/blocks_0/CausalAttn_0", "CausalAttn"),
            *(buffer(f"net/attn_{n}", "attention", category="residuals") for n in range(3)),
            *(buffer(f"net/attn_{n}", "attention", category="residuals", checkpoint_name="q") for n in range(3)),
            *(buffer(f"net/mlp_{n}", "param_copy") for n in range(3)),
            buffer("Net/head", "head"),
            buffer("Net/head", "head"),
            buffer("Gpt/LayerNorm", "norm"),
            buffer("Gpt/Block/LayerNorm", "norm"),  # classes: nobody knows how many
            Buffer("late", 1, category="workspace", phase="backward", component="head", module="Net/head_1"),
        ]
    )
    assert found == {"backward/CausalAttn": "backward/CausalAttn x 6", "(attention/div)": "(attention x 3/div)"}


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(f)/jvp(net)/exp", "(attend()/exp)"),
        ("jit(f)/jvp(net)/bld,df->blf", "(attend()/einsum)"),
        ("jit(f)/jvp(net)/transpose", "(attend()/transpose)"),
        ("jit(f)/jvp(net)/while/body", "(attend()/carry)"),
        ("jit(f)/jvp(net)/exp/reduce_precision", "(attend()/exp)"),
        ("jit(f)/jvp(net)/mul;jit(f)/jvp(net)/broadcast_in_dim", "(attend()/mul)"),
    ],
)
def test_residuals_without_a_name(op_name, expected):
    assert label(Buffer("x", 1, category="residuals", component="attend()", op_name=op_name)) == expected


def test_buffers_without_a_component():
    assert label(Buffer("x", 1, category="residuals", op_name="jit(norm)/jvp(jit(norm))/sqrt")) == "(sqrt)"
    assert label(Buffer("x", 1, category="workspace", phase="backward")) == "backward"


def test_bytes_without_a_place():
    at = {"at_peak": True, "category": "workspace", "phase": "forward"}
    report = ReportRecord(
        15,
        15,
        {"workspace": 15},
        buffers=(
            Buffer("a", 8, source="net.py:7", **at),
            Buffer("b", 4, module="Net", **at),
            Buffer("c", 2, component="x", **at),
            Buffer("d", 1, **{**at, "phase": "argument"}),
            Buffer("e", 1, memory="host", **at),
            Buffer("f", 1, start=1, end=1),
        ),
    )
    assert report.unplaced_bytes == 2 == report.to_json()["unplaced_bytes"]
