"""Read images from an .npz as input of a vision transformer: three channels scaled to -1..1.

Images are not resized here, because a training run is repeated many times; resize them once, before it. The whole file
is held in memory, as bytes.
"""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from configs.common.files.reading import SAMPLES_BYTES, check_regular
from configs.common.printable import some_of
from configs.families.numbers import MAX_SIZE, size_of, size_pair
from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.models.weights import required_manifest
from engine.training.data.examples import RANDOM_STEPS, Examples, Inputs, Numbers, input_file, rows_fingerprint
from engine.training.task_types.common import SHOWN_CLASSES, numbered_names, tensors

RANDOM_CLASSES = 2
_MIDDLE = 127.5
"""Half of a byte's range: pixels become (value - middle) / middle, as in ViT's processor."""


def image_examples(
    data: str | None, field: str, workload: TrainWorkload, context: Context, names: tuple[str, ...]
) -> Examples:
    """Return rows of a file, or random ones. names: the classes of the training data; () for the file's own."""
    manifest = required_manifest(context)
    told = {name: value for name, value in manifest.config.items() if value is not None}
    if "image_size" not in told:
        raise ValueError(f"{manifest.identity}: config.json names no image_size, so it learns no images")
    height, width = size_pair(told["image_size"], "image_size")
    patch = size_pair(told.get("patch_size", told["image_size"]), "patch_size")
    shape = height, width, size_of(told.get("num_channels", 3), "num_channels", MAX_SIZE)
    if data is None:
        seed, found = context.job.measuring.seed, tuple(map(str, range(RANDOM_CLASSES)))
        labels = np.random.default_rng(seed).integers(0, RANDOM_CLASSES, RANDOM_STEPS * workload.global_batch_size)

        def pixels_of(numbers: Numbers) -> np.ndarray:
            # Drawn on demand: all of them may exceed memory.
            draws = [np.random.default_rng([seed, int(number)]) for number in numbers]
            return np.stack([draw.integers(0, 256, shape, dtype=np.uint8) for draw in draws])
    else:
        images, labels, found = _read(input_file(data, field, context), field)
        images = _fitting(images, shape, field)

        def pixels_of(numbers: Numbers) -> np.ndarray:
            return images[numbers]

    labels, names = _with_names(labels, found, names, field)

    def collate(numbers: Numbers, places: Numbers) -> Inputs:
        pixels = (pixels_of(numbers).astype(np.float32) - _MIDDLE) / _MIDDLE
        return tensors(pixels=np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), targets=labels[numbers])

    return Examples(
        count=len(labels),
        # The patches, and the class token; DeiT has one for its teacher's class too.
        positions=(height // patch[0]) * (width // patch[1]) + (2 if told.get("model_type") == "deit" else 1),
        collate=collate,
        targets=lambda numbers: np.ones(len(numbers), dtype=np.int64),
        fingerprint=rows_fingerprint(workload, context),
        names=names,
    )


def _read(path: Path, field: str) -> tuple[np.ndarray, Numbers, tuple[str, ...]]:
    """Return images [rows, height, width, channels], labels, names of the classes; () if the file has none."""
    if path.suffix != ".npz":
        raise ValueError(
            f"workload.{field}: task image_classification learns from an .npz of `images` and `labels`; "
            "write one, or name hf:DATASET"
        )
    try:
        check_regular(path, SAMPLES_BYTES)
        with np.load(path) as arrays:
            held = {name: arrays[name] for name in arrays.files if name in ("images", "labels", "label_names")}
    except (ValueError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"workload.{field}: not an .npz that can be read without unpickling ({error})") from error
    missing = [name for name in ("images", "labels") if name not in held]
    if missing:
        raise ValueError(f"workload.{field}: the .npz holds no `{missing[0]}`; it needs `images` and `labels`")
    images, labels = held["images"], held["labels"]
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise ValueError(
            f"workload.{field}: `images` is {images.dtype} of shape {images.shape}; use uint8 [rows, height, width] or "
            "[rows, height, width, channels]"
        )
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu" or not len(labels):
        raise ValueError(
            f"workload.{field}: `labels` is {labels.dtype} of shape {labels.shape}; use a whole number for each of "
            f"{len(images)} images"
        )
    named = tuple(map(str, held["label_names"].tolist())) if "label_names" in held else ()
    return images if images.ndim == 4 else images[..., None], labels.astype(np.int64), named


def _with_names(
    labels: Numbers, own: tuple[str, ...], trained: tuple[str, ...], field: str
) -> tuple[Numbers, tuple[str, ...]]:
    """Return labels as positions in the names of the classes, and these names: the training data's, if there are any.

    own: the file's names, () for none. Files may number the same classes differently, as where one lacks a class.
    """
    known = own or trained or numbered_names(int(labels.max()), field)
    outside = labels[(labels < 0) | (labels >= len(known))]
    if len(outside):
        raise ValueError(f"workload.{field}: label {outside[0]} is none of the {len(known)} classes, numbered from 0")
    if not trained or known == trained:
        return labels, known
    place_of = {name: place for place, name in reversed(list(enumerate(trained)))}  # of equal names, the first
    unknown = [known[label] for label in np.unique(labels) if known[label] not in place_of]
    if unknown:
        told = some_of(trained, SHOWN_CLASSES)
        raise ValueError(f"workload.{field}: class {unknown[0]!r} is none of data's: {told}")
    places = np.array([place_of.get(name, -1) for name in known])
    return places[labels], trained


def _fitting(images: np.ndarray, shape: tuple[int, int, int], field: str) -> np.ndarray:
    """Return images with the model's size and channels; grey is repeated. Raises ValueError if they do not match."""
    if images.shape[-1] == 1 and shape[-1] > 1:
        images = np.broadcast_to(images, (*images.shape[:-1], shape[-1]))
    if images.shape[1:] != shape:
        raise ValueError(
            f"workload.{field}: images of {' x '.join(map(str, images.shape[1:]))}; the model takes "
            f"{' x '.join(map(str, shape))} (image_size, num_channels of its config.json); resize them"
        )
    return images
