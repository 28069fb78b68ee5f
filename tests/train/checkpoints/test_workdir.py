"""The run directory: what may change between starts, what may not, and rows that survive a kill."""

import dataclasses
import errno
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bytescope.memory.cost import flops
from bytescope.memory.formulas.model_shape import matrices
from bytescope.train.checkpoints.saved_run import SavedRun
from bytescope.train.checkpoints.workdir import (
    Identity,
    check_path,
    claim,
    claimed,
    continued_config,
    interrupted_note,
    new_workdir,
    recordable,
    recorded,
    saved_config,
)
from bytescope.train.commands import train_command
from bytescope.train.export.model_folder import refuse_used
from bytescope.train.plan.config_facts import question_of
from bytescope.train.program.config_files import flatten, load, override
from bytescope.train.program.run_command import Command
from bytescope.train.run.metrics import MetricsLog, adapter_parameters, matmul_parameters, model_flops_per_token
from bytescope.train.source import METRICS
from bytescope.train.user_errors import UserError
from support.toy import small_config, small_program

pytestmark = pytest.mark.quick


def identity(rows=16, data="abc", **changes):
    config = small_config()
    for key, value in changes.items():
        override(config, key.replace("__", "."), str(value))
    return Identity.from_config(config, rows, data)


def begun(workdir, run=None):
    """A run directory of a run that has a row."""
    claim(workdir, run or identity(), extend=False)
    (workdir / METRICS).write_text('{"step": 1}\n')


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"mesh__fsdp": 4}, "mesh.fsdp"),
        ({"batch__micro": 2}, "batch.micro"),
        ({"batch__mode": "scan"}, "batch.mode"),
        ({"remat__policy": "full"}, "remat.policy"),
        ({"loss__kind": "full"}, "loss.kind"),
        ({"model__attention": "chunked"}, "model.attention"),
        ({"data__source": "elsewhere"}, "data.source"),
        ({"train__log_every": 3}, ""),
        ({"train__checkpoint_every": 9}, ""),
        ({"data__workers": 1}, ""),
        ({}, ""),
    ],
)
def test_what_does_not_move_the_curve_may_change_with_a_note_and_a_cadence_silently(tmp_path, change, note):
    begun(tmp_path / "run")
    notes = claim(tmp_path / "run", identity(**change), extend=False)
    assert len(notes) == bool(note) and all(note in line and "->" in line for line in notes)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"model__d_ff": 64}, "model.d_ff 48 -> 64"),
        ({"seed": 3}, "seed 0 -> 3"),
        ({"optimizer__learning_rate": 0.5}, "optimizer.learning_rate 0.01 -> 0.5"),
        ({"precision__preset": "bf16"}, "precision.preset 'fp32' -> 'bf16'"),
        ({"data__seq_len": 16}, "data.seq_len 32 -> 16"),
        ({"loss__balance": 0.5}, "loss.balance 0.01 -> 0.5"),
        ({"rows": 8}, "global batch (sequences) 16 -> 8"),
        ({"data": "xyz"}, "data.source='stdlib' has other content than before, or is read in another way"),
        ({"data": "xyz", "data__source": "b.txt"}, "another run: data.source 'stdlib' -> 'b.txt'. Leave out"),
    ],
)
def test_another_run_is_refused_with_the_difference(tmp_path, change, shown):
    begun(tmp_path / "run")
    before = (tmp_path / "run" / "config.json").read_text()
    with pytest.raises(UserError) as caught:
        claim(tmp_path / "run", identity(**change), extend=False)
    assert shown in str(caught.value) and "another --workdir" in str(caught.value)
    assert (tmp_path / "run" / "config.json").read_text() == before


