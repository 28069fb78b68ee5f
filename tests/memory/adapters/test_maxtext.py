"""MaxText's own step through the commands, in the environment that has MaxText: a small Llama 2 on eight H100s."""

import json
import os
import subprocess

import pytest

from support.oracles import MAXTEXT_PYTHON

pytestmark = pytest.mark.oracle("maxtext")

# Large enough for the findings, small enough to compile in a few seconds.
SMALL = [
    "override_model_config=true",
    "base_num_decoder_layers=4",
    "base_emb_dim=512",
    "base_mlp_dim=2048",
    "base_num_query_heads=8",
    "base_num_kv_heads=8",
    "head_dim=64",
    "vocab_size=1024",
    "max_target_length=2048",
    "per_device_batch_size=1",
]
TOKENS = 8 * 2048


def run(*words, code=0):
    """Runs a command in the environment of MaxText. Returns (its output, its errors)."""
    own = ("XLA_", "JAX_", "PYTHON", "TF_")  # flags of the tests, which another jaxlib may not know
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    command = [MAXTEXT_PYTHON, "-m", "bytescope.memory", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=540)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_the_report_of_a_step(tmp_path):
    file = tmp_path / "report.json"
    out, errors = run(
        *("report", "maxtext:llama2-7b", "h100:8", *SMALL, "remat_policy=minimal_with_context", f"--json={file}")
    )
    report = json.loads(file.read_text())
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
    out, _ = run(
        *(
            "compare",
            "maxtext:llama2-7b",
            "h100:2x4",
            *SMALL,
            "--remat=full,none,fulll",
            "--no-cache",
            f"--json={file}",
        ),
        code=2,
    )
    assert out == "" and not file.exists()  # an unknown policy is refused before anything is compiled
    run(*("compare", "maxtext:llama2-7b", "h100:2x4", *SMALL, "--remat=full,none", "--no-cache", f"--json={file}"))
    result = json.loads(file.read_text())
    full, none = result["rows"]
    assert [row["status"] for row in (full, none)] == ["ok", "ok"]
    assert full["allocated_bytes"] == none["allocated_bytes"]  # `none` recomputes everything in 0.2.5
    assert full["recompute_flops_fraction"] == none["recompute_flops_fraction"] > 0
    assert full["predicted_mfu"] > 0 and full["tokens_per_update"] == TOKENS
    assert result["best"]["flags"] == "remat_policy=full"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["maxtext:llama2-7x", "h100:8"], "did you mean llama2-7b"),
        (["maxtext:llama2-7b", "h100:8", "remat_polcy=full"], "did you mean remat_policy?"),
        (["maxtext:llama2-7b", "h100:8", "per_device_batch_size=some"], "per_device_batch_size=some: Input should be"),
        (["maxtext:llama2-7b", "h100:8", "base_emb_dim=64"], "unless setting `override_model_config=True`"),
    ],
)
@pytest.mark.exhaustive
def test_what_maxtext_refuses_is_one_line(words, said):
    out, errors = run("report", *words, code=2)
    assert said in errors and errors.count("\n") == 1 and not out


@pytest.mark.exhaustive
def test_unrolled_layers_and_two_reports_side_by_side(tmp_path):
    files = [str(tmp_path / name) for name in ("scanned.json", "unrolled.json", "diff.json")]
    policy = "remat_policy=minimal"
    for file, scan in zip(files, ("true", "false")):
        run("report", "maxtext:llama2-7b", "h100:8", *SMALL, policy, f"scan_layers={scan}", f"--json={file}")
    names = [json.loads(open(file).read())["residuals_by_name"] for file in files[:2]]
    assert {"query_proj", "out_proj", "mlpwi_0, mlpwi_1"} <= names[0].keys() & names[1].keys()
    out, _ = run("diff", *files[:2], f"--json={files[2]}")
    assert "maxtext:llama2-7b" in out
