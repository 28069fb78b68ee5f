"""MaxText's own step through the commands, in the environment that has MaxText: a small Llama 2 on eight H100s."""

import os
import subprocess

import pytest

from support.json_results import result_of
from support.oracles import MAXTEXT_PYTHON

pytestmark = pytest.mark.oracle("maxtext")

# Large enough for the findings, small enough to compile in a few seconds.
SMALL = (
    *("override_model_config=true", "base_num_decoder_layers=4", "base_emb_dim=512", "base_mlp_dim=2048"),
    *("head_dim=64", "base_num_query_heads=8", "base_num_kv_heads=8", "vocab_size=1024", "max_target_length=1024"),
    "per_device_batch_size=1",
)
TOKENS = 8 * 1024
COMMAND = ("-m", "bytescope.memory")
# Prints the adapter's message for each line of words.
REFUSED = """
import sys
from bytescope.memory.adapters.maxtext import FACTORY
from bytescope.memory.adapters.trainers import overrides_of
from bytescope.memory.devices import targets
for line in sys.argv[1:]:
    name, *words = line.split()
    try:
        FACTORY(overrides_of(name, words), targets.parse("h100:8"))
    except ValueError as error:
        print(error.exit_code, error)
"""


def run(*words):
    """Runs the Python of MaxText's environment. Returns (its output, its errors)."""
    own = ("XLA_", "JAX_", "PYTHON", "TF_")  # flags of the tests, which another jaxlib may not know
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    done = subprocess.run(
        [MAXTEXT_PYTHON, *words], capture_output=True, text=True, env=env | {"JAX_PLATFORMS": "cpu"}, timeout=540
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_the_report_of_a_step(tmp_path):
    file, policy = tmp_path / "report.json", "remat_policy=minimal_with_context"
    out, errors = run(*COMMAND, "report", "maxtext:llama2-7b", "h100:8", *SMALL, policy, f"--json={file}")
    report = result_of(file.read_text())
    assert "note: attention=autoselected is replaced by attention=cudnn_flash_jax" in " ".join(out.split())
    assert "NO-OP" not in out + errors and "INFO" not in out + errors  # MaxText's log
    subject, prediction = report["subject"], report["prediction"]
    assert subject["name"] == "maxtext:llama2-7b" and subject["tokens"] == TOKENS
    assert prediction["tokens_per_s"] > 0 and 0 < prediction["mfu"] < 1
    # All values that the policy saves, by the names of MaxText.
    named = {"query_proj", "key_proj", "value_proj", "context", "out_proj", "mlpwi_0, mlpwi_1"}
    assert named <= report["residuals_by_name"].keys()
    findings = {finding["kind"]: finding for finding in report["findings"]}
    assert "remat_policy=minimal" in findings["kernel_runs_again"]["remedy"]
    # Four layers: query, key, value and output, and three matrices of the MLP, in float32 on 8 devices.
    stacked = 4 * (4 * 512 * 512 + 3 * 512 * 2048) * 4 // 8
    assert findings["weight_copies"]["bytes"] == pytest.approx(stacked, rel=0.01)
    assert "param_scan_axis=0" in findings["weight_copies"]["remedy"]


def test_the_policies_of_a_step(tmp_path):
    file = tmp_path / "compare.json"
    words = (*SMALL, "--remat=full,none", "--no-cache", "--jobs=1", f"--json={file}")
    out, _ = run(*COMMAND, "compare", "maxtext:llama2-7b", "h100:2x4", *words)
    result = result_of(file.read_text())
    full, none = result["rows"]
    assert [row["status"] for row in (full, none)] == ["ok", "ok"]
    assert full["allocated_bytes"] == none["allocated_bytes"]  # `none` recomputes everything in 0.2.5
    assert full["recompute_flops_fraction"] == none["recompute_flops_fraction"] > 0
    assert full["predicted_mfu"] > 0 and full["tokens_per_update"] == TOKENS
    assert result["best"]["flags"] == "remat_policy=full"
    assert "note: attention=autoselected is replaced" in " ".join(out.split())


def test_what_maxtext_refuses_is_one_line():
    refused = {
        "maxtext:llama2-7x": "did you mean llama2-7b",
        "maxtext:none.yml": "there is no file none.yml",
        "maxtext:llama2-7b remat_polcy=full": "did you mean remat_policy?",
        "maxtext:llama2-7b remat_policy=fulll": "did you mean full?",
        "maxtext:llama2-7b per_device_batch_size=some": "per_device_batch_size=some: Input should be",
        "maxtext:llama2-7b base_emb_dim=64": "unless setting `override_model_config=True`",
        "maxtext:llama2-7b ici_fsdp_parallelism=3": "cannot arrange 8 devices by the keys ici_* and dcn_*",
    }
    lines = run("-c", REFUSED, *refused)[0].splitlines()
    assert len(lines) == len(refused)
    for line, said in zip(lines, refused.values()):
        assert line.startswith("2 ") and said in line
