"""Bytes that kernels read and write: hand-made instructions, fusions, loops, and a compiled program of known size."""

import jax
import jax.numpy as jnp
import pytest

from bytescope import memory
from bytescope.memory.cost import kernel_costs
from bytescope.memory.hlo.module import Computation, Instruction, Module
from bytescope.memory.hlo.shapes import HloShape
from bytescope.memory.records.schedule_records import Loop, ScheduledKernel

pytestmark = pytest.mark.quick


def array(*dims, dtype="float32", bits=32, space=0):
    return HloShape(dtype, dims, space, None, bits)


def parts(*shapes):
    return HloShape(parts=shapes)


def module(*lines):
    """Instructions (computation, opcode, operands by place, shape, more), the last of each computation its root."""
    out = Module(entry=1)
    for id, (computation, opcode, operands, shape, more) in enumerate(lines):
        inside = out.computations.setdefault(computation, Computation(computation))
        out.instructions[id] = Instruction(id, f"i{id}", opcode, list(operands), computation=computation, **more)
        if opcode == "parameter":
            number = len(inside.parameters)
            out.instructions[id].parameter, inside.parameters[number] = number, id
        inside.instructions.append(id)
        inside.root, out._shapes[id] = id, shape
    return out


def alone(opcode, operands, result, **more):
    """One operation over parameters, and the bytes it moves."""
    made = module(
        *((1, "parameter", (), shape, {}) for shape in operands), (1, opcode, range(len(operands)), result, more)
    )
    return kernel_costs.moved(made, made.instructions[len(operands)])


A, B, S = array(10, 4), array(2, 4), array()


@pytest.mark.parametrize(
    ("opcode", "operands", "result", "size"),
    [
        ("add", (A, A), A, 480),
        ("dot", (A, array(4, 6)), array(10, 6), 160 + 96 + 240),
        ("broadcast", (S,), A, 164),
        ("reduce", (A, S), array(10), 160 + 4 + 40),
        ("copy", (A,), A, 320),
        ("transpose", (A,), array(4, 10), 320),
        ("dynamic-slice", (A, S, S), B, 32 + 8 + 32),
        ("slice", (A,), B, 64),
        ("gather", (A, array(2)), B, 32 + 8 + 32),
        ("dynamic-update-slice", (A, B, S, S), A, 32 + 8 + 32),
        ("scatter", (A, array(2), B), A, 32 + 8 + 32 + 32),
        ("convert", (A,), array(10, 4, dtype="bfloat16", bits=16), 160 + 80),
        ("tuple", (A, B), parts(A, B), 0),
        ("bitcast", (A,), array(40), 0),
        ("all-reduce", (A,), A, 0),
        ("all-gather-start", (A,), parts(A, A), 0),
        ("get-tuple-element", (parts(A, B),), A, 0),
        ("copy", (A,), array(10, 4, space=5), 160),
        ("copy-start", (A,), parts(array(10, 4, space=5), A, S), 160),
        ("copy-start", (A,), parts(A, A, S), 320),
        ("copy-done", (parts(A, A, S),), A, 0),
        ("add", (array(10, 4, space=1), A), A, 320),
        ("sort", (A, A), parts(A, A), 640),
    ],
)
def test_one_operation(opcode, operands, result, size):
    assert alone(opcode, operands, result) == size


def test_an_operand_that_comes_twice_is_read_once():
    made = module((1, "parameter", (), A, {}), (1, "multiply", (0, 0), A, {}))
    assert kernel_costs.moved(made, made.instructions[1]) == 320


@pytest.mark.parametrize(
    ("target", "product", "size"),
    [
        ("__cublas$lt$matmul", True, 480),
        ("__cudnn$fmhaSoftmax", True, 480),
        ("TopK", False, 480 + 99),
        ("MoveToHost", False, 0),
    ],
)
def test_calls_of_a_library_and_their_workspace(target, product, size):
    result = parts(A, array(99, dtype="int8", bits=8))
    assert alone("custom-call", (A, A), result, target=target) == size
    kernel = Instruction(opcode="custom-call", target=target)
    assert kernel.call.is_product is product


