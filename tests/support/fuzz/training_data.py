"""The readers of what a run trains on: token arrays and shards, their index, tokenizers, texts."""

import functools
import gzip
import io
import json
import tempfile
from pathlib import Path
from random import Random

import numpy as np

from support import text_data
from support.fuzz import mutations


def use(source: Path) -> None:
    """Opens data as a run does, and reads some of it."""
    from bytescope.train.data.batches import open_data

    data = open_data(text_data.config(source=str(source), seq_len=4))
    for part in (data.train, data.heldout):
        data.decode(data.train.windows(range(min(len(part), 3))).clip(min=0).flatten())
    data.encode("def x return")


def damaged_array(data: bytes, rng: Random) -> bytes:
    """A .npy file whose header, of text, is the part worth damaging."""
    if rng.random() < 0.3:
        return mutations.damaged_bytes(data, rng)
    return mutations.damaged_bytes(data[:128], rng) + data[128:]


def arrays() -> list[bytes]:
    return [_saved(np.arange(600, dtype=dtype) % 200) for dtype in ("uint8", "uint16", "int64")]


def _saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def read_array(data: bytes, folder: Path) -> None:
    (folder / "tokens.npy").write_bytes(data)
    use(folder / "tokens.npy")


def read_bin(data: bytes, folder: Path) -> None:
    (folder / "tokens.bin").write_bytes(data)
    use(folder / "tokens.bin")


def index() -> bytes:
    shards = [{"file": f"{split}_00000.bin", "tokens": 300, "split": split} for split in ("train", "heldout")]
    return json.dumps(
        {
            "dtype": "uint16",
            "vocab_size": 256,
            "tokenizer": "bytes",
            "tokenizer_hash": "bytes",
            "separator": 0,
            "shards": shards,
        }
    ).encode()


def read_index(data: bytes, folder: Path) -> None:
    for split in ("train", "heldout"):
        (folder / f"{split}_00000.bin").write_bytes((np.arange(300, dtype="<u2") % 256).tobytes())
    (folder / "index.json").write_bytes(data)
    use(folder)


@functools.cache
def tokenizer() -> bytes:
    path = Path(tempfile.mkdtemp(prefix="fuzz-")) / "tokenizer.json"
    text_data.save_tokenizer(path)
    return path.read_bytes()


def read_tokenizer(data: bytes, folder: Path) -> None:
    from bytescope.train.data.tokenizer import load_tokenizer

    (folder / "tokenizer.json").write_bytes(data)
    found = load_tokenizer(str(folder))
    found.decode([*found.encode("def x return unknown").tolist(), 0, 3, 10**6])


def records() -> list[bytes]:
    pairs = [{"prompt": f"x {i}", "completion": " y", "text": f"größe {i}"} for i in range(30)]
    return ["".join(json.dumps(pair) + "\n" for pair in pairs).encode()]


def read_records(data: bytes, folder: Path) -> None:
    """As documents, and as pairs, of which some may be malformed."""
    from bytescope.train.data.batches import open_data

    (folder / "records.jsonl").write_bytes(data)
    open_data(text_data.config(source=str(folder / "records.jsonl"), seq_len=4, skip_bad=2))
    found = open_data(text_data.config(source=str(folder / "records.jsonl"), seq_len=16, format="pairs", skip_bad=2))
    found.train.batch(range(3))


def damaged_archive(data: bytes, rng: Random) -> bytes:
    """Lines of JSON in an archive, one of the two damaged."""
    if rng.random() < 0.5:
        return gzip.compress(mutations.damaged_lines(data, rng), mtime=0)
    return mutations.damaged_bytes(gzip.compress(data, mtime=0), rng)


def read_zipped(data: bytes, folder: Path) -> None:
    (folder / "records.jsonl.gz").write_bytes(data if data[:1] != b"{" else gzip.compress(data, mtime=0))
    use(folder / "records.jsonl.gz")


@functools.cache
def table() -> bytes:
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"größe {i}" for i in range(60)]}), file)
    return file.getvalue()


def read_table(data: bytes, folder: Path) -> None:
    (folder / "rows.parquet").write_bytes(data)
    use(folder / "rows.parquet")


def saved() -> bytes:
    return json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}).encode()


def read_saved(data: bytes, folder: Path) -> None:
    """A folder as `datasets` saves it, whose state.json is damaged."""
    import pyarrow

    rows = pyarrow.table({"text": [f"größe {i}" for i in range(30)]})
    with (
        pyarrow.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, rows.schema) as writer,
    ):
        writer.write_table(rows)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_bytes(data)
    use(folder)


def read_text(data: bytes, folder: Path) -> None:
    (folder / "corpus.txt").write_bytes(data)
    use(folder / "corpus.txt")
