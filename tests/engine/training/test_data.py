"""Which rows a step takes, on any number of ranks and after a stop; texts as windows, tokenised once."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from engine.training.data import text
from engine.training.data.examples import IGNORED, Examples, Inputs, Numbers
from engine.training.data.feed import Feed
from engine.training.data.text import text_tokens
from engine.training.data.validation import validation_batches
from engine.training.shares import make_feed
from engine.training.task_types import load_examples
from engine.training.task_types.classify import label_names
from engine.training.task_types.images import image_examples
from engine.training.trainer import TrainerOptions
from tests.support.training.training_tasks import CPU, VOCABULARY, made_context, workload_of, write_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    write_inputs(made / "inputs")
    return made


def numbered_rows(count: int, fingerprint: str = "rows") -> Examples:
    """Rows that hold their own number; row n has n % 3 + 1 targets."""

    def collate(numbers: Numbers, places: Numbers) -> Inputs:
        return {"rows": torch.from_numpy(numbers), "targets": torch.from_numpy(places)}

    return Examples(count, 1, collate, lambda numbers: numbers % 3 + 1, fingerprint)


def feed_of(count: int, size: int, accumulation: int = 1, dp: int = 1, rank: int = 0, ahead: bool = False) -> Feed:
    return Feed(numbered_rows(count), size, accumulation, (dp, rank), seed=5, device=CPU, ahead=ahead)


def seen(feed: Feed, steps: range) -> list[list[int]]:
    """The rows of each step, of this rank."""
    return [[row for batch in feed.step(step) for row in batch.inputs["rows"].tolist()] for step in steps]


@settings(deadline=None, max_examples=60)
@given(
    dp=st.integers(1, 8),
    each=st.integers(1, 4),
    accumulation=st.sampled_from([1, 2, 3]),
    count=st.integers(1, 60),
)
def test_ranks_share_the_rows_of_an_epoch_whatever_their_number(
    dp: int, each: int, accumulation: int, count: int
) -> None:
    size = dp * each * accumulation
    steps = range(-(-3 * count // size))
    ranks = [seen(feed_of(count, size, accumulation, dp, rank), steps) for rank in range(dp)]
    endless = [row for step in steps for rank in ranks for row in rank[step]]
    # Whole epochs hold every row once; the last incomplete batch of one is the beginning of the next.
    for epoch in range(3):
        assert sorted(endless[epoch * count : (epoch + 1) * count]) == list(range(count))
    # One rank takes the same global batches, in the same order.
    assert [row for step in seen(feed_of(count, size), steps) for row in step] == endless


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    feed = feed_of(30, 30)
    first, second = seen(feed, range(2))
    other = Feed(numbered_rows(30), 30, 1, (1, 0), seed=6, device=CPU, ahead=False)
    assert first != second and seen(other, range(1)) != [first] and first != sorted(first)
    assert seen(feed, range(1)) == [first]  # any step may be asked for again


class _Raced(Feed):
    """Another thread's order of another epoch is in the place of each that is kept."""

    @property
    def _order(self) -> tuple[int, Numbers] | None:
        return self.__dict__.get("kept")

    @_order.setter
    def _order(self, order: tuple[int, Numbers] | None) -> None:
        self.__dict__["kept"] = None if order is None else (-1, order[1][::-1])


def test_two_threads_in_two_epochs_have_the_order_of_their_own() -> None:
    raced = _Raced(numbered_rows(30), 10, 1, (1, 0), seed=5, device=CPU, ahead=False)
    assert seen(raced, range(6)) == seen(feed_of(30, 10), range(6))


def test_shares_weigh_micro_batches_by_their_targets() -> None:
    """The mean over all targets of the step, over all ranks and micro-batches."""
    batches = [batch for rank in (0, 1) for batch in feed_of(10, 8, 2, 2, rank).step(4)]
    targets = [sum(row % 3 + 1 for row in batch.inputs["rows"].tolist()) for batch in batches]
    assert [batch.share for batch in batches] == pytest.approx([count / sum(targets) for count in targets])
    assert len(set(targets)) > 1 and [batch.sequences for batch in batches] == [2] * 4
    # A row is told its place among all epochs', by which masks are drawn: another one whenever it comes again.
    assert [batch.inputs["targets"].tolist() for batch in batches] == [[32, 33], [34, 35], [36, 37], [38, 39]]


