"""Values that no run can want are refused at the start, in a line with the value and what is valid."""

import re
from types import SimpleNamespace

import jax
import pytest

from bytescope.configs import base
from bytescope.model import ModelConfig
from bytescope.train.commands.train_command import parse
from bytescope.train.config_fields import FIELDS, names_in
from bytescope.train.data.tokenizer import ByteTokenizer, IdTokenizer
from bytescope.train.launch.processes import find
from bytescope.train.plan import remat_auto
from bytescope.train.program import program_settings
from bytescope.train.program.config_files import flatten
from bytescope.train.program.program import build
from bytescope.train.program.program_settings import read_settings
from bytescope.train.run.startup import doubtful_settings
from bytescope.train.user_errors import UserError
from support.toy import small_config

pytestmark = pytest.mark.quick


def test_the_list_has_every_key_and_each_default_is_valid():
    defaults = flatten(base.get_config())
    assert sorted(FIELDS) == list(defaults)
    for key, field in FIELDS.items():
        assert field.default == defaults[key] and field.meaning, key
        assert len(names_in(field.choices)) != 1 and len(names_in(field.plans)) != 1, key
        field.check(field.default)


NEAR = "did you mean q_rot\\? Else choose one of"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remat.save", "q_rott"),
        ("remat.offload", "v,q_rott"),
        ("remat.layers", "0-2:full,2-4:v+q_rott"),
        ("remat.layers", "0-2:q_rott@host+v"),
        ("remat.policy", "v+q_rott@host"),
    ],
)
def test_a_misspelled_checkpoint_name_is_refused_with_the_nearest(key, value):
    with pytest.raises(ValueError, match=f"^{key}='.*q_rott.*': {NEAR}"):
        read_settings(small_config({key: value}))


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("optimizer.learning_rate", ("nan", "inf", "-1e-3", "1e39")),
        ("model.norm_eps", ("-1e-5", "nan")),
        *((key, ("1.0", "-0.1", "nan", "2")) for key, field in FIELDS.items() if field.decay),
        *((key, ("0", "-0.02", "inf")) for key, field in FIELDS.items() if field.positive),
        ("train.sample_temperature", ("inf", "nan", "-1")),
        ("precision.loss_scale_init", ("inf", "nan", "0", "1e30")),
        ("seed", ("-1", "2147483648", "99999999999999999999")),
        ("model.vocab_size", ("99999999999",)),
        ("train.steps", ("0", "3000000000")),
        ("optimizer.weight_decay", ("-0.1", "inf")),
        ("optimizer.eps", ("-1", "nan")),
        ("optimizer.end_fraction", ("-0.1", "inf")),
        ("optimizer.clip_norm", ("-1", "nan")),
        ("optimizer.warmup_steps", ("-1",)),
        ("remat.budget", ("much", "-5GiB", "nan", "7 parsecs")),
        ("model.d_model", ("10000000000",)),
        ("batch.micro", ("4294967296",)),
        ("train.sample_prompt", ("\udcff",)),
        ("batch.tokens", ("9" * 20,)),
    ],
)
def test_a_value_that_no_run_can_want_is_refused(key, values):
    for value in values:
        with pytest.raises(ValueError) as caught:
            read_settings(small_config({key: value}))
        assert str(caught.value).startswith(key) and "\n" not in str(caught.value), value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", "2147483647"),
        ("batch.tokens", "4000000000"),
        ("optimizer.b1", "0"),
        ("optimizer.learning_rate", "0"),
        ("remat.budget", "72GiB"),
        ("model.norm_eps", "0"),
    ],
)
def test_the_ends_of_the_ranges_are_valid(key, value):
    assert read_settings(small_config({key: value}))


@pytest.mark.parametrize("text", ["a,b,c,d", "0", "-8", "8,1", "8,1,4", "8,1,4,-1", "8,1,4,nan", "8,1,4,0"])
def test_scaling_of_rotary_positions_takes_one_or_four_positive_numbers(text):
    with pytest.raises(ValueError, match="rope_scaling=.*or positive numbers"):
        ModelConfig.from_dict(small_config({"model.rope_scaling": text}).model)
    for valid in ("8", "8,1,4,8192"):
        assert ModelConfig.from_dict(small_config({"model.rope_scaling": valid}).model).rope_scaling[0] == 8


@pytest.mark.parametrize("text", ["inf", "nan", "0", "-3", "1e18"])
def test_a_timeout_is_a_number_of_seconds(text):
    with pytest.raises(UserError, match="--timeout=.*positive number of seconds"):
        find(parse([f"--timeout={text}"]))


def test_what_is_doubtful_is_said_and_runs():
    def lines(rows, read, tokenizer=None, **keys):
        tokenizer = tokenizer or ByteTokenizer()
        data = SimpleNamespace(train=range(rows), tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
        config = small_config({"model.vocab_size": 256, "train.steps": 1000, **keys})
        return doubtful_settings(read_settings(config), data, read)

    assert lines(500, 8000) == [] and lines(9000, 8000) == []
    (line,) = lines(14, 8000)  # 8 sequences an update
    assert line.startswith("train.steps=1000 reads each sequence 571 times") and "train.steps=28," in line
    (line,) = lines(9000, 8000, **{"model.vocab_size": 50_304})
    assert "data.tokenizer=bytes has 256 different tokens, but model.vocab_size=50304: set data.tokenizer" in line
    (line,) = lines(9000, 8000, **{"optimizer.warmup_steps": 1001})
    assert "warmup_steps=1001" in line and "train.steps=1000" in line
    assert lines(9000, 8000, IdTokenizer(64), **{"model.vocab_size": 50_304}) == []


# In the order in which they are checked: each is refused for the first of two neighbors.
IN_ORDER = [
    ({"train.steps": 0}, "train.steps=0"),
    ({"mesh.fsdp": 3}, "mesh.fsdp=3 does not divide"),
    ({"model.mlp_chunk": 7}, "model.mlp_chunk=7 does not divide"),
    ({"model.n_heads": 3}, "model.n_heads=3 is not a multiple"),
    ({"batch.micro": 0}, "batch.micro=0"),
    ({"remat.layers": "(0-9:full)"}, "remat.layers=0-9:full overlaps"),
    ({"xla.gemm": "triton"}, "xla.gemm=triton is for XLA's GPU compiler"),
    ({"pipeline.virtual": 2}, "pipeline.virtual=2 cannot be combined with mesh.stage=1"),
    ({"lora.rank": 4, "lora.targets": "(x)"}, "lora.targets=x"),
]


@pytest.mark.parametrize("number", range(len(IN_ORDER) - 1))
def test_of_several_mistakes_the_first_check_decides(number):
    (first, message), (second, _) = IN_ORDER[number], IN_ORDER[number + 1]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        build(small_config({**second, **first}), jax.devices()[:1])


def test_a_config_is_read_and_checked_once_on_its_way_to_a_program(monkeypatch):
    calls = []
    for module, name in ((remat_auto, "read_settings"), (program_settings, "check_values"), (remat_auto, "check")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real, name=name: calls.append(name) or real(*args))
    remat_auto.settled_program(small_config(), jax.devices()[:1])
    assert calls == ["read_settings", "check_values", "check"]
