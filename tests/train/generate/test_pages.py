"""Whose each page is: nothing is given twice, nothing is lost, whatever happens."""

import random

import pytest

from bytescope.model.paged.page_pool import NOBODY, PAGE
from bytescope.train.generate.engine import Pages

pytestmark = pytest.mark.quick


def test_pages_of_many_lives():
    rng, pages, lives = random.Random(0), Pages(30), []
    for _ in range(4000):
        if lives and rng.random() < 0.4:
            own = lives.pop(rng.randrange(len(lives)))
            pages.take(own)
            assert not own
        else:
            own, length, free = [], rng.randint(1, 5 * PAGE), pages.free
            if not pages.give(own, length):
                assert not own and pages.free == free < -(-length // PAGE)
                continue
            assert len(own) == -(-length // PAGE)
            lives.append(own)
        held = [page for own in lives for page in own]
        assert NOBODY not in held and len(set(held)) == len(held)
        assert pages.used == len(held) and pages.used + pages.free == 29
