"""Requests of OpenAI's API, as far as they are supported; what is not is refused by its name.

wanted = read_request(body, CompletionRequest)        # raises ApiError 400
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from configs.common.files.reading import brief, parse_json
from engine.serving.http.errors import ApiError

_MAX_STOPS, _MAX_STOP_CHARACTERS, _MAX_BIAS, _MAX_PROMPTS = 16, 256, 1024, 1 << 16
_Item = TypeVar("_Item")
_Request = TypeVar("_Request", bound="ApiRequest")


def _few_tokens(value: object) -> object:
    if isinstance(value, dict) and len(value) > _MAX_BIAS:
        raise ApiError(400, f"logit_bias: at most {_MAX_BIAS} tokens", "logit_bias")
    return value


def _short_texts(stop: str | list[str] | None) -> str | list[str] | None:
    stops = [stop] if isinstance(stop, str) else stop or ()
    if len(stops) > _MAX_STOPS or any(not 0 < len(one) <= _MAX_STOP_CHARACTERS for one in stops):
        raise ApiError(400, f"stop: at most {_MAX_STOPS} texts of 1 to {_MAX_STOP_CHARACTERS} characters", "stop")
    return stop


# A body has room for a million wrong items: to describe each takes seconds and gigabytes.
Items = Annotated[list[_Item], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Prompts = (
    str
    | Annotated[Items[str], Field(max_length=_MAX_PROMPTS)]
    | Items[TokenId]
    | Annotated[Items[Items[TokenId]], Field(max_length=_MAX_PROMPTS)]
)
"""Of a request: a text or its tokens, one or several."""
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class _Object(BaseModel):
    """An object of a request: the first of its unknown fields is refused, but for those of null, which ask nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, data: Any) -> Any:
        """Leave out all unknown fields but the first; as with items, there may be too many to describe."""
        if not isinstance(data, dict):
            return data
        unknown = next((name for name in data if name not in cls.model_fields and data[name] is not None), None)
        return {name: value for name, value in data.items() if name in cls.model_fields or name == unknown}


class ApiRequest(_Object):
    """Fields of any request."""

    model: str
    user: str | None = None


class StreamOptions(_Object):
    """What a stream has beside the answer. continuous_usage_stats: the counts so far in every event, as vLLM."""

    include_usage: bool = False
    continuous_usage_stats: bool | None = False


class GenerationRequest(ApiRequest):
    """Fields of both ways to generate. Those from `top_k` on are vLLM's."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    n: int | None = Field(1, ge=1, le=128)
    stop: Annotated[str | Items[str] | None, AfterValidator(_short_texts)] = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: Annotated[dict[str, _Bias] | None, BeforeValidator(_few_tokens)] = None
    top_k: int | None = Field(0, ge=-1, lt=1 << 31)
    min_p: float | None = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    # A smaller one may be 0 in float32, and a forbidden word's logit of minus infinity no number at all.
    repetition_penalty: float | None = Field(1.0, ge=0.01, le=100, allow_inf_nan=False)
    min_tokens: int | None = Field(0, ge=0, lt=1 << 31)
    ignore_eos: bool | None = False
    stop_token_ids: Items[TokenId] | None = Field(None, max_length=_MAX_BIAS)
    return_token_ids: bool | None = False

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def bias(self, vocabulary: int) -> tuple[tuple[int, float], ...]:
        """The added logits by token. Raises ApiError for keys that are no tokens."""
        given = self.logit_bias or {}
        for key in given:
            if not (key.isascii() and key.isdigit() and len(key) < 11 and int(key) < vocabulary):
                raise ApiError(400, f"logit_bias: {brief(key)} is no token of this model", "logit_bias")
        return tuple((int(key), value) for key, value in given.items())


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: int | None = Field(16, ge=0, lt=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = False
    best_of: Literal[1] | None = 1
    suffix: None = None


class ContentPart(_Object):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


_TEXT, _PARTS = "str", "list[ContentPart]"
"""Alternatives by the names that pydantic gives them, which a refusal leaves out."""


def _form_of(content: object) -> str:
    return _PARTS if isinstance(content, list) else _TEXT


class ChatMessage(_Object):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    # By its form, so that a part that is refused is not called no string.
    content: Annotated[Annotated[str, Tag(_TEXT)] | Annotated[Items[ContentPart], Tag(_PARTS)], Discriminator(_form_of)]
    name: str | None = None

    def as_template_data(self) -> dict[str, str]:
        """Return what a chat template gets: parts as the lines of one text, as with vLLM."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})


class ResponseFormat(_Object):
    """Only plain text is supported."""

    type: Literal["text"]


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Items[ChatMessage] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None


def read_request(body: bytes, kind: type[_Request]) -> _Request:
    """Return the request in a body. Raises ApiError 400, which names what is wrong."""
    try:
        data = parse_json(body, "the request's body")
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    if not isinstance(data, dict):
        raise ApiError(400, "the request's body is no JSON object")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _refusal(error, kind) from None


def _refusal(error: ValidationError, kind: type[ApiRequest]) -> ApiError:
    """Return the first problem of a request by its field."""
    first: Any = error.errors(include_url=False, include_context=False)[0]
    field = str(first["loc"][0]) if first["loc"] else ""
    # Behind the field there are names of the alternatives of a union, too.
    inner = [
        str(part) for part in first["loc"][1:] if not str(part).startswith(("list[", "function-")) and part != "str"
    ]
    where = ".".join([field, *inner])
    shown = brief(where)[1:-1] if where not in kind.model_fields else where
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{shown}: not supported by this server", shown, "unsupported_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{shown}: missing", shown, "missing_required_parameter")
    message = first["msg"][0].lower() + first["msg"][1:]
    return ApiError(400, f"{shown}: got {brief(first['input'])}; {message}", field or None)
