"""`rankwise manifest dockerfile | compose | k8s | apptainer BUNDLE|STUDY.yaml --out DIR`.

BUNDLE is a name of `rankwise deployments`, or its file bundle.json. Of a bundle a server is made, of a study a job.
"""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configs.common.base import write_atomically
from configs.common.printable import some_of
from flows.cli.options import write_output

if TYPE_CHECKING:
    from configs.serving.deployment import ServingBundle
    from configs.spec.study import StudySpec
    from flows.cli.manifest.study_files import MountedFile
    from flows.cli.manifest.study_memory import StudyMemory

app = typer.Typer(help="Write files for Docker, Compose, Kubernetes and Apptainer.", no_args_is_help=True)
What = Annotated[str, typer.Argument(metavar="BUNDLE|STUDY.yaml", help="bundle of a deployment, or study file")]
OutFolder = Annotated[Path, typer.Option("--out", metavar="DIR", help="new or empty folder")]
Gpus = Annotated[int, typer.Option(min=0, help="GPUs of a container; 0: its cores")]
Image = Annotated[str, typer.Option(help="name of the image in your registry")]


@app.command()
def dockerfile(context: typer.Context, what: What, out: OutFolder, gpus: Gpus = 0) -> None:
    """Write a build context: Dockerfile, wheel, constraints and the model's files."""

    def work() -> int:
        from slurm.manifests.dockerfile import dockerfile as text_of

        bundle, _ = _read(what)
        served = None if bundle is None else _served(bundle, gpus)
        _check_model(bundle)
        folder = _new(out)
        write_atomically(folder / "Dockerfile", text_of(served, "cuda" if gpus else "cpu"))
        _write_context(folder, bundle)
        return _said(folder, shlex.join(["docker", "build", "-t", "rankwise", str(folder)]))

    _exit(context, work)


@app.command()
def compose(
    context: typer.Context, what: What, out: OutFolder, gpus: Gpus = 0,
    nodes: Annotated[int, typer.Option(min=1, help="of a study: containers that torchrun joins")] = 2,
) -> None:  # fmt: skip
    """Write a Compose project: a server with Prometheus and Grafana, or a study's script on several nodes."""

    def work() -> int:
        from slurm.manifests.compose import compose_of_server, compose_of_study
        from slurm.manifests.dockerfile import dockerfile as text_of

        bundle, study = _read(what)
        if bundle is not None:
            _refuse(context, "nodes", "only for a study")
        served = None if bundle is None else _served(bundle, gpus)
        _check_model(bundle)
        folder = _new(out)
        if served is not None:
            files = compose_of_server(served)
            import secrets

            folder.chmod(0o700)  # in the containers others than this user read the token, here nobody else
            write_atomically(folder / "rankwise_key", secrets.token_urlsafe(32) + "\n", mode=0o644)
        else:
            assert study is not None
            from slurm.manifests.serving import dns_name
            from slurm.sbatch_bundle.scripts import multi_node_example

            files = compose_of_study(dns_name(study.study, "study"), nodes, max(1, gpus), gpus)
            write_atomically(folder / "train.py", multi_node_example())
        write_files(folder, files)
        write_atomically(folder / "Dockerfile", text_of(served, "cuda" if gpus else "cpu"))
        _write_context(folder, bundle)
        return _said(folder, shlex.join(["docker", "compose", "--project-directory", str(folder), "up", "--build"]))

    _exit(context, work)


@app.command()
def k8s(
    context: typer.Context, what: What, out: OutFolder, image: Image = "rankwise:latest", gpus: Gpus = 0,
    nodes: Annotated[int, typer.Option(min=1, help="of a study's script: pods that torchrun joins; 1: the study")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="servers at least")] = 1,
) -> None:  # fmt: skip
    """Write kustomize files: Deployment, Service and autoscaler of a server, or the Job of a study."""

    def work() -> int:
        from slurm.manifests.kubernetes import kubernetes_of_script, kubernetes_of_server, kubernetes_of_study
        from slurm.manifests.serving import dns_name
        from slurm.sbatch_bundle.scripts import multi_node_example

        bundle, study = _read(what)
        _refuse(context, *(("nodes", "only for a study") if bundle is not None else ("replicas", "only for a bundle")))
        served = None if bundle is None else _served(bundle, gpus)
        mounted = _mounted(study, Path(what)) if study is not None and nodes == 1 else []
        need = _needed(study, Path(what)) if study is not None and nodes == 1 else None
        folder = _new(out)
        if served is not None:
            files = kubernetes_of_server(served, image, replicas)
            needed = ["secret", "generic", f"{served.slug}-key", "--from-file=key=TOKEN_FILE"]
        else:
            assert study is not None
            name = dns_name(study.study, "study")
            if nodes > 1:
                files = kubernetes_of_script(name, image, nodes, max(1, gpus)) | {"train.py": multi_node_example()}
                needed = ["configmap", f"{name}-script", f"--from-file={folder}/train.py"]
            else:
                assert need is not None
                placed = {file.key: file.path for file in mounted}
                files = kubernetes_of_study(name, image, max(1, gpus), placed, need.bytes)
                needed = ["configmap", f"{name}-study", *(f"--from-file={file.key}={file.source}" for file in mounted)]
        write_files(folder, files)
        apply = ["kubectl", "apply", "-k", f"{folder}/overlays/{'gpu' if gpus else 'cpu'}"]
        code = _said(folder, shlex.join(["kubectl", "create", *needed]), shlex.join(apply))
        if need is not None and need.unknown is not None:
            print(f"  memory: not all cells are counted ({need.unknown}). Check `resources` in base/job.yaml")
        return code

    _exit(context, work)


