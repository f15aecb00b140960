"""Recipes: training from Python on one process, on two ranks, under torchrun that loses a rank, on two hosts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import engine
from engine.training.checkpoints.measurement import save
from engine.training.recipes import ClassifyRecipe, OptimizerSpec
from engine.training.recipes.loaders import share_out
from engine.training.recipes.loop import DataPosition, Loop
from slurm.sbatch_bundle.scripts import setup_script
from tests.support.cluster.two_hosts import TwoHosts, why_not
from tests.support.rank_pool import RankPool
from tests.support.training import recipe_runs
from tests.support.training.recipe_runs import (
    CLASSES,
    EXAMPLES,
    FEATURES,
    GLOBAL_BATCH,
    HELD,
    Partly,
    Points,
    Run,
    make_model,
    refused,
    train,
    train_apart,
)

FLOAT32_NOISE = 2e-6
SCRIPT = Path(recipe_runs.__file__)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train(0, Run())


def follows(seen: dict[str, Any], other: dict[str, Any], noise: float = FLOAT32_NOISE) -> None:
    for column in ("losses", "norms"):
        assert len(seen[column]) == len(other[column])
        np.testing.assert_allclose(seen[column], other[column], rtol=0, atol=noise)
    for (step, sums), (other_step, other_sums) in zip(seen["evaluations"], other["evaluations"], strict=True):
        assert step == other_step
        assert sums == pytest.approx(other_sums, abs=HELD * noise)


def bare_loop(epochs: int) -> list[float]:
    """The same training as a loop of plain PyTorch."""
    model, points = make_model(), Points(EXAMPLES, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler: DistributedSampler[Any] = DistributedSampler(points, 1, 0, shuffle=True, seed=0)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(points, batch_size=GLOBAL_BATCH, sampler=sampler):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_one_process_trains_as_a_bare_loop_does(alone: dict[str, Any]) -> None:
    assert alone["losses"] == pytest.approx(bare_loop(2), abs=FLOAT32_NOISE)
    assert [step for step, _ in alone["evaluations"]] == [EXAMPLES // GLOBAL_BATCH, 2 * EXAMPLES // GLOBAL_BATCH]
    assert all(sums["targets"] == HELD for _, sums in alone["evaluations"])
    assert alone["evaluations"][-1][1]["correct"] > 0.9 * HELD
    weights = {name: torch.tensor(values) for name, values in alone["weights"].items()}
    make_model().load_state_dict(weights)


@pytest.mark.parametrize(
    "run",
    [Run(ranks=2), Run(ranks=2, strategy="fsdp"), Run(ranks=2, accumulation=2)],
    ids=["ddp", "fsdp", "accumulated"],
)
def test_two_ranks_follow_one(pool: RankPool, alone: dict[str, Any], run: Run) -> None:
    """A part of 37 held-out examples is filled up to 40: what is there twice must not count."""
    answers = pool.run(train, run)
    for seen in answers:
        follows(seen, alone)
    for name, values in alone["weights"].items():
        np.testing.assert_allclose(answers[0]["weights"][name], values, atol=2e-4)
    assert not answers[1]["weights"]


def test_two_ranks_train_a_model_with_a_layer_that_the_loss_does_not_depend_on(pool: RankPool) -> None:
    whole = train(0, Run(spare=True))
    for seen in pool.run(train, Run(ranks=2, spare=True)):
        follows(seen, whole)


def test_a_run_goes_on_alone_where_two_ranks_left_off(tmp_path: Path, pool: RankPool) -> None:
    """In mid-epoch, with the same global batch: 25 steps an epoch, the last checkpoint after step 49."""
    whole = train(0, Run(epochs=3))
    pool.run(train, Run(ranks=2, epochs=2, checkpoints=str(tmp_path), checkpoint_every=49))
    newest = tmp_path / "step_00000050"
    assert newest.is_dir()
    (newest / "progress.json").write_text("torn")
    seen = train(0, Run(ranks=2, epochs=3, checkpoints=str(tmp_path)))  # batches of 4, so that it accumulates
    follows(seen, whole)


def test_the_rest_of_an_epoch_is_that_of_its_own_order_of_examples(tmp_path: Path) -> None:
    """With another seed, or other data, some examples came twice and others never, without a word."""
    whole, cut = (Run(checkpoints=str(tmp_path / name), checkpoint_every=49) for name in ("whole", "cut"))
    train(0, whole)
    assert len(train(0, replace(whole, epochs=3, seed=1))["losses"]) == 75, "an epoch begins in whatever order"
    train(0, cut)
    (tmp_path / "cut" / "step_00000050" / "progress.json").write_text("torn")
    said = r"checkpoints: .*step_00000049 is in the middle of an epoch of (\d+) examples, shuffled with seed 0; got "
    with pytest.raises(ValueError, match=rf"{said}\1 examples, shuffled with seed 1, which would repeat some and skip"):
        train(0, replace(cut, epochs=3, seed=1))
    with pytest.raises(ValueError, match=rf"{said}{EXAMPLES + 1} examples, shuffled with seed 0, which would"):
        train(0, replace(cut, epochs=3), Points(EXAMPLES + 1, 2))
    follows(train(0, replace(cut, epochs=3)), train(0, Run(epochs=3)))


def test_processes_of_a_group_train_models_of_their_own(pool: RankPool, tmp_path: Path) -> None:
    """With data of their own, without waiting for each other, and each goes on from its own checkpoints."""
    pool.run(train_apart, str(tmp_path / "cut"), 1)
    together = pool.run(train_apart, str(tmp_path / "cut"), 3)
    apart = [train_apart(rank, str(tmp_path / "alone"), 3) for rank in (0, 1)]
    assert together == apart


def test_a_place_behind_the_last_step_of_an_epoch_is_the_next_epochs_first() -> None:
    """A checkpoint of two processes, whose padded epoch of 105 examples had a sixth step of 20; here it has five."""
    begun: list[tuple[int, int]] = []

    class Data:
        batches = 11

        def begin(self, epoch: int, examples: int = 0) -> None:
            assert not begun, "no step is found, again and again"
            begun.append((epoch, examples))

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter([{"targets": [0] * 10}] * self.batches)

    given: Any = SimpleNamespace(world_size=1, global_batch_size=20)
    loop = Loop(given, given, given, given, Data(), None, dict, 2, 0.1, None, print, DataPosition(0, 100))  # type: ignore[arg-type]
    assert [batch.sequences for batch in next(loop._groups())] == [10, 10]
    assert begun == [(1, 0)] and loop.place == DataPosition(1, 20)


def test_a_run_that_ended_is_not_made_again(tmp_path: Path, alone: dict[str, Any]) -> None:
    run = Run(checkpoints=str(tmp_path))
    first, second = train(0, run), train(0, run)
    assert first["losses"] == alone["losses"]
    assert {**second, "seconds": first["seconds"]} == first


def test_layers_that_share_a_weight_are_sharded_together(pool: RankPool) -> None:
    """`Parameter 'weight' is shared with a parameter already managed by another FSDP group`, torch said."""
    whole = train(0, Run(tied=True))
    for seen in pool.run(train, Run(ranks=2, strategy="fsdp", tied=True)):
        follows(seen, whole)


def test_a_batch_norm_may_be_a_block_that_is_sharded_in_16_bits(pool: RankPool) -> None:
    """`fully_shard has already been applied to the following module: BatchNorm1d`."""
    expected = pool.run(train, Run(ranks=2, norm=True))[0]["losses"]
    for seen in pool.run(train, Run(ranks=2, strategy="fsdp", dtype="bfloat16", norm=True)):
        np.testing.assert_allclose(seen["losses"][:5], expected[:5], atol=2e-2)


@pytest.mark.parametrize("name", ["Adafactor", "Rprop"])
def test_optimizers_that_take_no_sharded_weights_are_refused_by_name(name: str, pool: RankPool) -> None:
    said = f"optimizer.name: torch's {name} takes no sharded weights; use strategy ddp"
    assert pool.run(refused, name) == [said, said]


def test_running_means_are_those_of_all_ranks(pool: RankPool) -> None:
    answers = pool.run(train, Run(ranks=2, norm=True, epochs=1))
    assert all(seen["evaluations"] == answers[0]["evaluations"] for seen in answers)


@pytest.mark.parametrize(
    ("times", "low", "high"),
    [({"min_period": "0.3s"}, 0.3, 1.5), ({"min_period": 0.1, "max_period": "0.4s"}, 0.4, 1.6)],
)
def test_training_is_bounded_by_time(times: dict[str, Any], low: float, high: float) -> None:
    assert low <= train(0, Run(times=times))["seconds"] < high


def test_training_ends_at_a_loss() -> None:
    seen = train(0, Run(times={"max_period": "60s", "target_loss": 0.5}))
    means = [sums["loss"] / sums["targets"] for _, sums in seen["evaluations"]]
    assert means[-1] <= 0.5 and all(mean > 0.5 for mean in means[:-1])


def test_the_first_pattern_that_matches_has_the_rate(tmp_path: Path) -> None:
    """The head learns ten times as fast as the bias below it; the weights below are not trained at all."""
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    specs = [OptimizerSpec("SGD", ["2.*"], lr=0.1), OptimizerSpec("SGD", ["*bias"], lr=0.01)]
    inputs, targets = Points(8, 2).inputs, Points(8, 2).targets
    loss = nn.functional.cross_entropy(model(inputs), targets)
    slopes = dict(zip(before, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    recipe = ClassifyRecipe(model, nn.CrossEntropyLoss(), specs)
    recipe.train(DataLoader(Points(8, 2), batch_size=8), verbose=False)
    after = recipe.state_dict()
    for name, rate in {"2.weight": 0.1, "2.bias": 0.1, "0.bias": 0.01, "0.weight": 0.0}.items():
        torch.testing.assert_close(after[name], before[name] - rate * slopes[name], rtol=0, atol=1e-6)


def test_the_weights_of_a_recipe_stay_when_the_model_is_trained_further() -> None:
    """On a CPU they were those of the model, and the weights of two trainings in one process were the same."""
    model, kept = make_model(), []
    for _ in range(2):
        recipe = ClassifyRecipe(model, nn.CrossEntropyLoss(), OptimizerSpec("SGD", lr=0.1))
        recipe.train(DataLoader(Points(8, 2), batch_size=8), verbose=False)
        kept.append(recipe.state_dict())
    first, second = kept
    assert all(not torch.equal(first[name], second[name]) for name in first)


class Named(nn.Module):
    """Called by names, answers as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, pixels: Tensor) -> Any:
        return type("Output", (), {"logits": self.layer(pixels)})


