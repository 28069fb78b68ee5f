"""The function whose checkpointing frees most: by hand-made residuals with source frames."""

import dataclasses
import linecache
import sys

import pytest

from bytescope.memory.findings.checkpoint_findings import candidates, checkpoint_saves, kernel_runs_again
from bytescope.memory.findings.user_functions import Function, calls, wrapper
from bytescope.memory.hlo.buffers import HloProgram
from bytescope.memory.hlo.module import Frame, Instruction, Metadata, Module
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import ROWS, Buffer, ReportRecord
from bytescope.memory.units import GIB, KIB, MIB

pytestmark = pytest.mark.quick

# A file that only linecache knows, as a notebook's cells are: the blocks are called in a loop, or one by one.
SOURCE = """\
class Mlp(Module):
    def __call__(self, x):
        x = up(x)
        return gelu(x)


class Block(Module):
    def __call__(self, x):
        return x + Mlp()(x)


class Gpt(Module):
    def __call__(self, x):
        for layer in range(self.layers):
            x = Block()(x)
        return norm(x)


class Twice(Module):
    def __call__(self, x):
        x = Block()(x)
        x = Block()(x)
        return norm(x)
"""
FILE = "model.py"
UP, GELU, ADD, CALL, FIRST, SECOND = 3, 4, 9, 15, 21, 22
FLAX = "/usr/lib/python3.11/site-packages/flax/linen/linear.py"
OUTSIDE = (
    Frame("train.py", 7, function="make.<locals>.loss_fn"),
    Frame("train.py", 9, function="make.<locals>.step"),
    Frame(FILE, CALL, function="Gpt.__call__"),
)  # what traced the step does not count, whatever it is


@pytest.fixture(autouse=True)
def source(monkeypatch):
    """The source of the model, where Python looks for it."""
    monkeypatch.setitem(linecache.cache, FILE, (len(SOURCE), None, SOURCE.splitlines(keepends=True), FILE))


def block(line=CALL, function="Gpt.__call__"):
    """Frames of an operation in a block, which `line` calls."""
    return (Frame(FILE, ADD, function="Block.__call__"), Frame(FILE, line, function=function), *OUTSIDE)


def mlp(line, around=None):
    """Frames of an operation in the MLP of a block; its product is computed by Flax."""
    return (
        Frame(FLAX, 199, function="Dense.__call__"),
        Frame(FILE, line, function="Mlp.__call__"),
        *(around or block()),
    )


def program(places):
    """A program whose instructions have these (op_name, frames)."""
    instructions = {id: Instruction(id, f"op.{id}") for id in range(len(places))}
    return PlacedProgram(
        HloProgram(
            Module(
                instructions=instructions,
                _metadata={id: Metadata(name, frames) for id, (name, frames) in enumerate(places)},
            )
        )
    )


def model(around=None, up=128 * MIB, norm=32 * MIB):
    """(buffers, places): in each layer, of these frames, two arrays of the MLP and the output of the block."""
    buffers, places = [], []
    for layer, frames in enumerate(around or [block()] * 4):
        for what, size, line in (("up", up, UP), ("gelu", up, GELU), ("add", norm, ADD)):
            name = f"jit(step)/jvp(Gpt)/block_{layer}/{what}"
            places.append((name, frames if what == "add" else mlp(line, frames)))
            buffers.append(
                Buffer(
                    f"{what}.{layer}",
                    size,
                    (8, size // 32),
                    "float32",
                    "residuals",
                    "forward",
                    op_name=name,
                    source=f"{FILE}:{line}",
                    at_peak=True,
                )
            )
    return buffers, places


def report(buffers, limit=4 * GIB, verdict="fits", **fields):
    kept = sum(b.bytes for b in buffers)
    size = kept + 100 * MIB
    rows = dict.fromkeys(ROWS, 0) | {"residuals": kept, "workspace": size - kept}
    return ReportRecord(
        size,
        size,
        rows,
        buffers=tuple(buffers),
        limit_bytes=limit,
        verdict=verdict,
        fits=verdict != "exceeds",
        **fields,
    )


def test_the_block_frees_most_and_its_call_is_named():
    buffers, places = model()
    best, inner = candidates(report(buffers), program(places))
    assert (best.call.function, best.call.caller) == (Function("Block.__call__", FILE), f"{FILE}:{CALL}")
    # Four calls of 288 MiB: one is alive at a time, and each keeps an input as large as its output.
    assert (best.calls, best.kept, best.freed) == (4, 4 * 288 * MIB, (3 * 288 - 4 * 32) * MIB)
    assert inner.call.function.title == "Mlp" and inner.freed == (3 * 256 - 4 * 128) * MIB
    found = checkpoint_saves(report(buffers), program(places))
    assert found.bytes == best.freed and "Block keeps 1.12 GiB for the backward pass, 92% of the peak" in found.message
    assert found.remedy.startswith("call nn.remat(Block) instead of Block at model.py:15")


@pytest.mark.parametrize(
    ("folder", "decorator"), [("/flax/nnx/", "nnx.remat"), ("/equinox/nn/", "eqx.filter_checkpoint")]
)
def test_a_class_whose_wrapper_would_wrap_its_constructor_is_decorated(folder, decorator, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "FLAX", f"/usr/lib/python3.11/site-packages{folder}linear.py")
    buffers, places = model()
    found = checkpoint_saves(report(buffers), program(places))
    assert found.remedy.startswith(f"decorate Block.__call__, called at model.py:15, with @{decorator}: it frees about")


def test_what_is_called_once_frees_nothing():
    """All of a model in one function: recomputing it as a whole holds as much as before."""
    buffers, places = model([block()])
    assert candidates(report(buffers), program(places)) == []


def test_a_function_that_has_the_loop_is_called_once():
    """Layers written out in the loop of one function: there is nothing to wrap but the MLP."""
    own = [block()[1:]] * 4
    found = candidates(report(model(own)[0]), program(model(own)[1]))
    assert [candidate.call.function.title for candidate in found] == ["Mlp"]


def test_calls_that_are_written_out_count_by_their_lines():
    buffers, places = model([block(FIRST, "Twice.__call__"), block(SECOND, "Twice.__call__")])
    best = candidates(report(buffers), program(places))[0]
    assert (best.call.function.title, best.calls, best.freed) == ("Block", 2, (288 - 2 * 32) * MIB)


def test_a_checkpoint_that_keeps_too_much_is_told_to_keep_less():
    buffers, places = model()
    places.append(("jit(step)/transpose(jvp(Gpt))/block_0/rematted_computation/tanh", mlp(GELU)))
    found = checkpoint_saves(report(buffers), program(places))
    assert found.remedy.startswith(
        "use a policy that saves less, such as nothing_saveable, for jax.checkpoint of Block at model.py:15"
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, True),
        ({"limit": None, "verdict": "unknown"}, True),
        ({"limit": 100 * GIB}, False),  # no need of memory at all
        ({"target": {"platform": "cuda"}}, True),
        ({"target": {"platform": "cpu"}}, False),  # XLA's CPU compiler recomputes unrolled layers all at once
        ({"limit": GIB, "verdict": "exceeds"}, True),
    ],
)
def test_only_where_memory_is_wanted(fields, said):
    buffers, places = model()
    assert (checkpoint_saves(report(buffers, **fields), program(places)) is not None) is said


