"""Packed conversations through the step: rows with unequal numbers of learned tokens weigh as their tokens do."""

import json

import jax
import numpy as np
import pytest

from bytescope.train.data.batches import DataConfig, heldout_batches, open_data, train_batches
from bytescope.train.run.feed import calls, put
from support.exhaustive import exhaustive
from support.text_data import write
from support.toy import first_state, small_program

ROWS, LENGTH = 8, 64


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Config keys of conversations whose answers are short in some rows and long in others."""
    talks = [
        {"messages": [{"role": "user", "content": "u" * (n % 5)}, {"role": "assistant", "content": "a" * length}]}
        for n, length in enumerate([1, 2, 1, 30, 2, 40, 1, 1, 60, 3, 2, 1] * 4)
    ]
    folder = write(tmp_path_factory.mktemp("talks"), {"talks.jsonl": "".join(json.dumps(t) + "\n" for t in talks)})
    template = (
        "{% for m in messages %}{{ m.role[0] + ':' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '.' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    write(folder, {"short.jinja": template, "held.jsonl": json.dumps(talks[3]) + "\n" + json.dumps(talks[1])})
    return {
        "data.source": folder / "talks.jsonl",
        "data.eval_source": folder / "held.jsonl",
        "data.format": "chat",
        "data.chat_template": folder / "short.jinja",
        "data.seq_len": LENGTH,
        "model.vocab_size": 256,
        "model.n_layers": 2,
        "model.max_seq_len": LENGTH,
        "optimizer.warmup_steps": 1,
        "optimizer.name": "momentum",
        "optimizer.learning_rate": 1.0,
    }  # linear in the gradients


def updated(keys, micro, mode):
    """Parameters and loss after two updates of ROWS rows in micro-batches of `micro`, and the learned tokens of each
    micro-batch."""
    program = small_program({**keys, "batch.micro": micro, "batch.accumulation": ROWS // micro, "batch.mode": mode})
    config = DataConfig(**program.config.data)
    data = open_data(config)
    batches = train_batches(data, rows=ROWS, seed=0, position=0, config=config)
    state, counts = first_state(program), []
    for _ in range(2):
        host = next(batches)
        counts += (host["targets"] >= 0).reshape(-1, micro * LENGTH).sum(axis=1).tolist()
        for call in calls(program, host):
            state, metrics = program.step(state, call)
    batches.close()
    return jax.device_get(state.params), float(metrics["loss"]), counts, (program, data)


@pytest.fixture(scope="module")
def whole(keys):
    return updated(keys, ROWS, "multisteps")


@pytest.mark.parametrize("mode", ["scan", *exhaustive("multisteps")])
def test_micro_batches_of_unequal_learned_tokens_give_the_update_of_one_batch(keys, whole, mode):
    params, loss, counts, (program, _) = updated(keys, 2, mode)
    assert max(counts) > 1.5 * min(counts)  # a mean of their means would be another update
    np.testing.assert_allclose(loss, whole[1], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), params, whole[0])
    assert program.batch_shapes["segments"].shape == program.batch_shapes["inputs"].shape


def test_a_packed_row_has_the_loss_of_its_examples_apart(keys, whole):
    """Held-out loss, summed over targets: attention and positions stay within an example."""
    params, _, _, (program, data) = whole
    alone = small_program({**keys, "data.packing": False, "batch.micro": ROWS})
    found = []
    for one, source in ((program, data), (alone, open_data(DataConfig(**alone.config.data)))):
        (host,) = heldout_batches(source, rows=ROWS)
        assert ("segments" in host) == (one is program)
        tally = one.evaluate(params, put(host, one.eval_shapes))
        found.append((float(tally.loss), int(tally.tokens)))
    assert found[0][1] == found[1][1] == 31 + 3
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    assert len(data.heldout) == 1  # both examples share a row