def test_a_run_directory_is_enough_to_continue(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from bytescope.configs.tiny import get_config\n")
    (tmp_path / "poem.txt").write_text("the moon over the sea\n" * 90)
    first = ["mine.py", "--workdir=run", "--config.data.source=poem.txt", "--config.remat.layers=0-2:none,2-4:full"]

    def begin(*words):
        """The config of a start, which is recorded as a run records it."""
        args = train_command.parse(words)
        train_command.settle_config(args)
        config, command = load(args.config, args.overrides), Command.from_args(args)
        claim(tmp_path / "run", recordable(config, command, 16, "abc"), extend=True)
        (tmp_path / "run" / METRICS).write_text('{"step": 1}\n')
        return config

    started = begin(*first)
    assert begin("--workdir=run", "--config.train.steps=70", "--extend").train.steps == 70
    continued = begin("--workdir=run")
    assert continued.train.steps == 70 and continued.data.source == "poem.txt"
    assert continued.remat.layers == started.remat.layers
    assert begin("mine.py", "--workdir=run").to_dict() == continued.to_dict()  # keys of earlier command lines stay
    saved = recorded(tmp_path / "run" / "config.json")
    assert saved.name == "mine.py" and saved.given == ["data.source", "remat.layers", "train.steps"]

    with pytest.raises(UserError, match="contains another run: model.d_model 128 -> 64. Leave out these keys"):
        begin("--workdir=run", "--config.model.d_model=64")
    with pytest.raises(UserError, match="contains another run: .*model.bias False -> True.* and 7 more. Leave out"):
        begin("char", "--workdir=run")
    (tmp_path / "mine.py").write_text(
        "from bytescope.configs import tiny\ndef get_config():\n    config = tiny.get_config()\n"
        "    config.seed = 3\n    config.train.steps = 9\n    return config\n"
    )
    assert begin("--workdir=run").seed == 0  # an edited config counts where it is named
    with pytest.raises(UserError, match="contains another run: seed 0 -> 3. "):
        begin("mine.py", "--workdir=run")

    (tmp_path / "mine.py").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert begin("--workdir=../run").data.source == str(tmp_path / "poem.txt")


def mixture(micro, accumulation, ranks=1, **changes):
    """16 sequences of a mixture of experts, in micro-batches of `micro` x `ranks`."""
    changes = {"model__experts": 4, "batch__micro": micro, "batch__accumulation": accumulation, **changes}
    return dataclasses.replace(identity(mesh__fsdp=ranks, **changes), micro_rows=micro * ranks)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({}, "but the load-balance loss (loss.balance) is a product of two means over a micro-batch"),
        ({"loss__balance": 0.0, "model__moe_kernel": "capacity"}, "but experts drop the rows of a micro-batch"),
        ({"loss__balance": 0.0, "mesh__expert": 2, "model__capacity_factor": 2.0}, "but experts drop the rows"),
    ],
)
def test_a_mixture_whose_results_depend_on_the_micro_batch_keeps_it(tmp_path, keys, why):
    """Also one whose first version did not record it."""
    begun(tmp_path, mixture(16, 1, **keys))
    recorded = json.loads((tmp_path / "config.json").read_text())
    for known in ({}, {"micro_rows": 0}):
        (tmp_path / "config.json").write_text(json.dumps(recorded | known))
        with pytest.raises(UserError) as caught:
            claim(tmp_path, mixture(4, 4, **keys), extend=False)
        changed = "sequences of a micro-batch 16 -> 4; batch.accumulation 1 -> 4; batch.micro 16 -> 4"
        assert f"contains another run: {changed}, {why}" in str(caught.value) and "\n" not in str(caught.value)
    assert claim(tmp_path, mixture(8, 1, 2, **keys), extend=False)  # the same sequences on two ranks


@pytest.mark.parametrize("keys", [{"loss__balance": 0.0}, {"model__experts": 0}])
def test_micro_batches_of_another_size_may_go_on_where_they_add_up_to_their_batch(tmp_path, keys):
    begun(tmp_path, mixture(16, 1, **keys))
    assert len(claim(tmp_path, mixture(4, 4, **keys), extend=False)) == 2


