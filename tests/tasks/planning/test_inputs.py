"""Data that a study names become files of its run: rows, images, and Hugging Face datasets by the real library."""

import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from configs.inputs.examples import read_examples
from configs.plans.expand import expand
from configs.plans.paths import RunPaths
from configs.plans.plan import PlannedModel
from configs.spec.cell import Cell
from configs.spec.study import StudyError, StudySpec, parse_study
from engine.training.task_types import load_examples
from tasks.models.dataset import write_dataset
from tasks.planning import inputs
from tasks.planning.inputs import copy_inputs
from tasks.planning.study_models import planned_model
from tasks.planning.study_plan import make_plan
from tests.support.training.training_tasks import made_context, workload_of, write_inputs

TOKENIZER = Path(__file__).parents[3] / "configs" / "models" / "tiny-stdlib" / "tokenizer.json"


@pytest.fixture(autouse=True)
def _cache_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def study_of(data: str, **work: Any) -> StudySpec:
    return parse_study(
        {
            "study": "learning",
            "models": [{"id": "synthetic:bert-1m@0", "name": "tiny"}],
            "workload": {"kind": "train", "data": data, **work},
            "experiments": {"sizes": {"kind": "sweep", "over": {"workload.global_batch_size": [4, 8]}}},
        }
    )


def copied(tmp_path: Path, data: str, **work: Any) -> tuple[StudySpec, dict[str, str], Path]:
    study, run = study_of(data, **work), RunPaths(tmp_path / "run")
    return study, copy_inputs(study, run, tmp_path), run.inputs


def problems(tmp_path: Path, data: str) -> str:
    with pytest.raises(StudyError) as caught:
        copied(tmp_path, data)
    [problem] = caught.value.problems
    return problem


def reviews(count: int = 12) -> datasets.Dataset:
    classes = datasets.ClassLabel(names=["dull", "fine"])
    columns = {"text": [f"day {n}" for n in range(count)], "label": [n % 2 for n in range(count)], "extra": [0] * count}
    return datasets.Dataset.from_dict(columns).cast_column("label", classes)


def test_a_saved_dataset_becomes_rows_that_a_task_learns(tmp_path: Path) -> None:
    datasets.DatasetDict(train=reviews(), test=reviews(4)).save_to_disk(str(tmp_path / "reviews"))
    write_inputs(tmp_path)
    study, names, inputs = copied(
        tmp_path, "hf:reviews", validation_data="hf:reviews:test", task="text_classification", tokenizer="words.json"
    )
    assert set(names) == {"hf:reviews", "hf:reviews:test", "words.json"}
    rows = read_examples(inputs / f"{names['hf:reviews']}.ndjson")
    assert rows[:2] == [{"text": "day 0", "label": "dull"}, {"text": "day 1", "label": "fine"}] and len(rows) == 12
    # A second run finds the same file by the same hash, so that a resumed study measures the same cells.
    assert copy_inputs(study, RunPaths(tmp_path / "again"), tmp_path) == names
    plan = expand(study, [PlannedModel(name="tiny", identity="synthetic:bert-1m@0", manifest="m")], names, lambda _: 0)
    cell: Cell = next(iter(plan.cells.values()))
    assert (cell.workload.data, cell.workload.validation_data) == (names["hf:reviews"], names["hf:reviews:test"])
    context = made_context(tmp_path / "run", "bert classes", **cell.workload.model_dump(exclude={"kind"}))
    train, held = load_examples(workload_of(context), context)
    assert (train.count, train.names) == (12, ("dull", "fine")) and held is not None and held.count == 4


