"""bytescope bisect with configs: which programs are measured for keys, another config, flags and lines."""

from pathlib import Path

import pytest

from bytescope.memory.bisect.measuring import Measuring
from bytescope.memory.records.report_record import ROWS, Buffer, ReportRecord
from bytescope.memory.units import MIB
from bytescope.train import cli
from bytescope.train.program import config_files
from support.json_results import read_result

pytestmark = pytest.mark.quick

CONFIG = """
from bytescope.configs import base

def get_config():
    config = base.get_config()
    config.model.n_layers = 2
    return config
"""


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The whole config of each measured program. A layer has 10 MiB, a flag of XLA adds 100 MiB."""
    configs = []

    def answer(self, place, candidate):
        name, pairs = candidate.overrides["config"], [*candidate.overrides.items()][1:]
        flat = config_files.load_flat(name, pairs)
        configs.append(flat)
        size = 10 * MIB * flat["model.n_layers"] + 100 * MIB * ("xla_gpu_copies=2" in flat["xla.flags"])
        buffers = (Buffer("a", size, (size,), "int8", "params", "argument"),)
        report = ReportRecord(size, size, {**dict.fromkeys(ROWS, 0), "params": size}, buffers=buffers)
        return {"status": "ok", "report": report.to_json()}

    monkeypatch.setattr(Measuring, "_ask", answer)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CONFIG)
    return configs


def bisect(*words):
    """(exit code, names of the found changes)."""
    code = cli.main(["bisect", *words, "--json=out.json"])
    return code, read_result("out.json")["change"]


def test_one_key_of_three_is_found(measured):
    keys = "--keys=model.n_layers=9,data.seq_len=8,--config.model.d_ff=64"
    assert bisect("mine.py", "h100", keys, "--bytes=+5%", "--config.train.steps=3") == (0, ["model.n_layers=9"])
    assert {flat["train.steps"] for flat in measured} == {3}
    assert {(flat["model.n_layers"], flat["data.seq_len"]) for flat in measured} > {(9, 8)}


def test_the_key_in_which_another_config_differs_is_found(measured):
    Path("other.py").write_text(CONFIG.replace("n_layers = 2", "n_layers = 5\n    config.model.d_ff = 96"))
    assert bisect("mine.py", "h100", "--keys=other.py", "--bytes=40MiB") == (0, ["model.n_layers=5"])


def test_one_flag_is_found_beside_the_flags_of_the_config(measured):
    words = ["mine.py", "h100", "--xla-flags=xla_gpu_a=true,xla_gpu_copies=2", "--config.xla.flags=xla_gpu_b=1"]
    assert bisect(*words, "--of=peak") == (0, ["xla_gpu_copies=2"])
    assert all("xla_gpu_b=1" in flat["xla.flags"] for flat in measured)


def test_one_line_of_two_configs_is_found(measured):
    Path("other.py").write_text(CONFIG.replace("n_layers = 2", "n_layers = 5\n    config.model.d_ff = 96"))
    code, change = bisect("--diff=mine.py..other.py", "h100", "--bytes=+5%")
    assert code == 0 and change[0].startswith("other.py:6: config.model.n_layers = 5")


def test_the_same_question_is_answered_from_the_cache(measured, capsys):
    words = ["mine.py", "h100", "--keys=model.n_layers=9", "--bytes=+5%"]
    assert [bisect(*words) for _ in range(2)] == 2 * [(0, ["model.n_layers=9"])]
    assert len(measured) == 2 and capsys.readouterr().out.count("recorded") == 2
    assert bisect(*words, "--no-cache")[0] == 0 and len(measured) == 4
    Path("mine.py").write_text(CONFIG.replace("n_layers = 2", "n_layers = 3"))
    assert bisect(*words)[0] == 0 and len(measured) == 6
