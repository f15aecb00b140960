"""Hugging Face datasets as files of a study: `hf:NAME_OR_FOLDER[[:CONFIGURATION]:SPLIT]`, or a .parquet.

    digest = write_dataset("hf:owner/name:train", base=Path("."), folder=Path("inputs"))

The split is `train` where none is named, and may be cut as the library does it (`train[:1000]`). Texts become a .ndjson
of the columns that are learnt from, images an .npz; both are copied into the run, so that what a study was trained on
stays even where the dataset changes. The library `datasets` does the reading: it is an extra. Columns must have our
names (`text`; `text`, `label`; `source`, `target`; `image`, `label`): a dataset of others is renamed once, with
`rename_columns` and `save_to_disk`, and named as a folder.
"""

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from configs.common.base import sha256_of_file
from configs.common.files.reading import brief

HUB_PREFIX = "hf:"
_COLUMNS = (("image", "label"), ("source", "target"), ("text", "label"), ("text",))
"""What is learnt from; the first that a dataset has."""
_CONVERTED = {"1": "L", "P": "RGB", "PA": "RGBA"}
"""PIL's modes whose numbers are not brightness: bits, and places in a palette."""
_SEPARATOR = re.compile(r":(?![^\[\]]*\])")
"""A colon, but for that of a cut: `train[:1000]`."""


def write_dataset(written: str, base: Path, folder: Path) -> str:
    """Write a dataset's split, or a .parquet, to `folder`; the hash that the file is called by.

    Folders are relative to `base`. Raises ValueError for a dataset that is not there or has other columns.
    """
    data = _loaded(written, base)
    columns = next((known for known in _COLUMNS if set(known) <= set(data.column_names)), None)
    if columns is None:
        wanted = "; ".join(" and ".join(known) for known in _COLUMNS)
        raise ValueError(
            f"{written}: got columns {', '.join(data.column_names)}; rename them to one of: {wanted} "
            "(rename_columns and save_to_disk, then name the folder)"
        )
    if not len(data):
        raise ValueError(f"{written}: no rows")
    suffix = ".npz" if columns[0] == "image" else ".ndjson"
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        path = Path(unfinished) / f"data{suffix}"
        if columns[0] == "image":
            _write_images(data, path, written)
        else:
            _named_labels(data.select_columns(list(columns))).to_json(path, lines=True, force_ascii=False)
        digest = sha256_of_file(path)
        path.chmod(0o644)
        path.replace(folder / f"{digest}{suffix}")
    return digest


def _loaded(written: str, base: Path) -> Any:
    """The rows of a .parquet, of a folder that `save_to_disk` left, of a folder of files, or of the hub."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{written}: requires the library `datasets`. Run pip install 'rankwise[datasets]'") from error
    datasets.disable_progress_bars()
    if not written.startswith(HUB_PREFIX):
        name, configuration, split = written, None, None
    else:
        name, configuration, split = _parts(written)
    folder = base / name
    try:
        if not written.startswith(HUB_PREFIX):
            return datasets.Dataset.from_parquet(str(folder), cache_dir=None)
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            return _saved(datasets.load_from_disk(str(folder)), configuration, split)
        return datasets.load_dataset(str(folder) if folder.is_dir() else name, configuration, split=split or "train")
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = error.__cause__ or error if isinstance(error, datasets.exceptions.DatasetBuildError) else error
        raise ValueError(
            f"{written}: cannot be loaded ({reason}); use a folder (looked for {folder}) or a repository of the hub, "
            "and an existing split"
        ) from error


def _parts(written: str) -> tuple[str, str | None, str | None]:
    """Name or folder, configuration and split."""
    name, *rest = _SEPARATOR.split(written.removeprefix(HUB_PREFIX))
    if len(rest) > 2 or not all((name, *rest)):
        raise ValueError(f"{written}: expected {HUB_PREFIX}NAME_OR_FOLDER[[:CONFIGURATION]:SPLIT]")
    return name, rest[0] if len(rest) == 2 else None, rest[-1] if rest else None


def _saved(data: Any, configuration: str | None, split: str | None) -> Any:
    """Rows of a split of what `save_to_disk` left; ValueError for a part that it does not have."""
    if configuration is not None:
        raise ValueError(f"a saved dataset has no configuration {configuration}")
    if isinstance(data, dict):
        if (split or "train") not in data:
            raise ValueError(f"no split {split or 'train'} among {', '.join(data)}")
        return data[split or "train"]
    if split is not None and split != str(data.split):
        raise ValueError(f"it is one split ({data.split or 'without a name'}); leave :{split} out")
    return data


def _named_labels(data: Any) -> Any:
    """Classes by their names, where the dataset knows them."""
    feature = data.features.get("label")
    if not hasattr(feature, "int2str"):
        return data
    names = [None if number is None or number < 0 else feature.int2str(number) for number in data["label"]]
    return data.remove_columns("label").add_column("label", names)


def _write_images(data: Any, path: Path, written: str) -> None:
    images = [_pixels(image, written) for image in data["image"]]
    shapes = {image.shape for image in images}
    if len(shapes) > 1:
        some = " and ".join(" x ".join(map(str, shape)) for shape in sorted(shapes, key=str)[:2])
        raise ValueError(f"{written}: images of several sizes ({some}). Resize them to the model's size")
    feature = data.features["label"]
    arrays: dict[str, Any] = {
        "images": np.stack(images),
        "labels": _class_numbers(data["label"], written),
    }
    if hasattr(feature, "names"):
        arrays["label_names"] = np.array(feature.names)
    np.savez(path, allow_pickle=False, **arrays)


def _pixels(image: Any, written: str) -> np.ndarray:
    """The values of one image, uint8. Raises ValueError for what 8 bits do not hold: a cast would wrap it around."""
    mode = getattr(image, "mode", None)  # of PIL: a column of arrays has lists
    pixels = _array(image.convert(_CONVERTED[mode]) if mode in _CONVERTED else image)
    in_range = mode is None and pixels.dtype.kind in "iu" and pixels.size and pixels.min() >= 0 and pixels.max() <= 255
    if pixels.dtype != np.uint8 and not in_range:
        raise ValueError(
            f"{written}: image: got {f'mode {mode}' if mode else type(image).__name__} ({pixels.dtype}), expected an "
            "image of 8 bits, or whole numbers from 0 to 255. Convert the column (map, cast_column)"
        )
    return pixels.astype(np.uint8)


def _array(image: Any) -> np.ndarray:
    try:
        return np.asarray(image)
    except ValueError:  # rows of several lengths
        return np.asarray(None)


def _class_numbers(labels: Any, written: str) -> np.ndarray:
    """Return the labels, int64. Raises ValueError for one that numbers no class."""
    found = list(labels)
    wrong = [label for label in found if not isinstance(label, int | np.integer)]
    if wrong:
        raise ValueError(
            f"{written}: label: got {brief(wrong[0])}, expected the number of a class for each image. Number them "
            "(class_encode_column), or leave rows without one out (filter)"
        )
    return np.array(found, dtype=np.int64)