def test_images_of_a_dataset_become_arrays(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    columns = {"image": [Image.fromarray(one) for one in pixels], "label": [0, 1, 2, 0, 1, 2]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(tmp_path / "pictures"))
    _, names, inputs = copied(tmp_path, "hf:pictures", task="image_classification")
    context = made_context(tmp_path / "run", "vit", data=names["hf:pictures"])
    assert context.inputs == inputs
    train, _ = load_examples(workload_of(context), context)
    assert (train.count, train.names) == (6, ("a", "b", "c"))
    found = train.collate(np.arange(6), np.arange(6))
    assert found["targets"].tolist() == [0, 1, 2, 0, 1, 2]
    assert np.allclose(found["pixels"].numpy().transpose(0, 2, 3, 1) * 127.5 + 127.5, pixels, atol=1e-3)


def saved_images(folder: Path, images: list[Any], labels: Sequence[Any] = (0, 1)) -> None:
    """Images of PIL have their type; lists of numbers are a column of arrays."""
    made = datasets.Dataset.from_dict({"image": images, "label": list(labels)})
    made.save_to_disk(str(folder / "pictures"))


RED = Image.fromarray(np.full((4, 4, 3), [200, 10, 10], dtype=np.uint8))


@pytest.mark.parametrize(
    ("image", "value"),
    [
        (RED.convert("P", palette=Image.Palette.ADAPTIVE), [200, 10, 10]),
        (Image.fromarray(np.ones((4, 4), dtype=bool)), [255]),
        (np.full((4, 4), 30).tolist(), [30]),
    ],
    ids=["palette", "bits", "whole numbers"],
)
def test_pixels_are_brightness(tmp_path: Path, image: Any, value: list[int]) -> None:
    """Places in a palette were learned as brightness, and a bit as nearly black."""
    saved_images(tmp_path, [image, image])
    _, names, inputs = copied(tmp_path, "hf:pictures", task="image_classification")
    with np.load(inputs / f"{names['hf:pictures']}.npz") as arrays:
        assert arrays["images"].dtype == np.uint8 and arrays["labels"].tolist() == [0, 1]
        assert arrays["images"].reshape(-1, len(value)).tolist() == [value] * 32


@pytest.mark.parametrize(
    ("image", "labels", "message"),
    [
        (Image.fromarray(np.full((4, 4), 300, dtype=np.uint16)), [0, 1], "image: got mode I;16 (uint16)"),
        (np.full((4, 4), 0.5).tolist(), [0, 1], "image: got list (float64)"),
        (np.full((4, 4), 300).tolist(), [0, 1], "image: got list (int64)"),
        ([[1, 2], [3]], [0, 1], "image: got list (object)"),
        (None, [0, 1], "image: got NoneType (object)"),
        (RED, [0, None], "label: got None, expected the number of a class"),
        (RED, ["cat", "dog"], "label: got 'cat', expected the number of a class"),
    ],
    ids=["16 bits", "shares", "over 255", "ragged", "no image", "no label", "names"],
)
def test_images_that_8_bits_do_not_hold_are_refused(
    tmp_path: Path, image: Any, labels: list[Any], message: str
) -> None:
    """They were wrapped around: 300 became 44, and 0.5 became 0."""
    saved_images(tmp_path, [image, image], labels)
    assert f"workload.data: hf:pictures: {message}" in problems(tmp_path, "hf:pictures")


def test_a_row_without_a_label_is_one_without_a_class(tmp_path: Path) -> None:
    classes = datasets.ClassLabel(names=["dull", "fine"])
    made = datasets.Dataset.from_dict({"text": ["one", "two", "three"], "label": [1, None, -1]})
    made.cast_column("label", classes).save_to_disk(str(tmp_path / "reviews"))
    digest = write_dataset("hf:reviews", tmp_path, tmp_path)
    found = [json.loads(line) for line in (tmp_path / f"{digest}.ndjson").read_text().splitlines()]
    assert [row["label"] for row in found] == ["fine", None, None]


def test_files_of_rows_in_other_forms_become_the_same(tmp_path: Path) -> None:
    rows = [{"source": f"a {n}", "target": f"b {n}"} for n in range(5)]
    (tmp_path / "folder").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "folder" / "train.jsonl").write_text(lines)
    (tmp_path / "pairs.jsonl").write_text(lines + "\n")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "pairs.parquet")
    _, names, inputs = copied(tmp_path, "hf:folder:train[1:3]", task="seq2seq")
    assert read_examples(inputs / f"{names['hf:folder:train[1:3]']}.ndjson") == rows[1:3]
    for written in ("hf:folder", "hf:folder:default:train", "pairs.parquet", "pairs.jsonl"):
        _, names, inputs = copied(tmp_path, written, task="seq2seq")
        assert read_examples(inputs / f"{names[written]}.ndjson") == rows, written
    # What prompts are kept as stays for prompts.
    assert not list((tmp_path / "run" / "inputs").glob("*.jsonl"))


