"""The engine: its tokens are those of the model, whatever else is in the batch and however often pages run out."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bytescope.model.paged import paged_step as decode
from bytescope.model.paged.page_pool import PAGE, View
from bytescope.train.generate.engine import PATIENCE
from bytescope.train.generate.request import Request
from bytescope.train.generate.steps import Steps
from bytescope.train.user_errors import UserError
from support.exhaustive import exhaustive
from support.models import checkpoints
from support.models.generating import LATENT, alone, engine_of, random_engine, random_model, together

LONGER = {"max_position_embeddings": 128}


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("family", ["llama", *exhaustive("gemma2")])
def test_greedy_tokens_are_those_of_transformers(tmp_path, family):
    """Of GPT-2 and of experts: tests/train/weights/test_against_transformers.py, whose text is the engine's too."""
    import torch

    made = checkpoints.model(family, **LONGER)
    engine = engine_of(checkpoints.save(made, tmp_path / family))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, checkpoints.VOCAB, length).tolist() for length in (3, 11, 37, 20)]
    answers = together(engine, [Request(tuple(prompt), 64) for prompt in prompts])
    for prompt, answer in zip(prompts, answers):
        with torch.no_grad():
            theirs = made.generate(
                torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0].tolist()
        assert answer == theirs[len(prompt) :]


@pytest.mark.parametrize("keys", [{}, LATENT], ids=["heads", "latents"])
def test_logits_of_pages_are_those_of_a_whole_pass(keys):
    model, params = random_model(keys)
    tokens_BT = jnp.asarray(np.random.default_rng(1).integers(0, 64, (2, 48)), jnp.int32)
    whole = nnx.merge(model.graph, params)(tokens_BT)
    pools = decode.make_pools(model.config, 12, jnp.float32, jnp.float32)
    table = jnp.asarray([[3, 9, 1, 0], [2, 5, 7, 0]], jnp.int32)
    run = jax.jit(lambda tokens, view, pools: decode.step(nnx.merge(model.graph, params), tokens, view, pools))
    found = []
    for start, stop in ((0, 20), (20, 40), (40, 41), (41, 48)):  # of any width, page or not
        places = jnp.tile(jnp.arange(start, stop)[None], (2, 1)).astype(jnp.int32)
        x_BTD, pools = run(tokens_BT[:, start:stop], View(places, table), pools)
        found.append(nnx.merge(model.graph, params).logits(x_BTD, jnp.float32))
    np.testing.assert_allclose(jnp.concatenate(found, 1), whole, rtol=0, atol=1e-5)


def requests(count, rng, longest=40, most=12, vocab=64):
    """Requests of mixed lengths, some with a common beginning, greedy and drawn."""
    common = tuple(rng.randrange(vocab) for _ in range(2 * PAGE + 1))
    found = []
    for number in range(count):
        own = tuple(rng.randrange(vocab) for _ in range(rng.randint(1, longest)))
        prompt = common + own[:20] if number % 3 == 0 else own
        found.append(
            Request(
                prompt,
                rng.randint(1, most),
                temperature=0.9 * (number % 2),
                top_k=(0, 5)[number % 4 == 1],
                top_p=(1.0, 0.9)[number % 8 == 3],
                seed=number,
            )
        )
    return found


@pytest.mark.parametrize("count", exhaustive(150))
def test_many_answers_are_what_they_are_alone(count):
    rng = random.Random(0)
    asked = requests(count, rng)
    engine = random_engine({"model.n_layers": 1}, pages=14, sequences=8)
    running = [engine.submit(one) for one in asked]
    for_room, by_chance = 0, 0
    while engine.busy:
        before = engine.preempted
        engine.step()
        for_room += engine.preempted - before
        if engine.running and rng.random() < 0.1:
            engine.preempt(rng.choice(engine.running))
            by_chance += 1
    assert for_room > count / 20 and by_chance > count / 10 and engine.pages.used == 0
    single = random_engine({"model.n_layers": 1}, pages=14, sequences=1)
    assert [list(one.answer) for one in running] == alone(single, asked)