@app.command()
def apptainer(
    context: typer.Context,
    what: Annotated[str | None, typer.Argument(metavar="BUNDLE", help="none: the engine alone")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="[default: standard output]")] = None,
    gpus: Gpus = 0,
) -> None:
    """Write the Apptainer definition file of the engine, or of a server with the model's files beside it."""

    def work() -> int:
        from slurm.manifests.apptainer import bundle_definition

        bundle = _read(what)[0] if what is not None else None
        if bundle is None:
            _refuse(context, "gpus", "only for a bundle")
        text = bundle_definition(None if bundle is None else _served(bundle, gpus))
        if out is None:
            print(text, end="")
        else:
            if bundle is not None:
                _check_model(bundle)
                _write_model(out.parent, bundle)
            write_output(out, text)
        return 0

    _exit(context, work)


def _mounted(study: "StudySpec", path: Path) -> "list[MountedFile]":
    from flows.cli.manifest.study_files import study_files

    return study_files(study, path)


def _needed(study: "StudySpec", path: Path) -> "StudyMemory":
    from flows.cli.manifest.study_memory import study_memory
    from flows.folders import cache_folder

    return study_memory(study, path.parent, cache_folder())


def write_files(folder: Path, files: dict[str, Any]) -> None:
    """Write mappings as YAML (JSON where the name says so), texts as they are."""
    from configs.common.files.yaml_text import yaml_text

    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else yaml_text(content)
        if path.suffix == ".json":
            text = json.dumps(content, indent=1) + "\n"
        write_atomically(path, text)


def _served(bundle: "ServingBundle", gpus: int) -> Any:
    from slurm.manifests.serving import ContainedServer

    if bundle.kind != "decoder":
        raise ValueError(f"{bundle.model}: containers serve decoders; `rankwise deploy` serves this model on a host")
    served = ContainedServer.of_bundle(bundle, gpus)
    ranks = served.tp * served.pp * served.dp
    if 0 < gpus < ranks:
        raise ValueError(f"--gpus: got {gpus}, but {bundle.model} has {ranks} ranks, each on a GPU. Use --gpus {ranks}")
    return served


def _read(what: str) -> "tuple[ServingBundle | None, StudySpec | None]":
    """Return a bundle, or a study. Raises ValueError naming what there is."""
    from configs.common.files.reading import PLAN_BYTES, read_model
    from configs.serving.deployment import ServingBundle
    from configs.spec.study import load_study
    from flows.cli.deploy.listing import store_of_user

    path = Path(what)
    if path.suffix in (".yaml", ".yml"):
        return None, load_study(path)
    if path.is_file():
        return read_model(path, ServingBundle, PLAN_BYTES), None
    store = store_of_user()
    if what in (deployment.name for deployment in store.all()):
        return store.bundle(store.read(what)), None
    found = store.bundles / Path(what).name / "bundle.json"
    if found.is_file():
        return read_model(found, ServingBundle, PLAN_BYTES), None
    known = sorted(each.parent.name for each in store.bundles.glob("*/bundle.json"))
    raise ValueError(f"{what}: no bundle, deployment or study file. Bundles: {', '.join(known) or 'none'}")


def _write_context(folder: Path, bundle: "ServingBundle | None") -> None:
    """Bring wheel, constraints and the model."""
    from slurm.staging.packages import node_requirements
    from slurm.staging.wheel import pack_wheel

    pack_wheel(folder)
    shutil.copyfile(node_requirements()[0], folder / "constraints.txt")
    if bundle is not None:
        _write_model(folder, bundle)


def _check_model(bundle: "ServingBundle | None") -> None:
    """Raise ValueError for a model whose files are no longer those that the bundle's evidence is of."""
    from configs.common.base import sha256_of_file
    from tasks.models.model_cache import load_manifest, verify_manifest

    if bundle is None or bundle.identity.startswith("synthetic:"):
        return
    manifest = load_manifest(Path(bundle.manifest)).model_copy(update={"files": bundle.files})
    for name, problem in verify_manifest(manifest, sha256_of_file).items():
        raise ValueError(
            f"{Path(manifest.folder) / name}: {problem}; the bundle of {bundle.model} was measured with the file as it "
            "was. Bring it back, or deploy the model again"
        )


def _write_model(folder: Path, bundle: "ServingBundle") -> None:
    """Bring the files of a real model into `model`; a synthetic one is made where it is served."""
    from tasks.models.model_cache import load_manifest

    if bundle.identity.startswith("synthetic:"):
        return
    manifest, model = load_manifest(Path(bundle.manifest)), _new(folder / "model")
    for name in bundle.files:
        target = model / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(manifest.folder) / name, target)


def _refuse(context: typer.Context, name: str, why: str) -> None:
    """Raises ValueError where an option is given that would have no effect."""
    source = context.get_parameter_source(name)
    if source is not None and source.name == "COMMANDLINE":
        raise ValueError(f"--{name}: {why}. Leave it out")


def _new(out: Path) -> Path:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out: {out} is not an empty folder. Use another folder or remove it")
    out.mkdir(parents=True, exist_ok=True)
    return out


def _said(folder: Path, *commands: str) -> int:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    print("\n".join([f"{folder}: {some_of(names, 11)}", *(f"  next: {command}" for command in commands)]))
    return 0


def _exit(context: typer.Context, work: Callable[[], int]) -> None:
    from flows.cli.errors import guarded, plainly

    debug = bool((context.obj or {}).get("debug"))
    raise typer.Exit(guarded(lambda: plainly(work), Path("manifest"), debug, wrong_value=2))