def test_a_text_stays_a_text_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print()\n")
    _, names, inputs = copied(tmp_path, "program.py")
    assert (inputs / f"{names['program.py']}.txt").read_text() == "print()\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("hf:nowhere", "workload.data: hf:nowhere: cannot be loaded"),
        ("hf:saved:other", "workload.data: hf:saved:other: cannot be loaded (no split other among train)"),
        ("hf:saved:plain:train", "cannot be loaded (a saved dataset has no configuration plain)"),
        ("hf:columns:test", "cannot be loaded (it is one split (without a name); leave :test out)"),
        ("hf:saved:a:b:c", "workload.data: hf:saved:a:b:c: expected hf:NAME_OR_FOLDER[[:CONFIGURATION]:SPLIT]"),
        ("hf:saved:", "workload.data: hf:saved:: expected hf:NAME_OR_FOLDER"),
        ("hf:columns", "workload.data: hf:columns: got columns question, answer; rename them to one of: image and"),
        ("hf:sizes", "workload.data: hf:sizes: images of several sizes (4 x 4 and 5 x 5)"),
        ("broken.jsonl", "line 2: not JSON"),
        ("columns.jsonl", "line 1: expected `text`, or `source` and `target`"),
        ("blank.jsonl", "empty file, expected one object per line"),
        ("broken.npz", "workload.data: broken.npz: not an .npz file"),
        ("broken.parquet", "workload.data: broken.parquet: cannot be loaded"),
        ("hf:torn", "workload.data: hf:torn: cannot be loaded (JSON parse error"),
        ("absent.jsonl", "workload.data: no such file: absent.jsonl"),
    ],
)
def test_data_that_do_not_do_are_refused_before_anything_starts(tmp_path: Path, data: str, message: str) -> None:
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": ')
    (tmp_path / "columns.jsonl").write_text('{"question": "fine"}\n')
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "broken.npz").write_text("no zip")
    (tmp_path / "broken.parquet").write_text("no parquet")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "train.jsonl").write_text('{"text": "fine"}\n{"text": ')
    if data.startswith("hf:saved:"):
        datasets.DatasetDict(train=reviews()).save_to_disk(str(tmp_path / "saved"))
    if data.startswith("hf:columns"):
        datasets.Dataset.from_dict({"question": ["a"], "answer": ["b"]}).save_to_disk(str(tmp_path / "columns"))
    if data == "hf:sizes":
        images = [Image.fromarray(np.zeros((size, size), dtype=np.uint8)) for size in (4, 5)]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        made = datasets.Dataset.from_dict({"image": images, "label": [0, 1]}, features=features)
        made.save_to_disk(str(tmp_path / "sizes"))
    assert message in problems(tmp_path, data)


def test_texts_for_a_model_that_cannot_read_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    model = PlannedModel(name="tiny", identity="synthetic:bert-1m@0", manifest="")
    study, inputs, folder = copied(tmp_path, "stdlib", task="masked_lm")
    assert [path.stat().st_mode & 0o777 for path in folder.glob("*.txt")] == [0o644]  # others may read the run
    with pytest.raises(StudyError, match=r"workload\.tokenizer: synthetic:bert-1m@0 has no tokenizer\.json"):
        make_plan(study, [model], inputs, folder)
    read = study_of("stdlib", task="masked_lm", tokenizer=str(TOKENIZER))
    found = copy_inputs(read, RunPaths(tmp_path / "other"), tmp_path)
    assert make_plan(read, [model], found, RunPaths(tmp_path / "other").inputs).cells
    (text,) = RunPaths(tmp_path / "other").inputs.glob("*.txt")
    assert text.stat().st_mode & 0o777 == 0o644, "as any other input: whoever goes on with the run reads it"