@pytest.mark.exhaustive
def test_pages_are_hardly_wasted():
    """What 200 requests hold beyond their tokens, of all that they hold. Of older systems' caches 20.4 to 38.2 % held
    tokens, of PagedAttention's 96.3 % (arXiv 2309.06180, figure 2)."""
    rng = random.Random(3)
    engine = random_engine({"model.n_layers": 1, "model.max_seq_len": 512}, pages=257, sequences=32, chunk=64)
    for _ in range(200):
        engine.submit(Request(tuple(rng.randrange(64) for _ in range(rng.randint(16, 450))), rng.randint(1, 60)))
    held = stored = 0
    while engine.busy:
        engine.step()
        held += engine.pages.used * PAGE
        stored += sum(one.computed for one in engine.running)
    assert stored > 0.96 * held and engine.preempted > 0 and engine.pages.used == 0


def test_prompts_do_not_hold_up_the_others():
    engine = random_engine()
    first = engine.submit(Request((1, 2, 3), 20))
    engine.step()
    engine.submit(Request(tuple(range(110)), 2))  # seven pieces
    grown = []
    for _ in range(10):
        engine.step()
        grown.append(len(first.tokens))
    assert grown == [4] * PATIENCE + [5] + [5] * 3 + [6, 7]


def test_eight_bits_are_close():
    model, params = random_model()
    tokens_BT = jnp.asarray(np.random.default_rng(1).integers(0, 64, (2, 48)), jnp.int32)
    whole = nnx.merge(model.graph, params).hidden(tokens_BT)
    pools = decode.make_pools(model.config, 7, jnp.int8, jnp.float32)
    places = jnp.tile(jnp.arange(48)[None], (2, 1)).astype(jnp.int32)
    view = View(places, jnp.asarray([[1, 2, 3], [4, 5, 6]], jnp.int32))
    x_BTD, _ = decode.step(nnx.merge(model.graph, params), tokens_BT, view, pools)
    error = float(jnp.sqrt(jnp.mean((x_BTD - whole) ** 2) / jnp.mean(whole**2)))
    assert 0 < error < 0.02
    # Positions, layers, keys and values, width and a scale.
    assert Steps(model, jnp.int8).page_bytes == PAGE * 2 * 2 * (8 + 4)


@pytest.mark.oracle("transformers")
def test_devices_share_a_model(tmp_path):
    folder = checkpoints.save(checkpoints.model("llama"), tmp_path / "llama")
    asked = [Request((5, 6, 7), 12), Request(tuple(range(2, 30)), 12)]
    alike = together(engine_of(folder), asked)
    shared = engine_of(folder, fsdp=2, tensor=2)
    assert together(shared, asked) == alike
    local, whole = shared._steps.weight_bytes, engine_of(folder)._steps.weight_bytes
    assert local < 0.3 * whole and shared._steps.page_bytes * 2 == engine_of(folder)._steps.page_bytes


def test_what_never_fits_is_refused_when_it_comes():
    engine = random_engine(pages=4)
    for asked, message in (
        (Request((), 3), "the prompt is empty"),
        (Request((1,), 128), "128 positions"),
        (Request((1,) * 40, 20), "need 4 pages of 16 positions, but the KV cache has only 3"),
    ):
        with pytest.raises(UserError, match=message):
            engine.submit(asked)
    assert together(engine, [Request((1,) * 40, 8)]) and not engine.busy


def test_stops_and_ends():
    engine = random_engine()
    whole = alone(engine, [Request((1, 2, 3), 8)])[0]
    stop = whole[3]
    one = engine.submit(Request((1, 2, 3), 8, stops=frozenset([stop])))
    while engine.busy:
        engine.step()
    assert one.ended == "stop" and one.answer == whole[: whole.index(stop)]
    assert not engine.busy and engine.pages.used == 0