class Mappings(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        points = Points(16, 2)
        return {"pixels": points.inputs[place], "labels": points.targets[place]}


def test_batches_may_be_mappings_and_outputs_have_logits() -> None:
    recipe = ClassifyRecipe(Named(), nn.CrossEntropyLoss(), OptimizerSpec("AdamW"), gradient_clipping=1.0)
    history = recipe.train(DataLoader(Mappings(), batch_size=8), epochs=3, verbose=False)
    assert history.steps == 6 and history.losses[-1] < history.losses[0]
    with pytest.raises(ValueError, match="has been trained"):
        recipe.train(DataLoader(Mappings(), batch_size=8))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: OptimizerSpec("Adm"), "torch.optim has no 'Adm'; it has ASGD"),
        (lambda: OptimizerSpec("SGD", momentun=0.9), "SGD has no such setting"),
        (lambda: OptimizerSpec("LBFGS"), "several times a step"),
        (lambda: OptimizerSpec("SGD", lr=-1), "is not above 0"),
        (lambda: a_recipe([OptimizerSpec("SGD", ["head.*"])]), "'head.\\*' matches no parameter; there are 0.weight"),
        (lambda: a_recipe([OptimizerSpec("SGD"), OptimizerSpec("Adam")]), "SGD, Adam in one recipe"),
        (lambda: a_recipe([OptimizerSpec("SGD")]).train(a_loader(), "1s", epochs=1), "a period is given"),
        (lambda: a_recipe([OptimizerSpec("SGD")]).train(a_loader(), "1 fortnight"), "invalid duration"),
        (lambda: a_recipe([OptimizerSpec("SGD")], accumulation=0), "accumulation: 0 is not above 0"),
        (lambda: a_recipe([OptimizerSpec("SGD")]).train(a_loader(), epochs=0), "epochs: 0 is not above 0"),
        (lambda: trained_with(epochs=1.5), "epochs: expected a whole number, got 1.5"),
        (lambda: trained_with(max_period="0s"), "^max_period: input should be greater than 0, got 0"),
        (lambda: trained_with(min_period="2m", max_period="1s"), r"^min_period: got 120, more than max_period \(1\)$"),
        (lambda: trained_with(min_period="2m", target_loss=0.1), "^target_loss: may never .* epochs or max_period as"),
        (lambda: trained_with(target_loss=float("nan")), "^target_loss: .*got nan"),
        (lambda: trained_with(checkpoint_every=0), "checkpoint_every: 0 is not above 0"),
        (lambda: trained_with(checkpoints_kept=-1), "checkpoints_kept: -1 is not above 0"),
        (lambda: a_recipe([OptimizerSpec("SGD")], accumulation=99).train(a_loader()), "less than the 99 of one step"),
    ],
)
def test_what_is_wrong_is_named(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def trained_with(**more: Any) -> Any:
    return a_recipe([OptimizerSpec("SGD")]).train(a_loader(), verbose=False, **more)


def test_data_to_evaluate_on_that_have_no_batch_are_refused_before_the_training() -> None:
    few = DataLoader(Points(3, 2), batch_size=8, drop_last=True)
    for none in (few, DataLoader(Points(0, 2), batch_size=8)):
        with pytest.raises(ValueError, match="val_data: it has no batch to evaluate"):
            trained_with(val_data=none)
    with pytest.raises(ValueError, match="val_data: a loader of an IterableDataset"):
        trained_with(val_data=DataLoader(Endless(), batch_size=2))


def test_checkpoints_that_no_recipe_made_are_refused(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"a": torch.zeros(2)}}, step=3, progress={"epoch": 1})
    with pytest.raises(ValueError, match=r"checkpoints: .*step_00000003 was not made by a recipe"):
        trained_with(checkpoints=tmp_path)