def test_a_full_disk_leaves_no_part_of_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, name: str) -> None:
        Path(name).write_text("a part")
        raise OSError(28, "No space left on device")

    (tmp_path / "here").write_text("text")
    (tmp_path / "inputs").mkdir()
    monkeypatch.setattr(inputs.shutil, "copyfile", refuse)
    with pytest.raises(OSError, match="No space"):
        inputs._place(tmp_path / "here", "here", tmp_path / "inputs" / "digest.txt", kept=True)
    assert list((tmp_path / "inputs").iterdir()) == []


def trained_and(tmp_path: Path, other: dict[str, Any], **work: Any) -> tuple[StudySpec, dict[str, str], Path]:
    """A study that trains, and asks for other work in a second experiment."""
    study = study_of("texts.jsonl", **work)
    more = {"kind": "sweep", "base": {"workload": other}, "over": {"dp": [1]}}
    study = parse_study(study.model_dump() | {"experiments": {"more": more, **study.model_dump()["experiments"]}})
    run = RunPaths(tmp_path / "run")
    return study, copy_inputs(study, run, tmp_path), run.inputs


def test_one_file_may_be_learnt_from_here_and_asked_there(tmp_path: Path) -> None:
    """It was kept for the first of them alone: the other found no file in the inputs."""
    write_inputs(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"prompt": "import os", "text": "import os"}\n')
    asked = {"kind": "encode", "prompts": "texts.jsonl"}
    study, names, folder = trained_and(tmp_path, asked, task="masked_lm", tokenizer=str(TOKENIZER))
    digest = names["texts.jsonl"]
    assert (folder / f"{digest}.jsonl").is_file() and (folder / f"{digest}.ndjson").is_file()
    model = planned_model(study.models[0], 0, tmp_path / "cache", tmp_path)
    found = expand(study, [model], names, lambda work: len((folder / f"{work.prompts}.jsonl").read_text().split("\n")))
    kinds = {cell.workload.kind: cell.workload for cell in found.cells.values()}
    assert (kinds["train"].data, kinds["encode"].prompts) == (digest, digest)


def test_one_path_in_two_forms_is_refused_with_another_way_to_write_it(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"prompt": "import os", "text": "import os"}\n')
    packed = {"kind": "script", "command": ["true"], "inputs": ["texts.jsonl"]}
    with pytest.raises(StudyError) as caught:
        trained_and(tmp_path, packed)
    assert caught.value.problems == [
        "experiments.more.base.workload.inputs: texts.jsonl is the same path as in workload.data, which keeps the file "
        "in another form. Write one of the two as ./texts.jsonl"
    ]
    assert trained_and(tmp_path, packed | {"inputs": ["./texts.jsonl"]})[1].keys() == {"texts.jsonl", "./texts.jsonl"}


@pytest.mark.parametrize("name", ["data", "tokenizer", "prompts", "trace", "inputs"])
def test_a_parameter_of_a_script_that_is_called_as_a_field_names_no_file(tmp_path: Path, name: str) -> None:
    work = {"kind": "script", "command": ["echo", f"{{params.{name}}}"], "params": {name: "mnist"}}
    experiments = {
        "swept": {"kind": "sweep", "over": {f"params.{name}": ["imagenet", "cifar"]}},
        "based": {"kind": "sweep", "base": {f"workload.params.{name}": "svhn"}, "over": {"dp": [1]}},
        "varied": {"kind": "optimization", "variants": {"x": {f"params.{name}": "coco"}}},
    }
    study = parse_study({"study": "s", "workload": work, "experiments": experiments})
    assert copy_inputs(study, RunPaths(tmp_path / "run"), tmp_path) == {}