def test_a_resumed_feed_goes_on_with_the_same_batch_and_refuses_other_data() -> None:
    state = feed_of(20, 8).state_dict(3)
    for dp in (1, 2, 4):
        resumed = [feed_of(20, 8, 1, dp, rank) for rank in range(dp)]
        for feed in resumed:
            feed.load_state_dict(state)
        rows = [row for feed in resumed for row in seen(feed, range(state["step"], 4))[0]]
        assert [rows] == seen(feed_of(20, 8), range(3, 4))
    others = {
        "workload.data: the checkpoint was trained on data rows, this run has others": replace(
            numbered_rows(20), fingerprint="others"
        ),
        "workload.data: the checkpoint was trained on rows 20, this run has 21": numbered_rows(21),
    }
    for message, examples in others.items():
        with pytest.raises(ValueError, match=message):
            Feed(examples, 8, 1, (1, 0), 5, CPU, False).load_state_dict(state)
    with pytest.raises(ValueError, match=r"workload.global_batch_size: .* global_batch_size 8, this run has 4"):
        feed_of(20, 4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"measuring.seed: .* seed 5, this run has 9"):
        Feed(numbered_rows(20), 8, 1, (1, 0), 9, CPU, False).load_state_dict(state)


def test_the_fingerprint_follows_what_the_rows_are_made_from(folder: Path) -> None:
    def fingerprint(**work: object) -> str:
        context = made_context(folder, "bert classes", **work)  # type: ignore[arg-type]
        return load_examples(workload_of(context), context)[0].fingerprint

    first = fingerprint()
    assert first == fingerprint(global_batch_size=4, learning_rate=1.0)
    (folder / "inputs" / "again.ndjson").write_bytes((folder / "inputs" / "reviews.ndjson").read_bytes())
    changes = [{"data": "again"}, {"sequence_length": 8}, {"heldout_share": 0.2}, {"data": None}]
    assert len({first, *(fingerprint(**change) for change in changes)}) == 5


