"""The order of least memory: on schedules written by hand, where the best order is known."""

import pytest

from bytescope.memory.hlo.module import Computation, Instruction, Module
from bytescope.memory.hlo.shapes import HloShape
from bytescope.memory.peak import memory_order

pytestmark = pytest.mark.quick


def schedule(*rows, predecessors=None):
    """A module whose entry runs the rows in order: (name, bytes of the result, names that it reads)."""
    module, ids = Module(entry=1), {}
    for number, (name, size, *operands) in enumerate(rows, 1):
        ids[name] = number
        opcode = name if name in ("parameter", "tuple") else "custom-call"
        instruction = Instruction(number, name, opcode, [ids[each] for each in operands], computation=1)
        instruction.predecessors += [ids[each] for each in (predecessors or {}).get(name, ())]
        module.instructions[number] = instruction
        module._shapes[number] = HloShape("uint8", (size,), bits=8)
    order = list(module.instructions)
    parameters = {0: ids["parameter"]} if "parameter" in ids else {}
    module.computations[1] = Computation(1, "main", order[-1], order, order, parameters)
    return module


def test_a_deferred_reader_runs_as_soon_as_its_operands_exist():
    """Each weight gradient g frees an activation x and a cotangent d, and the compiler runs all of them at the end."""
    module = schedule(
        ("parameter", 1),
        ("x1", 100, "parameter"),
        ("x2", 100, "x1"),
        ("x3", 100, "x2"),
        ("d3", 100, "x3"),
        ("d2", 100, "d3"),
        ("d1", 100, "d2"),
        ("g3", 10, "x3", "d3"),
        ("g2", 10, "x2", "d2"),
        ("g1", 10, "x1", "d1"),
        ("end", 1, "g1", "g2", "g3"),
    )
    found = memory_order.find(module)
    assert (found.compiled_bytes, found.least_bytes, found.excess_bytes) == (610, 410, 200)
    held = {value.instruction.name: value.reader.name for value in found.held}
    assert held == {"x3": "g3", "d3": "g3", "x2": "g2"}
    assert [value.bytes for value in found.held] == [100, 100, 100]


def test_a_value_computed_early_moves_to_its_reader():
    module = schedule(
        ("parameter", 1), ("early", 50, "parameter"), ("a", 100, "parameter"), ("b", 10, "a"), ("end", 1, "b", "early")
    )
    found = memory_order.find(module)
    assert (found.compiled_bytes, found.least_bytes) == (160, 110)
    assert [(value.instruction.name, value.reader) for value in found.held] == [("early", None)]


def test_an_order_that_needs_least_stays():
    module = schedule(("parameter", 1), ("a", 100, "parameter"), ("b", 10, "a"), ("end", 1, "b"))
    assert memory_order.find(module) == memory_order.OrderEstimate(110, 110, ())


def test_control_dependencies_hold():
    rows = (("parameter", 1), ("early", 50, "parameter"), ("a", 100, "parameter"), ("b", 10, "a"))
    module = schedule(*rows, ("end", 1, "b", "early"), predecessors={"a": ["early"]})
    assert memory_order.find(module).excess_bytes == 0


def test_without_a_schedule_there_is_no_estimate():
    module = schedule(("parameter", 1), ("end", 1, "parameter"))
    module.computations[1].schedule = None
    assert memory_order.find(module) == memory_order.find(Module()) == memory_order.OrderEstimate()
