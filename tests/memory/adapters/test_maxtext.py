"""MaxText's own step through the commands, in the environment that has MaxText: a small Llama 2 on eight H100s."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

import support
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
OFFLOAD = "optimizer_memory_host_offload=true"
REPORT = ("maxtext:llama2-7b", "h100:8", *SMALL, "remat_policy=minimal_with_context", OFFLOAD)
COMPARED = ("maxtext:llama2-7b", "h100:2x4", *SMALL, "--remat=full,none", "--no-cache", "--jobs=1")
REFUSED = {
    "maxtext:llama2-7x": "did you mean llama2-7b",
    "maxtext:none.yml": "there is no file none.yml",
    "maxtext:llama2-7b remat_polcy=full": "did you mean remat_policy?",
    "maxtext:llama2-7b remat_policy=fulll": "did you mean full?",
    "maxtext:llama2-7b per_device_batch_size=some": "per_device_batch_size=some: Input should be",
    "maxtext:llama2-7b base_emb_dim=64": "unless setting `override_model_config=True`",
    "maxtext:llama2-7b ici_fsdp_parallelism=3": "cannot arrange 8 devices by the keys ici_* and dcn_*",
}
# Runs the commands of the JSON in standard input and prints the adapter's message for each line of words. One process
# does all of it: importing jax and MaxText takes as long as compiling a step.
SCRIPT = """
import json, sys
asked = json.load(sys.stdin)
sys.path.insert(0, asked["tests"])
from bytescope.memory import __main__ as command
from bytescope.memory.adapters.maxtext import FACTORY
from bytescope.memory.adapters.trainers import overrides_of
from bytescope.memory.compare import worker_pool
from bytescope.memory.devices import targets
from support.same_process import SameProcess
worker_pool.Worker = SameProcess
for words in asked["commands"]:
    assert command.main(words) == 0, words
    print("== end of the command", flush=True)
for line in asked["refused"]:
    name, *words = line.split()
    try:
        FACTORY(overrides_of(name, words), targets.parse("h100:8"))
    except ValueError as error:
        print(error.exit_code, error)
"""


@dataclasses.dataclass(frozen=True)
class Done:
    """What the process of MaxText's environment printed: of the two commands, of the refused words, and its log; and
    the results of the commands."""

    report_text: str
    compare_text: str
    refused: list[str]
    log: str
    report: dict
    compared: dict


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("maxtext")
    files = [folder / "report.json", folder / "compare.json"]
    commands = [["report", *REPORT, f"--json={files[0]}"], ["compare", *COMPARED, f"--json={files[1]}"]]
    own = ("XLA_", "JAX_", "PYTHON", "TF_")  # flags of the tests, which another jaxlib may not know
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    asked = {"tests": str(Path(support.__path__[0]).parent), "commands": commands, "refused": list(REFUSED)}
    process = subprocess.run(
        [MAXTEXT_PYTHON, "-c", SCRIPT],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=env | {"JAX_PLATFORMS": "cpu"},
        timeout=1200,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    report_text, compare_text, refused = process.stdout.split("== end of the command\n")
    results = [result_of(file.read_text()) for file in files]
    return Done(report_text, compare_text, refused.splitlines(), process.stdout + process.stderr, *results)


def test_the_report_of_a_step(done):
    report = done.report
    assert "note: attention=autoselected is replaced by attention=cudnn_flash_jax" in " ".join(done.report_text.split())
    assert "NO-OP" not in done.log and "INFO" not in done.log  # MaxText's log
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


def test_the_optimizer_of_a_step_is_in_host_memory(done):
    """The optimizer state, two float32 moments on 8 devices, is in host memory, and is fetched in each step."""
    report = done.report
    moments = 2 * report["breakdown"]["params"]
    assert report["host_bytes"] >= 0.99 * moments and report["breakdown"]["optimizer"] < 0.01 * moments
    rows = [row for row in report["audit"] if row["kind"] == "offload"]
    assert {row["done"] for row in rows} == {"offloaded"} and sum(row["bytes"] for row in rows) >= 0.99 * moments


def test_the_policies_of_a_step(done):
    result = done.compared
    full, none = result["rows"]
    assert [row["status"] for row in (full, none)] == ["ok", "ok"]
    assert full["allocated_bytes"] == none["allocated_bytes"]  # `none` recomputes everything in 0.2.5
    assert full["recompute_flops_fraction"] == none["recompute_flops_fraction"] > 0
    assert full["predicted_mfu"] > 0 and full["tokens_per_update"] == TOKENS
    assert result["best"]["flags"] == "remat_policy=full"
    assert "note: attention=autoselected is replaced" in " ".join(done.compare_text.split())


def test_what_maxtext_refuses_is_one_line(done):
    assert len(done.refused) == len(REFUSED)
    for line, said in zip(done.refused, REFUSED.values()):
        assert line.startswith("2 ") and said in line
