"""Build TensorRT plans from ONNX graphs, if TensorRT is installed; a plan is specific to its GPU and version.

    plans = build_plans([folder / "encoder.onnx"], "float16")

Dynamic sizes of a graph get a range: up to 16 sequences and 2048 positions, best at one sequence of 128.
"""

from pathlib import Path
from typing import Any

MOST_ROWS, MOST_POSITIONS, BEST_POSITIONS = 16, 2048, 128


def build_plans(graphs: list[Path], dtype: str) -> list[Path]:
    """Write a `.plan` file beside each graph. Raises NotImplementedError if TensorRT cannot build one."""
    import tensorrt  # type: ignore[import-not-found,unused-ignore]

    logger = tensorrt.Logger(tensorrt.Logger.WARNING)
    return [_build(tensorrt, logger, path, dtype) for path in graphs]


def _build(tensorrt: Any, logger: Any, path: Path, dtype: str) -> Path:
    builder = tensorrt.Builder(logger)
    network = builder.create_network(0)
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        reasons = "; ".join(str(parser.get_error(place)) for place in range(parser.num_errors))
        raise NotImplementedError(f"{path}: TensorRT cannot read the graph: {reasons}")
    settings = builder.create_builder_config()
    if dtype == "float16" and hasattr(tensorrt.BuilderFlag, "FP16"):  # newer versions use the graph's types
        settings.set_flag(tensorrt.BuilderFlag.FP16)
    profile = builder.create_optimization_profile()
    for place in range(network.num_inputs):
        each = network.get_input(place)
        profile.set_shape(each.name, *shape_range(each.name, tuple(each.shape)))
    settings.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, settings)
    if plan is None:
        raise NotImplementedError(f"{path}: TensorRT built no plan; its own messages above say why")
    written = path.with_suffix(".plan")
    written.write_bytes(bytes(plan))
    return written


def shape_range(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return minimum, optimum and maximum sizes of an input, whose dynamic sizes are -1; only a past may be empty.

    A mask covers past and new positions; a past has as many as fit beside one new one.
    """
    least, best, most = [], [], []
    for axis, size in enumerate(shape):
        rows = axis == 0 and len(shape) > 1
        past = name.startswith("past.")
        least.append(size if size >= 0 else 1 if rows or not past else 0)
        best.append(size if size >= 0 else 1 if rows else BEST_POSITIONS)
        most.append(size if size >= 0 else MOST_ROWS if rows else MOST_POSITIONS - past)
    return tuple(least), tuple(best), tuple(most)
