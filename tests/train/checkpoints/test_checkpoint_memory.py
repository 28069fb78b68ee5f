"""Host memory of checkpoints: bytes that a process writes and reads, the terms by phase, and wasteful restores."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.serialization import replica_slices

from bytescope.memory.host import host_ledger
from bytescope.memory.host.host_ledger import ledger
from bytescope.memory.host.process_memory import host_phase, phase_peaks, resident
from bytescope.train.checkpoints.checkpoint import Checkpoints, Position, checksums
from bytescope.train.checkpoints.checkpoint_memory import (
    array_shares,
    expect_restore,
    expect_saves,
    restore_findings,
    restore_terms,
    save_terms,
    saves_overlap,
    stored_chunks,
)
from bytescope.train.checkpoints.saved_state import portable, shard_bytes, write_limit
from bytescope.train.step.state import TrainState
from support.toy import first_state, small_program

SHAPE = (8, 1024, 2**14)  # float32, 512 MiB


def large_state(spec, devices=8):
    """The shapes of a state of 1.5 GiB on a mesh [2, 4] of 8 devices, or on a mesh of one device."""
    mesh = jax.make_mesh(
        (2, devices // 2) if devices > 1 else (1, 1), ("data", "fsdp"), devices=jax.devices()[:devices]
    )
    leaf = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(mesh, spec))
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return TrainState(count, {"w": leaf}, {"mu": {"w": leaf}, "nu": {"w": leaf}}, {}, None, None)


REPLICATED, SHARDED, HALF = large_state(P()), large_state(P(None, ("data", "fsdp"))), large_state(P(None, "fsdp"))
MOMENT = SHARDED.opt_state["mu"]["w"]
ARRAYS = 3 * 4 * math.prod(SHAPE) + 4  # with the step


def by_name(terms):
    return {(term.phase, term.name): term.bytes for term in terms}


@pytest.mark.parametrize("spec", [P(), P("fsdp"), P(None, "data"), P(("data", "fsdp"))])
def test_a_process_writes_the_bytes_that_orbax_gives_it(spec):
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for shape in ((8, 6), (16, 24)):
        leaf = jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, spec))
        (share,) = array_shares([leaf])
        slices = replica_slices.get_replica_slices(leaf, 0, True)
        assert share.written == slices.nbytes == leaf.nbytes
        assert share.sliced == any(one.slice_args is not None for one in slices.replica_slices)
        assert share.on_devices == sum(shard.data.nbytes for shard in leaf.addressable_shards)


def test_offloaded_arrays_of_described_devices_count_like_those_on_the_devices():
    sharding = MOMENT.sharding
    hosted = NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind="pinned_host")
    offloaded = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=hosted)
    assert array_shares([offloaded, SHARDED.step])[0] == array_shares([MOMENT])[0]


def test_processes_share_the_bytes_of_a_save():
    for state in (SHARDED, HALF, REPLICATED):  # replicas write a slice each
        assert sum(share.written for share in array_shares(portable(state), processes=8)) == (ARRAYS - 4) // 8 + 4
    assert sum(share.read for share in array_shares(portable(HALF), processes=4)) == (ARRAYS - 4) // 2 + 4
    assert sum(share.read for share in array_shares(portable(HALF), processes=2)) == ARRAYS


def test_a_gpu_copies_what_it_writes_and_a_cpu_takes_views():
    copy = ("save", "copy of the state for the checkpoint")
    assert by_name(save_terms(SHARDED, "cuda", 8))[copy] == (ARRAYS - 4) // 8 + 4
    assert by_name(save_terms(SHARDED, "cpu"))[copy] == 0
    assert by_name(save_terms(REPLICATED, "cpu"))[copy] == ARRAYS - 4
    assert by_name(save_terms(REPLICATED, "cpu"))["save", "training state"] == 8 * ARRAYS
    phases = {term.phase for term in save_terms(SHARDED, "cuda")}
    assert phases == {"save"} and {term.phase for term in save_terms(SHARDED, "cuda", overlaps=True)} == {
        "save",
        "train",
    }


@pytest.mark.parametrize(
    ("steps", "every", "done", "overlaps"),
    [(20, 0, None, False), (20, 20, None, False), (20, 10, None, False), (20, 9, None, True), (20, 10, 5, True)],
)
def test_updates_overlap_with_saves_but_the_first_and_the_last(steps, every, done, overlaps):
    assert saves_overlap(steps, every, done) == overlaps
    assert not saves_overlap(20, 10, 10)


def test_chunks_in_flight_are_limited_when_saving_and_by_threads_when_restoring():
    one = large_state(P(), devices=1)
    limit, leaf = write_limit(one), 4 * math.prod(SHAPE)
    assert 2 * leaf < limit < 2 * leaf + 2 * 10**9
    chunks = by_name(save_terms(one, "cuda"))["save", "compressed chunks that are not yet written"]
    assert chunks == int(0.92 * ARRAYS)  # less than the limit
    unlimited = by_name(save_terms(large_state(P(None, None, "fsdp")), "cuda", 2))
    assert unlimited["save", "compressed chunks that are not yet written"] == int(0.92 * (ARRAYS // 2 + 2))
    decoding = [
        by_name(restore_terms(one, "cpu", threads=threads))["restore", "chunks that are being decoded"]
        for threads in (1, 2, None)
    ]
    assert decoding == [int(1.92 * leaf), int(1.92 * 2 * leaf), int(1.92 * ARRAYS)]


def test_decoded_chunks_add_up_where_a_process_needs_a_part_of_each():
    whole = dict.fromkeys(("params.w", "opt_state.mu.w", "opt_state.nu.w"), SHAPE)
    terms = by_name(restore_terms(SHARDED, "cpu", processes=8, chunks=whole, threads=1))
    assert sum(terms.values()) == ARRAYS  # all chunks, more than the shards and one chunk
    assert sum(by_name(restore_terms(SHARDED, "cpu", processes=8, threads=1)).values()) < ARRAYS / 2


def test_processes_of_a_node_that_hold_replicas_are_found():
    (finding,) = restore_findings(REPLICATED, processes=8, per_node=8)
    assert finding.kind == "replicated_restore" and finding.bytes == 7 * ARRAYS
    assert "12.00 GiB of host memory on each node: each of the 8 processes holds 1.50 GiB" in finding.message
    assert "one process per node" in finding.remedy
    assert not restore_findings(REPLICATED, processes=1, per_node=1)  # reads once, for all of its devices
    assert not restore_findings(REPLICATED, processes=8, per_node=1)
    assert not restore_findings(SHARDED, processes=8, per_node=8)


def test_processes_that_decode_whole_files_for_a_part_are_found():
    whole = dict.fromkeys(("params.w", "opt_state.mu.w", "opt_state.nu.w"), SHAPE)
    (finding,) = restore_findings(SHARDED, processes=8, per_node=8, chunks=whole)
    assert finding.kind == "whole_file_restore" and finding.bytes == 7 * (ARRAYS - 4)
    assert "decodes 12.00 GiB of chunks on each node for 1.50 GiB of arrays" in finding.message
    assert not restore_findings(SHARDED, processes=1, per_node=1, chunks=whole)
    parts = dict.fromkeys(whole, (8, 128, 2**14))
    assert not restore_findings(SHARDED, processes=8, per_node=8, chunks=parts)


@pytest.fixture(scope="module")
def program():
    return small_program({"model.n_layers": 1})


def test_the_chunks_of_a_checkpoint_are_the_shards_that_saved_it(tmp_path, program, monkeypatch):
    monkeypatch.setattr(host_ledger, "_EXPECTED", {})
    checkpoints = Checkpoints(tmp_path, 1, state=program.state)
    checkpoints.save(first_state(program), Position(1, 8))
    checkpoints.close()
    folder = tmp_path / "checkpoints" / "1"
    saved = portable(program.state)
    chunks = stored_chunks(folder / "state")
    shares = array_shares(saved)
    assert set(chunks) == {share.path for share in shares}
    assert [share.chunk for share in array_shares(saved, chunks=chunks)] == [share.shard for share in shares]
    assert stored_chunks(tmp_path) is None
    expect_saves(program.state, "cpu", 1, overlaps=False)
    assert not expect_restore(program.state, "cpu", 1, folder)
    assert {"save", "restore"} <= {term.phase for term in ledger().terms}
    assert ledger().predicted("restore") > resident()[0] / 2


def test_the_limit_of_a_save_reaches_orbax_and_is_above_every_shard(tmp_path, program, monkeypatch):
    limits = []
    handler = ocp.StandardCheckpointHandler
    monkeypatch.setattr(ocp, "StandardCheckpointHandler", lambda **limit: limits.append(limit) or handler(**limit))
    Checkpoints(tmp_path, 1, state=program.state).close()
    assert limits == [{"save_concurrent_gb": 1}]
    for state in (REPLICATED, SHARDED, large_state(P(), devices=1)):
        for processes in (1, 8):
            assert write_limit(state, processes) > 2 * max(shard_bytes(leaf) for leaf in jax.tree.leaves(state))
    many = dataclasses.replace(REPLICATED, params={str(number): REPLICATED.params["w"] for number in range(64)})
    assert [write_limit(many, processes) // 10**9 for processes in (1, 16)] == [5, 2]  # an eighth of 35 GB, two shards


def test_checksums_need_memory_for_one_array_only():
    """XLA for CPUs materializes the products that are summed: for all arrays at once that is a second state."""
    leaves = [jnp.full((2**22,), number, jnp.float32) for number in range(8)]  # 16 MiB each
    checksums(leaves)
    before = resident()[0]
    with host_phase("quantize"):  # a phase that no other test of this process enters
        checksums(leaves)
    assert phase_peaks()["quantize"] - before < 64 * 2**20
