"""Every reader of files and words that others write: good inputs, damage for them, and what it may refuse."""

from collections.abc import Callable

import numpy as np

from bytescope.memory.errors import ReportError
from bytescope.train.user_errors import UserError
from support.fuzz import mutations
from support.fuzz.command import (
    Printed,
    damaged_words,
    flag_values,
    override_lines,
    read_overrides,
    read_target,
    read_words,
)
from support.fuzz.folders import configs, damaged_header, headers, indexes, read_header
from support.fuzz.folders import read_config as read_hf_config
from support.fuzz.folders import read_index as read_weight_map
from support.fuzz.harness import Reader
from support.fuzz.reports import beside, program, rates, read_hlo, read_rates, read_report, read_trace, report, trace
from support.fuzz.run_directory import (
    damaged_file,
    metrics_rows,
    read_metrics,
    read_row,
    read_run,
    read_run_config,
    row,
    run_config,
    run_files,
)
from support.fuzz.training_data import (
    arrays,
    damaged_archive,
    damaged_array,
    index,
    read_array,
    read_bin,
    read_index,
    read_records,
    read_saved,
    read_table,
    read_text,
    read_tokenizer,
    read_zipped,
    records,
    saved,
    table,
    tokenizer,
)


def _listed(seed: Callable[[], bytes]) -> Callable[[], list[bytes]]:
    return lambda: [seed()]


READERS = {
    reader.name: reader
    for reader in (
        Reader("hlo", _listed(program), mutations.damaged_bytes, read_hlo, (Printed,), 300),
        Reader("trace", _listed(trace), mutations.damaged_bytes, read_trace, (Printed,), 400),
        Reader("report", _listed(report), mutations.damaged_json, read_report, (Printed,), 350),
        Reader("rates", _listed(rates), mutations.damaged_json, read_rates, (Printed,), 200),
        Reader("overrides", override_lines, damaged_words, read_overrides, (UserError, ReportError), 300),
        Reader(
            "targets",
            lambda: [b"h100", b"h100:8", b"h100:2x8", b"v5e:4x4", b"v5p:2x2x1", b"cpu:8", b"rtx4090"],
            damaged_words,
            read_target,
            (ReportError,),
            4000,
        ),
        Reader("flags", flag_values, damaged_words, read_words, (UserError, ReportError), 8000),
        Reader("npy", arrays, damaged_array, read_array, (UserError,), 800),
        Reader(
            "bin",
            _listed(lambda: (np.arange(600, dtype="<u2") % 256).tobytes()),
            mutations.damaged_bytes,
            read_bin,
            (UserError,),
            400,
        ),
        Reader("index", _listed(index), mutations.damaged_json, read_index, (UserError,), 300),
        Reader("tokenizer", _listed(tokenizer), mutations.damaged_json, read_tokenizer, (UserError,), 500),
        Reader(
            "text",
            _listed(lambda: ("größe, line\n" * 40).encode()),
            mutations.damaged_bytes,
            read_text,
            (UserError,),
            400,
        ),
        Reader("records", records, mutations.damaged_lines, read_records, (UserError,), 200),
        Reader("gzip", records, damaged_archive, read_zipped, (UserError,), 150),
        Reader("parquet", _listed(table), mutations.damaged_bytes, read_table, (UserError,), 150),
        Reader("saved", _listed(saved), mutations.damaged_json, read_saved, (UserError,), 100),
        Reader("metrics", metrics_rows, mutations.damaged_lines, read_metrics, (), 150),
        Reader("run_config", _listed(run_config), mutations.damaged_json, read_run_config, (UserError,), 250),
        Reader("run", run_files, damaged_file, read_run, (), 150),
        Reader("hf_config", configs, mutations.damaged_json, read_hf_config, (UserError, ValueError), 300),
        Reader("weight_map", indexes, mutations.damaged_json, read_weight_map, (UserError,), 200),
        Reader("safetensors", headers, damaged_header, read_header, (UserError,), 300),
        Reader("row", _listed(row), mutations.damaged_bytes, read_row, (), 500),
    )
}


def prepare() -> None:
    """Makes all good inputs, and starts jax with them: under the limit of memory it would abort the process."""
    for reader in READERS.values():
        reader.seeds()
    beside()
