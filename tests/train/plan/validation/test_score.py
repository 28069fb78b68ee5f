"""Scores by hand: ratios, pairs, ranks, bytes."""

import dataclasses

import pytest

from bytescope.train.plan.validation import validation_score
from bytescope.train.plan.validation.measured_rows import MeasuredRow
from bytescope.train.plan.validation.validation_score import ScoredRun

pytestmark = pytest.mark.quick


def scored(
    measured,
    predicted,
    *,
    tensor=1,
    model="m",
    gpus=8,
    held=None,
    ours=None,
    launch=0.0,
    bound=None,
    stages=1,
    micro=1,
    **more,
):
    row = MeasuredRow(
        "s",
        f"{measured}",
        model,
        "h100",
        gpus,
        {"batch.accumulation": f"{micro}"},
        "tiny",
        "h100:8",
        measured,
        held,
        "A",
        "somewhere",
        tensor=tensor,
        stages=stages,
        launch_seconds=launch,
        host_bound=bound,
        **more,
    )
    return ScoredRun(row, predicted, validation_score.with_launches(predicted, row), predicted, predicted, ours)


def test_pairs_count_those_apart_and_ties_by_half():
    runs = [
        scored(1.0, 2.0, tensor=1),
        scored(1.04, 1.0, tensor=2),
        scored(2.0, 2.0, tensor=2),
        scored(4.0, 5.0, tensor=1),
    ]
    pairs = validation_score.pairs_of(runs)
    # 1 against 1.04 is not apart. 1-2: tie; 1-4: right; 1.04-2, 1.04-4, 2-4: right.
    assert (pairs.count, pairs.right) == (5, pytest.approx(4.5 / 5))
    # By tensor: 1-2 right, 1-4 tie, 1.04-2 tie, 1.04-4 and 2-4 wrong.
    assert pairs.sorted_by["tensor"] == pytest.approx(2 / 5)
    assert (pairs.near_count, pairs.near_right) == (0, None)
    near = validation_score.pairs_of([scored(1.0, 3.0), scored(1.2, 2.0), scored(9.0, 10.0)])
    assert (near.near_count, near.near_right, near.right) == (1, 0.0, pytest.approx(2 / 3))


def test_ranks_share_their_mean():
    assert validation_score.spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert validation_score.spearman([3, 2, 1], [10, 20, 30]) == pytest.approx(-1)
    # ranks 0.5 0.5 2 3 against 0 1 2 3: covariance 4.5 over sqrt(4.5 * 5)
    assert validation_score.spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert validation_score.spearman([1, 2], [1, 2]) is None and validation_score.spearman([1, 1, 1], [1, 2, 3]) is None


def test_groups_are_never_pooled():
    runs = [scored(1.0, 0.9), scored(2.0, 2.4), scored(5.0, 5.0, gpus=64), scored(7.0, 7.0, model="n")]
    found = validation_score.groups(runs)
    assert [(group.model, group.gpus, group.all.rows) for group in found] == [("m", 8, 2), ("m", 64, 1), ("n", 8, 1)]
    first = found[0]
    assert first.all.median == pytest.approx(1.05) and first.all.within == 0.5 and first.order.pairs.right == 1.0


def test_runs_in_stages_have_a_group_and_pairs_of_their_own():
    runs = [
        scored(1.0, 1.0),
        scored(2.0, 2.1),
        scored(1.5, 3.0, stages=2),
        scored(3.0, 2.8, stages=2),
        scored(6.0, 6.0, stages=4),
        scored(9.0, 9.0, gpus=64, stages=2),
    ]
    one, staged, alone = validation_score.groups(runs)
    assert (one.staged, one.order.across, one.all.rows, one.name) == (False, None, 2, "m")
    assert one.order.pairs.count == 1
    assert (staged.staged, staged.all.rows, staged.name) == (True, 3, "m in stages")
    assert (staged.order.pairs.count, staged.order.pairs.right) == (1, 0.0)  # 1.5 before 3.0, predicted the other way
    # Of eight pairs across 1, 2 and 4 stages one is wrong: 1.5 before 2.0, predicted 3.0 and 2.1.
    assert (staged.order.across.count, staged.order.across.right) == (8, pytest.approx(7 / 8))
    assert (alone.gpus, alone.order.across.count, alone.order.across.right) == (64, 0, None)


