"""Convert a sentencepiece model to a fast tokenizer (tokenizer.json), and check it against sentencepiece itself.

    python -m engine.tools.sentencepiece_tokenizer FOLDER

FOLDER holds tokenizer.model or spiece.model and, if it has one, tokenizer_config.json. The conversion honours the
model's own normalizer: OpenLLaMA's merges repeated spaces, which the usual conversion of a Llama tokenizer does not, so
its token ids differ. Whatever tokenizer is built must give sentencepiece's ids on all of SAMPLES; otherwise nothing is
written. Tokens added to the model (added_tokens.json, added_tokens_decoder of tokenizer_config.json, T5's sentinels)
keep their ids. On failure the exit code is 2, with one line on stderr.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE, Unigram

from configs.common.base import write_atomically
from configs.common.files.reading import TEXT_BYTES, read_json_object

SOURCES = ("tokenizer.model", "spiece.model")
RESULT = "tokenizer.json"
ADDED = "added_tokens.json"
NAMED = "special_tokens_map.json"
SAMPLES = (
    "",
    "The quick brown fox jumps over the lazy dog.",
    "  leading, trailing and   repeated spaces  ",
    "def add(a, b):\n    return a + b\n\n\tprint(add(1, 2))\r\n",
    "3.14159 + 2,718 = 5.859; 100% of $1,000,000 (2026-11-23)",
    "Ein Größenvergleich, naïve café, Ωμέγα, Привет мир, 你好，世界, こんにちは, 안녕하세요, مرحبا, नमस्ते",
    "emoji 🙂🚀 and e\u0301 combining, \u00a0no-break, \u200bzero width, ﬁ ligature, ½, ①",
    "https://example.org/a_b?c=d&e=%20f <html> [x] {y} `z` ~/path/to/file.txt",
    "A",
    " ",
    "\n\n\n",
    "CamelCase snake_case kebab-case UPPERCASE mIxEd",
)
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # sentencepiece_model.proto, ModelProto.SentencePiece.Type
_BPE = 2  # TrainerSpec.ModelType
_SPACE = "\u2581"
_T5 = "T5Tokenizer"
# Special tokens around a text where tokenizer_config.json does not set them: (beginning, end), by tokenizer class.
_AROUND = {"LlamaTokenizer": (True, False), "CodeLlamaTokenizer": (True, False), _T5: (False, True)}
_CLASSES = {"t5": _T5, "mt5": _T5}  # by model_type, where no file names a class; of all others Llama's
_SENTINELS, _MOST_SENTINELS = 100, 100_000  # T5's `extra_ids`, where tokenizer_config.json has none; a bound for junk


def source_of(folder: Path) -> Path | None:
    """Return the sentencepiece model of a folder without a fast tokenizer; None if there is nothing to convert."""
    if (folder / RESULT).is_file():
        return None
    return next((folder / name for name in SOURCES if (folder / name).is_file()), None)


def convert_tokenizer(
    model: Path, config: dict[str, Any], result: Path, added: Mapping[int, AddedToken] | None = None
) -> None:
    """Write the fast tokenizer of a sentencepiece model. Raises ValueError, with nothing written, if they differ.

    config: contents of tokenizer_config.json, for the special tokens around a text and T5's sentinels. added: by id,
    tokens that are matched as a whole, in the model's vocabulary or after it.
    """
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise ValueError(f"{model}: needs the package sentencepiece to be converted; pip install it") from error
    try:
        reference = SentencePieceProcessor(model_file=str(model))
        proto = _proto(reference.serialized_model_proto())
    except (RuntimeError, OSError, ValueError) as error:
        raise ValueError(f"{model}: not a sentencepiece model; fetch or copy it again") from error
    begins, ends = _around(config, model)
    fast = _fast(proto, reference.bos_id() if begins else -1, reference.eos_id() if ends else -1)
    before = [reference.bos_id()] if begins else []
    after = [reference.eos_id()] if ends else []
    for sample in SAMPLES:
        wanted, got = before + list(reference.encode(sample)) + after, fast.encode(sample).ids
        if got != wanted:
            raise ValueError(
                f"{model}: the fast tokenizer differs from sentencepiece on {sample[:40]!r}: token ids {got[:12]}, "
                f"expected {wanted[:12]}. Convert it by hand and add {RESULT}"
            )
    listed = _sentinels(config, proto, model) | dict(added or {})
    # After the comparison, because sentencepiece lacks them.
    for index, token in sorted(listed.items()):
        fast.add_tokens([token])
        if fast.token_to_id(token.content) != index:
            raise ValueError(
                f"{model}: the added token {token.content[:40]!r} has the id {index}, the fast tokenizer would give it "
                f"{fast.token_to_id(token.content)}. Convert it by hand and add {RESULT}"
            )
    write_atomically(result, fast.to_str())


def added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens that a folder adds to its sentencepiece model. Raises ValueError for a list of another form.

    They are found in a text before it is normalized, as by the tokenizers of transformers that run sentencepiece. Of
    those in added_tokens.json the ones that the folder names as end of text, padding and so on are special.
    """
    place = folder / ADDED
    ids = read_json_object(place, TEXT_BYTES) if place.is_file() else {}
    told = config.get("added_tokens_decoder") or {}
    special = _special_texts(folder, config)
    found: dict[int, AddedToken] = {}
    for text, index in ids.items():
        if type(index) is not int:
            raise ValueError(f"{place}: {text[:40]!r}: got {str(index)[:40]!r}, expected its token id")
        found[index] = AddedToken(text, normalized=False, special=text in special)
    for index, entry in told.items() if isinstance(told, dict) else ():
        content: Any = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not index.isdecimal():
            raise ValueError(f"{folder}/tokenizer_config.json: added_tokens_decoder: {index[:40]!r} has no content")
        how = {name: entry.get(name) is True for name in ("single_word", "lstrip", "rstrip", "special")}
        found[int(index)] = AddedToken(content, normalized=False, **how)
    return found


