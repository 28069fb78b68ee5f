"""Command lines of one subcommand: `train(["tiny"])` is `bytescope train tiny`; returns the exit code."""

from collections.abc import Sequence

from bytescope.train import cli


def prepare(words: Sequence[str]) -> int:
    return cli.main(["prepare", *words])


def train(words: Sequence[str]) -> int:
    return cli.main(["train", *words])
