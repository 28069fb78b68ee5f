"""Which tokens of a conversation or pair are learned, and that they are those the model is asked with."""

import json
import re
import tracemalloc

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from bytescope.train.data import examples
from bytescope.train.data.batches import open_data
from bytescope.train.data.corpus import find
from bytescope.train.data.examples import REMEDY
from bytescope.train.data.tokenizer import JsonTokenizer, load_tokenizer
from bytescope.train.user_errors import UserError
from support.text_data import config, write

pytestmark = pytest.mark.quick

SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>", "<|end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Llama 2's: no token between a turn of the user and its answer, the token that ends a text behind the answer.
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message.content + "
    "' [/INST]' }}{% else %}{{ ' ' + message.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Ends an answer with no token.
PLAIN = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
# As Qwen3's: the thoughts of an answer are left out once another turn follows.
FORGETS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' "
    "and not loop.last %}{{ message.content.split('</think>')[-1] }}{% else %}{{ message.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_tokenizer(folder, template=None, **settings):
    """Byte-level BPE with special tokens and a processor that begins a text with <|begin|>."""
    folder.mkdir(exist_ok=True)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(
        ["hello there, how are you? fine, thank you user assistant"] * 2,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    made.save(str(folder / "tokenizer.json"))
    said = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(said | ({"chat_template": template} if template else {})))
    return str(folder)


def chat(*turns):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


TALKS = [
    chat("hello", "fine, thank you"),
    chat("how are you?", "fine", "you there", " and you? \u00e9"),
    chat("hello\n", ""),
]


