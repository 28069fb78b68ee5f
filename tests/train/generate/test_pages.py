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
            tokens, own = lives.pop(rng.randrange(len(lives)))
            pages.computed(own, tokens)
            pages.take(own)
            assert not own
        else:
            tokens = [bit for bit in rng.choices((0, 1), k=5) for _ in range(PAGE)][: rng.randint(1, 5 * PAGE)]
            own = pages.begin(tokens)
            if not pages.give(own, len(tokens)):
                pages.take(own)
                continue
            lives.append((tokens, own))
            pages.computed(own, tokens)
        users = {}
        for tokens, own in lives:
            assert NOBODY not in own and len(own) == -(-len(tokens) // PAGE)
            for place, page in enumerate(own):
                users.setdefault(page, set()).add(tuple(tokens[: (place + 1) * PAGE]))
        assert all(len(held) == 1 for held in users.values())  # shared only by those that begin alike
        assert pages.used == len(users) and pages.used + pages.free == 29
    assert pages.reused > 0


def test_a_whole_prompt_leaves_a_token_to_compute():
    pages, tokens = Pages(9), list(range(2 * PAGE))
    own = pages.begin(tokens)
    pages.give(own, len(tokens))
    pages.computed(own, tokens)
    assert len(pages.begin(tokens)) == 1 and len(pages.begin([*tokens, 5])) == 2