def test_a_key_that_is_newer_than_the_run_has_its_default(tmp_path):
    begun(tmp_path)
    path = tmp_path / "config.json"
    old = json.loads(path.read_text())
    del old["config"]["optimizer.freeze"]
    path.write_text(json.dumps(old))
    with pytest.raises(UserError, match="contains another run: optimizer.freeze"):
        claim(tmp_path, identity(optimizer__freeze="w_head"), extend=False)
    assert claim(tmp_path, identity(), extend=False) == []


def test_what_earlier_versions_recorded_is_left_out(tmp_path):
    begun(tmp_path)
    path = tmp_path / "config.json"
    old = json.loads(path.read_text()) | {"files": {"data.source a.txt": "sha256:0"}}
    gone = {"batch.accumulation_schedule": [], "optimizer.batch_scaling": "none", "optimizer.base_batch_tokens": 0}
    old["config"] |= {"train.tensorboard": True, **gone}
    path.write_text(json.dumps(old))
    assert claim(tmp_path, identity(), extend=False) == []
    assert continued_config(tmp_path, None, []) == small_config()
    with pytest.raises(UserError, match="train.tensorboard is an unknown key, because it is gone: leave it out"):
        identity(train__tensorboard=False)
    old["config"]["optimizer.batch_scaling"] = "sqrt"  # the loss curve would change
    path.write_text(json.dumps(old))
    with pytest.raises(UserError, match="optimizer.batch_scaling"):
        saved_config(recorded(path), path)


def test_a_run_that_never_began_may_become_another(tmp_path):
    """It was refused for its memory, and its user follows the advice."""
    claim(tmp_path / "run", identity(), extend=False)
    (tmp_path / "run" / "checkpoints").mkdir()
    assert claim(tmp_path / "run", identity(optimizer__name="adamw_8bit"), extend=False) == []
    (tmp_path / "run" / "checkpoints" / "1").mkdir()
    with pytest.raises(UserError, match="contains another run"):
        claim(tmp_path / "run", identity(), extend=False)


def test_an_interrupted_run_promises_no_checkpoint_that_is_not_there(tmp_path):
    nothing = "interrupted before the first checkpoint: nothing is saved"
    assert interrupted_note(tmp_path / "new") == nothing
    (tmp_path / "checkpoints" / "8.orbax-checkpoint-tmp").mkdir(parents=True)
    assert interrupted_note(tmp_path) == nothing
    for step in (20, 100):
        (tmp_path / "checkpoints" / str(step)).mkdir()
    assert interrupted_note(tmp_path) == f"interrupted: bytescope train --workdir={tmp_path} resumes from step 100"


def test_more_steps_need_extend(tmp_path):
    begun(tmp_path / "run")
    with pytest.raises(UserError, match="planned for 20 steps, not 30.*--extend"):
        claim(tmp_path / "run", identity(train__steps=30), extend=False)
    assert claim(tmp_path / "run", identity(train__steps=30), extend=True) == []


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(UserError, match="is not a run directory"):
        claim(tmp_path, identity(), extend=False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: "{",
        lambda whole: "",
        lambda whole: "\0" * 64,
        lambda whole: "[" * 100_000,
        lambda whole: "null",
        lambda whole: "[1]",
        lambda whole: "3",
        lambda whole: '"text"',
        lambda whole: "{}",
        lambda whole: json.dumps({**json.loads(whole), "config": None}),
        lambda whole: json.dumps({**json.loads(whole), "config": ["train.steps"]}),
        lambda whole: json.dumps({**json.loads(whole), "config": {}}),
        lambda whole: json.dumps({**json.loads(whole), "global_rows": "16"}),
        lambda whole: json.dumps({**json.loads(whole), "global_rows": 0}),
        lambda whole: json.dumps({**json.loads(whole), "data": None}),
        lambda whole: json.dumps({**json.loads(whole), "more": 1}),
        lambda whole: json.dumps({**json.loads(whole), "given": 3}),
        lambda whole: json.dumps({**json.loads(whole), "given": [["seed"]]}),
        lambda whole: json.dumps({**json.loads(whole), "folder": None}),
        lambda whole: json.dumps({**json.loads(whole), "micro_rows": "8"}),
        lambda whole: whole.replace('"train.steps": 20', '"train.steps": null'),
        lambda whole: whole.replace('"train.steps": 20', '"train.steps": "20"'),
    ],
)
def test_a_damaged_identity_is_one_line(tmp_path, damage):
    claim(tmp_path, identity(), extend=False)
    path = tmp_path / "config.json"
    damaged = damage(path.read_text())
    path.write_text(damaged)
    with pytest.raises(UserError, match="is damaged .*: restore it, or choose another --workdir") as caught:
        claim(tmp_path, identity(), extend=False)
    assert "\n" not in str(caught.value) and path.read_text() == damaged


