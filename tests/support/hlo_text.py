"""Collectives of a compiled program, read from its text."""

import re

COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(")


def collectives(text):
    """computation -> [(kind, result as printed, operation)] of an HLO module; fused ones count each of their arrays."""
    found, name = {}, ""
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = head[1]
        if match := COLLECTIVE.search(line):
            operation = re.search(r'op_name="([^"]*)"', line)
            found.setdefault(name, []).append((match[2], match[1], operation[1] if operation else ""))
    return found
