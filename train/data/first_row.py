"""Prints the first row that a run would train on, with the trained tokens in brackets: `bytescope train
--show-data`.
"""

import contextlib

import numpy as np
from rich.console import Console
from rich.text import Text

from bytescope.train.data.batch_algebra import IGNORE
from bytescope.train.data.batches import Batch, Data, open_data, train_batches
from bytescope.train.data.settings import DataConfig

LEARNED = "bold green"
# Control characters are replaced, since they could control the terminal. Line ends and tabs are kept.
CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\ufffd")


def show_data(config: DataConfig, seed: int, console: Console) -> None:
    """Prints a description of the data and the text of each example in the first training row (sequence of seq_len
    tokens).

    Raises UserError if the data cannot be opened.
    """
    data = open_data(config)
    with contextlib.closing(train_batches(data, rows=1, seed=seed, position=0, config=config)) as batches:
        row = {name: array[0] for name, array in next(batches).items()}
    console.print(Text(data.description), soft_wrap=True)
    for number, text in enumerate(examples(data, row), 1):
        console.print(Text(f"--- example {number} of the first row"), soft_wrap=True)
        console.print(text, soft_wrap=True)


def examples(data: Data, row: Batch) -> list[Text]:
    """Returns the text of each example in a row of data. The row has inputs, targets and optionally segments, each
    int32 [seq_len].
    """
    inputs, targets = row["inputs"], row["targets"]
    used = int(np.flatnonzero(targets != IGNORE)[-1]) + 1  # positions after the last target are not trained on
    segments = row.get("segments", np.ones_like(inputs))[:used]
    texts = []
    for segment in np.unique(segments):
        place = np.flatnonzero(segments == segment)
        # Each target that is not masked is the next input.
        outputs = np.where(targets[place] != IGNORE, targets[place], np.append(inputs[place][1:], 0))
        tokens, learned = np.append(inputs[place][0], outputs), np.append(False, targets[place] != IGNORE)
        text = Text()
        for run in np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(learned)) + 1):
            part = data.decode(tokens[run].tolist()).translate(CONTROLS)
            text.append(f"[{part}]" if learned[run[0]] else part, LEARNED if learned[run[0]] else "")
        texts.append(text)
    return texts
