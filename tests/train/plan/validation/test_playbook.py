"""The Playbook's rows: which are said, and what of each is held."""

import re
from collections import Counter

import pytest

from bytescope.memory.seconds.achieved import NETWORKS
from bytescope.model.remat.policies import ADAPTERS, EXPERTS, LATENTS, POLICIES
from bytescope.train.plan.validation import setups_playbook

pytestmark = pytest.mark.quick


def test_the_rows_that_are_compiled_are_those_without_suspicion():
    rows = setups_playbook.rows()
    assert len(rows) == 532 and len({row.id for row in rows}) == 532
    said = Counter((row.gpus, row.stages > 1) for row in rows if not row.reason)
    assert said == {(8, False): 26, (32, False): 52, (64, False): 52, (8, True): 40, (32, True): 120, (64, True): 187}
    assert Counter(row.stages for row in rows if not row.reason) == {1: 130, 2: 159, 4: 107, 8: 61, 16: 19, 32: 1}
    assert sum("suspect" in row.reason for row in rows) == 51
    assert all(row.config and row.overrides for row in rows if not row.reason)


def test_every_row_computes_one_batch_on_its_devices():
    for row in setups_playbook.rows():
        if not row.reason:
            of = row.overrides
            sequences = int(of["mesh.fsdp"]) * int(of["batch.micro"]) * int(of["batch.accumulation"])
            assert sequences == 256, row
            assert int(of["mesh.fsdp"]) * int(of["mesh.tensor"]) * int(of.get("mesh.stage", 1)) == row.gpus, row
            assert int(of.get("mesh.stage", 1)) == row.stages, row


def test_a_row_says_its_setup():
    row = next(row for row in setups_playbook.rows() if row.setup == "dp2 tp4 zero1 1x128")
    assert (row.model, row.target, row.tensor) == ("llama-8.86B", "h100:8", 4)
    assert row.overrides["mesh.strategy"] == "zero1" and row.overrides["mesh.sequence_parallel"] == "True"
    assert row.measured_seconds == pytest.approx(21.0113) and row.measured_bytes == 36946 << 20
    assert row.launch_seconds == pytest.approx(4.4e-3 * 32 * 128) and row.host_bound is True
    plain = next(row for row in setups_playbook.rows() if row.setup == "dp8 tp1 zero0 2x16")
    assert plain.overrides["mesh.strategy"] == "ddp" and plain.overrides["mesh.sequence_parallel"] == "False"
    assert plain.host_bound is False


def test_stages_have_the_floor_of_their_own_layers_and_bubble():
    row = next(
        row for row in setups_playbook.rows() if (row.model, row.setup) == ("llama-1.34B", "dp2 tp2 pp2 zero1 1x128")
    )
    assert row.launch_seconds == pytest.approx(4.4e-3 * 16 / 2 * (128 + 1)) and row.stages == 2
    assert row.overrides["pipeline.schedule"] == "1f1b" and row.overrides["mesh.stage"] == "2"


def test_a_split_over_hosts_has_a_floor_of_its_own_and_rows_near_it_do_not_count_for_the_level():
    rows = {(row.model, row.gpus, row.setup): row for row in setups_playbook.rows()}
    bound, free = rows["llama-8.86B", 32, "dp1 tp32 zero0 1x256"], rows["llama-8.86B", 32, "dp1 tp32 zero0 16x16"]
    assert bound.launch_seconds == pytest.approx(15.4e-3 * 32 * 256) and bound.host_bound is True
    assert free.launch_seconds == pytest.approx(15.4e-3 * 32 * 16) and free.host_bound is False
    assert rows["llama-1.34B", 32, "dp2 tp16 zero0 1x128"].host_bound is True


def test_hosts_are_joined_by_the_network_of_their_instances():
    assert {(row.gpus, row.network) for row in setups_playbook.rows()} == {(8, ""), (32, "efa"), (64, "efa")}
    assert {row.network for row in setups_playbook.rows()} - {""} <= set(NETWORKS)


def test_a_slot_that_was_faster_on_other_gpus_is_said():
    rows = {(row.model, row.gpus, row.setup): row for row in setups_playbook.rows()}
    assert "1.7x" in rows["llama-8.86B", 32, "dp2 tp16 zero1 16x8"].differs
    assert not rows["llama-8.86B", 32, "dp1 tp32 zero0 16x16"].differs


# What src/nanotron/models/llama.py and the kernels it calls save for the gradient of a layer, by our names; the input
# of the layer is kept under any policy.
SAVED = {"attn_norm", "q_rot", "k_rot", "v", "context", "lse", "mid", "mlp_norm", "gate", "up", "act"}


def test_the_policy_keeps_what_nanotron_keeps():
    (policy,) = {row.overrides["remat.policy"] for row in setups_playbook.rows() if row.overrides}
    # What only other families, adapters, experts, latents, dropout and fp8 make is not in these programs, or not read.
    other = {"q", "k", "attn_out", "mlp_out", *ADAPTERS, *EXPERTS, *LATENTS}
    names = set(POLICIES[policy].names) - other
    assert {name for name in names if not name.endswith(("_mask", "_fp8", "_scale"))} == SAVED


def needed(row):
    """Bytes that nanotron holds at once at least: bfloat16 parameters, float32 sums, masters and moments, DDP's
    buckets, what layers keep, and the logits twice in float32."""
    layers, h, heads, f, tied = setups_playbook.SHAPES[row.model]
    dp, tp, zero, micro = (int(part) for part in re.findall(r"\d+", row.setup)[:4])
    parameters = layers * (4 * h * h + 3 * h * f) + 131072 * h * (1 if tied else 2)
    state = 6 + 12 / (dp if zero else 1) + (2 if dp > 1 and not zero else 0)
    token = layers * (20 * h + 8 * f + 4 * heads + 8) + 131072 * 8
    return (parameters * state + micro * 4096 * token) / tp


def test_no_run_reserved_less_than_it_needs_but_the_one_that_says_so():
    said = [row for row in setups_playbook.rows() if not row.reason and row.stages == 1]
    ratios = {row.id: row.measured_bytes / needed(row) for row in said}
    (doubted,) = (row for row in said if row.bytes_reason)
    assert ratios.pop(doubted.id) < 0.5
    assert min(ratios.values()) > 1.03
    assert needed(doubted) / 2**30 == pytest.approx(60.7, abs=0.05)


def test_rows_that_ran_out_of_memory_are_those_slower_than_half_their_micro_batch():
    runs = {}
    for row in setups_playbook.rows():
        if not row.reason and row.stages == 1:
            dp, tp, zero, micro = (int(part) for part in re.findall(r"\d+", row.setup)[:4])
            runs.setdefault((row.model, row.gpus, dp, tp, zero), {})[micro] = row
    slower = set()
    for of in runs.values():
        for micro, row in of.items():
            if (half := of.get(micro // 2)) and row.measured_seconds > 1.5 * half.measured_seconds:
                assert row.measured_bytes - half.measured_bytes < needed(row) - needed(half) - 9 * 2**30
                slower.add(row.id)
    assert slower == {row.id for row in setups_playbook.rows() if "out of memory" in row.differs}


def test_every_row_is_a_config_of_ours():
    from bytescope.train.plan.config_factory import check_config

    for row in setups_playbook.rows()[::7]:
        if row.config:
            check_config(row.config, list(row.overrides.items()))