def test_rows_are_made_ahead_in_a_thread_where_a_device_computes(folder: Path) -> None:
    plain, ahead = feed_of(50, 4), feed_of(50, 4, ahead=True)
    made: list[tuple[int, str]] = []
    collate = ahead.examples.collate

    def told(numbers: Numbers, places: Numbers) -> Inputs:
        made.append((int(places[0]) // 4, threading.current_thread().name))
        return collate(numbers, places)

    ahead.examples = replace(ahead.examples, collate=told)
    # In order, then a jump back, as after an evaluation or a resumed run.
    order = [0, 1, 2, 3, 1, 2]
    assert [seen(ahead, range(step, step + 1)) for step in order] == [
        seen(plain, range(step, step + 1)) for step in order
    ]
    ahead.close()
    assert not any(thread.name.startswith("feed") for thread in threading.enumerate())
    assert all(name.startswith("feed") for step, name in made[1:4])
    context = made_context(folder, "llama")
    feed = make_feed(workload_of(context), TrainerOptions.of(context.job.cell), context, None)  # type: ignore[arg-type]
    assert not feed.ahead  # a thread would take the core that computes


def test_masks_are_as_many_in_every_row_and_drawn_by_place(folder: Path) -> None:
    context = made_context(folder, "bert", sequence_length=20)
    train, _ = load_examples(workload_of(context), context)
    numbers = np.zeros(400, dtype=np.int64)
    places = np.arange(400)
    inputs, ids = train.collate(numbers, places), text_of(context)[:20]
    tokens, targets = inputs["tokens"].numpy(), inputs["targets"].numpy()
    asked = targets != IGNORED
    assert (asked.sum(axis=1) == 3).all() and train.targets(numbers).tolist() == [3] * 400
    assert np.array_equal(np.where(asked, targets, tokens), np.broadcast_to(ids, tokens.shape))
    shown, original = tokens[asked], np.broadcast_to(ids, tokens.shape)[asked]
    assert 0.75 < (shown == 4).mean() < 0.85  # [MASK]
    assert 0.05 < ((shown != 4) & (shown != original)).mean() < 0.15
    assert (asked.sum(axis=0) > 0).all() and len({row.tobytes() for row in asked}) > 200
    # By place alone: in pieces, as ranks take them, they are the same.
    pieces = [train.collate(numbers[part], places[part])["tokens"] for part in np.split(places, 8)]
    assert torch.equal(torch.cat(pieces), inputs["tokens"])


def text_of(context: object) -> np.ndarray:
    """The ids of a context's text."""
    work = workload_of(context)  # type: ignore[arg-type]
    return text_tokens(work.data, "data", work, context, VOCABULARY)  # type: ignore[arg-type]


def test_tokens_are_kept_for_all_users_of_a_cache(folder: Path) -> None:
    """Another user could not read them, and removed them or failed."""
    context = made_context(folder, "bert")
    text_of(context)
    kept = list((Path(context.job.cache) / "tokens").glob("*.npy"))
    assert kept and all(path.stat().st_mode & 0o777 == 0o644 for path in kept)


def test_a_text_without_a_word_for_masks_takes_one_that_it_never_makes(folder: Path) -> None:
    words = Tokenizer.from_file(str(folder / "inputs" / "words.json")).to_str()
    (folder / "inputs" / "maskless.json").write_text(words.replace("[MASK]", "[ASKM]"))
    context = made_context(folder, "bert", tokenizer="maskless")
    numbers = np.arange(20)
    tokens = load_examples(workload_of(context), context)[0].collate(numbers, numbers)["tokens"]
    assert (tokens == VOCABULARY - 1).any()
    size = Tokenizer.from_str(words).get_vocab_size()
    full = context.manifest.model_copy(update={"config": context.manifest.config | {"vocab_size": size}})  # type: ignore[union-attr]
    context = made_context(folder, "bert", tokenizer="maskless", manifest=full)
    with pytest.raises(ValueError, match=r"workload.tokenizer: it has no \[MASK\] or <mask>"):
        load_examples(workload_of(context), context)


def word_tokenizer(path: Path, words: dict[str, int], special: tuple[str, ...] = (), end: str | None = None) -> None:
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    if end is not None:
        tokenizer.post_processor = processors.TemplateProcessing(f"$A {end}", special_tokens=[(end, words[end])])
    tokenizer.save(str(path))


def test_a_mask_may_have_any_name_that_says_so(folder: Path) -> None:
    """EuroBERT's was not found, and a word of the vocabulary was learnt as the mask."""
    (folder / "inputs" / "two_words.txt").write_text("a b " * 200)
    word_tokenizer(folder / "inputs" / "named.json", {"a": 0, "[UNK]": 1, "b": 2, "<|mask|>": 3}, ("<|mask|>",))
    context = made_context(folder, "bert", data="two_words", tokenizer="named")
    numbers = np.arange(20)
    tokens = load_examples(workload_of(context), context)[0].collate(numbers, numbers)["tokens"]
    assert (tokens == 3).float().mean() > 0.05


@pytest.mark.parametrize("adds", [True, False])
def test_long_pairs_are_cut_before_their_end(folder: Path, adds: bool) -> None:
    """The end was cut off, so that a model learnt of long targets not to end; transformers' tokenizers keep it."""
    (folder / "inputs" / "long.ndjson").write_text(
        "".join(json.dumps({"source": "a b " * count, "target": "b " * count}) + "\n" for count in (2, 40) * 4)
    )
    end = 1  # T5's
    words = {"a": 0, "</s>": end, "b": 2, "[UNK]": 3}
    word_tokenizer(folder / "inputs" / "ends.json", words, end="</s>" if adds else None)
    context = made_context(folder, "t5", data="long", tokenizer="ends", heldout_share=0.0)
    rows = load_examples(workload_of(context), context)[0].collate(np.arange(8), np.arange(8))
    lengths = (rows["targets"] != IGNORED).sum(1)
    assert sorted(set(lengths.tolist())) == [3, 16]
    for row, length in zip(rows["targets"], lengths, strict=True):
        assert row[length - 1] == end and (row[: length - 1] == 2).all()
    if adds:
        sources = [row[seen == 1].tolist() for row, seen in zip(rows["tokens"], rows["seen"], strict=True)]
        assert {len(row) for row in sources} == {5, 16} and all(row[-1] == end for row in sources)


def test_a_mask_outside_the_model_s_vocabulary_is_refused(folder: Path) -> None:
    word_tokenizer(folder / "inputs" / "far.json", {"a": 0, "[UNK]": 1, "[MASK]": 5000})
    context = made_context(folder, "bert", tokenizer="far")
    with pytest.raises(ValueError, match=f"workload.tokenizer: its mask is token 5000, but the model has {VOCABULARY}"):
        load_examples(workload_of(context), context)


def test_ids_of_a_tokenizer_may_have_gaps(folder: Path) -> None:
    (folder / "inputs" / "two_words.txt").write_text("a b " * 200)
    word_tokenizer(folder / "inputs" / "gaps.json", {"a": 0, "[UNK]": 1, "b": 70_000})
    context = made_context(folder, "llama", data="two_words", tokenizer="gaps")
    with pytest.raises(ValueError, match=f"workload.tokenizer: it makes token 70000, but the model has {VOCABULARY}"):
        load_examples(workload_of(context), context)
    word_tokenizer(folder / "inputs" / "taken.json", {"a": 0, "[UNK]": 1, "b": VOCABULARY - 1})
    context = made_context(folder, "bert", data="two_words", tokenizer="taken")
    with pytest.raises(ValueError, match=r"workload.tokenizer: it has no \[MASK\] or <mask>"):
        load_examples(workload_of(context), context)


def test_windows_leave_nothing_out_and_overlap_by_one(folder: Path) -> None:
    context = made_context(folder, "llama")
    train, held = load_examples(workload_of(context), context)
    ids = text_of(context).astype(np.int64)
    assert held is None and train.count == (len(ids) - 1) // 16
    rows = train.collate(np.arange(train.count), np.arange(train.count))
    assert np.array_equal(rows["tokens"].flatten(), ids[: train.count * 16])
    assert np.array_equal(rows["targets"].flatten(), ids[1 : train.count * 16 + 1])


def test_rows_of_text_are_packed_behind_one_another(folder: Path) -> None:
    context = made_context(folder, "gpt2")  # its end of a text is token 0, [PAD]
    ids = text_of(context).tolist()
    decoded = Tokenizer.from_file(str(folder / "inputs" / "words.json"))
    assert ids.count(0) == 60
    assert decoded.decode(ids[: ids.index(0)]) == "The 0th story ends here."


def test_a_text_is_tokenised_once_and_read_from_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inputs").symlink_to(folder / "inputs")
    monkeypatch.setattr(text, "_CHUNK_CHARACTERS", 1000)
    first = text_of(made_context(tmp_path, "llama"))
    whole = Tokenizer.from_file(str(folder / "inputs" / "words.json"))
    assert whole.decode(first.tolist()) == (folder / "inputs" / "text.txt").read_text()
    assert isinstance(first, np.memmap)  # ranks of a node share its pages
    monkeypatch.setattr(text, "_tokenised", None)  # a second call would fail
    assert np.array_equal(text_of(made_context(tmp_path, "llama")), first)
    [cached] = (tmp_path / "cache" / "tokens").iterdir()
    assert cached.stat().st_mode & 0o044 == 0o044  # others may have the cache, too
    monkeypatch.undo()
    monkeypatch.setattr(text, "_CHUNK_CHARACTERS", 1000)
    kept = np.array(first)
    whole_file = cached.read_bytes()
    for length in (100, 0):  # no byte: what a power failure may leave
        cached.unlink()
        cached.write_bytes(whole_file[:length])
        assert np.array_equal(text_of(made_context(tmp_path, "llama")), kept)


@pytest.mark.parametrize("case", ["llama", "bert", "t5", "bert classes", "vit"])
def test_what_is_held_out_is_never_trained_on(case: str, folder: Path) -> None:
    context = made_context(folder, case, heldout_share=0.25)
    train, held = load_examples(workload_of(context), context)
    assert held is not None
    everything, none = load_examples(workload_of(made_context(folder, case)), made_context(folder, case))
    assert none is None
    if case in ("llama", "bert"):
        assert abs(train.count + held.count - everything.count) <= 1
        return
    assert held.count == 10 and train.count == 30

    def contents(examples: Examples) -> list[bytes]:
        places = np.arange(examples.count)
        inputs = examples.collate(places, places)
        return [b"".join(inputs[name][row].numpy().tobytes() for name in sorted(inputs)) for row in places]

    assert sorted([*contents(train), *contents(held)]) == sorted(contents(everything))


@pytest.mark.parametrize(("case", "other"), [("llama", "stories"), ("bert", "stories"), ("t5", "pairs")])
def test_another_file_is_evaluated_on(case: str, other: str, folder: Path) -> None:
    context = made_context(folder, case, validation_data=other)
    train, held = load_examples(workload_of(context), context)
    plain = load_examples(workload_of(made_context(folder, case)), made_context(folder, case))[0]
    assert held is not None and train.count == plain.count and held.count > 0
    assert (held.count == plain.count) == (case == "t5")


def test_files_may_number_their_classes_differently(folder: Path) -> None:
    with np.load(folder / "inputs" / "squares.npz") as squares:
        images, labels = squares["images"], squares["labels"]
    renumbered = {"labels": 1 - labels, "label_names": np.array(["light", "dark"])}
    np.savez(folder / "inputs" / "renumbered.npz", images=images, **renumbered)
    np.savez(folder / "inputs" / "blue.npz", images=images, labels=labels, label_names=np.array(["light", "blue"]))
    context = made_context(folder, "vit", validation_data="renumbered")
    train, held = load_examples(workload_of(context), context)
    assert held is not None and held.names == train.names == ("dark", "light")
    places = np.arange(len(labels))
    assert torch.equal(held.collate(places, places)["targets"], train.collate(places, places)["targets"])
    context = made_context(folder, "vit", validation_data="blue")
    with pytest.raises(ValueError, match=r"workload.validation_data: class 'blue' is none of data's: dark, light"):
        load_examples(workload_of(context), context)


def test_each_of_thousands_of_classes_is_found_by_its_name_at_once(folder: Path) -> None:
    comparisons = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            return str.__eq__(self, other)

    trained = tuple(Name(f"class-{number}") for number in range(3000))
    with np.load(folder / "inputs" / "squares.npz") as squares:
        images, labels = squares["images"], squares["labels"]
    names = np.array([f"class-{number}" for number in reversed(range(3000))])
    np.savez(folder / "inputs" / "many.npz", images=images, labels=labels, label_names=names)
    context = made_context(folder, "vit", validation_data="many")
    examples = image_examples("many", "validation_data", workload_of(context), context, trained)
    places = np.arange(len(labels))
    assert examples.collate(places, places)["targets"].tolist() == (2999 - labels).tolist()
    assert examples.names == trained and comparisons <= 4 * len(trained)
    names[1] = "blue"
    np.savez(folder / "inputs" / "unknown.npz", images=images, labels=labels, label_names=names)
    context = made_context(folder, "vit", validation_data="unknown")
    told = r"class 'blue' is none of data's: class-0, class-1, .*, class-19 and 2,980 more$"
    with pytest.raises(ValueError, match=told):
        image_examples("unknown", "validation_data", workload_of(context), context, trained)


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_every_rank_evaluates_as_often_and_every_row_is_counted_once(dp: int) -> None:
    shares = [validation_batches(numbered_rows(11), 2, (dp, rank), CPU) for rank in range(dp)]
    assert len({len(share) for share in shares}) == 1
    counted = [
        row
        for share in shares
        for batch in share
        for row, target in zip(batch.inputs["rows"].tolist(), batch.inputs["targets"].tolist(), strict=True)
        if target != IGNORED
    ]
    assert sorted(counted) == list(range(11)) == sorted(counted)
    assert sum(batch.sequences for share in shares for batch in share) == 11


def test_random_data_are_the_same_in_every_launch(folder: Path) -> None:
    for case in ("llama", "bert", "t5", "bert classes", "vit"):
        found = []
        for seed in (0, 0, 1):
            context = made_context(folder, case, seed=seed, data=None, tokenizer=None)
            train, _ = load_examples(workload_of(context), context)
            inputs = train.collate(np.arange(4), np.arange(4))
            found.append(torch.cat([inputs[name].flatten().double() for name in sorted(inputs)]))
        assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2]), case


def test_classes_are_words_in_their_order_or_numbers_from_0() -> None:
    assert label_names(["no", "yes", "no"]) == ("no", "yes")
    assert label_names([2, 0]) == ("0", "1", "2")
    with pytest.raises(ValueError, match="label -1 is below 0"):
        label_names([0, -1])
    with pytest.raises(ValueError, match=r"workload.data: label 5000000 would be one of 5,000,001 classes"):
        label_names([0, 5_000_000])