def _special_texts(folder: Path, config: dict[str, Any]) -> set[str]:
    """Return the tokens that a folder names as special, from where transformers takes them (`_from_pretrained`)."""
    place = folder / NAMED
    if "added_tokens_decoder" not in config and place.is_file():
        config = config | read_json_object(place, TEXT_BYTES)
    named = [value for name, value in config.items() if name.endswith("_token")]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(name)
        named += listed if isinstance(listed, list) else []
    contents = [one.get("content") if isinstance(one, dict) else one for one in named]
    return {one for one in contents if isinstance(one, str)}


def _sentinels(config: dict[str, Any], proto: Any, model: Path) -> dict[int, AddedToken]:
    """Return T5's tokens for spans of a text by id, but those that are pieces; of another class none.

    They follow the pieces, the last one first. Raises ValueError for a number of them that is none.
    """
    if _class_of(config) != _T5:
        return {}
    count = _SENTINELS if config.get("extra_ids") is None else config["extra_ids"]
    if type(count) is not int or not 0 <= count <= _MOST_SENTINELS:
        raise ValueError(
            f"{model.parent}/tokenizer_config.json: extra_ids: got {str(count)[:40]!r}, expected a whole number"
        )
    pieces = {piece.piece for piece in proto.pieces}
    names = [name for number in range(count) if (name := f"<extra_id_{number}>") not in pieces]
    first = len(proto.pieces)
    return {first + at: AddedToken(name, normalized=False, special=True) for at, name in enumerate(reversed(names))}


def _proto(serialized: bytes) -> Any:
    from transformers.utils import sentencepiece_model_pb2_new

    proto = sentencepiece_model_pb2_new.ModelProto()
    proto.ParseFromString(serialized)
    return proto