def test_a_global_batch_that_cannot_be_kept_is_told_with_the_one_that_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained_with(checkpoints=tmp_path)
    recipe = a_recipe([OptimizerSpec("SGD")], accumulation=2)
    recipe.train(DataLoader(Points(15, 2), batch_size=3), epochs=4, checkpoints=tmp_path, verbose=False)
    assert "global batch of 8 is no multiple of 3: 6 from here on" in capsys.readouterr().out


class Kinked(nn.Module):
    """Its outputs are finite, its gradients never."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sqrt(self.layer(inputs).float() * 0)


def test_gradients_that_no_loss_scale_makes_finite_end_the_training() -> None:
    recipe = ClassifyRecipe(Kinked(), nn.CrossEntropyLoss(), OptimizerSpec("SGD"), dtype="float16")
    with pytest.raises(FloatingPointError, match=r"at a loss scale of 3.05\d+e-05; lower the optimizer's lr"):
        recipe.train(a_loader(), epochs=20, verbose=False)


@pytest.mark.parametrize("optimizer", [OptimizerSpec("AdamW", lr=0.01), OptimizerSpec("SGD", lr=0.1, momentum=0.9)])
def test_a_model_with_a_layer_without_gradients_goes_on(tmp_path: Path, optimizer: OptimizerSpec) -> None:
    def train_partly(epochs: int, folder: Path | None) -> tuple[list[float], dict[str, Tensor]]:
        recipe = ClassifyRecipe(Partly(), nn.CrossEntropyLoss(), optimizer)
        loader = DataLoader(Points(16, 2), batch_size=8, shuffle=True)
        return recipe.train(loader, epochs=epochs, checkpoints=folder, verbose=False).losses, recipe.state_dict()

    whole = train_partly(3, None)
    train_partly(1, tmp_path)
    losses, weights = train_partly(3, tmp_path)
    assert losses == whole[0]
    assert all(torch.equal(weights[name], whole[1][name]) for name in weights if name.startswith("used."))


def a_recipe(specs: list[OptimizerSpec], **more: Any) -> ClassifyRecipe:
    return ClassifyRecipe(make_model(), nn.CrossEntropyLoss(), specs, **more)


def a_loader() -> DataLoader[Any]:
    return DataLoader(Points(16, 2), batch_size=8)


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from iter(lambda: torch.zeros(FEATURES), None)


class Later(nn.Module):
    """A layer takes part from the fourth step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.later = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
        self.steps = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.steps += self.training
        out: Tensor = self.first(inputs)
        return out + self.later(inputs) if self.steps > 3 else out


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_a_checkpoint_changes_nothing_of_a_layer_that_has_had_no_gradient(name: str, tmp_path: Path) -> None:
    settings = {"momentum": 0.9} if name == "SGD" else {}
    curves = []
    for folder in (None, tmp_path):
        torch.manual_seed(0)
        optimizer = OptimizerSpec(name, lr=0.05, weight_decay=0.5, **settings)
        recipe = ClassifyRecipe(Later(), nn.CrossEntropyLoss(), optimizer, use_distributed=False)
        loader = DataLoader(Points(EXAMPLES, 2), batch_size=GLOBAL_BATCH)
        curves.append(recipe.train(loader, checkpoints=folder, checkpoint_every=2, verbose=False).losses)
    assert len(curves[0]) > 5 and curves[0] == curves[1]


