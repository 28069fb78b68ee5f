"""Full and broken disks, and what libraries say about them: one line that names the file."""

import errno
import json
import logging
import os
import subprocess
import sys

import pytest

from bytescope.train.checkpoints.checkpoint import Checkpoints, _held_out_loss
from bytescope.train.checkpoints.workdir import write_atomically
from bytescope.train.launch.failures import explained, silence_library_log
from bytescope.train.run.metrics import has_evaluation
from bytescope.train.user_errors import DoesNotFit, UserError

pytestmark = pytest.mark.quick

# As tensorstore says it, through Orbax.
FULL = (
    'RESOURCE_EXHAUSTED: Error writing "params.w/0.0" in OCDBT database at local file "/r/checkpoints/6.orbax-'
    'checkpoint-tmp/state/": Failed writing: "/r/checkpoints/6.orbax-checkpoint-tmp/state.orbax-checkpoint-tmp/d/'
    "b6\": Failed to write 141233 bytes to file 18: No space left on device [os_error_code='28']"
)


FILES = FULL.replace("No space left on device [os_error_code='28']", "Too many open files [os_error_code='24']")
CAUSED = RuntimeError("a save failed")
CAUSED.__cause__ = ValueError(FULL)
AGAIN = "and run the same"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            ValueError(FULL),
            UserError,
            "cannot write the checkpoint /r/checkpoints/6: No space left on device. Make room",
        ),
        (CAUSED, UserError, "cannot write the checkpoint /r/checkpoints/6: No space left on device. Make room"),
        (ValueError(FILES), UserError, "reached its limit of open files: raise the hard limit"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/r/x"), UserError, "reached its limit of open files: raise"),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), DoesNotFit, "out of device memory"),
        (OSError(errno.EDQUOT, "", "/r/x"), UserError, f"cannot write /r/x: Disk quota exceeded. Make room {AGAIN}"),
        (OSError(errno.EFBIG, "", "/r/x"), UserError, f"cannot write /r/x: File too large. Make room {AGAIN}"),
        (OSError(errno.EROFS, "", "/r/x"), UserError, f"/r/x: Read-only file system. Repair the disk {AGAIN}"),
        (OSError(errno.EIO, "", "/r/x"), UserError, f"/r/x: Input/output error. Repair the disk {AGAIN}"),
    ],
    ids=str,
)
def test_disks_files_and_device_memory_are_told_apart(error, kind, message):
    with pytest.raises(kind) as caught, explained():
        raise error
    assert type(caught.value) is kind and message in str(caught.value)


def test_a_full_disk_keeps_the_old_file_and_is_named(tmp_path):
    path = tmp_path / "config.json"
    write_atomically(path, "old")
    (tmp_path / "config.json.tmp").symlink_to("/dev/full")
    with pytest.raises(UserError, match=f"cannot write {path}: No space left on device. Make room"), explained():
        write_atomically(path, "new")
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_other_errors_pass_through():
    for error in (KeyError("x"), OSError(errno.ENOENT, "gone", "/r/x"), UserError("x")):
        with pytest.raises(type(error)) as caught, explained():
            raise error
        assert caught.value is error


def test_what_orbax_logs_is_dropped(capsys):
    silence_library_log()
    silence_library_log()
    logger = logging.getLogger("absl")
    logger.error("said by orbax")
    assert "orbax" not in capsys.readouterr().err


LATE = """
import asyncio, tempfile, time
import numpy as np, tensorstore
from bytescope.train.launch.failures import silence_library_log

silence_library_log()

async def write():
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": tempfile.mkdtemp()}, "create": True,
            "metadata": {"shape": [900, 900], "dtype": "<f4", "chunks": [10, 10]}}
    store = await tensorstore.open(spec)
    for place in range(0, 900, 10):
        asyncio.ensure_future(one(store[place:place + 10].write(np.ones((10, 900), np.float32))))
    await asyncio.sleep(0.001)

async def one(write):
    await write

loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)
loop.run_until_complete(write())
loop.close()
time.sleep(0.5)
"""


def test_late_writes_of_a_failed_save_are_not_printed():
    """What tensorstore's threads still write finds its loop closed: without the hook a traceback each."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    assert "Event loop is closed" not in done.stderr


ROW = json.dumps({"item_handlers": {}, "metrics": {}, "init_timestamp_nsecs": 1, "custom_metadata": {}})


@pytest.mark.parametrize(
    "damaged", ["", "{", "[1]", "null", "3", '{"item_handlers": 3}', '{"metrics": []}', '{"init_timestamp_nsecs": "x"}']
)
def test_damaged_metadata_of_a_checkpoint_is_one_line(tmp_path, damaged):
    for step, content in ((1, ROW), (2, damaged)):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "checkpoints" / str(step) / "_CHECKPOINT_METADATA").write_text(content)
    checkpoints = Checkpoints(tmp_path, 3)
    assert checkpoints.steps() == [1, 2]
    [line] = checkpoints._damage_notes
    assert line.startswith("checkpoint 2: its _CHECKPOINT_METADATA was damaged and is removed")
    checkpoints.close()


@pytest.mark.parametrize("damaged", ["", "{", "[1]", "null", "{}", '{"eval_loss": null}', '{"eval_loss": "1.5"}'])
def test_damaged_metrics_of_a_checkpoint_are_one_line(tmp_path, damaged):
    for step, content in ((1, '{"eval_loss": 1.5}'), (2, damaged)):
        (tmp_path / "checkpoints" / str(step) / "metrics").mkdir(parents=True)
        (tmp_path / "checkpoints" / str(step) / "metrics" / "metrics").write_text(content)
    checkpoints = Checkpoints(tmp_path, 3)
    assert checkpoints.steps() == [1] and (tmp_path / "damaged" / "2.1").is_dir()
    [line] = checkpoints._damage_notes
    assert line == f"checkpoint 2 is damaged (its metrics cannot be read); moved to {tmp_path / 'damaged' / '2.1'}"
    checkpoints.close()


@pytest.mark.parametrize("line", ['{"step": 3}', "[]", "null", '{"step": "3", "eval_loss": 1}', "\0\0", '{"step": 3,'])
def test_damaged_rows_hold_no_evaluation(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    assert has_evaluation(tmp_path / "metrics.jsonl", 3) is False


@pytest.mark.parametrize("metrics", [{}, {"eval_loss": None}, None, []])
def test_metrics_without_a_loss_are_never_the_best(metrics):
    assert _held_out_loss(metrics) > _held_out_loss({"eval_loss": 9.9}) == 9.9
