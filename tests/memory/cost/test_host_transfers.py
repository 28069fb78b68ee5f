"""Bytes between device and host memory, of a program that offloads a known number of them."""

import jax
import jax.numpy as jnp
import pytest

from bytescope.memory.cost import host_transfers
from bytescope.memory.hlo.module import Computation, Instruction, Module
from bytescope.memory.hlo.shapes import HloShape


def module(opcode, operands, result):
    """A module that runs `opcode` once over operands (shapes) with a result."""
    out = Module(entry=1, computations={1: Computation(1, instructions=[])})
    for i, shape in enumerate([*operands, result], 1):
        last = i == len(operands) + 1
        out.instructions[i] = Instruction(
            i, f"i{i}", opcode if last else "parameter", computation=1, operands=list(range(1, i)) if last else []
        )
        out.computations[1].instructions.append(i)
        out._shapes[i] = shape
    return out


def array(elements, host=False):
    return HloShape("float32", (elements,), host_transfers.HOST_SPACE * host, None, 32)


@pytest.mark.parametrize(
    ("opcode", "operands", "result", "moved"),
    [
        ("copy", [array(10)], array(10, True), (40, 0)),
        ("copy", [array(10)], array(10), (0, 0)),
        ("copy-start", [array(10, True)], HloShape(parts=(array(10), array(10, True))), (0, 40)),
        ("dynamic-slice", [array(10, True), array(1)], array(5), (0, 20)),
        ("dynamic-update-slice", [array(10, True), array(5), array(1)], array(10, True), (20, 0)),
        ("add", [array(10, True), array(10)], array(10), (0, 0)),
    ],
)
def test_what_moves(opcode, operands, result, moved):
    found = host_transfers.find(module(opcode, operands, result), 8.0)
    assert {row.direction: (row.bytes, row.seconds) for row in found} == {
        direction: (size, size / 8) for direction, size in zip(("to host", "to device"), moved) if size
    }


def test_a_program_without_host_memory_moves_nothing():
    from bytescope import memory

    report = memory.analyze(jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((8, 8))))
    assert report.transfers == () and report.moved("to host") == 0
