"""`bytescope train --show-data`: the first row that a run would train on, with what is learned in brackets."""

import contextlib

import numpy as np
from rich.console import Console
from rich.text import Text

from bytescope.train.data.batch_algebra import IGNORE
from bytescope.train.data.batches import Batch, Data, open_data, train_batches
from bytescope.train.data.settings import DataConfig

LEARNED = "bold green"
# Control characters could write to a terminal what they like; line ends and tabs stay.
CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\ufffd")


def show_data(config: DataConfig, seed: int, console: Console) -> None:
    """Prints what there is, and each example of the first row. Raises UserError as `open_data`."""
    data = open_data(config)
    with contextlib.closing(train_batches(data, rows=1, seed=seed, position=0, config=config)) as batches:
        row = {name: array[0] for name, array in next(batches).items()}
    console.print(Text(data.description), soft_wrap=True)
    for number, text in enumerate(examples(data, row), 1):
        console.print(Text(f"--- example {number} of the first row"), soft_wrap=True)
        console.print(text, soft_wrap=True)


def examples(data: Data, row: Batch) -> list[Text]:
    """Returns the text of each example in a row of inputs, targets and optional segments, int32 [seq_len] each."""
    inputs, targets = row["inputs"], row["targets"]
    used = int(np.flatnonzero(targets != IGNORE)[-1]) + 1  # nothing is learned behind it
    segments = row.get("segments", np.ones_like(inputs))[:used]
    found = []
    for segment in np.unique(segments):
        place = np.flatnonzero(segments == segment)
        # Each target is the next input, where it is not hidden.
        shown = np.where(targets[place] != IGNORE, targets[place], np.append(inputs[place][1:], 0))
        tokens, learned = np.append(inputs[place][0], shown), np.append(False, targets[place] != IGNORE)
        text = Text()
        for run in np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(learned)) + 1):
            part = data.decode(tokens[run].tolist()).translate(CONTROLS)
            text.append(f"[{part}]" if learned[run[0]] else part, LEARNED if learned[run[0]] else "")
        found.append(text)
    return found
