"""A run that begins from a folder: loaded once, refused with another folder, and never loaded again."""

import io
import json

import jax
import numpy as np
import pytest
from rich.console import Console

from bytescope.train.program import config_files as configs
from bytescope.train.program.program import build
from bytescope.train.run import initial_state, loop
from bytescope.train.user_errors import UserError
from support.command_line import train
from support.models import weights
from support.toy import compiled_once

KEYS = {
    "data.seq_len": 32,
    "batch.micro": 1,
    "batch.accumulation": 1,
    "train.eval_every": 0,
    "train.eval_sequences": 2,
    "train.sample_tokens": 0,
    "train.log_every": 1,
    "train.steps": 1,
    "optimizer.warmup_steps": 0,
    "precision.preset": "fp32",
    "mesh.fsdp": 8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return weights.llama(tmp_path_factory.mktemp("start") / "Llama-3.2 x", vocab_size=256, shards=2)


def config_of(folder, **keys):
    return configs.load(f"hf:{folder}", [(key, str(value)) for key, value in {**KEYS, **keys}.items()])


def run(folder, workdir, source, **keys):
    out = io.StringIO()
    loop.run(
        config_of(folder, **{"data.source": source, **keys}),
        workdir=workdir,
        extend="train.steps" in keys,
        console=Console(file=out, width=100),
    )
    return out.getvalue()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("some text to train on, in several lines\n" * 400)
    return path


def test_a_run_begins_there_and_resumes_without_it(folder, tmp_path, source, monkeypatch):
    compiled_once(monkeypatch)
    began, real = [], loop.train
    monkeypatch.setattr(
        loop,
        "train",
        lambda run, state, *rest: began.append(jax.tree.map(np.array, state.params)) or real(run, state, *rest),
    )
    run(folder, tmp_path / "run", source)
    tensors = weights.numbers(weights.llama_shapes({**weights.LLAMA, "vocab_size": 256}))
    assert np.array_equal(began[0]["w_token"], tensors["model.embed_tokens.weight"])
    assert np.array_equal(began[0]["blocks"]["mlp"]["w_up"][1], tensors["model.layers.1.mlp.up_proj.weight"].T)
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["weights"] and recorded["config"]["init.folder"] == str(folder)

    monkeypatch.setattr(initial_state, "load_params", lambda *_: pytest.fail("loaded again"))
    text = run(folder, tmp_path / "run", source, **{"train.steps": 2})
    assert "resumed at step 1" in text
    assert not np.array_equal(began[1]["w_token"], tensors["model.embed_tokens.weight"])

    other = weights.llama(tmp_path / "other", vocab_size=256, seed=1)
    with pytest.raises(UserError, match=r"init.folder '.*' -> '.*other'"):
        run(other, tmp_path / "run", source, **{"train.steps": 2})


def test_a_folder_that_lacks_a_tensor_is_refused_before_anything_is_compiled(tmp_path, source, monkeypatch):
    config = {**weights.LLAMA, "vocab_size": 256}
    tensors = weights.numbers(weights.llama_shapes(config))
    del tensors["model.norm.weight"]
    folder = weights.write(tmp_path / "m", config, tensors)
    monkeypatch.setattr(loop.startup, "compile_step", lambda *_: pytest.fail("compiled"))
    with pytest.raises(UserError, match="has no tensor model.norm.weight"):
        run(folder, tmp_path / "run", source)


@pytest.mark.parametrize(
    "keys",
    [{"optimizer.name": "adamw_8bit", "batch.accumulation": 2}, {"optimizer.name": "muon", "precision.preset": "fp16"}],
)
def test_the_state_around_given_parameters_is_the_initial_one(folder, keys):
    """But for the parameters: no optimizer's state depends on their values."""
    program = build(config_of(folder, **keys, **{"mesh.fsdp": 1}), jax.devices()[:1])
    state = program.init()
    around = program.init_around(state.params)
    assert around.params is state.params
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), around) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), program.state
    )
    for one, other in zip(jax.tree.leaves(around.opt_state), jax.tree.leaves(state.opt_state), strict=True):
        assert np.array_equal(one, other)


def test_a_page_and_a_run_directory_have_the_name_of_the_folder(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(loop, "run", lambda *_, workdir, **__: seen.append(workdir))
    assert train([f"hf:{folder}", "--config.train.cache_dir=none"]) == 0
    assert seen[0].parent.name == "runs" and seen[0].name.startswith("Llama-3.2 x-2")
