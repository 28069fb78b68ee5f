"""Tiny models of each family against transformers: logits, loss, every gradient, an AdamW update, greedy text."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from bytescope.train.data.batch_algebra import IGNORE
from bytescope.train.generate.training_sample import generate
from bytescope.train.program.config_files import as_text, load, override
from bytescope.train.program.program import build
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.load import load_params
from support.exhaustive import exhaustive
from support.models import checkpoints

pytestmark = pytest.mark.oracle("transformers")

ROWS, LENGTH, RATE = 2, 24, 1e-2
# eps above the rounding of gradients that are zero in exact arithmetic, such as that of a bias of all keys.
SETTINGS = {
    "precision.preset": "fp32",
    "remat.policy": "none",
    "model.attention": "naive",
    "data.seq_len": LENGTH,
    "batch.micro": ROWS,
    "batch.accumulation": 1,
    "loss.chunk": 16,
    "optimizer.learning_rate": RATE,
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0.1,
    "optimizer.clip_norm": 0.0,
    "optimizer.eps": 1e-4,
    "loss.balance": 0.0,
}
PROMPT, MORE = [5, 17, 42, 8], 16
# Text follows from logits, which are compared of all: of rotated and of learned positions, and of experts.
GREEDY = ("llama", "gpt2", "mixtral")


def read(folder, program):
    """A saved model's tensors as a tree like the program's parameters, on the host."""
    return jax.device_get(load_params(Folder.open(folder), program.model, program.state.params))  # without biases


def theirs(name, made, folder, program, batch):
    """What transformers and torch.optim have: as trees of ours, each by way of a saved model with those weights."""
    import torch

    inputs, targets = (torch.tensor(batch[key], dtype=torch.long) for key in ("inputs", "targets"))
    logits = made(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    loss.backward()
    grouped = [
        {"params": [p for p in made.parameters() if matrix == (p.ndim > 1)], "weight_decay": 0.1 * matrix}
        for matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW(grouped, lr=RATE, betas=(0.9, 0.95), eps=SETTINGS["optimizer.eps"])
    with torch.no_grad():
        greedy = (
            made.generate(
                torch.tensor([PROMPT]), max_new_tokens=MORE, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, len(PROMPT) :].tolist()
            if name in GREEDY
            else None
        )
        optimizer.step()
        checkpoints.save(made, folder / "updated", tokenizer=False)
        for parameter in made.parameters():
            parameter.copy_(parameter.grad)
        checkpoints.save(made, folder / "gradients", tokenizer=False)
    return SimpleNamespace(
        logits=logits.detach().numpy(),
        loss=loss.item(),
        greedy=greedy,
        updated=read(folder / "updated", program),
        gradients=read(folder / "gradients", program),
    )


@functools.cache
def compiled(model):
    """(program, its step and the logits of the batch) of a model; families may be alike, such as Llama and Mistral."""
    config = load("tiny")
    for key, value in {**{f"model.{key}": value for key, value in model}, **SETTINGS}.items():
        override(config, key, as_text(value))
    program = build(config, jax.devices()[:1])

    @jax.jit
    def run(params, batch):
        state, metrics = program.step(program.init_around(params), batch)
        return nnx.merge(program.graph, params)(batch["inputs"]), metrics, state

    return program, run


# A dense model, and a mixture with latent attention.
FIRST = ("llama",)


@pytest.fixture(
    scope="module", params=[*FIRST, *exhaustive(*(name for name in checkpoints.FAMILIES if name not in FIRST))]
)
def both(request, tmp_path_factory):
    """(ours, theirs) of one family; ours of one program: the step that runs, and the logits of its batch."""
    folder, made = tmp_path_factory.mktemp(request.param), checkpoints.model(request.param)
    config = load(f"hf:{checkpoints.save(made, folder)}")
    program, run = compiled(tuple(sorted(config.model.items())))
    tokens = np.random.default_rng(1).integers(0, checkpoints.VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": np.where(tokens[:, 1:] % 5, tokens[:, 1:], IGNORE)}
    params = load_params(Folder.open(folder), program.model, program.state.model_params)
    logits, metrics, state = jax.device_get(run(params, batch))
    # The first moment after one update is (1 - b1) times the gradient.
    gradients = jax.tree.map(lambda leaf: leaf / 0.1, optax.tree_utils.tree_get(state.opt_state, "mu"))
    ours = SimpleNamespace(
        logits=logits,
        loss=metrics["loss"],
        gradients=gradients,
        updated=state.params,
        greedy=generate(program, params, PROMPT, MORE, 0.0) if request.param in GREEDY else None,
    )
    return ours, theirs(request.param, made, folder, program, batch)


def furthest(ours, theirs):
    """The largest difference of a leaf, in norm, over the leaf's own norm; of leaves that are zero but for rounding, as
    the gradient of a bias of all keys is, over that of all."""
    whole = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(theirs)))

    def one(ours, theirs):
        norm = float(np.linalg.norm(theirs))
        return np.linalg.norm(ours - theirs) / (norm if norm > 1e-6 * whole else whole)

    return max(jax.tree.leaves(jax.tree.map(one, ours, theirs)))


def test_logits_and_greedy_text(both):
    ours, theirs = both
    assert theirs.logits.std() > 0.3  # and not all alike
    np.testing.assert_allclose(ours.logits, theirs.logits, rtol=0, atol=2e-5)
    assert ours.greedy == theirs.greedy and (theirs.greedy is None or len(set(theirs.greedy)) > 1)


def test_loss_and_every_gradient(both):
    ours, theirs = both
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(theirs.gradients))
    assert furthest(ours.gradients, theirs.gradients) < 1e-5


def test_adamw_update(both):
    ours, theirs = both
    assert furthest(ours.updated, theirs.updated) < 1e-5