def _around(config: dict[str, Any], model: Path) -> tuple[bool, bool]:
    """Return whether a token begins and ends each text. Raises ValueError for an unknown class of tokenizer."""
    name = _class_of(config)
    if name not in _AROUND:
        known = ", ".join(_AROUND)
        raise ValueError(
            f"{model}: tokenizer_class {name} cannot be converted, only {known}. Convert it by hand and add {RESULT}"
        )
    begins, ends = _AROUND[name]
    return bool(config.get("add_bos_token", begins)), bool(config.get("add_eos_token", ends))


def _class_of(config: dict[str, Any]) -> str:
    """Return the class of a tokenizer_config.json; where it names none, Llama's."""
    return str(config.get("tokenizer_class") or "LlamaTokenizer").removesuffix("Fast")


def _fast(proto: Any, bos: int, eos: int) -> Tokenizer:
    """Build the tokenizer; bos and eos: token ids around each text, -1 for none."""
    pieces = [piece.piece for piece in proto.pieces]
    trainer = proto.trainer_spec
    if trainer.model_type == _BPE:
        vocabulary = {piece: index for index, piece in enumerate(pieces)}
        model: BPE | Unigram = BPE(
            vocabulary,
            _merges(proto, vocabulary),
            unk_token=pieces[trainer.unk_id],
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
        )
    else:
        scores = [(piece.piece, piece.score) for piece in proto.pieces]
        model = Unigram(scores, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    fast = Tokenizer(model)
    fast.normalizer = _normalizer(proto.normalizer_spec)
    strip = [decoders.Strip(content=" ", left=1)] if proto.normalizer_spec.add_dummy_prefix else []
    fast.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    added = [piece for piece in proto.pieces if piece.type in (_CONTROL, _USER_DEFINED)]
    fast.add_tokens([AddedToken(piece.piece, normalized=False, special=piece.type == _CONTROL) for piece in added])
    if bos >= 0 or eos >= 0:
        around = [(pieces[index], index) for index in (bos, eos) if index >= 0]
        template = [pieces[bos]] * (bos >= 0) + ["$A"] + [pieces[eos]] * (eos >= 0)
        fast.post_processor = processors.TemplateProcessing(single=template, special_tokens=around)
    return fast


def _merges(proto: Any, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs that make each piece, the best score first, as sentencepiece merges them."""
    normal = [piece for piece in proto.pieces if piece.type == _NORMAL]
    merges = []
    for piece in sorted(normal, key=lambda each: (-each.score, vocabulary[each.piece])):
        text = piece.piece
        halves = [(text[:at], text[at:]) for at in range(1, len(text))]
        found = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        merges += sorted(found, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges


def _normalizer(spec: Any) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def convert_folder(folder: Path) -> Path | None:
    """Write the fast tokenizer of a folder that has a sentencepiece model only; None if there is nothing to do."""
    model = source_of(folder)
    if model is None:
        return None
    place = folder / "tokenizer_config.json"
    # transformers writes 10^30 into it, as model_max_length, where a tokenizer has no limit.
    config = read_json_object(place, TEXT_BYTES, bounded=False) if place.is_file() else {}
    if not config.get("tokenizer_class"):
        config["tokenizer_class"] = _class_of_model(folder)
    convert_tokenizer(model, config, folder / RESULT, added_tokens(folder, config))
    return folder / RESULT


def _class_of_model(folder: Path) -> str | None:
    """Return the class that config.json names, or that its family has: tokenizer_config.json of 2020 names none."""
    place = folder / "config.json"
    model = read_json_object(place, TEXT_BYTES, bounded=False) if place.is_file() else {}
    return model.get("tokenizer_class") or _CLASSES.get(str(model.get("model_type")))


def main(arguments: list[str]) -> int:
    """Return exit code 0 (converted, or nothing to do) or 2 (rejected)."""
    if len(arguments) != 1:
        print("usage: python -m engine.tools.sentencepiece_tokenizer FOLDER", file=sys.stderr)
        return 2
    try:
        written = convert_folder(Path(arguments[0]))
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    if written is not None:
        print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