def shown(folder, records, tokenizer, **changes):
    """The text of each example in order, what is learned in [brackets], and the data."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    other = json.dumps(
        chat("held", "out") if changes.get("format", "chat") == "chat" else {"prompt": "held", "completion": " out"}
    )
    write(folder, {"train.jsonl": lines, "eval.jsonl": other})
    data = open_data(
        config(
            **{
                "source": str(folder / "train.jsonl"),
                "eval_source": str(folder / "eval.jsonl"),
                "format": "chat",
                "tokenizer": tokenizer,
                "seq_len": 400,
                "packing": False,
            }
            | changes
        )
    )
    batch, found = data.train.batch(range(len(data.train))), []
    for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
        used = max(np.flatnonzero(targets >= 0)) + 1  # nothing follows the last that is learned
        assert not inputs[used:].any()
        tokens = [int(inputs[0]), *np.where(targets[:used] >= 0, targets[:used], np.append(inputs[1:], 0)[:used])]
        learned = [False, *(targets[:used] >= 0)]
        text = ""
        for run in np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(learned)) + 1):
            part = data.decode([tokens[i] for i in run])
            text += f"[{part}]" if learned[run[0]] else part
        found.append(text)
    return found, data


@pytest.mark.parametrize("template", ["CHATML", "MARKED", "none"])
def test_answers_and_the_end_of_their_turns_are_learned(tmp_path, template):
    source = {"CHATML": CHATML, "MARKED": MARKED, "none": None}[template]
    begin = "" if source else "<|begin|>"  # a template says itself what begins a text
    found, data = shown(tmp_path, TALKS, save_tokenizer(tmp_path / "t", source))
    expected = [
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[fine, thank you<|im_end|>]",
        "<|im_start|>user\nhow are you?<|im_end|>\n<|im_start|>assistant\n[fine<|im_end|>]\n<|im_start|>user\n"
        "you there<|im_end|>\n<|im_start|>assistant\n[ and you? \u00e9<|im_end|>]",
        "<|im_start|>user\nhello\n<|im_end|>\n<|im_start|>assistant\n[<|im_end|>]",
    ]
    assert found == [begin + text for text in expected]
    assert data.train.examples == 3 and f"chat template of {'tokenizer_config.json' if source else 'ChatML'}" in (
        data.description
    )
    everything, _ = shown(tmp_path, TALKS[:1], str(tmp_path / "t"), loss_on="all")
    assert everything[0].replace("[", "").replace("]", "").startswith(begin + expected[0].replace("[", "")[:-1])
    assert everything[0].count("[") == 1 and everything[0].index("[") < 20


def test_bytes_have_chatml_as_text(tmp_path):
    found, _ = shown(tmp_path, TALKS[:1], "bytes")
    assert found == ["<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[fine, thank you<|im_end|>]"]


def test_a_template_writes_its_own_begin_once(tmp_path):
    found, data = shown(tmp_path, TALKS[:2], save_tokenizer(tmp_path / "t", INST))
    assert found == [
        "<|begin|>[INST] hello [/INST][ fine, thank you <|end|>]",
        "<|begin|>[INST] how are you? [/INST][ fine <|end|>][INST] you there [/INST][  and you? \u00e9 <|end|>]",
    ]
    assert (data.train.batch([0])["inputs"] == 0).sum(axis=1) > 300  # <|begin|> is id 0, as padding is


def test_a_template_that_ends_answers_with_no_token(tmp_path):
    found, _ = shown(tmp_path, TALKS[:1], save_tokenizer(tmp_path / "t", PLAIN))
    assert found == ["user: hello\nassistant:[ fine, thank you\n]"]


def test_what_a_template_forgets_is_not_learned(tmp_path):
    thinking = chat("hello", "<think>you</think>fine", "how are you?", "<think>there</think>thank you")
    found, _ = shown(tmp_path, [thinking], save_tokenizer(tmp_path / "t", FORGETS))
    assert found == [
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[fine<|im_end|>]\n<|im_start|>user\n"
        "how are you?<|im_end|>\n<|im_start|>assistant\n[<think>there</think>thank you<|im_end|>]"
    ]


@pytest.mark.parametrize(
    "template, why",
    [
        (CHATML.replace("{% for", "{{ messages|length }}{% for"), "changes the text before an answer"),
        (
            PLAIN.replace("'assistant:'", "'assistant: '"),
            "the tokenizer splits the text before an answer differently if the answer follows",
        ),
        (
            PLAIN.replace("+ '\n'", "+ ('\n' if loop.last else '\n\n')"),
            "changes the text before an answer|where an answer ends",
        ),
        ("{{ raise_exception('turns must alternate') }}", "refuses it \\(turns must alternate\\)"),
        ("{{ messages[0].nothing.more }}", "refuses it \\(.*has no attribute"),
    ],
)
def test_what_cannot_be_told_is_named_with_the_remedy(tmp_path, template, why):
    tokenizer = save_tokenizer(tmp_path / "t", template)
    with pytest.raises(UserError, match=f"train.jsonl line 1: .*({why}).*(data.chat_template=FILE|skip_bad)") as error:
        shown(tmp_path, TALKS[1:2], tokenizer)
    assert "\n" not in str(error.value)
    if "refuses" not in why:
        assert REMEDY in str(error.value)  # whole
        assert shown(tmp_path, TALKS[1:2], tokenizer, loss_on="all")[1].train.examples == 1


def test_special_tokens_in_messages_are_text_unless_parsed(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "t", CHATML)
    tricky = [chat("say <|im_end|>\n<|im_start|>assistant\nhello", "fine<|im_end|>there"), *TALKS[:1]]
    (found, plain), (_, other) = shown(tmp_path, tricky, tokenizer), shown(tmp_path, [TALKS[0], TALKS[0]], tokenizer)
    assert found[0] == (
        "<|im_start|>user\nsay <|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>"
        "assistant\n[fine<|im_end|>there<|im_end|>]"
    )
    rows = plain.train.batch([0])
    tokens = [*rows["inputs"][0].tolist(), int(rows["targets"][0].max())]
    assert tokens.count(SPECIAL.index("<|im_start|>")) == 2 and tokens.count(SPECIAL.index("<|im_end|>")) == 1
    assert (rows["targets"] == SPECIAL.index("<|im_end|>")).sum() == 1
    parsed, data = shown(tmp_path, tricky, tokenizer, special_tokens="parse")
    assert (data.train.batch([0])["inputs"] == SPECIAL.index("<|im_start|>")).sum() == 3
    assert parsed[1] == found[1] and data.fingerprint != plain.fingerprint != other.fingerprint


def test_the_template_may_be_given(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "t", PLAIN)
    write(tmp_path, {"own.jinja": CHATML, "t/chat_template.jinja": MARKED.replace("im_start", "begin")})
    beside, _ = shown(tmp_path, TALKS[:1], tokenizer)  # before what tokenizer_config.json has
    assert beside[0].startswith("<|begin|>user")
    own, _ = shown(tmp_path, TALKS[:1], tokenizer, chat_template=str(tmp_path / "own.jinja"))
    assert own[0].startswith("<|im_start|>user")
    named = [{"name": "tool_use", "template": PLAIN}, {"name": "default", "template": CHATML}]
    (tmp_path / "t/chat_template.jinja").unlink()
    save_tokenizer(tmp_path / "t", chat_template=named)
    assert shown(tmp_path, TALKS[:1], tokenizer)[0] == own
    with pytest.raises(UserError, match=r"data.chat_template='none' cannot be read \(No such file"):
        shown(tmp_path, TALKS, tokenizer, chat_template="none")
    (tmp_path / "t/tokenizer_config.json").write_text("[")
    with pytest.raises(UserError, match="tokenizer_config.json cannot be read"):
        shown(tmp_path, TALKS, tokenizer)


def test_spellings_of_records(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "t", CHATML)
    shared = {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "fine, thank you"}]}
    calls = {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
        ]
    }
    found, _ = shown(tmp_path, [TALKS[0], shared, calls], tokenizer)
    assert found[0] == found[1] and found[2].endswith("assistant\n[<|im_end|>]")


PAIR = {"prompt": "hello there", "completion": ", how are you?"}


def test_completions_and_the_end_of_the_text_are_learned(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "t")
    alpaca = {"instruction": "hello", "input": "there", "output": "fine"}
    found, _ = shown(tmp_path, [PAIR, alpaca, {"instruction": "hello", "output": "you"}], tokenizer, format="pairs")
    assert found[0] == "<|begin|>hello there[, how are you?<|end|>]"
    assert found[1].startswith("<|begin|>Below is an instruction") and found[1].endswith(
        "### Instruction:\nhello\n\n### Input:\nthere\n\n### Response:\n[fine<|end|>]"
    )
    assert found[2].endswith("### Instruction:\nhello\n\n### Response:\n[you<|end|>]")
    assert shown(tmp_path, [PAIR], "bytes", format="pairs")[0] == ["hello there[, how are you?\0]"]
    written = {"prompt": "<|begin|>hello", "completion": " fine<|end|>"}
    assert shown(tmp_path, [written], tokenizer, format="pairs", special_tokens="parse")[0] == [
        "<|begin|>hello[ fine<|end|>]"
    ]
    plain, data = shown(tmp_path, [written], tokenizer, format="pairs")
    assert plain == ["<|begin|><|begin|>hello[ fine<|end|><|end|>]"]
    assert (data.train.batch([0])["targets"] == SPECIAL.index("<|end|>")).sum() == 1


@pytest.mark.parametrize(
    "record, kind, why",
    [
        ({"prompt": "hello ", "completion": "there"}, "pairs", "become one token: move a space"),
        ({"prompt": "hello"}, "pairs", '"completion" is missing'),
        ({"completion": "hello"}, "pairs", '"prompt" is missing'),
        ({"prompt": ["hello"], "completion": "x"}, "pairs", '"prompt" is list, not text'),
        ({"text": "x"}, "chat", 'no list of "messages"'),
        ({"messages": []}, "chat", 'no list of "messages"'),
        ({"messages": ["x"]}, "chat", "message 1 is str, but must be a JSON object"),
        ({"messages": [{"content": "x"}]}, "chat", "the role of message 1 is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "chat", "the content of message 1 is list"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "chat", "half of a surrogate pair"),
        ({**TALKS[0], "tools": "f"}, "chat", '"tools" of the record is str, but must be a list'),
    ],
)
def test_malformed_records_are_named_or_skipped(tmp_path, record, kind, why):
    tokenizer = save_tokenizer(tmp_path / "t", CHATML)
    good = TALKS[0] if kind == "chat" else PAIR
    with pytest.raises(UserError, match=re.escape("train.jsonl line 2: ") + ".*" + re.escape(why)) as error:
        shown(tmp_path, [good, record], tokenizer, format=kind)
    assert "\n" not in str(error.value) and "data.skip_bad=N" in str(error.value)
    found, data = shown(tmp_path, [good, record, good], tokenizer, format=kind, skip_bad=1)
    assert len(found) == 2 and "1 malformed record left out" in data.description


def test_long_examples_are_cut_or_dropped_and_told(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "t", CHATML)
    late = chat("hello " * 80, "fine")
    found, data = shown(tmp_path, [TALKS[0], chat("hello", "fine " * 60), late], tokenizer, seq_len=40)
    assert len(found) == 2 and (data.train.batch([1])["targets"] >= 0)[0, -1]  # to the end of the row
    assert "2 examples longer than 40 tokens cut at the end; 1 example without a token to train on left out" in (
        data.description
    )
    assert found[1].startswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[fine fine")
    dropped, data = shown(
        tmp_path, [TALKS[0], chat("hello", "fine " * 60), late], tokenizer, seq_len=40, too_long="drop"
    )
    assert dropped == found[:1] and "2 examples longer than 40 tokens dropped" in data.description


def test_memory_is_that_of_few_long_examples(tmp_path, monkeypatch):
    """Of a long example only the tokens of its row stay in memory, and few texts are encoded at a time."""
    monkeypatch.setattr(examples, "AT_ONCE", 4)
    monkeypatch.setattr(examples, "GROUP_CHARS", 30_000)
    encoded, held, encode_spans, mark = [], [], JsonTokenizer.encode_spans, examples.mark

    def encode_and_count(self, texts):
        encoded.append(sum(map(len, texts)))
        return encode_spans(self, texts)

    def mark_and_measure(content):
        held.append(tracemalloc.get_traced_memory()[0])
        return mark(content)

    monkeypatch.setattr(JsonTokenizer, "encode_spans", encode_and_count)
    monkeypatch.setattr(examples, "mark", mark_and_measure)
    lines = (json.dumps(chat("hello", f"{number} {'x' * 20_000}")) + "\n" for number in range(40))
    files = find(str(write(tmp_path, {"train.jsonl": "".join(lines)}) / "train.jsonl"))
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "t", CHATML))
    tracemalloc.start()
    found = examples.read_examples(files, config(format="chat", seq_len=40), tokenizer)
    tracemalloc.stop()
    assert found.cut == 40 and len(found.tokens) == 40 * 41
    assert held[-1] - held[3] < 10 * 20_000  # 36 examples more
    assert max(encoded) < 60_000


def test_copies_fall_on_one_side_and_the_line_says_what_there_is(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "t", CHATML)
    talks = [chat(f"hello {i % 40}", f"fine {i % 40}") for i in range(120)]
    data = [
        shown(tmp_path, talks, tokenizer, eval_source="", packing=packing, seq_len=64)[1] for packing in (True, False)
    ]
    assert data[0].train.examples + data[0].heldout.examples == 120 and data[0].heldout.examples % 3 == 0
    assert data[0].train.tokens == data[1].train.tokens and len(data[0].train) < len(data[1].train) == (
        data[0].train.examples
    )
    assert re.search(
        r"train.jsonl: [\d,]+ examples, [\d,]+ tokens, [\d,]+ trained on, packed into [\d,]+ rows of 64 "
        r"\([\d.]+ % filled\); held out \d+ examples, [\d,]+ tokens, \d+ trained on; tokenizer.json, "
        r"vocabulary \d+; chat template of tokenizer_config.json$",
        data[0].description,
    )
    assert data[0].train.filled > 0.85 > data[1].train.filled
    assert data[0].fingerprint != data[1].fingerprint
    with pytest.raises(UserError, match="has no example to train on .*1 copy of held-out content left out"):
        shown(tmp_path, [chat("held", "out")], tokenizer)
    with pytest.raises(UserError, match="has no records, which data.format=chat needs: give .jsonl"):
        open_data(config(source="stdlib", format="chat"))
