"""Damage to files and words, drawn from a `random.Random`: the same seed damages alike on every machine."""

import json
import math
from random import Random

# What stands in the place of a JSON value of another type, and numbers and texts that nobody expects.
VALUES = (
    None,
    True,
    False,
    0,
    -1,
    1,
    0.5,
    2**31,
    2**60,
    2**63,
    -(2**70),
    10**400,
    1e308,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x",
    "0",
    "NaN",
    "[/b]",
    "\x1b[2J",
    "\ud800",
    "a\nb",
    "../..",
    "/dev/null",
    "\0",
    "ü" * 40,
    "x" * 5000,
    [],
    [[]],
    [None],
    [1, "x"],
    {},
    {"": None},
    {"x": {"y": []}},
    {"name": 3},
)
# Numbers as a varint or a fixed field can hold them, and as lengths that no file has.
NUMBERS = (0, 1, 2**7 - 1, 2**31, 2**32 - 1, 2**53, 2**60, 2**63, 2**64 - 1)
WORDS = (
    "",
    " ",
    "-",
    "=",
    ",",
    ":",
    "x",
    "0",
    "-1",
    "1e999",
    "nan",
    "inf",
    "9" * 400,
    "(",
    ")",
    "()",
    "+",
    "@host",
    "~",
    "~nobody-here",
    "/",
    "..",
    "\0",
    "\n",
    "\x1b[31m",
    "[/b]",
    "\udcff",
    "é",
    "٣",
    "²",
    "None",
    "True",
    "0x10",
    "1_0",
    "GiB",
)


def damaged_bytes(data: bytes, rng: Random) -> bytes:
    """The bytes after one to six damages."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        data = rng.choice(_BYTES)(data, rng)
    return data


def _cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flip(data: bytes, rng: Random) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _set(data: bytes, rng: Random) -> bytes:
    at, count = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 8))
    made = bytes(rng.choice((0, 127, 128, 255, rng.randrange(256))) for _ in range(count))
    return data[:at] + made + data[at + count :]


def _swap(data: bytes, rng: Random) -> bytes:
    """Two blocks change places."""
    a, b, c, d = sorted(rng.randrange(len(data) + 1) for _ in range(4))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def _double(data: bytes, rng: Random) -> bytes:
    a = rng.randrange(len(data) + 1)
    b = min(len(data), a + rng.choice((1, 16, 256, 4096)))
    return data[:b] + data[a:b] * rng.choice((1, 1, 50)) + data[b:]


def _drop(data: bytes, rng: Random) -> bytes:
    a = rng.randrange(len(data) + 1)
    return data[:a] + data[a + rng.choice((1, 2, 16, 256)) :]


def _number(data: bytes, rng: Random) -> bytes:
    """A number that is too large, as a varint or in a fixed width, over what was there."""
    value, at = rng.choice(NUMBERS), rng.randrange(len(data) + 1)
    if rng.random() < 0.5:
        size = rng.choice((4, 8))
        made = (value % 256**size).to_bytes(size, rng.choice(("little", "big")))
    else:
        made = b""
        while value > 127:
            made, value = made + bytes([value & 127 | 128]), value >> 7
        made += bytes([value])
    return data[:at] + made + data[at + rng.choice((1, len(made))) :]


def _foreign(data: bytes, rng: Random) -> bytes:
    """Another encoding, a mark in front, nothing, or noise."""
    text = data.decode("utf-8", "replace")
    return rng.choice(
        (
            b"",
            b"\0",
            text.encode("utf-16"),
            b"\xef\xbb\xbf" + data,
            b"\xff" + data,
            rng.randbytes(300),
            data[::-1],
            data + data,
            b"PK\x03\x04" + data,
            b"\x1f\x8b\x08" + data,
        )
    )


_BYTES = (
    _cut,
    _flip,
    _flip,
    _flip,
    _set,
    _set,
    _set,
    _swap,
    _double,
    _drop,
    _drop,
    _number,
    _number,
    _number,
    _foreign,
)


def damaged_json(data: bytes, rng: Random) -> bytes:
    """A JSON document with values of other types, keys gone, renamed or given twice, nesting; or damaged bytes."""
    if rng.random() < 0.15:
        return damaged_bytes(data, rng)
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _changed(value, rng)
    if rng.random() < 0.03:
        return b'{"x": ' * 20_000 + json.dumps(value).encode() + b"}" * 20_000
    text = json.dumps(value, ensure_ascii=rng.random() < 0.9)
    return text.encode("utf-8", "surrogatepass")


def _changed(value, rng: Random):
    """A JSON value with one change somewhere in it."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.93:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = rng.choice(keys)
        copy = value.copy()
        act = rng.random()
        if act < 0.8:
            copy[key] = _changed(value[key], rng)
        elif act < 0.9:
            del copy[key]
        elif isinstance(copy, dict):
            copy[rng.choice((*map(str, keys), "x", "", "\ud800", "__proto__"))] = value[key]
        else:
            copy *= rng.choice((2, 50)) if len(copy) < 100 else 1
        return copy
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.3:
        return rng.choice((-value, value + 1, value * 2**40, float(value % 2**60), str(value)[:4000]))
    if isinstance(value, str) and rng.random() < 0.3:
        return damaged_text(value, rng)
    return rng.choice(VALUES)


def damaged_lines(data: bytes, rng: Random) -> bytes:
    """A file of JSON lines with one of them damaged, or as bytes."""
    lines = data.splitlines()
    if rng.random() < 0.4 or not lines:
        return damaged_bytes(data, rng)
    at = rng.randrange(len(lines))
    lines[at] = damaged_json(lines[at], rng)
    return b"\n".join(rng.sample(lines, len(lines)) if rng.random() < 0.2 else lines)


def damaged_text(text: str, rng: Random) -> str:
    """Words of a command line after one to four damages."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        b = min(b, a + rng.choice((0, 1, 1, 3, 100)))
        text = text[:a] + rng.choice((rng.choice(WORDS), text[a:b] * 2, chr(rng.randrange(1, 0x250)))) + text[b:]
    return text
