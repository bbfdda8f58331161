"""Chat templates: the text that transformers writes, and no way out of the sandbox in time, space or by attribute."""

from __future__ import annotations

from typing import Any

import pytest

from bifolio.errors import ChatTemplateError
from bifolio.text import template_limits
from bifolio.text.chat_template import render_chat
from helpers import END_OF_TEXT, tiny_tokenizer

HELLO = [{"role": "user", "content": "hi"}]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == "user" %}
        {{- "[INST] " ~ message.content | trim ~ " [/INST]" }}
    {%- else %}
        {{- " " ~ message["content"].strip() ~ eos_token }}
    {%- endif %}
{%- endfor %}"""
TOOLS = """{%- set ns = namespace(count=0, first=true) %}
{%- if tools is not none and tools %}
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- set ns.count = ns.count + 1 %}
{%- endfor %}
</tools> {{ ns.count }} in all: {{ tools | map(attribute='name') | join(', ') }}
{%- endif %}
{%- for message in messages if message.role != 'system' %}
{%- if loop.last %}{{ '%s:%03d ' % (message.role, loop.index) }}{% continue %}{% endif %}
{{ loop.index }}. {{ message.content.split('</think>')[-1] | replace('\\n', ' ') | upper }}
{%- endfor %}"""
CONVERSATION = [
    {"role": "user", "content": "  What is 2+2? "},
    {"role": "assistant", "content": "<think>easy</think>Four.\nQuite sure: 你好"},
    {"role": "user", "content": "Thanks"},
]
SOME_TOOLS = [{"name": "search", "parameters": {"q": "string ü"}}, {"name": "clock", "parameters": {}}]


@pytest.mark.full
@pytest.mark.parametrize("tools", [None, SOME_TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("template", [CHATML, STRICT, TOOLS])
def test_the_text_is_that_of_transformers(template: str, prompt: bool, tools: list[Any] | None) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), bos_token="<s>", eos_token=END_OF_TEXT)
    theirs.chat_template = template
    expected = theirs.apply_chat_template(CONVERSATION, tools=tools, add_generation_prompt=prompt, tokenize=False)
    special = {"bos_token": "<s>", "eos_token": END_OF_TEXT}
    ours = render_chat(template, CONVERSATION, special_tokens=special, add_generation_prompt=prompt, tools=tools)
    assert ours == expected


def test_a_template_may_refuse_the_messages() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render_chat(STRICT, [*HELLO, *HELLO], special_tokens={"bos_token": "", "eos_token": ""})


def test_variables_reach_the_template() -> None:
    assert (
        render_chat("{{ enable_thinking }} {{ documents | length }}", HELLO, enable_thinking=False, documents=[1])
        == "False 1"
    )
    assert len(render_chat("{{ strftime_now('%Y-%m-%d') }}", HELLO)) == 10


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, HELLO, "no chat template"),
        ("x" * (300 << 10), HELLO, "more than the 262144 allowed"),
        ("{% for m in messages %}", HELLO, "broken"),
        ("{{ 1 + }}", HELLO, "broken"),
        ("{{ messages[7].content }}", HELLO, "refused"),
        ("{{ 'a' + 1 }}", HELLO, "refused"),
        ("{{ 1 / 0 }}", HELLO, "refused"),
        ("{% include 'other' %}", HELLO, "refused"),
        (CHATML, [], "at least one message"),
        (CHATML, [{"content": "x"}], "'role'"),
        (CHATML, ["hello"], "'role'"),
        (CHATML, [{"role": "user", "content": 7}], "'content'"),
    ],
)
def test_bad_templates_and_messages_are_named_errors(template: str | None, messages: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render_chat(template, messages)


# -- the sandbox ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ raise_exception.__globals__['time'] }}",
        "{{ range.__wrapped__ }}{{ range.__code__.co_consts }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ '{0.__class__.__base__}'.format('') }}",
    ],
)
def test_nothing_is_reached_or_changed_from_a_template(template: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ChatTemplateError):
        render_chat(template, messages)
    assert messages == HELLO


def test_attributes_by_name_are_refused_as_well() -> None:
    assert render_chat("{{ messages | attr('__class__') }}", HELLO) == ""  # undefined, as jinja's sandbox has it


BIG = "{% set big = 'x' * 4000000 %}"
LOOP = "{% for a in range(100000) %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 1000000000 }}",
        "{{ 2 ** 100000000 }}",
        "{{ range(1000000000) | list }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{0:{1}}'.format(1, 999999999) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'.zfill(1000000000) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x' | indent(1000000000, true) }}",
        "{{ ['x'] | map('center', 1000000000) | list }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{{ lipsum(n=1000000) }}",
        BIG + "{{ big.replace('x', big) }}",
        BIG + "{{ big | replace('x', big) }}",
        BIG + "{{ big + big }}",
        BIG + "{{ big ~ big }}",
        BIG + "{{ big }}{{ big }}",
        BIG + "{{ ([big] * 10000) | join }}",
        BIG + "{{ big.join(['a', 'b', 'c']) }}",
        BIG + "{{ [big] * 10000 }}",
        BIG + "{{ ([big] * 10000) | string | length }}",
        BIG + "{{ ('%s' % ([big] * 10000)) | length }}",
        BIG + "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l = ns.l + [big ~ a] %}{% endfor %}",
        "{% set ns = namespace(s='x') %}" + LOOP + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    ],
)
def test_a_template_that_blows_up_is_stopped_before_it_does(template: str) -> None:
    import tracemalloc

    tracemalloc.start()
    with pytest.raises(ChatTemplateError):
        render_chat(template, HELLO)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 << 20


@pytest.mark.full
@pytest.mark.parametrize(
    "template",
    [
        LOOP * 3 + "{% endfor %}" * 3,
        LOOP * 3 + "x" + "{% endfor %}" * 3,
        "{% macro f(n) %}" + LOOP + "{{ f(n + 1) }}{% endfor %}{% endmacro %}{{ f(0) }}",
        "{% set bifolio_tick = dict %}{% set tick = dict %}" + LOOP * 2 + "{% endfor %}" * 2,
        "{% set all = range(100000) | list %}" + LOOP + "{% set b = all | sort %}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    with pytest.raises(ChatTemplateError, match=r"ran longer than 0\.2 seconds|recursion|more than"):
        render_chat(template, HELLO)


def test_honest_use_of_what_is_watched_still_works() -> None:
    template = (
        "{{ 7 % 3 }} {{ 'a' * 3 }} {{ '%s-%05d' % ('a', 3) }} {{ '{:>5}|{}'.format('x', 1) }} {{ '{{{}}}'.format(2) }} "
        "{{ messages | join('|', 'content') }} {{ '-'.join(['a', 'b']) }} {{ 'x' | center(5) }} {{ none }} "
        "{{ [1, 'a'] }}"
    )
    assert render_chat(template, HELLO) == "1 aaa a-00003     x|1 {2} hi a-b   x   None [1, 'a']"


# -- small templates with large values -------------------------------------------------------------------------------

NESTED = (
    "{% set ns = namespace(a=[], b=[]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)


@pytest.mark.full
@pytest.mark.parametrize(
    "expression",
    [
        "ns.a == ns.b", "ns.a < ns.b", "ns.a != ns.b", "ns.a in [ns.b]", "ns.a is eq(ns.b)", "[ns.a].index(ns.b)",
        "[ns.a].count(ns.b)", "[ns.b] | select('eq', ns.a) | list", "[ns.a, ns.b] | sort", "[ns.a, ns.b] | max",
        "ns.a | string | length", "{'a': ns.a} == {'a': ns.b}",
    ],
)  # fmt: skip
def test_comparisons_of_lists_that_share_their_parts_are_bounded(expression: str) -> None:
    with pytest.raises(ChatTemplateError):
        render_chat(NESTED + "{{ " + expression + " }}", HELLO)


@pytest.mark.parametrize(
    "expression",
    [
        "('a' * 1000000) | wordwrap(1)",
        "[[[[1]]]] | tojson(indent=99999)",
        "('a' * 100000).translate({97: 'b' * 100000})",
        "(1).to_bytes(9999999999, 'big')",
        "'a' | center(99999999999)",
        "('%(a)s' * 100000) % {'a': 'b' * 100000}",
    ],
)
def test_methods_that_make_large_values_are_refused(expression: str) -> None:
    with pytest.raises(ChatTemplateError):
        render_chat("{{ " + expression + " }}", HELLO)


NESTED = "{%% set ns = namespace(a=1) %%}{%% for i in range(40) %%}{%% set ns.a = %s %%}{%% endfor %%}%s"


@pytest.mark.parametrize(
    ("grow", "end"),
    [
        ("namespace(p=ns.a, q=ns.a)", "{{ ns.a }}"),
        ("namespace(p=ns.a, q=ns.a)", "{{ raise_exception(ns.a) }}"),
        ("(ns.a, ns.a)", "{{ {ns.a: 1} }}"),
        ("(ns.a, ns.a)", "{{ {}[ns.a] }}"),
        ("dict(p=ns.a, q=ns.a)", "{{ ns.a.values() }}"),
    ],
)
def test_values_that_share_their_parts_are_bounded(monkeypatch: pytest.MonkeyPatch, grow: str, end: str) -> None:
    """2 to the power of 40 parts: spelling or hashing them would take days."""
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    with pytest.raises(ChatTemplateError):
        render_chat(NESTED % (grow, end), [{"role": "user", "content": "a"}])


def test_a_template_that_python_cannot_compile_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="broken"):
        render_chat("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, [{"role": "user", "content": "a"}])
