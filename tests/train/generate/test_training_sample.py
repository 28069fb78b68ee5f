"""Text in training: the tokens of whole passes, on any mesh, and answers at every evaluation."""

import json
import re

import jax
import numpy as np
import pytest
from flax import nnx

from bytescope.memory import cli
from bytescope.train.data.batches import open_data
from bytescope.train.data.settings import DataConfig
from bytescope.train.generate.steps import own_bytes
from bytescope.train.generate.training_sample import (
    Sampler,
    can_generate,
    generate,
    read_part,
    sample_bytes,
    sample_prompt,
    sample_text,
    separate_layers,
)
from support.exhaustive import exhaustive
from support.toy import compiled_once, first_state, small_config, small_program

SMALL = {
    "model.n_layers": 2,
    "model.d_model": 32,
    "model.d_ff": 64,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.d_head": 8,
}
LENGTH = {**SMALL, "data.seq_len": 48, "model.max_seq_len": 64, "precision.preset": "fp32", "model.init_std": 0.3}


@pytest.mark.parametrize(
    ("keys", "devices"),
    [
        ({"mesh.fsdp": 2, "mesh.tensor": 2}, 4),
        *exhaustive(
            ({"mesh.context": 2, "mesh.fsdp": 2}, 4),
            ({"lora.rank": 4}, 1),
            ({"model.scan": False}, 1),
        ),
    ],
    ids=str,
)
def test_tokens_are_those_of_whole_passes(keys, devices):
    program = small_program({**LENGTH, **keys}, devices)
    params = first_state(program).model_params
    assert can_generate(program)
    for prompt, count in (([5, 6, 7], 12), (list(range(60)), 6)):
        assert generate(program, params, prompt, count, 0.0) == by_whole_passes(keys, prompt, count)


def by_whole_passes(keys, prompt, count):
    """The most likely tokens of the model on one device, by a pass over the whole sequence for each token."""
    alone = small_program({**LENGTH, **{key: value for key, value in keys.items() if key.startswith("lora")}})
    params = first_state(alone).model_params
    logits = jax.jit(lambda tokens_BL: nnx.merge(alone.graph, params)(tokens_BL))
    tokens = read_part(prompt, count, 48)
    for _ in range(count):
        padded = np.zeros((1, 48), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens = [*tokens, int(logits(padded)[0, len(tokens) - 1].argmax())]
    return tokens[-count:]


def test_layers_are_not_copied_out_of_a_stack():
    program = small_program({**LENGTH, "model.d_ff": 512})
    params = first_state(program).model_params
    sampler = Sampler(program, 4, 8)
    compiled = sampler.steps.compilation(sampler.sizes, 1, 1, False).executable
    layer_bytes = params["blocks"]["mlp"]["w_up"][0].nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < layer_bytes
    layers = separate_layers(program.model, params)["blocks"]
    start = params["blocks"]["mlp"]["w_up"].unsafe_buffer_pointer()
    for number, layer in layers.items():
        assert layer["mlp"]["w_up"].unsafe_buffer_pointer() == start + number * layer_bytes


@pytest.mark.exhaustive
def test_bytes_of_a_sample():
    small, long = (small_program({**LENGTH, "data.seq_len": length}) for length in (32, 64))
    pool = 4 * 2 * long.model.n_layers * long.model.n_kv_heads * long.model.d_head
    assert 64 * pool < sample_bytes(long) and sample_bytes(long) - sample_bytes(small) >= 32 * pool


@pytest.mark.quick
def test_a_pipeline_generates_nothing():
    staged = small_program({**LENGTH, "mesh.stage": 2, "batch.mode": "scan", "batch.accumulation": 2}, 2)
    assert not can_generate(staged) and sample_text(staged, None, None) == ""


@pytest.mark.quick
def test_a_chat_fine_tune_is_sampled_in_its_chat_template(tmp_path):
    """Of a held-out conversation all before its first answer, or the user's message that the config has."""
    path = tmp_path / "talks.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": f"what is {n}"},
                        {"role": "assistant", "content": f"it is {n}"},
                    ]
                }
            )
            + "\n"
            for n in range(40)
        )
    )
    for keys, prompt in (
        ({}, r"what is \d+"),
        ({"train.sample_prompt": "and you"}, "and you"),
    ):
        config = small_config(
            {"data.source": str(path), "data.format": "chat", "data.seq_len": 128, "data.tokenizer": "bytes", **keys}
        )
        data = open_data(DataConfig(**config.data))
        text = data.decode(sample_prompt(config, data))
        assert re.fullmatch(rf"<\|im_start\|>user\n{prompt}<\|im_end\|>\n<\|im_start\|>assistant\n", text), text


@pytest.mark.quick
def test_the_sample_of_texts_begins_like_a_held_out_document(tmp_path):
    for n in range(4):
        (tmp_path / f"{n}.txt").write_text(f"poem {n} of the moon over the sea\n" * 9)
    config = small_config({"data.source": str(tmp_path), "data.seq_len": 24})
    data = open_data(DataConfig(**config.data))
    assert re.fullmatch(r"poem \d of th", data.decode(sample_prompt(config, data)))
    config.train.sample_prompt = "def "
    assert sample_prompt(config, data) == list(b"def ")


def test_a_run_ends_with_a_sample_and_the_next_commands(tmp_path, monkeypatch, capsys):
    compiled_once(monkeypatch)
    monkeypatch.chdir(tmp_path)
    settings = {
        **SMALL,
        "model.n_layers": 1,
        "data.seq_len": 32,
        "batch.micro": 8,
        "train.eval_every": 2,
        "train.eval_sequences": 4,
        "train.checkpoint_every": 2,
        "train.sample_tokens": 6,
        "train.cache_dir": "cache",
    }
    command = ["train", "--workdir=run", *(f"--config.{key}={value}" for key, value in settings.items())]
    assert cli.main([*command, "--config.train.steps=2"]) == 0
    more = ["train", "--workdir=run", "--config.train.steps=4", "--extend"]  # the directory has all other keys
    assert cli.main(more) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert [line.split()[:3] for line in out.splitlines() if line.startswith("  bytescope ")][-4:] == [
        ["bytescope", "train", "--workdir=run"],
        ["bytescope", "generate", "run"],
        ["bytescope", "export", "run"],
        ["bytescope", "report", "run"],
    ]
    assert "sample:" in out and re.search(r"passes +[\d,]+ sequences to train on, 4 updates read ", out)

    # Ctrl-C between the compile and the first update: nothing is saved, and nothing says so.
    monkeypatch.setattr("bytescope.train.launch.signals.Stop.watch", lambda stop: stop.names.append("SIGINT"))
    assert cli.main([*command, "--workdir=stopped"]) == 0
    out = capsys.readouterr().out
    assert "SIGINT before the first update: nothing is saved" in out and "no update of" in out
    assert re.search("checkpoint +none", out) and "saved step" not in out and "to start again" in out


@pytest.mark.quick
def test_a_runtime_without_statistics_counts_no_bytes():
    class Compiled:
        def memory_analysis(self):
            raise NotImplementedError

    assert own_bytes(Compiled()) == 0
