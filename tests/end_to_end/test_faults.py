"""A life with a few faults, and the parts of the script that tries them for an hour."""

import random

import pytest
from end_to_end.faults import DAMAGES, KINDS, damage
from end_to_end.hour_of_faults import BETWEEN, ORDER, plan, table
from end_to_end.lives import Fault, Ground, Life, same


@pytest.mark.exhaustive
def test_a_life_with_faults_ends_with_the_curve_of_one_without(tmp_path):
    """The cache and a checkpoint damaged, killed in a save: nothing is lost. Of all parameters, test_survival.py has
    kills and SIGTERM; here are adapters, whose base no checkpoint holds, and packed chats."""
    ground = Ground(tmp_path / "ground", steps=24, adapters=True)
    ground.undisturbed(1)  # fills the cache that is damaged first
    life = Life(ground, tmp_path / "run", random.Random(4))
    for kind in ("damaged compile cache", "killed in a save", "damaged checkpoint"):
        if not life.over:  # a machine with more to do may see its end first
            life.suffer(kind, KINDS[kind])
    life.finish()
    assert not life.wrong and life.identical(), life.wrong
    assert len(life.faults) > 1 and all(fault.recovered for fault in life.faults)


@pytest.mark.quick
def test_every_kind_of_fault_is_tried():
    tried = {kind for number in range(60) for kind in plan(ORDER[number % len(ORDER)], random.Random(number))}
    assert tried == set(KINDS)
    assert plan("one device", random.Random(3)) == plan("one device", random.Random(3))
    assert set(BETWEEN) < tried


@pytest.mark.quick
def test_another_curve_is_seen():
    whole = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 2, "eval_loss": 1.5}]
    assert same(whole, [dict(row) for row in whole]) and same(whole, whole, 1e-4)
    near = [{**whole[0], "loss": 2.0001}, *whole[1:]]
    assert same(near, whole, 1e-4) and not same(near, whole)
    for other in (whole[:2], [{**whole[0], "loss": 2.1}, *whole[1:]], [*whole[:2], {"step": 2}]):
        assert not same(other, whole) and not same(other, whole, 1e-4)


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_every_damage_changes_a_file(tmp_path, name):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789" * 10)
    after = DAMAGES[name](random.Random(1), path.read_bytes())
    assert after != path.read_bytes()
    damage(random.Random(1), path)
    assert not path.exists() or path.read_bytes() != b"0123456789" * 10


@pytest.mark.quick
def test_the_table_counts_by_kind():
    faults = [Fault("a", True, True), Fault("a", True, False), Fault("b", False, None)]
    assert table(faults)[2:] == ["| a | 2 | 2 | 1 |", "| b | 1 | 0 | 0 |", "| all | 3 | 2 | 1 |"]
