"""Text files, data settings and tokenizers for the tests of the data pipeline."""

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from bytescope.train.data.batches import DataConfig


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def config(**changes):
    defaults = {
        "source": "stdlib",
        "eval_source": "",
        "format": "text",
        "field": "text",
        "skip_bad": 0,
        "tokenizer": "bytes",
        "special_tokens": "text",
        "chat_template": "",
        "loss_on": "assistant",
        "packing": True,
        "too_long": "cut",
        "dtype": "uint16",
        "seq_len": 4,
        "prefetch": 3,
        "workers": 2,
    }
    return DataConfig(**(defaults | changes))


def save_tokenizer(path, special=("<|endoftext|>",), words=("def", "return", "x", "y"), first_id=0):
    """A word-level tokenizer with everything switched on that would spoil training data."""
    vocab = {word: first_id + i for i, word in enumerate([*special, "[UNK]", *words])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(list(special))
    made.enable_truncation(2)
    made.enable_padding(length=7)
    if special:
        made.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], vocab[special[0]])]
        )
    made.save(str(path))
    return vocab
