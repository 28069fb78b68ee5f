"""bytescope audit CONFIG --fix --small: changed and unchanged configs give equal results at small sizes, or not."""

import pytest

from bytescope.memory.commands.audit_fix import TriedProposal
from bytescope.memory.compare.program_factory import load_factory
from bytescope.memory.devices import targets
from bytescope.memory.fixes import equal_results
from bytescope.memory.fixes.proposals import Proposal
from bytescope.train import cli
from bytescope.train.commands.audit_config import with_small_runs
from support.json_results import read_result

SMALL = "model.n_layers=1,model.d_model=32,model.d_ff=32,data.seq_len=16,batch.micro=2"
XLA_FLAG = "--config.xla.memory_slop=75"


@pytest.fixture
def ran(monkeypatch):
    """Runs the programs in this process. Returns the list of the keys of each run."""
    keys = []

    def run(reference, small, devices=1):
        keys.append(dict(small))
        return equal_results.run_small(load_factory(reference)(small, targets.parse(f"cpu:{devices}")))

    monkeypatch.setattr(equal_results, "run_version", run)
    return keys


def test_the_changes_of_a_config_are_compared(ran):
    flags = (
        "--config.remat.policy=full",
        f"--config.optimizer.weight_decay=0.9 {XLA_FLAG}",
        XLA_FLAG,
        "--config.batch.micro=4 --config.loss.chunk=4",
        "--config.mesh.fsdp=3",
    )
    tried = [TriedProposal(Proposal("kind", "words", flags=text), 8, 4) for text in flags]
    tried.append(TriedProposal(Proposal("options", "words", flags="xla_gpu_x=1"), 8, 4))
    tried.append(TriedProposal(Proposal("not compiled", "words", flags=flags[0]), 8))
    rows = with_small_runs(tried, "tiny", [("remat.policy", "none"), ("optimizer.warmup_steps", "0")], SMALL, 1)
    assert [row.numerics for row in rows] == ["equal", "differs", *["not checked"] * 5]
    assert "all" in rows[0].comparison and "results are equal up to rounding" in rows[0].comparison
    assert "params" in rows[1].comparison
    assert "do not apply to the CPU" in rows[2].comparison
    assert "--small also sets batch.micro" in rows[3].comparison
    assert "mesh.fsdp" in rows[4].comparison  # the config cannot run
    assert rows[5:] == tried[5:]
    unchanged, full, *_ = ran
    assert (unchanged["remat.policy"], full["remat.policy"]) == ("none", "full") and len(ran) == 4
    assert not any(key.startswith("xla.") for keys in ran for key in keys)


@pytest.mark.exhaustive
def test_fix_of_a_config_at_small_sizes(tmp_path, capsys):
    """The whole command: the runs are processes of their own, with the config's mesh on simulated CPU devices."""
    sizes = f"{SMALL},model.vocab_size=256"
    words = ["audit", "gpt2_small", "h100:2", "--fix", f"--small={sizes}", f"--json={tmp_path / 'fix.json'}"]
    assert cli.main(words) == 0
    tried = [row for row in read_result(tmp_path / "fix.json")["proposals"] if row["kind"] == "full_logits"]
    assert [(row["flags"], row["numerics"]) for row in tried] == [("--config.loss.chunk=1024", "equal")]
    assert "results are equal up to rounding" in capsys.readouterr().out