def fused(*inside, operands=(A, B, S), result=A):
    """The bytes of a fusion over three parameters; `inside`: (opcode, operands, shape) of each."""
    n = len(operands)
    made = module(
        *((1, "parameter", (), shape, {}) for shape in operands),
        (1, "fusion", range(n), result, {"called": [2]}),
        *((2, "parameter", (), shape, {}) for shape in operands),
        *((2, opcode, [n + 1 + at for at in places], shape, {}) for opcode, places, shape in inside),
    )
    return kernel_costs.moved(made, made.instructions[n])


UPDATE = ("dynamic-update-slice", (0, 1, 2), A)


@pytest.mark.parametrize(
    ("inside", "result", "size"),
    [
        ([("add", (0, 0), A)], A, 160 + 160),  # what is not asked for is not read
        ([("dynamic-slice", (0, 2), B), ("add", (3, 1), B)], B, 32 + 32 + 4 + 32),
        ([("convert", (0,), A), ("slice", (3,), B), ("add", (4, 1), B)], B, 32 + 32 + 32),
        ([("dynamic-slice", (0, 2), B), ("add", (0, 0), A)], A, 160 + 4 + 160),  # all of it anyway
        ([UPDATE], A, 32 + 4 + 32),
        ([UPDATE, ("bitcast", (3,), A)], A, 32 + 4 + 32),
        ([("convert", (0,), A), ("dynamic-update-slice", (3, 1, 2), A)], A, 160 + 32 + 4 + 32),
        ([UPDATE, ("negate", (1,), B), ("tuple", (3, 4), parts(A, B))], parts(A, B), 32 + 4 + 32 + 32),
        ([("dot", (0, 1), array(10, 2))], array(10, 2), 160 + 32 + 80),
    ],
)
def test_fusions_read_what_they_ask_for_and_write_what_they_update(inside, result, size):
    """Operands of the fused operations by place: 0 is A, 1 is B, 2 the scalar, 3 the first operation."""
    assert fused(*inside, result=result) == size


def test_slices_of_a_loop_are_not_the_stack():
    """One product and one elementwise kernel a turn, of a stack of six matrices."""

    def program(w_LDD, x_BD):
        return jax.lax.scan(lambda x_BD, w_DD: (jnp.sin(x_BD @ w_DD), None), x_BD, w_LDD)[0]

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((6, 128, 128), (256, 128))]
    report = memory.analyze(jax.jit(program).trace(*shapes))
    found, weights, values = report.work["forward"], 4 * 128 * 128, 4 * 256 * 128
    (loop,) = [step for step in report.schedule if isinstance(step, Loop)]
    (product,) = [kernel for kernel in loop.steps if isinstance(kernel, ScheduledKernel) and kernel.kind == "product"]
    assert (loop.trips, product.size, product.flops) == (6, (1, 256, 128, 128), 2 * 256 * 128 * 128)
    assert found["product_bytes"] == 6 * (weights + 2 * values)
    # sin reads and writes; a slice of the stack is copied out, the first carry in.
    least = 6 * (2 * values + 2 * weights)
    assert least <= found["other_bytes"] <= least + 2 * values + 6 * 64
    assert found["flops"] == {"tf32": 6 * 2 * 256 * 128 * 128}


def test_phases_and_branches(devices):
    def loss(w_DD, x_BD, take):
        with jax.named_scope("model"):
            return jax.lax.cond(take, lambda: x_BD @ w_DD @ w_DD, lambda: jnp.sin(x_BD @ w_DD)).sum()

    def step(w_DD, x_BD, take):
        gradient = jax.grad(loss)(w_DD, x_BD, take)
        with jax.named_scope("optimizer"):
            return w_DD - 0.1 * gradient

    kinds = (((64, 64), jnp.float32), ((32, 64), jnp.float32), ((), jnp.bool))
    shapes = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
    found = memory.analyze(jax.jit(step).trace(*shapes)).work
    assert found["optimizer"]["product_bytes"] == 0 and found["optimizer"]["other_bytes"] == 3 * 4 * 64 * 64
    assert found["forward"]["product_bytes"] > 0 < found["backward"]["product_bytes"]
    weights, values = 4 * 64 * 64, 4 * 32 * 64
    assert found["forward"]["product_bytes"] <= 2 * (weights + 2 * values)