def test_launches_set_the_pace_where_they_take_longer():
    slow = scored(2.0, 0.5, launch=1.9, bound=True)
    assert (slow.device_seconds, slow.predicted_seconds, slow.ratio) == (0.5, 1.9, 0.95)
    free = scored(2.0, 2.2, launch=1.9, bound=False)
    assert free.predicted_seconds == 2.2
    (group,) = validation_score.groups([slow, free])
    assert (group.all.free_rows, group.all.free_median) == (1, pytest.approx(1.1))


def test_bytes_are_compared_where_both_are_known():
    held = [scored(1.0 + ours, 1.0 + ours, held=100, ours=ours) for ours in (90, 100, 130)]
    (group,) = validation_score.groups([*held, scored(4.0, 4.0, ours=50), scored(None, 1.0, held=200, ours=50)])
    assert (group.all.bytes_rows, group.all.bytes_below, group.all.bytes_median) == (4, 0.75, 0.95)
    assert group.all.rows == 4 and group.all.within == 1


def test_bytes_that_are_doubted_are_not_compared():
    sure, doubted = scored(1.0, 1.0, held=100, ours=90), scored(2.0, 2.0, held=100, ours=300)
    doubted = dataclasses.replace(doubted, row=dataclasses.replace(doubted.row, bytes_reason="less than is needed"))
    (group,) = validation_score.groups([sure, doubted])
    assert (group.all.bytes_rows, group.all.bytes_below, group.all.rows) == (1, 1.0, 2)


def test_bytes_of_the_framework_alone_are_added_to_ours():
    one = scored(1.0, 1.0, held=100, ours=60, framework_bytes={"gathered inputs": 30, "workspaces": 5})
    assert one.bytes_ratio == pytest.approx(0.95)


def test_each_score_is_given_for_all_runs_and_for_those_claimed():
    runs = [
        scored(1.0, 1.0, tensor=1, held=100, ours=90),
        scored(2.0, 2.0, tensor=2, held=100, ours=80),
        scored(3.0, 0.5, tensor=1, held=100, ours=40, unreliable="the network"),
        scored(4.0, 0.4, tensor=4, held=100, ours=10, other_program="one program per stage"),
    ]
    (group,) = validation_score.groups(runs)
    assert (group.all.rows, group.claimed.rows) == (4, 2)
    assert (group.all.within, group.claimed.within) == (0.5, 1.0)
    assert (group.all.median, group.claimed.median) == (pytest.approx((1 + 0.5 / 3) / 2), 1.0)
    # Of six pairs one is right by prediction: 1 before 2.
    assert (group.order.pairs.count, group.order.pairs.right) == (6, pytest.approx(1 / 6))
    assert (group.claimed_order.pairs.count, group.claimed_order.pairs.right) == (1, 1.0)
    # Unreliable seconds say nothing against the bytes. Another program has other bytes.
    assert (group.all.bytes_rows, group.claimed.bytes_rows) == (4, 3)
    assert (group.claimed.bytes_least, group.claimed.bytes_most) == (0.4, 0.9)


def test_a_claimed_score_without_runs_is_empty():
    (group,) = validation_score.groups([scored(1.0, 2.0, stages=2, other_program="stages")])
    assert (group.all.rows, group.claimed.rows, group.claimed.median, group.claimed.within) == (1, 0, None, None)
    assert group.claimed_order.across.count == 0 and group.claimed_order.pairs.right is None


def test_baselines_sort_by_split_then_stages_then_micro_batches_smaller_first():
    runs = [
        scored(1.0, 9.0, tensor=1, micro=4, stages=1),
        scored(2.0, 5.0, tensor=1, micro=8, stages=1),
        scored(4.0, 4.0, tensor=2, micro=2, stages=1),
    ]
    found = validation_score.pairs_of(runs)
    assert (found.count, found.right) == (3, 0.0)
    assert found.sorted_by == {"tensor": pytest.approx(2.5 / 3), "tensor_micro": 1.0, "tensor_stages_micro": 1.0}
    # Of equal split: 2 stages with 4 micro-batches against 1 stage with 8. Only the stages have it in the wrong order.
    other = [scored(1.0, 1.0, stages=2, micro=4), scored(2.0, 2.0, stages=1, micro=8)]
    across = validation_score.pairs_of(other, across=True)
    assert across.sorted_by == {"tensor": 0.5, "tensor_micro": 1.0, "tensor_stages_micro": 0.0}
    (group,) = validation_score.groups(runs)
    assert group.order.spearman == pytest.approx(-1.0)
    assert group.order.spearman_by["tensor_micro"] == pytest.approx(1.0)
