"""The walk of the READMEs: a folder of transformers in, updates on chats, a folder out, the same in transformers."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from bytescope.memory import cli
from bytescope.train.program.config_files import load, override
from bytescope.train.program.program import build
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.load import load_params
from support.models import checkpoints

SETTINGS = {
    "data.format": "chat",
    "data.seq_len": 32,
    "precision.preset": "fp32",
    "batch.accumulation": 1,
    "batch.micro": 4,
    "train.steps": 3,
    "train.eval_every": 3,
    "train.checkpoint_every": 2,
    "train.sample_tokens": 0,
    "train.cache_dir": "none",
    "optimizer.learning_rate": 1e-2,
    "optimizer.warmup_steps": 1,
}


@pytest.mark.oracle("transformers")
def test_a_folder_in_and_a_folder_out(tmp_path, monkeypatch, capsys):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    checkpoints.save(checkpoints.model("llama3"), tmp_path / "folder")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"train the model {number}"},
                {"role": "assistant", "content": f"the model is trained in {number} of {number * 7}"},
            ]
        }
        for number in range(100)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"--config.{key}={value}" for key, value in SETTINGS.items()]
    command = ["train", "hf:folder", "--config.data.source=chats.jsonl", "--workdir=run", *keys]
    assert cli.main(command) == 0, capsys.readouterr().err
    assert cli.main(["export", "run", "out"]) == 0 and cli.main(["export", "run", "before", "--step=2"]) == 0

    prompt = AutoTokenizer.from_pretrained("out").apply_chat_template(rows[3]["messages"], tokenize=False)
    tokens = AutoTokenizer.from_pretrained("out")(prompt, return_tensors="np")["input_ids"]
    models = {name: AutoModelForCausalLM.from_pretrained(name) for name in ("folder", "before", "out")}
    with torch.no_grad():
        logits = {name: made(torch.tensor(tokens)).logits.numpy() for name, made in models.items()}
    config = load("hf:out")
    for key in ("precision.preset", "data.seq_len"):
        override(config, key, str(SETTINGS[key]))
    program = build(config, jax.devices()[:1])
    params = load_params(Folder.open("out"), program.model, program.state.params)
    model = jax.jit(lambda params, tokens_BL: nnx.merge(program.graph, params)(tokens_BL))
    ours = model(params, tokens.astype(np.int32))
    np.testing.assert_allclose(ours, logits["out"], rtol=0, atol=5e-5)
    assert all(np.abs(logits["out"] - logits[name]).max() > 0.01 for name in ("folder", "before"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["eval_loss"] for row in rows if "eval_loss" in row][-1] < np.log(checkpoints.VOCAB)
