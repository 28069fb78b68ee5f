"""XLA's pools of pinned host memory: their growth, their limit, and the terms and findings that follow from them."""

import dataclasses

import pytest

from bytescope.memory.allocators import pinned_pool
from bytescope.memory.allocators.pinned_pool import PinnedRule, pinned_pool_bytes, pinned_rule, smallest_limit_gib
from bytescope.memory.devices import targets
from bytescope.memory.devices.platform import (
    HOST_LIMIT_VARIABLE,
    OWN_HOST_LIMIT_VARIABLE,
    PREALLOCATE_HOST_VARIABLE,
    choose_platform,
)
from bytescope.memory.findings.host_findings import host_findings, with_host_memory
from bytescope.memory.host.host_terms import LIBRARIES
from bytescope.memory.records.host_record import HostMemory, HostTerm
from bytescope.memory.records.report_record import ROWS, Buffer, ReportRecord, XlaStats
from bytescope.memory.units import GIB, MIB
from bytescope.train.plan.config_facts import model_facts
from bytescope.train.program.config_files import flatten
from support.facts import NOTHING
from support.toy import small_config

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (HOST_LIMIT_VARIABLE, OWN_HOST_LIMIT_VARIABLE, PREALLOCATE_HOST_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_regions_double_until_the_limit():
    sizes = [1, 2 * MIB, 4 * MIB, 9 * MIB, 20 * MIB]  # each needs a region: 2, 4, 8, 16 and 32 MiB
    taken = [pinned_pool_bytes(sizes[:count]).reserved for count in range(6)]
    assert taken == [0, 2 * MIB, 6 * MIB, 14 * MIB, 30 * MIB, 62 * MIB]
    eight = [8 * GIB] * 8
    assert pinned_pool_bytes(eight) == (64 * GIB, 64 * GIB, 64 * GIB, 0)  # 8 + 8 + 16 + 32 GiB
    assert pinned_pool_bytes([*eight, 1]) == (64 * GIB, 64 * GIB, 64 * GIB + 256, 256)
    assert pinned_pool_bytes([*eight, 1], PinnedRule(200 * GIB)).reserved == 128 * GIB
    assert pinned_pool_bytes([*eight, 1], PinnedRule(72 * GIB)).reserved == 72 * GIB  # the last region is cut


def test_a_buffer_needs_contiguous_memory():
    three = [5 * GIB] * 3  # one in each of the regions of 8, 8 and 16 GiB
    assert pinned_pool_bytes(three).reserved == 32 * GIB
    assert smallest_limit_gib(three) == 21  # regions of 8, 8 and 5 GiB
    assert smallest_limit_gib(three, preallocates=True) == 15
    assert pinned_pool_bytes(three, PinnedRule(16 * GIB, preallocates=True)) == (16 * GIB, 16 * GIB, 15 * GIB, 0)
    assert smallest_limit_gib([]) == smallest_limit_gib([1]) == 1


def test_the_limit_is_the_users_or_the_trainers_or_xlas(tmp_path):
    node = {"platform": "cuda", "host_memory_bytes": 1000 * GIB}
    assert pinned_rule(node, False, {}) == (64 * GIB, False, "XLA's default")
    assert pinned_rule(node, False, {PREALLOCATE_HOST_VARIABLE: "TRUE"})[:2] == (16 * GIB, True)
    assert pinned_rule(node, True, {}).limit == 900 * GIB
    assert pinned_rule(node, True, {HOST_LIMIT_VARIABLE: "180"}) == (180 * GIB, False, HOST_LIMIT_VARIABLE)
    own = {"JAX_PLATFORMS": "cuda"}
    choose_platform(str(tmp_path), own)
    assert int(own[HOST_LIMIT_VARIABLE]) > 0 and pinned_rule(node, False, own).limit == 64 * GIB


def offloaded(*sizes, target="h200:8", temp=0, **changes):
    """A report of a program that keeps arguments of these sizes in bytes, and a block, in host memory."""
    buffers = [Buffer(f"state[{at}]", size, phase="argument", memory="host") for at, size in enumerate(sizes)]
    described = {**targets.parse(target).to_json(), **changes}
    return ReportRecord(
        MIB,
        MIB,
        dict.fromkeys(ROWS, 0),
        buffers=tuple(buffers),
        host_bytes=sum(sizes) + temp,
        target=described,
        xla=XlaStats(host_temp_bytes=temp),
    )


def test_terms_are_the_buffers_and_the_rest_of_the_regions():
    report = offloaded(9 * GIB, 9 * GIB, temp=GIB)
    first, second = pinned_pool.pinned_terms(report, by_trainer=False)
    assert (first.name, first.bytes) == ("pinned buffers of 8 devices", 8 * 19 * GIB)
    assert second.bytes == 8 * (16 + 16 - 19) * GIB and {first.phase, second.phase} == {"train"}
    one = pinned_pool.pinned_terms(report, by_trainer=False, processes=8)
    assert [term.bytes * 8 for term in one] == [first.bytes, second.bytes]
    assert pinned_pool.pinned_terms(offloaded(), False) == ()
    assert pinned_pool.pinned_terms(offloaded(GIB, target="v5e:2x2"), False) == ()


def kinds(report, program=NOTHING):
    from bytescope.memory.findings import finding_rules

    return {finding.kind: finding for finding in finding_rules.find(report, program)}


def test_xlas_limit_below_what_offload_needs():
    report = offloaded(*[10 * GIB] * 7)
    found = kinds(report)["pinned_limit"]
    assert "needs 70.00 GiB" in found.message and "at most 64.00 GiB (XLA's default)" in found.message
    limit = smallest_limit_gib([10 * GIB] * 7)
    assert f"{HOST_LIMIT_VARIABLE}={limit} " in found.remedy
    assert not pinned_pool_bytes([10 * GIB] * 7, PinnedRule(limit * GIB)).refused
    assert pinned_pool_bytes([10 * GIB] * 7, PinnedRule((limit - 1) * GIB)).refused
    assert "pinned_limit" not in kinds(offloaded(*[10 * GIB] * 4))
    trainer = dataclasses.replace(NOTHING, facts=model_facts(flatten(small_config({"offload.optimizer": True}))))
    assert "pinned_limit" not in kinds(report, trainer), "bytescope train raises the limit itself"


def test_a_pool_that_doubles_past_the_node(monkeypatch):
    report = offloaded(9 * GIB, 9 * GIB, host_memory_bytes=200 * GIB)  # 144 GiB of buffers in 8 x 32 GiB
    found = kinds(report)["pinned_growth"]
    assert "take 256.00 GiB for 144.00 GiB" in found.message and "the host has 200.00 GiB" in found.message
    assert f"{HOST_LIMIT_VARIABLE}=25 " in found.remedy  # regions of 16 and 9 GiB
    assert "pinned_growth" not in kinds(offloaded(9 * GIB, 9 * GIB, host_memory_bytes=256 * GIB))
    assert "pinned_growth" not in kinds(offloaded(9 * GIB, 9 * GIB, host_memory_bytes=100 * GIB))  # host_memory instead
    tight = kinds(offloaded(9 * GIB, 9 * GIB, host_memory_bytes=160 * GIB))["pinned_growth"]
    assert f"{HOST_LIMIT_VARIABLE}=18 and {PREALLOCATE_HOST_VARIABLE}=true" in tight.remedy
    monkeypatch.setenv(HOST_LIMIT_VARIABLE, "25")
    assert "pinned_growth" not in kinds(report)


def test_all_processes_of_a_node_beyond_the_node():
    host = HostMemory((HostTerm("restore", "copies of the checkpoint", 90 * GIB),), 8, 512 * GIB, "--host-memory")
    (found,) = host_findings(host)
    assert found.kind == "node_memory" and found.bytes == 208 * GIB
    assert "the 8 processes of a node need 720.00 GiB" in found.message and "restore" in found.message
    assert found.remedy == (
        "run at most 5 processes per node (one process can use all devices of a node), "
        'reduce "copies of the checkpoint", or use a node with more memory'
    )
    (alone,) = host_findings(dataclasses.replace(host, processes=1, node_bytes=64 * GIB))
    assert alone.message.startswith("a process needs 90.00 GiB") and "per node" not in alone.remedy
    libraries = HostMemory((HostTerm("start", LIBRARIES, 2 * GIB),), 1, GIB, "the memory of this machine")
    (found_small,) = host_findings(libraries)
    assert found_small.remedy == "use a node with more memory, or give the size of your node with --host-memory"
    assert with_host_memory(offloaded(), host).findings == (found,)
    assert with_host_memory(offloaded(), host).host_memory == host
    assert not host_findings(dataclasses.replace(host, node_bytes=1024 * GIB))
    assert not host_findings(dataclasses.replace(host, node_bytes=None))