def test_a_loader_is_shared_out_or_refused() -> None:
    points = Points(20, 2)
    parts = [share_out(DataLoader(points, batch_size=5, shuffle=True), 2, rank, seed=0) for rank in (0, 1)]
    assert all(part.remade and part.batches == 2 for part in parts)
    for part in parts:
        part.begin(epoch=3)
    rows = [[tuple(row.tolist()) for inputs, _ in part for row in inputs] for part in parts]
    assert len(set(rows[0]) | set(rows[1])) == 20 and not set(rows[0]) & set(rows[1])
    parts[0].begin(epoch=3, examples=10)
    assert [tuple(row.tolist()) for inputs, _ in parts[0] for row in inputs] == rows[0][5:]
    own = DataLoader(points, batch_size=5, sampler=DistributedSampler(points, 2, 1))
    kept = share_out(own, 2, 1, seed=0)
    assert kept.loader is own and not kept.remade
    kept.begin(epoch=0, examples=10)
    assert len(list(kept)) == 1
    with pytest.raises(ValueError, match="rank 1 of 2, this process is 0 of 2"):
        share_out(own, 2, 0, seed=0)
    with pytest.raises(ValueError, match="IterableDataset cannot be shared out"):
        share_out(DataLoader(Endless(), batch_size=2), 2, 0, seed=0)
    for sampler, said in (
        (RandomSampler(points, replacement=True), "RandomSampler with replacement cannot be shared out"),
        (RandomSampler(points, num_samples=8), "RandomSampler of 8 examples out of 20 cannot be shared out"),
        (SequentialSampler(range(8)), "SequentialSampler of 8 examples out of 20 cannot"),
    ):
        with pytest.raises(ValueError, match=said):
            share_out(DataLoader(points, batch_size=5, sampler=sampler), 2, 0, seed=0)
    weighted = DataLoader(points, batch_size=5, sampler=WeightedRandomSampler([1.0] * 20, 20))
    with pytest.raises(ValueError, match="WeightedRandomSampler cannot be shared out"):
        share_out(weighted, 2, 0, seed=0)