HOLDER = """
import sys, time
from pathlib import Path
from bytescope.train.checkpoints.workdir import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_training_at_a_time_and_the_lock_dies_with_its_process(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError) as caught, claimed(tmp_path, identity(), extend=False):
            pass
        (tmp_path / "run.lock").unlink()  # the folder stays locked
        with (
            pytest.raises(UserError, match="in use by another process: wait for"),
            claimed(tmp_path, identity(), extend=False),
        ):
            pass
        holder.kill()
    assert f"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()} since " in str(caught.value)
    assert caught.value.exit_code == 2 and not (tmp_path / "config.json").exists()
    with claimed(tmp_path, identity(), extend=False) as notes:
        assert notes == []
        with (
            pytest.raises(UserError, match=f"in use by process {os.getpid()} "),
            claimed(tmp_path, identity(), extend=False),
        ):
            pass
    with claimed(tmp_path, identity(), extend=False):  # released
        pass


def test_the_processes_of_one_run_share_its_directory(tmp_path):
    class Second:
        """Process 1, which hears process 0's values: its identity, then its notes."""

        first, heard = False, [dataclasses.asdict(identity()), []]

        def from_first(self, value):
            return self.heard.pop(0)

    with (
        claimed(tmp_path, identity(), extend=False),
        claimed(tmp_path, identity(), extend=False, processes=Second()) as notes,
    ):
        assert notes == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, number):
    def flock(*_):
        raise OSError(number, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with claimed(tmp_path, identity(), extend=False) as notes:
        assert len(notes) == 1 and "cannot be locked (No locks available)" in notes[0]


def test_nfs_locks_no_folder_but_the_lock_file(tmp_path, monkeypatch):
    def flock(descriptor, _, real=fcntl.flock):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        return real(descriptor, _)

    monkeypatch.setattr("fcntl.flock", flock)
    with claimed(tmp_path, identity(), extend=False) as notes:
        assert notes == [] and json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
        with pytest.raises(UserError, match="in use by process"), claimed(tmp_path, identity(), extend=False):
            pass


def test_a_directory_of_another_user_is_one_line(tmp_path, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("os.open", refuse)
    with (
        pytest.raises(UserError, match="cannot be written .Permission denied.: choose another --workdir"),
        claimed(tmp_path, identity(), extend=False),
    ):
        pass


def test_a_start_killed_before_its_first_file_is_whole_leaves_a_directory_for_the_next(tmp_path):
    (tmp_path / "run.lock").write_text("")
    (tmp_path / "config.json.tmp").write_text('{"config"')
    with claimed(tmp_path, identity(), extend=False):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "run.lock"]


def test_a_workdir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("dear")
    with (
        pytest.raises(UserError, match="is a file: give a folder"),
        claimed(tmp_path / "file", identity(), extend=False),
    ):
        pass


@pytest.mark.parametrize("name", ["[run1]", "a*", "a?b", "lr=[1e-3", "a\udcff"])
def test_a_path_whose_checkpoints_nobody_could_read_is_refused(tmp_path, monkeypatch, name):
    with pytest.raises(UserError, match="rename the folder"):
        check_path(tmp_path / name / "run")
    monkeypatch.setattr(os, "getcwd", lambda: str(tmp_path / name))  # of the current folder, too
    with pytest.raises(UserError, match="rename the folder"):
        check_path(Path("runs"))
    check_path(tmp_path / "a b" / "ü #%20{run}|~$(1)!'\n")


def test_readers_and_writers_of_models_refuse_a_path_that_is_not_utf8(tmp_path):
    folder = tmp_path / "a\udcff"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for use in (SavedRun.open, lambda path: refuse_used(path, force=True)):
        with pytest.raises(UserError, match="is not valid UTF-8: rename the folder"):
            use(folder)


def test_new_workdirs_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = new_workdir("tiny")
    first.mkdir(parents=True)
    assert new_workdir("tiny") != first and first.parts[0] == "runs"


def test_metrics_drop_a_torn_line_and_rows_past_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1.0 / step})
    log.close()
    with open(path, "a") as file:
        file.write('{"step": 1}\n[2]\nnull\n{"step": "2", "loss": 1}\n{"step": 4, "lo')
    log = MetricsLog(path, 2)
    log.write({"step": 3, "loss": 9.0})
    log.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.5},
        {"step": 3, "loss": 9.0},
    ]


