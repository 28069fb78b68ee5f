"""Digests of the files that a run reads, by which a later start names the files that have moved or changed."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bytescope.train.data.corpus import INDEX, ShardFiles, find
from bytescope.train.data.documents import TextDocuments, reading
from bytescope.train.source import ADAPTER_CONFIG, CONFIG

MAX_FILES = 1000  # of a source with more files, only one digest of all files is recorded
ENDS = 1 << 16  # bytes at each end of a large file that are read
WHOLE = 1 << 30  # larger files, token shards and weights are not read as a whole


def file_digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns a digest of each file of the data, the tokenizer, the chat template and the initial weights: config key
    and name of the file, such as "data.source poem.txt" -> "sha256:" and the first 16 digits.

    The digest of a file that is too large to read as a whole is "ends:" and 16 digits of its size and its first and
    last bytes.

    Args:
      config: the config by dotted key.

    Raises:
      UserError: there is no such file, or it cannot be read.
    """
    digests: dict[str, str] = {}
    for key in ("data.source", "data.eval_source"):
        if not config[key]:
            continue
        files = dict(_source_files(config[key], key))
        if len(files) > MAX_FILES:
            files = {f"({len(files):,} files)": _digest_of_all(files)}
        digests |= {f"{key} {name}": text for name, text in files.items()}
    for key in ("data.tokenizer", "data.chat_template"):
        path = Path(os.path.expanduser(config[key]))
        if config[key] and path.is_file():
            digests[f"{key} {path.name}"] = _digest(path)
    for key in ("init.folder", "init.adapter"):
        if config[key]:
            for path in sorted(Path(os.path.expanduser(config[key])).glob("*")):
                if path.suffix == ".safetensors" or path.name in (CONFIG, ADAPTER_CONFIG):
                    digests[f"{key} {path.name}"] = _digest(path, path.suffix != ".safetensors")
    return digests


def _source_files(source: str, key: str) -> Iterator[tuple[str, str]]:
    found = find(source, key)
    if isinstance(found, ShardFiles):
        if found.folder is not None:
            yield INDEX, _digest(found.folder / INDEX)
        for path in found.files:
            yield path.name, _digest(path, whole=False)
    elif isinstance(found, TextDocuments):
        digests = {document.name: _digest(document.path) for document in found.documents}
        if found.version:  # the standard library of Python
            digests = {found.title: _digest_of_all(digests)}
        yield from digests.items()
    else:
        for file in found.files:
            yield file.name, _digest(file.path)


def _digest_of_all(digests: Mapping[str, str]) -> str:
    return f"sha256:{hashlib.sha256(repr(sorted(digests.items())).encode(errors='replace')).hexdigest()[:16]}"


def _digest(path: Path, whole: bool = True) -> str:
    digest = hashlib.sha256()
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        if whole and size <= WHOLE:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
            return f"sha256:{digest.hexdigest()[:16]}"
        digest.update(f"{size} ".encode() + file.read(ENDS))
        file.seek(max(size - ENDS, 0))
        digest.update(file.read(ENDS))
    return f"ends:{digest.hexdigest()[:16]}"
