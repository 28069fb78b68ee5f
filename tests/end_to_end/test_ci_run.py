"""`.ci/run` where programs are missing: what it says, and whether it goes on."""

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

RUN = Path(__file__).parents[2] / ".ci" / "run"


@pytest.mark.parametrize(
    ("user", "present", "code", "out"),
    [
        (1000, ("chromium",), 0, ""),
        (1000, (), 1, "chromium is missing: run apt-get install"),
        (0, (), 1, "apt-get update -qq\napt-get install -y -qq chromium\n"),
    ],
)
def test_what_is_missing_is_said_and_installed_by_root_only(user, present, code, out, tmp_path):
    (function,) = re.findall(r"^programs\(\) \{\n.*?^\}\n", RUN.read_text(), re.M | re.S)
    scripts = dict.fromkeys(present, "") | {"id": f"echo {user}", "apt-get": 'echo "apt-get $*" >&2'}
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", f"{function}\nprograms"],
        env={"PATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == code and out in done.stdout and bool(out) == bool(done.stdout), done.stdout