def test_rows_are_on_disk_before_the_next_step(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    log.write({"step": 1})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    log.close()


def test_model_flops_equal_the_published_formula():
    """Korthikanti et al. 2022: 72 B L s h^2 (1 + s/(6h) + v/(12hL)) per iteration for GPT shapes."""
    from bytescope.configs import gpt3_175b
    from bytescope.model import ModelConfig

    config = gpt3_175b.get_config()
    model = ModelConfig.from_dict(config.model)
    h, L, s, v = model.d_model, model.n_layers, config.data.seq_len, model.vocab_size
    published = 72 * L * s * h**2 * (1 + s / (6 * h) + v / (12 * h * L))
    assert model_flops_per_token(model, s) * s == pytest.approx(published, rel=1e-9)
    assert matmul_parameters(model) == pytest.approx(174.6e9, rel=0.01)


@pytest.mark.parametrize("patterns", ["blocks.*.w_*,w_head", "blocks.mlp.w_up,blocks.attention.w_k,*norm*,w_token"])
@pytest.mark.parametrize("tied", [False, True])
def test_frozen_matrices_take_four_flops_a_token(patterns, tied):
    """Of what the step computes: the gradient of the first layer's input has a reader in the token table."""
    if tied:
        patterns = patterns.replace(",w_head", "")
    program = small_program(
        {
            "optimizer.freeze": patterns,
            "remat.policy": "none",
            "loss.kind": "full",
            "model.tie_embeddings": str(tied).lower(),
            "model.attention": "naive",
        }
    )
    counted = flops.count(program.step.trace(program.state, program.batch_shapes).jaxpr).model_flops
    tokens = program.batch.rows * program.batch.seq_len
    assert counted == model_flops_per_token(program.model, program.batch.seq_len, program.frozen) * tokens
    assert model_flops_per_token(program.model, 8, program.frozen) < model_flops_per_token(program.model, 8)


@pytest.mark.parametrize("targets", ["q,k,v,o,gate,up,down", "q,v"])
def test_adapters_take_six_flops_a_token(targets):
    program = small_program(
        {
            "lora.rank": 4,
            "lora.targets": targets,
            "remat.policy": "none",
            "loss.kind": "full",
            "model.attention": "naive",
        }
    )
    counted = flops.count(program.step.trace(program.state, program.batch_shapes).jaxpr).model_flops
    own, length = adapter_parameters(program.state.params), program.batch.seq_len
    assert own == 4 * program.model.n_layers * sum(
        sum(shape)
        for name, shape in matrices(question_of(flatten(program.config)).model).items()
        if name in targets.split(",")
    )
    assert counted == model_flops_per_token(program.model, length, program.frozen, own) * program.batch.rows * length
