"""How a defect is registered, and for which models and settings it can happen at all."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from configs.families.config import ModelConfig
from engine.parallel.grid import Grid
from tests.support.answers.correctness_runs import Defect, Rank, Setting

Tensors = dict[str, Tensor]
LAYER = "model.layers.1."

DEFECTS: dict[str, Defect] = {}


def always(config: ModelConfig, setting: Setting) -> bool:
    return True


def tensor_parallel(config: ModelConfig, setting: Setting) -> bool:
    return setting.tp > 1


def batched(config: ModelConfig, setting: Setting) -> bool:
    return setting.batch // setting.pp > 1


def on_tensors(name: str, possible: Callable[[ModelConfig, Setting], bool] = always) -> Any:
    def add(function: Callable[[Tensors, Grid, ModelConfig], None]) -> None:
        DEFECTS[name] = Defect(name, on_tensors=function, possible=possible)

    return add


def on_rank(name: str, possible: Callable[[ModelConfig, Setting], bool] = always) -> Any:
    def add(function: Callable[[Rank], None]) -> None:
        DEFECTS[name] = Defect(name, on_rank=function, possible=possible)

    return add


def on_config(name: str, possible: Callable[[ModelConfig, Setting], bool] = always) -> Any:
    def add(function: Callable[[ModelConfig], ModelConfig]) -> None:
        DEFECTS[name] = Defect(name, on_config=function, possible=possible)

    return add


def change_steps(rank: Rank, change: Callable[[Any, Any, int, int], Any]) -> None:
    """Wrap each cache's step: change(cache, step, batch, length) -> step. Decoding then goes without its kernel."""
    for cache in rank.replica._caches:
        cache._attentions = None
        original = cache.step

        def step(batch: int, length: int, padding: Any, cache: Any = cache, original: Any = original) -> Any:
            return change(cache, original(batch, length, padding), batch, length)

        cache.step = step  # type: ignore[method-assign]
