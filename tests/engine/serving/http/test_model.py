"""Conversations become prompts as transformers makes them."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import ModelManifest
from configs.serving.settings import ServingSettings
from engine.prompts.tokenizer import load_tokenizer
from engine.serving.http.model import ServedModel, _template
from tests.support.servers.inference_server import TINY

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


def test_a_long_text_lets_other_threads_run(tmp_path: Path) -> None:
    """The tokenizer's own `encode` keeps Python's lock: in a thread too, it stopped every stream for seconds."""
    tokenizer = load_tokenizer(TINY / "tokenizer.json")
    text = "def hello(world): return 42\n" * 6000
    model = ServedModel("m", 1 << 20, 99, frozenset(), tokenizer, None, {})
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(model.encode(text)))
    turns = 0
    thread.start()
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 10
    assert found == [tokenizer.encode(text).ids]
