"""Conversations become prompts as transformers makes them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import ModelManifest
from configs.serving.settings import ServingSettings
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


def test_a_tokenizer_without_a_longest_text_is_served(tmp_path: Path) -> None:
    """transformers writes 10^30 for none, rounded: servers of Llama 2 and Mistral did not start."""
    told = {"model_max_length": 1000000000000000019884624838656, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    config = ARCHITECTURES["llama-1m"]
    manifest = ModelManifest(identity="folder:1", source="folder", folder=str(tmp_path), files={}, config=config)
    (tmp_path / "manifest.json").write_text(manifest.model_dump_json())
    settings = ServingSettings(
        name="m", manifest=str(tmp_path / "manifest.json"), folder=str(tmp_path), max_length=8, blocks=8
    )
    assert ServedModel.read(settings).special == {"bos_token": "<s>"}


@pytest.mark.parametrize(
    "template",
    [TAGGED, STRIPPED, TOOLS, LOOP, COMPACT],
    ids=["generation", "stripped", "tools", "loop", "compact"],
)
def test_a_conversation_is_rendered_as_by_transformers(tmp_path: Path, template: str) -> None:
    found = _template(tmp_path, template)
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


QWEN = """{% if messages[0].role == 'system' %}system: {{ messages[0].content }}
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' and not loop.first %}
        {{- message.role }}: {{ message.content }}
    {%- endif %}
{%- endfor %}"""
HARMONY = "{% for one in messages if one.role in ['developer', 'user'] %}<{{ one.role }}>{{ one.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [(QWEN, "system: in French\nuser: hello"), (HARMONY, "<developer>in French<user>hello")],
    ids=["unknown", "known"],
)
def test_a_developers_message_reaches_the_model(tmp_path: Path, template: str, expected: str) -> None:
    """Templates as Qwen's leave out messages of a role that they do not know: the instruction was lost."""
    config = ARCHITECTURES["llama-1m"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    manifest = ModelManifest(identity="folder:1", source="folder", folder=str(tmp_path), files={}, config=config)
    (tmp_path / "manifest.json").write_text(manifest.model_dump_json())
    settings = ServingSettings(
        name="m", manifest=str(tmp_path / "manifest.json"), folder=str(tmp_path), max_length=8, blocks=8
    )
    rendered: list[str] = []

    def encode(text: str, **_: Any) -> SimpleNamespace:
        rendered.append(text)
        return SimpleNamespace(ids=[1])

    model = replace(ServedModel.read(settings), tokenizer=SimpleNamespace(encode=encode))  # type: ignore[arg-type]
    model.encode_chat([{"role": "developer", "content": "in French"}, {"role": "user", "content": "hello"}])
    assert rendered == [expected]
