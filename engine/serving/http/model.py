"""What the HTTP side knows of the served model: tokenizer, chat template, limits. No torch.

model = ServedModel.read(settings)
ids = model.encode("Once upon a time")
ids = model.encode_chat(messages)
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from configs.common.files.reading import read_json_object, read_text
from configs.common.printable import printable
from configs.families.config import ModelConfig
from configs.plans.model_manifest import read_model_manifest
from configs.serving.settings import ServingSettings
from engine.prompts.tokenizer import encoded, load_tokenizer
from engine.serving.http.errors import ApiError, other_model
from engine.serving.http.text import token_text

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_DEVELOPER = "developer"
_MAX_TEMPLATE_TEXT = 4 << 20
LONG_TEXT = 20_000
"""Characters from which a text, or several together, are to be tokenised in another thread: others would wait."""


@dataclass(frozen=True)
class ServedModel:
    """vocabulary: number of token ids. end_tokens: those that end an answer. max_length: prompt and answer.

    knows_developer: the chat template has messages of the role `developer`, OpenAI's newer name of `system`.
    """

    name: str
    vocabulary: int
    max_length: int
    end_tokens: frozenset[int]
    tokenizer: Tokenizer | None
    template: Template | None
    special: dict[str, str]
    created: int = field(default_factory=lambda: int(time.time()))
    knows_developer: bool = False

    @classmethod
    def read(cls, settings: ServingSettings) -> "ServedModel":
        """Read the model's files. Raises ValueError and OSError for files that cannot be used."""
        manifest = read_model_manifest(Path(settings.manifest))
        folder = Path(manifest.folder)
        config = ModelConfig.parse(manifest.config)
        file = folder / "tokenizer.json"
        given = _json(folder / "tokenizer_config.json")
        source = _template_source(folder, given)
        return cls(
            name=settings.name,
            vocabulary=config.vocabulary,
            max_length=settings.max_length,
            end_tokens=_end_tokens(manifest.config, _json(folder / "generation_config.json")),
            tokenizer=load_tokenizer(file) if file.is_file() else None,
            template=None if source is None else _template(folder, source),
            special=_special_tokens(folder, given),
            knows_developer=source is not None and _DEVELOPER in source,
        )

    @property
    def entry(self) -> dict[str, object]:
        """The model as the API lists it."""
        return {
            "id": self.name, "object": "model", "created": self.created, "owned_by": "rankwise",
            "max_model_len": self.max_length,
        }  # fmt: skip

    def entry_of(self, name: str) -> dict[str, object]:
        """The same for a request that names a model. Raises ApiError 404."""
        if name != self.name:
            raise other_model(self.name)
        return self.entry

    def encode(self, text: str, special: bool = True, field: str = "prompt") -> list[int]:
        """Return the token ids of a text. Raises ApiError 400 naming the field."""
        if self.tokenizer is None:
            raise ApiError(400, f"{field}: {self.name} has no tokenizer; send token ids", field)
        try:
            return list(encoded(self.tokenizer, text, field, special, lets_others_run=len(text) > LONG_TEXT).ids)
        except ValueError as error:
            raise ApiError(400, str(error), field) from None

    def characters(self, prompt: str | Sequence[int]) -> int:
        """Return the length of a prompt's text; of token ids, the length of what they are decoded to."""
        if isinstance(prompt, str):
            return len(prompt)
        if self.tokenizer is None:
            return sum(len(token_text(None, token)) for token in prompt)
        return len(self.tokenizer.decode(list(prompt)))

    def special_tokens_of(self, texts: Sequence[str]) -> set[int]:
        """Return the ids of the special tokens among texts. A decoded text leaves them out, so none is found there."""
        if self.tokenizer is None or not texts:
            return set()
        added = self.tokenizer.get_added_tokens_decoder().items()
        return {token for token, one in added if one.special and one.content in texts}

    @property
    def message_ends(self) -> frozenset[int]:
        """The ids that end a message: those of the model, and its tokenizer's end of text.

        Models tuned for conversations may name the end of a turn (`<|im_end|>`) in their tokenizer alone.
        """
        name = self.special.get("eos_token")
        own = self.tokenizer.token_to_id(name) if self.tokenizer is not None and name else None
        return self.end_tokens if own is None else self.end_tokens | {own}

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the token ids of a conversation, ready for the next answer. Raises ApiError 400."""
        if self.template is None:
            raise ApiError(400, f"messages: {self.name} has no chat template; use /v1/completions", "messages")
        # Templates as Qwen's leave out messages of a role that they do not know, without an error.
        renamed = {} if self.knows_developer else {_DEVELOPER: "system"}
        told = [{**message, "role": renamed.get(message["role"], message["role"])} for message in messages]
        given = {"messages": told, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            text = self.template.render(**given, **self.special)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ApiError(
                400, f"messages: the chat template fails ({printable(str(error), 300)})", "messages"
            ) from None
        if len(text) > _MAX_TEMPLATE_TEXT:
            raise ApiError(400, f"messages: more than {_MAX_TEMPLATE_TEXT} characters", "messages")
        return self.encode(text, special=False, field="messages")

    def check_room(self, prompt: Sequence[int], max_tokens: int, field: str = "max_tokens") -> None:
        """Raise ApiError 400, naming the field, for more new tokens after a prompt than a sequence has."""
        if len(prompt) + max_tokens > self.max_length or max_tokens < 1:
            raise ApiError(
                400,
                f"{field}: {max_tokens} new tokens after {len(prompt)} of the prompt exceed the "
                f"{self.max_length} of this server",
                field,
                "context_length_exceeded",
            )

    def check_tokens(self, ids: Sequence[int]) -> None:
        """Raise ApiError 400 for ids that are no tokens of the model."""
        if not ids:
            raise ApiError(400, "prompt: has no tokens", "prompt")
        if max(ids) >= self.vocabulary:
            raise ApiError(400, f"prompt: token {max(ids)} is beyond the {self.vocabulary} of the model", "prompt")


def _json(path: Path) -> dict[str, Any]:
    # transformers writes 10^30 into tokenizer_config.json, as model_max_length, where a tokenizer has no limit.
    return read_json_object(path, bounded=False) if path.is_file() else {}


def _end_tokens(config: dict[str, Any], generation: dict[str, Any]) -> frozenset[int]:
    """Return the end-of-text ids, where transformers looks for them: generation_config.json, else config.json."""
    given = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = given if isinstance(given, list) else [given]
    return frozenset(one for one in ids if type(one) is int and one >= 0)


def _special_tokens(folder: Path, given: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that chat templates name, from where transformers takes them.

    Older folders have them in special_tokens_map.json, which counts where tokenizer_config.json lists no added tokens.
    """
    if "added_tokens_decoder" not in given:
        given = given | _json(folder / "special_tokens_map.json")
    return {name: _text_of(given[name]) for name in _SPECIAL if given.get(name) is not None}


def _text_of(token: object) -> str:
    return str(token["content"]) if isinstance(token, dict) and "content" in token else str(token)


class _GenerationTag(Extension):
    """`{% generation %}`: what a training learns of a conversation. Templates keep it, and transformers renders it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Scope:
        """Return what the tag encloses, whose variables end with it."""
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _template_source(folder: Path, given: dict[str, Any]) -> str | None:
    """Return the chat template of a file of its own, or of tokenizer_config.json; None: there is none."""
    file = folder / "chat_template.jinja"
    source: Any = read_text(file) if file.is_file() else given.get("chat_template")
    if isinstance(source, list):
        source = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
    if isinstance(source, dict):  # several, as a list of older files or by name
        source = source.get("default")
    return source if isinstance(source, str) else None


def _template(folder: Path, source: str) -> Template:
    """Return a chat template. Raises ValueError for a broken one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"{folder}: the chat template is broken ({printable(str(error), 300)})") from error


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without escaping for HTML, with the options of transformers, as templates of models expect."""
    import json

    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
