"""Conversations become prompts as transformers makes them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.serving.http.model import ServedModel, _template

MESSAGES = [
    {"role": "system", "content": "Python"},
    {"role": "user", "content": "<a> 'loop'"},
    {"role": "assistant", "content": "for"},
    {"role": "user", "content": "ü"},
]
TAGGED = """{% set mark = 'out' -%}
{% for message in messages %}
    {%- if message.role == 'assistant' -%}
        {% generation %}{% set mark = 'in' %}{{ message.content }}#{{ mark }}{% endgeneration %}
    {%- else -%}
        {{ message.role }}: {{ message.content }}{{ loop.index }}
    {%- endif %}{{ mark }}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""


STRIPPED = TAGGED.replace("{% generation %}", "{%- generation -%}").replace("{% endgen", "{%- endgen")
TOOLS = "{% if tools is not none %}{{ tools }}{% endif %}{% if documents is none %}{{ messages | tojson }}{% endif %}"
LOOP = "{{ bos_token }}{% for one in messages if one.role == 'user' %}{{ one.content }}{% break %}{% endfor %}"
COMPACT = "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}{{ messages | tojson(true, 2) }}"


@pytest.mark.parametrize(
    "template",
    [TAGGED, STRIPPED, TOOLS, LOOP, COMPACT],
    ids=["generation", "stripped", "tools", "loop", "compact"],
)
def test_a_conversation_is_rendered_as_by_transformers(tmp_path: Path, template: str) -> None:
    found = _template(tmp_path, {"chat_template": template})
    rendered: list[str] = []

    def encode(text: str, **_: Any) -> SimpleNamespace:
        rendered.append(text)
        return SimpleNamespace(ids=[1])

    tokenizer: Any = SimpleNamespace(encode=encode)
    model = ServedModel("m", 10, 99, frozenset(), tokenizer, found, {"bos_token": "<s>"})
    assert model.encode_chat(MESSAGES) == [1]
    given: dict[str, Any] = {"chat_template": template, "add_generation_prompt": True, "bos_token": "<s>"}
    expected, _ = render_jinja_template([MESSAGES], **given)
    assert rendered == expected
