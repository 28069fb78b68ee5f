"""The GitHub Action, run as its action.yml says in a repository, against a server that answers like GitHub's API."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from support import oracles
from support.budget_project import PYPROJECT, STEP, commit, git, make_project

ROOT = Path(__file__).parents[3]
ACTION = ROOT / ".github" / "actions" / "memory"
COMMENTS = "/repos/owner/project/issues/7/comments"


class CommentApi(BaseHTTPRequestHandler):
    """The part of GitHub's API that the action uses. The server has `comments` and `may_write`."""

    def answer(self, code, value):
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_request(self):
        comments, path = self.server.comments, self.path.partition("?")[0]
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        self.server.requests.append((self.command, path))
        if self.headers["Authorization"] != "Bearer secret":
            self.answer(401, {"message": "Bad credentials"})
        elif self.command == "GET" and path == COMMENTS:
            page = int(self.path.rpartition("&page=")[2])
            self.answer(200, comments[100 * (page - 1) : 100 * page])
        elif not self.server.may_write:
            self.answer(403, {"message": "Resource not accessible by integration"})
        elif self.command == "POST" and path == COMMENTS:
            comments.append({"id": 1000 + len(comments), "body": body["body"]})
            self.answer(201, comments[-1])
        elif self.command == "PATCH" and path.startswith("/repos/owner/project/issues/comments/"):
            comment = next(one for one in comments if str(one["id"]) == path.rpartition("/")[2])
            comment["body"] = body["body"]
            self.answer(200, comment)
        else:
            self.answer(404, {"message": "Not Found"})

    do_GET = do_POST = do_PATCH = handle_request

    def log_message(self, *words):
        pass


