"""Six small configs trained on this CPU: five correct the rates, and predict the step time of the sixth."""

import os
import subprocess
import sys

import pytest

from bytescope.memory.seconds import rates
from support.json_results import read_result

# (width, layers, micro-batch, tokens per sequence)
SHAPES = {
    "a": (64, 4, 16, 64),
    "b": (64, 8, 8, 64),
    "c": (128, 2, 8, 64),
    "d": (32, 4, 32, 64),
    "e": (128, 2, 4, 128),
    "f": (96, 4, 8, 64),
}
SETTINGS = {
    "train.steps": 30,
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.eval_sequences": 8,
    "train.checkpoint_every": 0,
    "train.sample_tokens": 0,
    "train.tensorboard": "false",
}


def keys_of(width, layers, micro, length):
    heads = width // 32
    return {
        "model.d_model": width,
        "model.n_heads": heads,
        "model.n_kv_heads": heads,
        "model.d_ff": 3 * width,
        "model.n_layers": layers,
        "batch.micro": micro,
        "data.seq_len": length,
        **SETTINGS,
    }


@pytest.mark.exhaustive
def test_five_trained_runs_predict_a_sixth(tmp_path):
    """The interval is meant for four of five. On a busy machine, whose load changes between the runs, it may hold for
    fewer."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_NUM_CPU_DEVICES": "1"}
    environment.pop("XLA_FLAGS", None)  # the tests' flags compile fast and run slowly

    def bytescope(*words):
        code = "import sys; from bytescope.train import cli; sys.exit(cli.main(sys.argv[1:]))"
        subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, env=environment, check=True)

    for name, shape in SHAPES.items():
        words = [f"--config.{key}={value}" for key, value in keys_of(*shape).items()]
        bytescope("train", "tiny", f"--workdir=runs/{name}", *words)
    bytescope("calibrate", "--seconds=20", "--out=cpu.json")
    bytescope("validate", "--runs=runs", "--rates=cpu.json", "--json=v.json")
    assert len(read_result(tmp_path / "v.json")["rows"]) == len(SHAPES)
    held = 0
    for sixth in SHAPES:
        others = ",".join(f"runs/{name}" for name in SHAPES if name != sixth)
        bytescope("calibrate", f"--from-runs={others}", "--rates=cpu.json", "--out=rates.json")
        assert len(rates.load(tmp_path / "rates.json").run_ratios) == 5
        bytescope("validate", f"--runs=runs/{sixth}", "--rates=rates.json", "--json=v.json")
        (row,) = read_result(tmp_path / "v.json")["rows"]
        print(sixth, row["seconds_low"], row["measured_seconds"], row["seconds_high"])
        held += row["seconds_low"] <= row["measured_seconds"] <= row["seconds_high"]
        assert row["bytes_ratio"] == pytest.approx(1, abs=0.35)
    assert held >= 3