def script_study(tmp_path: Path) -> StudySpec:
    """A study that names a file of each kind of keeping: copied, packed."""
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "text.jsonl").write_text('{"prompt": "once"}\n')
    work = {"kind": "script", "command": ["train.py"], "inputs": ["train.py"], "measure": "wall"}
    more = {"kind": "sweep", "base": {"workload": {"kind": "generate", "prompts": "text.jsonl"}}, "over": {"dp": [1]}}
    both = {"one": {"kind": "sweep", "over": {"dp": [1]}}, "two": more}
    models = [{"id": "synthetic:llama-1m@0"}]
    return parse_study({"study": "s", "models": models, "workload": work, "experiments": both})


def test_a_plan_that_is_only_looked_at_copies_nothing(tmp_path: Path) -> None:
    """`validate` and `plan` filled /tmp with the data of a study, and called its own file the full disk."""
    study = script_study(tmp_path)
    kept, looked = RunPaths(tmp_path / "kept"), RunPaths(tmp_path / "looked")
    names = copy_inputs(study, kept, tmp_path)
    assert copy_inputs(study, looked, tmp_path, kept=False) == names and len(names) == 2
    assert sorted(path.suffix for path in kept.inputs.iterdir()) == [".jsonl", ".tar"]
    [link] = looked.inputs.iterdir()
    assert link.name == f"{names['text.jsonl']}.jsonl" and link.readlink() == tmp_path / "text.jsonl"
    assert copy_inputs(study, looked, tmp_path, kept=False) == names


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO])
def test_a_disk_without_room_for_a_copy_is_the_copys(
    fault: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, run = script_study(tmp_path), RunPaths(tmp_path / "run")

    def full(source: Path, target: str) -> None:
        raise OSError(fault, "no", str(source), None, target)

    monkeypatch.setattr(inputs.shutil, "copyfile", full)
    with pytest.raises(OSError, match="no") as caught:
        copy_inputs(study, run, tmp_path)
    place = run.inputs if fault == errno.ENOSPC else tmp_path / "text.jsonl"
    assert caught.value.filename == str(place)
    assert [path.suffix for path in run.inputs.iterdir()] == [".tar"]


@pytest.mark.parametrize("name", ["text.txt", "rows.jsonl"])
def test_a_file_that_is_edited_while_it_is_read_is_not_copied(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run kept the new content under the old one's hash, by which its figures and those of others are compared."""
    (tmp_path / name).write_text('{"text": "before", "label": 0}\n')
    real = inputs.sha256_of_file

    def edited(path: Path) -> str:
        digest = real(path)
        if path == tmp_path / name:
            path.write_text('{"text": "after", "label": 1}\n')
        return digest

    monkeypatch.setattr(inputs, "sha256_of_file", edited)
    said = f"workload.data: {name}: changed while it was read. Start again when nobody writes it"
    assert problems(tmp_path, name) == said
    assert list((tmp_path / "run" / "inputs").iterdir()) == []
    monkeypatch.undo()
    _, names, folder = copied(tmp_path, name)
    [kept] = folder.iterdir()
    assert kept.stem == names[name] == real(kept)


@pytest.mark.parametrize("name", ["text.txt", "rows.jsonl", "images.npz"])
def test_data_that_no_rank_would_read_is_refused_before_a_run(name: str, tmp_path: Path) -> None:
    """`validate` called the study valid, the run copied gigabytes, and each cell failed."""
    most = inputs._MAX_LEARNT[{".jsonl": ".ndjson"}.get(Path(name).suffix, Path(name).suffix)]
    with (tmp_path / name).open("wb") as file:
        file.truncate(most + 1)
    assert f"workload.data: {name}: {most + 1:,} bytes to learn from, expected at most {most:,}" in problems(
        tmp_path, name
    )


def test_so_is_a_dataset_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.DatasetDict(train=reviews()).save_to_disk(str(tmp_path / "reviews"))
    monkeypatch.setitem(inputs._MAX_LEARNT, ".ndjson", 100)
    assert "hf:reviews: 386 bytes to learn from, expected at most 100" in problems(tmp_path, "hf:reviews")
