"""Files that commands write: all of the new one or all of the old one, on a full disk too."""

import os
import subprocess
import sys

import pytest

from bytescope.memory.files import write_whole
from bytescope.memory.records.report_record import ReportRecord, load

pytestmark = pytest.mark.quick

LIMITED = """
import resource, sys
from pathlib import Path
from bytescope.memory.commands import arguments
from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import ReportRecord
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
path = Path(sys.argv[1])
try:
    arguments.write(path, "new" * 100)
except ReportError as error:
    print(error)
try:
    ReportRecord(peak_bytes=1, allocated_bytes=1, breakdown={}).save(path)
except OSError as error:
    print(error.strerror)
"""


def test_a_full_disk_keeps_the_old_file_and_is_named(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"cannot write {path}: File too large; give another file", "File too large"]
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["report.json"]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "new")
    assert os.read(reader, 10) == b"new" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_a_saved_report_is_whole(tmp_path):
    report = ReportRecord(peak_bytes=1, allocated_bytes=1, breakdown={})
    report.save(tmp_path / "a.json")
    assert load(tmp_path / "a.json").to_json() == report.to_json() and os.listdir(tmp_path) == ["a.json"]
