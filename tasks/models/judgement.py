"""Judge the models of a plan by config.json and headers, before anything is started; see `configs.families.checkpoint`.

unusable_in(plan)         # (UnusableModel(name="mine", reason="config.json: quantization_config ..."),)
"""

from pathlib import Path

from configs.common.files.safetensors_header import StoredTensor, header_tensors
from configs.common.printable import printable
from configs.families.checkpoint import WORKLOADS_OF, check_model, is_trained_here
from configs.plans.model_manifest import ModelManifest, read_model_manifest
from configs.plans.plan import Plan, UnusableModel
from configs.workloads.train import TrainWorkload

_JUDGED = {kind for kinds in WORKLOADS_OF.values() for kind in kinds}


def unusable_in(plan: Plan) -> tuple[UnusableModel, ...]:
    """Return the models of a plan that our engine cannot measure, each with the reason.

    Models that are not fetched yet are left out, and so are cells of other engines and of training with transformers'
    models, whose own rules say what they can load.
    """
    kinds: dict[str, set[str]] = {}
    for cell in plan.cells.values():
        trained = isinstance(cell.workload, TrainWorkload) and cell.workload.task == "causal_lm"
        if cell.engine == "rankwise" and cell.model is not None and (trained or cell.workload.kind in _JUDGED):
            kinds.setdefault(cell.model, set()).add(cell.workload.kind)
    found = []
    for model in plan.models:
        for kind in sorted(kinds.get(model.identity, ())):
            if not model.manifest:
                continue
            try:
                judge_manifest(Path(model.manifest), kind, model.name)
            except (ValueError, OSError) as error:
                found.append(UnusableModel(name=model.name, reason=str(error)))
                break
    return tuple(found)


def judge_manifest(path: Path, workload: str, model: str) -> None:
    """As `judge_model`, by the path of a manifest. Raises OSError for files that are gone."""
    judge_model(read_model_manifest(path), workload, model)


def judge_model(manifest: ModelManifest, workload: str, model: str) -> None:
    """Raise ValueError for a model that our engine cannot run under a workload, or that has a tensor in two files,
    OSError for files that are gone.
    """
    if workload == "train":
        if not is_trained_here(manifest.config):
            return
        workload = WORKLOADS_OF["decoder"][0]
    folder = Path(manifest.folder)
    weights = [folder / file for file in manifest.files if file.endswith(".safetensors")]
    stored: dict[str, StoredTensor] = {}
    for file in weights:
        for tensor, header in header_tensors(file).items():
            if tensor in stored:
                name, other = printable(tensor, 100), stored[tensor].file
                raise ValueError(f"{file}: tensor {name} is also in {other}; keep one of the two files")
            stored[tensor] = header
    check_model(manifest.config, stored, workload, model)