def test_small_savings_count_only_where_memory_is_short():
    buffers, places = model()
    other = Buffer("state", 6 * GIB, category="params", phase="argument", at_peak=True)
    roomy = dataclasses.replace(report(buffers), peak_bytes=7 * GIB, allocated_bytes=7 * GIB, limit_bytes=10 * GIB)
    roomy = dataclasses.replace(roomy, buffers=(*roomy.buffers, other))
    assert checkpoint_saves(roomy, program(places)) is None
    tight = dataclasses.replace(roomy, limit_bytes=6 * GIB, verdict="exceeds", fits=False)
    assert checkpoint_saves(tight, program(places)) is not None
    toy = model(up=128 * KIB, norm=32 * KIB)
    assert checkpoint_saves(report(toy[0], limit=MIB, verdict="exceeds"), program(toy[1])) is None


def test_without_frames_nothing_is_said():
    buffers, _ = model()
    assert candidates(report(buffers), program([])) == []


def test_frames_of_libraries_are_passed_over():
    frames = mlp(UP, (Frame("/usr/lib/python3.11/functools.py", 3, function="wrapped"), *block()))
    found = calls(frames, "step")
    assert [call.function.title for call in found] == ["Mlp", "Block", "Gpt", "loss_fn", "step"]
    assert [call.caller for call in found] == [f"{FILE}:{ADD}", f"{FILE}:{CALL}", "train.py:7", "train.py:9", ""]
    assert [call.repeated for call in found] == [True, True, False, False, False]
    assert wrapper(frames) == "nn.remat" and wrapper(block()) == ""
    assert Function("step.<locals>.<lambda>", "").nameless and Function("a.<locals>.b", "").title == "b"


FORWARD = "jit(step)/jvp()/while/body/attend"
AGAIN = "jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/attend"


def attention(again=AGAIN, target="__cudnn$fmhaSoftmax", again_line=5):
    """A program with an attention kernel in the forward pass, and once more at `again`."""
    module = Module()
    for id, (name, line) in enumerate(((FORWARD, 5), (again, again_line))):
        module.instructions[id] = Instruction(id, f"kernel.{id}", "custom-call")
        module.instructions[id].target = target
        module._metadata[id] = Metadata(name, (Frame("attend.py", line),))
    return PlacedProgram(HloProgram(module))


def kept(op_name=FORWARD):
    """The result of the kernel, which is kept for the backward pass."""
    fields = {"op_name": op_name, "source": "attend.py:5", "checkpoint_name": "context", "at_peak": True}
    return [Buffer("while.1", 64 * MIB, (8, 8), "bfloat16", "residuals", "forward", **fields)]


def test_a_kernel_whose_saved_result_does_not_spare_it():
    found = kernel_runs_again(report(kept()), attention())
    assert found.bytes == 64 * MIB
    assert "__cudnn$fmhaSoftmax, saved as context, are kept" in found.message


@pytest.mark.parametrize(
    ("buffers", "program"),
    [
        ([], attention()),  # the policy does not save the result
        (kept("jit(step)/jvp()/while/body/dot_general"), attention()),  # another value is saved
        (kept(), attention(again="jit(step)/transpose(jvp())/while/body/attend")),  # only the gradient runs
        (kept(), attention(again_line=6)),  # another kernel runs again
        (kept(), attention(target="__cublas$gemm")),  # products have no residuals of their own
    ],
)
def test_a_kernel_that_runs_once_or_is_not_saved_is_no_finding(buffers, program):
    assert kernel_runs_again(report(buffers), program) is None
