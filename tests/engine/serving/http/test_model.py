"""Conversations become prompts as transformers makes them."""

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import ModelManifest
from configs.serving.settings import ServingSettings
from engine.prompts.tokenizer import load_tokenizer
from engine.serving.http.model import ServedModel, _special_tokens, _template, _template_source
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


SPECIAL = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ sep_token }}|{{ messages[0].content }}"
END = {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
LISTED = {"added_tokens_decoder": {"0": {"content": "<s>", "special": True}}}


@pytest.mark.parametrize(
    ("config", "special"),
    [
        ({}, {"bos_token": "<s>", "eos_token": END}),
        ({"bos_token": "<other>", "pad_token": "<p>"}, {"bos_token": "<s>"}),
        ({"sep_token": "<sep>", **LISTED}, {"bos_token": "<s>"}),
        ({"bos_token": None, "eos_token": "</s>"}, {}),
    ],
    ids=["older", "both", "newer", "none"],
)
def test_special_tokens_of_a_template_are_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], special: dict[str, Any]
) -> None:
    """Folders of older versions have them in special_tokens_map.json: conversations began without `bos_token`."""
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    written = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": SPECIAL, **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    (tmp_path / "config.json").write_text(json.dumps(ARCHITECTURES["llama-1m"]))
    messages = [{"role": "user", "content": "x"}]
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
    found = _template(tmp_path, SPECIAL).render(messages=messages, **_special_tokens(tmp_path, written))
    assert found == expected


@pytest.mark.parametrize(
    "templates",
    [
        "plain",
        {"default": "plain", "tool_use": "tools"},
        [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}],
        {"tool_use": "tools"},
    ],
    ids=["one", "by name", "list", "without a default"],
)
def test_of_several_templates_the_one_of_transformers_is_taken(tmp_path: Path, templates: Any) -> None:
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    written = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    try:
        expected = PreTrainedTokenizerFast.from_pretrained(tmp_path).get_chat_template()
    except ValueError:  # none of them is the default
        expected = None
    assert _template_source(tmp_path, written) == expected


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
