"""Runs `bytescope check` on a pull request and on its base, and writes the result as one comment.

The script of the composite action in this folder. It needs Git, and a Python that has bytescope and the project. Both
commits are compiled in the same folder, so that an editable installation of the project follows. The script ends with
the exit code of the check of the pull request. If GitHub refuses the comment, as for a pull request from a fork, the
text is only in the job summary.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

# GitHub refuses a comment of more than 65,536 characters.
MAX_CHARACTERS = 60_000
SECONDS = 30


def main() -> int:
    """Checks the pull request, writes the job summary and the comment, and returns the exit code of the check."""
    event = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))
    pull_request, project = event.get("pull_request"), Path.cwd()
    os.chdir(git("rev-parse", "--show-toplevel"))  # the base may not have the folder of the project
    with tempfile.TemporaryDirectory() as folder:
        notes, arguments = [], ["--github"]
        if pull_request:
            before = Path(folder, "before.json")
            note = check_base(project, pull_request["base"]["sha"], before)
            if before.is_file():
                arguments.append(f"--baseline={before}")
            if note:
                notes.append(f"> **Warning:** no figures of the base: {note}")
        summary = Path(folder, "summary.md")
        code, error = check(project, arguments, GITHUB_STEP_SUMMARY=str(summary))
        text = summary.read_text(encoding="utf-8") if summary.is_file() else f"### Device memory\n\n{error}\n"
    if len(text) > MAX_CHARACTERS:  # cut before the section that does not fit
        text = text[:MAX_CHARACTERS].rsplit("\n<details", 1)[0] + "\n\nThe rest is in the log of bytescope check.\n"
    text = "\n\n".join([text, *notes])
    if os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(os.environ["GITHUB_STEP_SUMMARY"], "a", encoding="utf-8") as file:
            file.write(text + "\n")
    if pull_request and os.environ.get("GITHUB_TOKEN"):
        head = pull_request["head"]["sha"][:7]
        try:
            write_comment(pull_request["number"], f"{text}\n\nCommit {head}, `bytescope check`.")
        except (OSError, ValueError, KeyError) as refused:  # no permission, no network, no JSON
            print(f"::notice title=memory budgets::no comment is written: {in_one_line(refused)}; see the job summary")
    return code


def check(project: Path, arguments: list[str], **environment: str) -> tuple[int, str]:
    """Runs `bytescope check` in a folder. Returns (its exit code, the last line that it printed to stderr)."""
    given = shlex.split(os.environ.get("CHECK_ARGUMENTS", ""))
    command = [sys.executable, "-m", "bytescope.memory", "check", *given, *arguments]
    # Bytecode is not written: a file of the base and of the pull request may have the same size and time.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    environment.pop("GITHUB_TOKEN", None)
    done = subprocess.run(command, cwd=project, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stderr)
    sys.stdout.flush()
    return done.returncode, (done.stderr.strip().splitlines() or ["bytescope check failed"])[-1]


def check_base(project: Path, base: str, file: Path) -> str:
    """Checks out the base, checks its budgets, and returns to the commit of the pull request.

    project: the folder of the project. base: the commit of the base branch, by the event. file: the JSON file to write.
    Returns why there are no figures, in one line; "" if there are.
    """
    here = git("symbolic-ref", "--quiet", "--short", "HEAD", check=False) or git("rev-parse", "HEAD")
    # actions/checkout checks out a merge of the base and the pull request. Its first parent is the base, also if the
    # base branch has moved. The parents stand in the commit, even if a shallow clone has only this commit.
    lines = git("cat-file", "-p", "HEAD").partition("\n\n")[0].splitlines()
    parents = [line.removeprefix("parent ") for line in lines if line.startswith("parent ")]
    if len(parents) == 2 and os.environ.get("GITHUB_REF", "").endswith("/merge"):
        base = parents[0]
    try:
        if git("cat-file", "-t", base, check=False) != "commit":
            git("fetch", "--quiet", "--no-tags", "--depth=1", "origin", base)
        git("checkout", "--quiet", "--detach", base)
    except subprocess.CalledProcessError as error:
        return in_one_line(error.stderr)
    print(f"::group::bytescope check on the base {base[:7]}", flush=True)
    try:
        if not project.is_dir():
            return f"the base has no folder {project.name}"
        _, message = check(project, [f"--json={file}"], GITHUB_STEP_SUMMARY="")
    finally:
        print("::endgroup::", flush=True)
        git("checkout", "--quiet", here)
    return "" if file.is_file() else message


def git(*words: str, check: bool = True) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=check).stdout.strip()


def write_comment(number: int, text: str) -> None:
    """Writes a comment on the pull request `number`, or replaces the comment that an earlier run wrote.

    Raises OSError if GitHub cannot be reached or refuses.
    """
    marker = f"<!-- bytescope {os.environ.get('COMMENT_NAME') or 'memory'} -->"
    issues = f"/repos/{os.environ['GITHUB_REPOSITORY']}/issues"
    page, found = 1, None
    while found is None:
        comments = request("GET", f"{issues}/{number}/comments?per_page=100&page={page}")
        found = next((comment for comment in comments if (comment["body"] or "").startswith(marker)), None)
        page += 1
        if len(comments) < 100:
            break
    body = {"body": f"{marker}\n{text}"}
    if found:
        request("PATCH", f"{issues}/comments/{found['id']}", body)
    else:
        request("POST", f"{issues}/{number}/comments", body)


def request(method: str, path: str, body: dict[str, str] | None = None) -> Any:
    """Sends a request to GitHub's API and returns its JSON."""
    asked = urllib.request.Request(
        os.environ.get("GITHUB_API_URL", "https://api.github.com") + path,
        data=json.dumps(body).encode() if body else None,
        method=method,
        headers={
            "Authorization": f"Bearer {os.environ['GITHUB_TOKEN']}",
            "Accept": "application/vnd.github+json",
            "Content-Type": "application/json",
            "X-GitHub-Api-Version": "2022-11-28",
            "User-Agent": "bytescope",
        },
    )
    with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
        return json.load(answer)


def in_one_line(text: object) -> str:
    return " ".join(str(text).split()).replace("%", "%25")


if __name__ == "__main__":
    sys.exit(main())
