"""Wheels of what is installed here: all that nodes need, packed from this environment, so that no network is needed.

node_wheels(folder)          # torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl, ...
empty_wheels(folder)         # the same names and versions, with nothing in them
"""

import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from slurm.staging.packages import node_requirements


def node_wheels(folder: Path) -> None:
    """Pack every distribution that nodes need; those that are there are kept."""
    for found in _needed():
        name, version, tag = _named(found)
        wheel = folder / f"{name}-{version}-{tag}.whl"
        if not wheel.exists():
            files = [file for file in found.files or [] if ".." not in file.parts and file.suffix != ".pyc"]
            content = {str(file): Path(str(file.locate())) for file in files if file.name != "RECORD"}
            _pack(wheel, {name: path.read_bytes() for name, path in content.items() if path.is_file()}, name, version)


def empty_wheels(folder: Path) -> None:
    """Wheels of the same names and versions that hold nothing and need nothing."""
    for found in _needed():
        name, version, _ = _named(found)
        about = f"{name}-{version}.dist-info"
        content = {
            f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
            f"{about}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        _pack(folder / f"{name}-{version}-py3-none-any.whl", content, name, version)


def _pack(wheel: Path, content: dict[str, bytes], name: str, version: str) -> None:
    work = wheel.with_suffix(".part")
    record = next((path for path in content if path.endswith(".dist-info/METADATA")), f"{name}-{version}.dist-info/")
    record = f"{record.rpartition('/')[0]}/RECORD"
    with zipfile.ZipFile(work, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path, data in content.items():
            archive.writestr(path, data)
        archive.writestr(record, "".join(f'"{path}",,\n' for path in (*content, record)))
    work.rename(wheel)


def _named(found: metadata.Distribution) -> tuple[str, str, str]:
    """Name, version and a tag of an installed distribution, as a wheel's file name has them."""
    lines = (found.read_text("WHEEL") or "Tag: py3-none-any").splitlines()
    tags = [line.partition(":")[2].strip() for line in lines if line.startswith("Tag:")]
    tag = next(tag for tag in tags if not tag.startswith("py2-"))
    return found.metadata["Name"].replace("-", "_"), found.version, tag


def _needed() -> Iterator[metadata.Distribution]:
    """Distributions that nodes need, with all that these need."""
    seen: set[str] = set()
    wanted = [Requirement(text) for text in node_requirements()[1]]
    while wanted:
        requirement = wanted.pop()
        for extra in ("", *requirement.extras):
            key = f"{requirement.name.lower().replace('_', '-')}[{extra}]"
            if key in seen or (requirement.marker is not None and not requirement.marker.evaluate({"extra": extra})):
                continue
            seen.add(key)
            found = metadata.distribution(requirement.name)
            if not extra:
                yield found
            needs = [Requirement(text) for text in found.requires or []]
            wanted += [each for each in needs if each.marker is None or each.marker.evaluate({"extra": extra})]
