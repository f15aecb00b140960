"""Models of `rankwise benchmark` whose names end alike."""

from pathlib import Path

from flows.cli.benchmark import _named_apart


def test_models_that_end_alike_are_named_by_the_whole(tmp_path: Path) -> None:
    """A study refuses two models of one name, and the command line has no `name`."""
    (tmp_path / "mine" / "gpt2").mkdir(parents=True)
    models = ["a/gpt2", "b/gpt2@main", "./mine/gpt2", "synthetic:llama-1m@0", "synthetic:llama-1m@1", "c/other"]
    named = {written: spec.name for written, spec in _named_apart(models, tmp_path)}
    assert named == {
        "a/gpt2": "a-gpt2",
        "b/gpt2@main": "b-gpt2@main",
        "./mine/gpt2": "mine-gpt2",
        "synthetic:llama-1m@0": "llama-1m@0",
        "synthetic:llama-1m@1": "llama-1m@1",
        "c/other": "other",
    }
