"""The text of an answer: whole in the end, never with half a character or the beginning of a stop string."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.prompts.tokenizer import load_tokenizer
from engine.serving.http.text import AnswerText, token_text

_TINY = Path(__file__).parents[4] / "configs" / "models" / "tiny-stdlib" / "tokenizer.json"
TINY = load_tokenizer(_TINY)


def bytes_tokenizer() -> Tokenizer:
    """One token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


BYTES = bytes_tokenizer()


def streamed(
    tokenizer: Tokenizer | None, tokens: list[int], stops: tuple[str, ...] = (), min_tokens: int = 0
) -> tuple[list[str], bool]:
    text = AnswerText(tokenizer, stops, min_tokens)
    pieces = []
    for token in tokens:
        pieces.append(text.add(token))
        if text.stopped:
            return pieces, True
    pieces.append(text.end())
    return pieces, text.stopped


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40), st.booleans())
def test_pieces_make_the_whole_text(text: str, by_bytes: bool) -> None:
    tokenizer = BYTES if by_bytes else TINY
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    pieces, stopped = streamed(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens) and not stopped


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab\nü", max_size=40), st.lists(st.text(alphabet="ab\nü", min_size=1, max_size=4), max_size=3))
def test_nothing_of_a_stop_string_is_sent(text: str, stops: list[str]) -> None:
    tokens = BYTES.encode(text, add_special_tokens=False).ids
    pieces, stopped = streamed(BYTES, tokens, tuple(stops))
    # The stop string that is complete first ends the answer; of several that end together, the longest.
    ends = sorted((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text)
    assert stopped == bool(ends)
    assert "".join(pieces) == (text[: ends[0][1]] if ends else text)


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="ab", max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    st.integers(0, 30),
)
def test_a_stop_string_counts_where_it_ends_after_the_least_tokens(text: str, stops: list[str], least: int) -> None:
    pieces, stopped = streamed(BYTES, BYTES.encode(text, add_special_tokens=False).ids, tuple(stops), least)
    ends = sorted(
        (start + len(stop), start)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > least
    )
    assert stopped == bool(ends)
    assert "".join(pieces) == (text[: ends[0][1]] if ends else text)


def test_a_character_of_several_tokens_comes_whole() -> None:
    tokens = BYTES.encode("é€😀", add_special_tokens=False).ids
    assert streamed(BYTES, tokens)[0] == ["", "é", "", "", "€", "", "", "", "😀", ""]


def test_half_a_character_at_the_end_is_marked() -> None:
    tokens = BYTES.encode("a😀", add_special_tokens=False).ids[:-1]
    assert "".join(streamed(BYTES, tokens)[0]) == BYTES.decode(tokens) == "a\ufffd"


@pytest.mark.parametrize("stops", [(), (" 7",)])
def test_without_a_tokenizer_tokens_are_numbers(stops: tuple[str, ...]) -> None:
    pieces, stopped = streamed(None, [5, 6, 7, 8], stops)
    assert ("".join(pieces), stopped) == ((" 5 6", True) if stops else (" 5 6 7 8", False))


def fallback_tokenizer() -> tuple[Tokenizer, dict[str, int]]:
    """A tokenizer as Llama's: what is no word is a token for each byte."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581a", "b", "\u2581c"]
    made = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, [], byte_fallback=True))
    blanks = decoders.Replace("\u2581", " ")
    made.decoder = decoders.Sequence([blanks, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return made, made.get_vocab()


@pytest.mark.parametrize(
    ("prompt", "names", "text"),
    [
        (["\u2581a", "b"], ["\u2581c", "b"], " cb"),
        (["\u2581a", "b"], ["\u2581c", "<0xC3>", "<0xA9>", "\u2581c", "<0xC3>"], " c\u00e9 c\ufffd"),
        (["\u2581c"] * 30, ["\u2581c", "<0xC3>"], " c\ufffd"),
        (["\u2581a", "<0x0A>"], ["<0xE3>", "b", "\u2581c"], "\ufffdb c"),
        # Half a character, which its answer may complete: decoded alone.
        (["\u2581a", "<0xC3>"], ["<0xA9>", "\u2581c"], "\ufffd c"),
        ([], ["\u2581c", "b"], "cb"),
    ],
)
def test_an_answer_keeps_the_blank_between_its_prompt_and_its_first_word(
    prompt: list[str], names: list[str], text: str
) -> None:
    """The decoder drops a blank at the beginning of a text, where an answer that continues one does not begin."""
    tokenizer, vocabulary = fallback_tokenizer()
    answer = AnswerText(tokenizer, prompt=[vocabulary[name] for name in prompt])
    pieces = [answer.add(vocabulary[name]) for name in names]
    assert "".join(pieces) + answer.end() == text == answer.text


def test_a_stop_string_that_begins_with_the_blank_behind_the_prompt_is_found() -> None:
    tokenizer, vocabulary = fallback_tokenizer()
    answer = AnswerText(tokenizer, (" c",), prompt=[vocabulary["\u2581a"]])
    assert answer.add(vocabulary["\u2581c"]) == "" and answer.stopped


def test_tokens_that_differ_in_a_blank_have_texts_that_do() -> None:
    """Alone the decoder drops it, and of ` c` and `c` one log-probability was left."""
    tokenizer, vocabulary = fallback_tokenizer()
    named = {"\u2581c": " c", "b": "b", "<0x0A>": "\n", "<0xC3>": "\ufffd", "<unk>": "<unk>"}
    assert [token_text(tokenizer, vocabulary[name]) for name in named] == list(named.values())
    assert [token_text(TINY, one) for one in range(600)] == [
        TINY.decode([one], skip_special_tokens=False) for one in range(600)
    ]


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_the_text_of_other_decoders_does_not_depend_on_the_prompt(before: str, text: str) -> None:
    tokens = TINY.encode(text, add_special_tokens=False).ids
    answer = AnswerText(TINY, prompt=TINY.encode(before, add_special_tokens=False).ids)
    assert "".join([*map(answer.add, tokens), answer.end()]) == TINY.decode(tokens)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["\u2581a", "<0x0A>", "<0xE3>", "b", "\u2581c"], "a\n\ufffdb c"),
        (["\u2581a", "<0x0A>", "<0xE3>", "<0x0A>", "b", "<0xE3>"], "a\n\ufffd\ufffdb\ufffd"),
        (["\u2581a", "<0x0A>", "<0xC3>", "<0xA9>", "b"], "a\n\u00e9b"),
        (["\u2581a", "<0xC3>", "<0xA9>", "<0xE2>", "<0x82>"], "a\u00e9\ufffd\ufffd"),
    ],
)
def test_a_byte_that_is_no_character_ends_no_answer(names: list[str], text: str) -> None:
    """The library's stream raises for it, since it decodes the line break before it anew."""
    tokenizer, vocabulary = fallback_tokenizer()
    pieces, _ = streamed(tokenizer, [vocabulary[name] for name in names])
    assert "".join(pieces) == text


def test_a_stop_string_is_found_behind_a_byte_that_is_no_character() -> None:
    tokenizer, vocabulary = fallback_tokenizer()
    names = ["\u2581a", "<0x0A>", "<0xE3>", "b", "\u2581c", "b"]
    pieces, stopped = streamed(tokenizer, [vocabulary[name] for name in names], (" cb",))
    assert ("".join(pieces), stopped) == ("a\n\ufffdb", True)