@pytest.fixture
def api():
    with ThreadingHTTPServer(("127.0.0.1", 0), CommentApi) as server:
        server.comments = [{"id": number, "body": f"words of people {number}"} for number in range(100)]
        server.requests, server.may_write = [], True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run_action(project, api, event, **inputs):
    """Runs the step of action.yml as a runner does. Returns (exit code, output, job summary)."""
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    given = {name: str(spec["default"]) for name, spec in action["inputs"].items()} | {"token": "secret"} | inputs
    (step,) = action["runs"]["steps"]
    event_file, summary = project.parent / "event.json", project.parent / "summary.md"
    event_file.write_text(json.dumps(event))
    summary.write_text("")
    environment = {name: given[text.split("inputs.")[1].split(" ")[0]] for name, text in step["env"].items()}
    environment |= {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "NO_PROXY": "127.0.0.1",
        "GITHUB_ACTION_PATH": str(ACTION),
        "GITHUB_API_URL": f"http://127.0.0.1:{api.server_address[1]}",
        "GITHUB_EVENT_PATH": str(event_file),
        "GITHUB_REF": "refs/pull/7/merge",
        "GITHUB_REPOSITORY": "owner/project",
        "GITHUB_STEP_SUMMARY": str(summary),
        "GITHUB_WORKSPACE": str(project),
    }
    command = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]
    where = project / given["working-directory"]
    done = subprocess.run(command, cwd=where, env=os.environ | environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, summary.read_text()


@pytest.fixture
def pull_request(tmp_path):
    """A shallow clone at the merge of a pull request that changes the width, as actions/checkout makes it, and the
    event. The base branch has moved since the event: its first commit is not what is compared."""
    project = make_project(tmp_path)
    first = git(project, "rev-parse", "HEAD")
    git(project, "checkout", "--quiet", "-b", "change")
    (project / "step.py").write_text(STEP.replace("width=64", "width=512"))
    head = commit(project, "Widen")
    git(project, "checkout", "--quiet", "main")
    (project / "pyproject.toml").write_text(PYPROJECT.replace("mlp", "net"))
    commit(project, "Rename the budget")
    git(project, "merge", "--quiet", "--no-edit", "change")
    clone = tmp_path / "runner" / "project"
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{project}", str(clone))
    git(clone, "checkout", "--quiet", "--detach")
    return clone, {"pull_request": {"number": 7, "base": {"sha": first}, "head": {"sha": head}}}


def test_one_comment_is_created_then_updated_and_without_permission_only_the_summary(pull_request, api):
    project, event = pull_request
    merged = git(project, "rev-parse", "HEAD")
    assert git(project, "rev-list", "--count", "HEAD") == "1", "the base has to be fetched"

    code, out, summary = run_action(project, api, event)
    assert code == 0, out
    assert len(api.comments) == 101 and api.requests[-1] == ("POST", COMMENTS), "the comment is looked for on two pages"
    text = api.comments[-1]["body"]
    assert text.startswith("<!-- bytescope memory -->\n### Device memory: 1 of 1 budget kept") and summary in text
    assert "| budget | target | before | peak |" in text and "| net | cpu |" in text, (
        "the merge's first parent is the base"
    )
    (peak,) = [line.split(" | ") for line in text.splitlines() if line.startswith("| **peak** | ")]
    assert peak[1].endswith("KiB") and peak[2].endswith("MiB") and peak[3].startswith("+"), peak
    assert "category params" in text and "| largest buffers at the peak | before | after | line |" in text
    assert "| step.py:7 |" in text and "| fits |" in text and "::warning file=step.py,line=7" in out
    assert git(project, "rev-parse", "HEAD") == merged and not git(project, "status", "--porcelain")

    (project / "pyproject.toml").write_text(PYPROJECT.replace("mlp", "net").replace("64MiB", "1MiB"))
    commit(project, "Lower the limit")
    code, out, summary = run_action(project, api, event)
    assert code == 1 and len(api.comments) == 101, out
    assert api.requests[-1] == ("PATCH", "/repos/owner/project/issues/comments/1100")
    text = api.comments[-1]["body"]
    assert "0 of 1 budget kept" in text and "**exceeds**" in text and "exceeds 1.00 MiB" in text
    assert "::error file=step.py,line=7,title=memory budget net::exceeds 1.00 MiB" in out

    api.may_write = False
    code, out, summary = run_action(project, api, event)
    assert code == 1 and api.comments[-1]["body"] == text, "the exit code is that of the check"
    assert "::notice title=memory budgets::no comment is written: HTTP Error 403" in out
    assert "0 of 1 budget kept" in summary and "secret" not in out

    api.requests.clear()
    code, out, summary = run_action(project, api, {}, arguments="--pyproject='no such.toml'")
    assert code == 2 and not api.requests, "a push has no pull request to write to"
    assert "cannot read" in summary and "no such.toml: No such file" in summary


@pytest.mark.quick
def test_a_base_without_budgets_is_said_and_no_other_comment_is_touched(tmp_path, api):
    project = make_project(tmp_path, pyproject="[project]\n")
    base = git(project, "rev-parse", "HEAD")
    (project / "pyproject.toml").write_text(PYPROJECT.replace("step.py:", "missing.py:"))
    head = commit(project, "Add a budget")
    event = {"pull_request": {"number": 7, "base": {"sha": base}, "head": {"sha": head}}}
    api.comments[3]["body"] = "<!-- bytescope memory -->\nby another use of the action"
    code, out, _ = run_action(project, api, event, comment="second")
    assert code == 2, out
    assert api.comments[3]["body"].endswith("another use of the action")
    text = api.comments[-1]["body"]
    assert text.startswith("<!-- bytescope second -->\n### Device memory: 0 of 1 budget kept"), text
    assert "missing.py does not exist" in text and "no figures of the base: " in text and "has no budgets" in text
    assert git(project, "symbolic-ref", "--short", "HEAD") == "main", "the branch is checked out again"
    event["pull_request"]["base"]["sha"] = "0" * 40
    code, out, summary = run_action(project, api, event)
    assert code == 2 and "no figures of the base: fatal: " in summary, "the base cannot be fetched"


@pytest.mark.quick
@pytest.mark.oracle("jsonschema")
@pytest.mark.parametrize(
    ("schema", "folder", "pattern"),
    [("workflows", "workflows", "*.yml"), ("actions", "actions", "*/action.yml")],
    ids=["workflows", "actions"],
)
def test_workflows_and_actions_match_the_schema_of_github(schema, folder, pattern, tmp_path):
    files = sorted((ROOT / ".github" / folder).glob(pattern))
    assert files
    oracles.check_schema(f"vendor.github-{schema}", files)
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(files[0].read_text().replace("runs", "run", 1))
    with pytest.raises(AssertionError, match="wrong.yml"):
        oracles.check_schema(f"vendor.github-{schema}", [wrong])
