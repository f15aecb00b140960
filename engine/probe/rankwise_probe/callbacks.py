"""Callbacks for HF Trainer and Lightning, added when the script imports the library; the script is not changed.

    watch("hf_trainer")      # before the script begins: sitecustomize does it

A Trainer gets the callback after its own __init__, so the script's arguments and callbacks stay as they are.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys

MODULES = {
    "hf_trainer": {"transformers.trainer": "Trainer"},
    "lightning": {
        "lightning.pytorch.trainer.trainer": "Trainer",
        "pytorch_lightning.trainer.trainer": "Trainer",
    },
}


def watch(wanted):
    """Patch the classes of `wanted` when their modules are imported. Raises KeyError for another library."""
    sys.meta_path.insert(0, _Finder(MODULES[wanted], _PATCHES[wanted]))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules as the rest of sys.meta_path does, and patches them after their execution."""

    def __init__(self, modules, patch):
        self._modules = modules
        self._patch = patch

    def find_spec(self, name, path=None, target=None):
        if name not in self._modules:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)  # old finders lack it
            spec = None if find is None else find(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self._modules[name], self._patch)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader, name, patch):
        self._loader, self._name, self._patch = loader, name, patch

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        try:
            self._patch(getattr(module, self._name))
        except Exception as error:
            os.write(2, ("rankwise_probe: %s is not instrumented: %s\n" % (module.__name__, error)).encode())


def _patch_trainer(trainer):
    """transformers.Trainer: a TrainerCallback that ends a step after each optimizer step."""
    begin = trainer.__init__

    @functools.wraps(begin)
    def initialised(self, *arguments, **named):
        begin(self, *arguments, **named)
        from transformers import TrainerCallback

        self.add_callback(type("RankwiseCallback", (_TrainerHooks, TrainerCallback), {})())

    trainer.__init__ = initialised


class _TrainerHooks:
    """Events of transformers.TrainerCallback; the loss is logged after the step that it belongs to."""

    def __init__(self):
        self._seen = None

    def on_step_end(self, args, state, control, **_):
        from rankwise_probe import step

        tokens = getattr(state, "num_input_tokens_seen", 0) or 0
        since = None if self._seen is None or not tokens else tokens - self._seen
        self._seen = tokens
        step(tokens=since)

    def on_log(self, args, state, control, logs=None, **_):
        loss = (logs or {}).get("loss")
        if loss is not None:
            _set_loss(loss)


def _patch_lightning(trainer):
    """lightning.pytorch.Trainer: a Callback that ends a step when the global step has grown."""
    begin = trainer.__init__

    @functools.wraps(begin)
    def initialised(self, *arguments, **named):
        begin(self, *arguments, **named)
        callback = sys.modules[trainer.__module__.split(".trainer.")[0] + ".callbacks"].Callback
        self.callbacks.append(type("RankwiseCallback", (_LightningHooks, callback), {})())

    trainer.__init__ = initialised


class _LightningHooks:
    """Events of lightning.pytorch.callbacks.Callback."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == getattr(self, "_last", 0):
            return  # gradients are accumulated
        self._last = trainer.global_step
        from rankwise_probe import step

        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # Lightning has divided it (pytorch/loops/optimization/automatic.py, ClosureResult.from_training_step_output).
        batches = getattr(trainer, "accumulate_grad_batches", 1)
        step(loss=loss if loss is None or batches == 1 else loss * batches)


def _set_loss(loss):
    import rankwise_probe

    recorder = getattr(getattr(rankwise_probe, "_opening", None), "recorder", None)
    if recorder is not None:
        recorder.set_loss(loss)


_PATCHES = {"hf_trainer": _patch_trainer, "lightning": _patch_lightning}
