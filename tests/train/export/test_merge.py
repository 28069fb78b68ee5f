"""`bytescope export --merge`: each weight, as the run computed with it, and what its adapter adds; GPT-2's adapters of
a shared tensor, which no folder of peft can hold."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

from bytescope.memory import cli
from bytescope.model.placement import ONE_DEVICE
from bytescope.model.quantized.quantized_formats import dequantize, quantize
from bytescope.model.quantized.weight import quantized_weights
from bytescope.train.checkpoints.checkpoint import Checkpoints, Position
from bytescope.train.checkpoints.workdir import Identity
from bytescope.train.program import config_files as configs
from bytescope.train.program.program import build
from bytescope.train.weights.folder import Folder
from support.models import weights

SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
}
LORA = {"lora.rank": 2, "lora.alpha": 5, "data.seq_len": 16}


def saved(folder, workdir, **keys):
    """(program, adapters) of a run over a folder, with random adapters in its checkpoint."""
    program = build(
        configs.load(f"hf:{folder}", [(key, str(value)) for key, value in {**LORA, **keys}.items()]), jax.devices()[:1]
    )
    rng = np.random.default_rng(5)
    params = jax.tree.map(lambda leaf: 0.2 * rng.standard_normal(leaf.shape, np.float32), program.state.params)
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), dataclasses.replace(program.state, params=None, frozen=None)
    )
    checkpoints = Checkpoints(workdir, keep=1)
    checkpoints.save(dataclasses.replace(zeros, params=jax.tree.map(jnp.asarray, params)), Position(3, 24))
    checkpoints.close()
    identity = Identity.from_config(program.config, 8, "data", Folder.open(folder).fingerprint)
    (workdir / "config.json").write_text(json.dumps(dataclasses.asdict(identity)))
    return program, params["blocks"]


def test_over_a_quantized_base_the_numbers_are_those_that_the_run_computed_with(tmp_path):
    folder = weights.llama(tmp_path / "m", **SIZES)
    program, adapters = saved(folder, tmp_path / "run", **{"lora.base": "nf4", "lora.targets": "q,down"})
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--merge", "--dtype=float32"]) == 0
    source, merged = Folder.open(folder), Folder.open(tmp_path / "out")
    for part, name, ours in (
        ("attention", "self_attn.q_proj", "w_q"),
        ("mlp", "mlp.down_proj", "w_down"),
        ("mlp", "mlp.up_proj", "w_up"),
    ):
        base, matrix = quantized_weights(program.abstract())[f"blocks.{part}.{ours}"]
        full = f"model.layers.1.{name}.weight"
        codes = quantize(base, matrix, [np.ascontiguousarray(source.read(full, []).T)])
        weight = np.asarray(dequantize(base, matrix, codes, jnp.float32, ONE_DEVICE)).reshape(128, 128)
        if ours != "w_up":
            a, b = (adapters[part][f"{ours}_{half}"][1] for half in "ab")
            weight = weight + 2.5 * a.reshape(128, 2) @ b.reshape(2, 128)
        np.testing.assert_allclose(merged.read(full, []).T, weight, atol=1e-6, err_msg=name)
        assert np.abs(merged.read(full, []) - source.read(full, [])).max() > 0.02
    head = "lm_head.weight"
    np.testing.assert_array_equal(merged.read(head, []), source.read(head, []))


def test_gpt2_has_no_adapters_of_a_shared_tensor_but_can_be_merged(tmp_path, capsys):
    folder = weights.write(tmp_path / "m", weights.GPT2, weights.numbers(weights.gpt2_shapes()))
    _, adapters = saved(folder, tmp_path / "run")
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "one tensor, transformer.h.0.attn.c_attn.weight, so" in said and "export with --merge" in said
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--merge"]) == 0
    source, merged = Folder.open(folder), Folder.open(tmp_path / "out")
    added = [
        2.5 * adapters["attention"][f"w_{target}_a"][1] @ adapters["attention"][f"w_{target}_b"][1].reshape(2, -1)
        for target in "qkv"
    ]
    name = "transformer.h.1.attn.c_attn.weight"
    np.testing.assert_allclose(merged.read(name, []), source.read(name, []) + np.concatenate(added, axis=1), atol=1e-6)