def test_the_package_has_the_recipe() -> None:
    assert engine.ClassifyRecipe is ClassifyRecipe and engine.OptimizerSpec is OptimizerSpec


def torchrun(*arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | one_thread())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def one_thread() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)}


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "step"), [(0, 33), pytest.param(1, 52, marks=pytest.mark.nightly)])
def test_torchrun_begins_anew_after_a_lost_rank(tmp_path: Path, rank: int, step: int) -> None:
    whole = train(0, Run(epochs=3))
    out, folder = tmp_path / "out.json", tmp_path / "checkpoints"
    said = torchrun("--max-restarts=3", str(SCRIPT), str(out), str(folder), str(rank), str(step))
    seen = json.loads(out.read_text())
    assert seen["world_size"] == 2 and said.count("goes on from") == 1
    follows(seen, whole)


@pytest.mark.nightly
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_two_hosts_train_by_the_setup_script(tmp_path: Path) -> None:
    script, out = tmp_path / "setup_multi_node.sh", tmp_path / "out.json"
    script.write_text(setup_script())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with TwoHosts(tmp_path) as hosts, ThreadPoolExecutor(2) as threads:
        variables = [f"PATH={path}", "MASTER_ADDR=10.99.0.1", "NPROC_PER_NODE=1", "OMP_NUM_THREADS=1"]
        started = [
            threads.submit(
                hosts.run, rank, "env", *variables, f"NODE_RANK={rank}", "bash", str(script), str(SCRIPT), str(out),
                str(tmp_path / "checkpoints"),
            )
            for rank in (0, 1)
        ]  # fmt: skip
        said = [each.result() for each in started]
    seen = json.loads(out.read_text())
    assert (seen["world_size"], seen["nnodes"]) == (2, 2)
    assert "a DistributedSampler was put in, for 2 processes" in said[0]
    assert "epoch 3, step 75: loss" in said[0] and "epoch" not in said[1]
    follows(seen, train(0, Run(epochs=3)))
