"""A Git repository with a program that has a memory budget, as a user of `bytescope check` has it."""

import subprocess
from pathlib import Path

# jax is imported in the function: a check whose results are in the cache starts fast.
STEP = """
def program(width=64, remat="none"):
    import jax
    import jax.numpy as jnp

    def step(w, x):
        return w - jax.grad(lambda w: jnp.tanh(jnp.tanh(x @ w) @ w).sum())(w)

    return step, (jnp.zeros((width, width)), jnp.zeros((32, width))), {"donate_argnums": 0}
"""
PYPROJECT = """
[tool.bytescope.budgets.mlp]
program = "step.py:program"
target = "cpu"
budget = "64MiB"
"""


def git(folder: Path, *words: str) -> str:
    """Runs git in a folder, without the user's configuration, and returns its output."""
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main"]
    command = ["git", *identity, "-c", "commit.gpgsign=false", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def make_project(folder: Path, pyproject: str = PYPROJECT) -> Path:
    """Creates a repository in `folder`/project with one commit. Returns its path. Its name decides the names in the
    cache, so that two tests share compiled programs."""
    project = folder / "project"
    project.mkdir()
    (project / "step.py").write_text(STEP)
    (project / "pyproject.toml").write_text(pyproject)
    git(project, "init", "--quiet")
    commit(project, "first")
    return project


def commit(project: Path, message: str) -> str:
    """Commits all files and returns the hash of the commit."""
    git(project, "add", "--all")
    git(project, "commit", "--quiet", f"--message={message}")
    return git(project, "rev-parse", "HEAD")
