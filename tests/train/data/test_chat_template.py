"""A chat template is a program from elsewhere: it renders as in transformers, and can do nothing else."""

import pytest

from bytescope.train.data.chat_template import CHATML, Renderer, Template
from bytescope.train.data.records import Chat, Malformed
from bytescope.train.user_errors import UserError

pytestmark = pytest.mark.quick

TALK = [
    {"role": "system", "content": " be kind \n"},
    {"role": "user", "content": "hello <b> \u8a9e"},
    {"role": "assistant", "content": "fine\n", "tool_calls": [{"name": "f", "arguments": {"b": 1, "a": "\u00e9"}}]},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "plain": CHATML.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", ""),
    "blocks": """{% if tools %}
    {{ tools | tojson(indent=2) }}
{% endif %}
{% set ns = namespace(seen=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% set ns.seen = ns.seen + 1 %}
    {{ bos_token if loop.first }}{{ message.role | upper }}: {{ message.content | trim }} {{ ns.seen }}
    {% if message.tool_calls is defined %}{{ message.tool_calls | tojson }}{% endif %}
    {% if loop.last %}{{ eos_token }}{% break %}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}ASSISTANT:{% endif %}""",
    "marked": """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
A: {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- else %}
U: {{ message.content }}
    {%- endif %}
{%- endfor %}""",
}


def render(source, messages=TALK, tools=None, **asked):
    renderer = Renderer(Template(source, "test", VARIABLES))
    return renderer.render(Chat(messages, tools), **{"before": True, "up_to": True} | asked)


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name):
    from transformers.utils.chat_template_utils import render_jinja_template

    tools = [{"type": "function", "function": {"name": "f", "description": "<\u8a9e>"}}]
    found, source = render(TEMPLATES[name], tools=tools), TEMPLATES[name]
    (text,), spans = render_jinja_template(
        [TALK],
        tools=tools,
        chat_template=source,
        return_assistant_tokens_mask=name == "marked",
        continue_final_message=False,
        add_generation_prompt=False,
        **VARIABLES,
    )
    assert found.text == text
    if name == "marked":
        assert found.learned == [tuple(span) for span in spans[0]] and len(spans[0]) == 2
    for number, before, up_to in zip((2, 4), found.before, found.up_to, strict=True):
        ((prompt,), _), ((whole,), _) = (
            render_jinja_template(
                [TALK[:count]], tools=tools, chat_template=source, add_generation_prompt=generation, **VARIABLES
            )
            for count, generation in ((number, True), (number + 1, False))
        )
        assert (before, up_to) == (prompt, whole)


def test_what_a_block_generation_holds_is_learned():
    found = render(TEMPLATES["marked"], before=False, up_to=False)
    assert [found.text[start:stop] for start, stop in found.learned] == ["fine\n</s>", "no</s>"]
    assert found.before == found.up_to == []


@pytest.mark.parametrize(
    "source, why",
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe|undefined"),
        ("{% include 'secrets' %}", "no loader"),
        ("{{ raise_exception('not like\nthis') }}", "not like this"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}", "nested generation blocks"),
    ],
)
def test_hostile_templates_are_refused(source, why):
    found = render(source)
    assert isinstance(found, Malformed) and "\n" not in str(found)
    assert any(word in str(found) for word in why.split("|")), found


def test_text_without_an_encoding_is_refused():
    found = render("{{ '\\ud800' }}")
    assert isinstance(found, Malformed) and "the rendered text has half of a surrogate pair" in str(found)


@pytest.mark.parametrize("source", ["{% for %}", "{{ 1 | nothing }}", "{% generation %}", "\x00{%"])
def test_a_template_that_is_none_is_refused(source):
    with pytest.raises(
        UserError, match="the chat template of test is not valid .*: give another template with data"
    ) as error:
        render(source)
    assert "\n" not in str(error.value)


def test_the_day_is_always_the_same():
    assert render("{{ strftime_now('%d %b %Y') }}").text == "26 Jul 2024"
