"""The host memory that a run is predicted to hold, by phase."""

import jax
import jax.numpy as jnp
import pytest

from bytescope.memory.devices import targets
from bytescope.memory.records.report_record import POOL, Buffer, ReportRecord, RuntimeOverhead
from bytescope.memory.units import GIB, MIB
from bytescope.train.plan.run_memory import RUN_PHASES, run_host_memory, run_terms
from bytescope.train.step.optimizer.host_offload import device_bytes
from support.toy import small_program

pytestmark = pytest.mark.quick


def report_on(name, **fields):
    overhead = RuntimeOverhead("batches waiting", 1024, POOL, "")
    return ReportRecord(
        3 * GIB, 3 * GIB, {}, target=targets.parse(name).to_json(), runtime_overheads=(overhead,), **fields
    )


def by_phase(terms):
    terms = [*terms]
    return {phase: {term.name: term.bytes for term in terms if term.phase == phase} for phase in RUN_PHASES}


@pytest.mark.parametrize("devices", [1, 4])
def test_on_cpus_arrays_and_temporaries_of_all_devices_are_host_memory(devices):
    program = small_program(devices=devices)
    state, batch = device_bytes(program.state), device_bytes(program.batch_shapes)
    found = by_phase(run_terms(program, report_on("cpu"), devices))
    assert all(found[phase]["training state"] == devices * state for phase in RUN_PHASES if found[phase])
    assert found["train"]["temporaries of the step"] == devices * (3 * GIB - state - batch)
    assert found["train"]["batches on the devices"] == devices * (batch + 1024)
    step = sum(found["train"][name] for name in ("training state", "temporaries of the step", "batches on the devices"))
    assert step == devices * report_on("cpu").predicted_bytes
    params = device_bytes(program.state.model_params)
    assert found["initialize"]["random bits of all parameters"] == devices * (params * 3 // 2)


def test_on_gpus_only_batches_and_offloaded_arrays_are():
    program = small_program(devices=4)
    found = by_phase(run_terms(program, report_on("h100:8"), 8))
    assert "training state" not in found["train"] and "temporaries of the step" not in found["train"]
    assert not any("pinned" in name for name in found["train"])
    buffers = (Buffer("moments", 100 * MIB, "", "optimizer", "argument", memory="host"),)
    offloads = report_on("h100:8", host_bytes=100 * MIB, buffers=buffers)
    found = by_phase(run_terms(program, offloads, 8))
    assert found["train"]["pinned buffers of 8 devices"] == 8 * 100 * MIB
    assert sum(found["train"].values()) < 2 * GIB  # the rest of the regions of the pools is among them


def test_batches_wait_in_host_memory_as_far_as_the_reader_is_ahead():
    keys = {"data.prefetch": 6, "data.workers": 2}
    program = small_program(keys)
    found = by_phase(run_terms(program, report_on("cpu"), 1))
    assert found["train"]["batches in host memory"] == device_bytes(program.batch_shapes) * (6 + 2 + 1)


def test_a_report_has_all_phases_of_a_run_on_the_target():
    """A larger program takes more memory to compile; a run without a sample has no such phase."""
    program = small_program({"train.sample_tokens": 0})

    def held(layers):
        def step(x):
            for _ in range(layers):
                x = jnp.sin(x)
            return x

        jaxpr = jax.make_jaxpr(step)(1.0)
        return run_host_memory(program, report_on("h100:8"), targets.parse("h100:8"), jaxpr)

    small, large = held(10), held(1000)
    begin = ("start", "trace", "compile", "analyze", "initialize")
    assert small.phases() == (*begin, "restore", "train", "evaluate", "save")
    assert large.predicted("compile") > small.predicted("compile") + 5 * MIB
    assert large.node_bytes >= 512 * GIB and large.verdict == "fits" and large.processes == 1
