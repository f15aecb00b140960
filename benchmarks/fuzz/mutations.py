"""Inputs for hypothesis: valid ones with hostile values, cut and spliced text, and plain bytes.

inputs((b'{"a": 1}',))         # a strategy of bytes
"""

import copy
import json
import random
from typing import Any

import yaml
from hypothesis import strategies as st

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**12, 10**18, 10**30, -(10**18), 1e308, 1e-320, -0.0, 1.5,
    float("inf"), float("nan"), "", "a", "²", "\x00", "\x1b[31m", "\u202e", "\ud800", "x" * 5000, "9" * 5000, "no",
    "../../etc/passwd", "/dev/zero", "1_000", "0x10", "1e5", [], {}, [[]], [None], {"": 1}, {"a": {}}, [1, 2],
    ["a"] * 3, [0] * 2000, {"kind": "train"}, {"kind": []}, {"dp": 2}, "int8+prune_50", "rankwise",
)  # fmt: skip
_PIECES = (
    b"[" * 3000, b"{" * 1000, b"]", b"}", b"\x00", b"\xff\xfe", b"&a ", b"*a", b"<<: ", b"? ", b"!!int ", b"!!binary ",
    b"!!python/name:os.system ", b"---\n", b"\n", b"\t", b"|", b"[0-99999999]", b"[", b",", b"9" * 5000, b"1e999",
    b"NaN", b"-Infinity", b'"', b"\\ud800", b"\xc2\xb2", b"\x1b[2J", b"\xe2\x80\xae", b": ", b"- ", b"#", b"%",
    b"1:60:99",
)  # fmt: skip


def inputs(seeds: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    """Bytes derived from the seeds, and bytes that know nothing of them."""
    plain = st.one_of(st.binary(max_size=300), st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
    if not seeds:
        return plain
    # A number and not st.randoms(), whose every draw hypothesis records: found inputs are made smaller by `finds`.
    changed = st.tuples(st.sampled_from(seeds), st.integers(0, 2**64).map(random.Random))
    return st.one_of(
        changed.map(lambda drawn: changed_values(*drawn)),
        changed.map(lambda drawn: spliced(*drawn)),
        plain,
    )


def spliced(seed: bytes, draw: random.Random) -> bytes:
    """A few cuts, copies and insertions."""
    data = seed
    for _ in range(draw.randint(1, 4)):
        start = draw.randint(0, len(data))
        end = min(len(data), start + draw.choice((0, 0, 1, 4, 16, 64)))
        copied = data[draw.randint(0, len(data)) :][: draw.choice((1, 8, 64))]
        data = data[:start] + draw.choice((*_PIECES, b"", copied, copied)) + data[end:]
    return data


def changed_values(seed: bytes, draw: random.Random) -> bytes:
    """The same document with some values and keys exchanged; spliced where the seed is neither JSON nor YAML."""
    try:
        document, as_json = json.loads(seed), True
    except ValueError:
        try:
            document, as_json = yaml.safe_load(seed), False
        except yaml.YAMLError:
            return spliced(seed, draw)
    if not isinstance(document, dict | list):
        return spliced(seed, draw)
    for _ in range(draw.randint(1, 3)):
        _change(document, draw)
    if as_json:
        return json.dumps(document).encode()
    try:
        return yaml.safe_dump(document, allow_unicode=True, sort_keys=False).encode("utf-8", "replace")
    except (yaml.YAMLError, ValueError):
        return spliced(seed, draw)


def _change(document: Any, draw: random.Random) -> None:
    """Exchange, remove or add one value; values are copied, because a later change may go into them."""
    places = list(_places(document))
    if not places:
        return
    holder, key = draw.choice(places)
    what = draw.random()
    if what < 0.7:
        holder[key] = copy.deepcopy(draw.choice(HOSTILE))
    elif what < 0.8:
        del holder[key]
    elif isinstance(holder, dict):
        donor, name = draw.choice(places)
        holder[draw.choice(("a.b", "", "²", "workload", "\x1b", str(name)))] = copy.deepcopy(donor[name])
    else:
        holder.append(copy.deepcopy(draw.choice(HOSTILE)))


def _places(document: Any) -> Any:
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(items):
        yield document, key
        if isinstance(value, dict | list):
            yield from _places(value)
