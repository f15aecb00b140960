"""Dockerfiles of a server or a study: on a CPU or a CUDA base, non-root, with a health check.

text = dockerfile(served, "cpu")          # docker build -f Dockerfile -t rankwise-tiny .
"""

from typing import Literal

from slurm.manifests.serving import PORT, ContainedServer

Base = Literal["cpu", "cuda"]
_BASES: dict[Base, str] = {
    "cpu": "python:3.11.13-slim-bookworm",
    "cuda": "nvidia/cuda:12.9.1-devel-ubuntu22.04",
}
_PYTHON: dict[Base, tuple[str, ...]] = {"cpu": (), "cuda": ("python3.11", "python3.11-dev", "python3.11-venv")}
_TORCH: dict[Base, str] = {
    "cpu": "--extra-index-url https://download.pytorch.org/whl/cpu",
    "cuda": "",
}
USER_ID = 10001


def dockerfile(served: ContainedServer | None, base: Base) -> str:
    """Return the text. served: None: the image runs studies. The context holds wheel, constraints and bundle."""
    python = "python3.11" if base == "cuda" else "python3"
    packages = " ".join(sorted((*_PYTHON[base], "g++", "gcc", "ninja-build")))
    extra = f" {_TORCH[base]}" if _TORCH[base] else ""
    lines = [
        "# Written by `rankwise manifest dockerfile`. Build it in the folder that the command wrote:",
        "#     docker build -t rankwise .",
        f"FROM {_BASES[base]}",
        'SHELL ["/bin/bash", "-o", "pipefail", "-c"]',
        "# Versions of the compilers are the base image's.",
        "# hadolint ignore=DL3008",
        "RUN apt-get update \\",
        f"    && apt-get install --yes --no-install-recommends {packages} \\",
        "    && rm -rf /var/lib/apt/lists/* \\",
        f"    && useradd --uid {USER_ID} --create-home --shell /usr/sbin/nologin rankwise \\",
        f"    && {python} -m venv /opt/rankwise",
        "ENV PATH=/opt/rankwise/bin:$PATH PYTHONNOUSERSITE=1 RANKWISE_CACHE=/home/rankwise/cache",
        "COPY constraints.txt rankwise-*.whl /tmp/install/",
        f"RUN pip install --no-cache-dir --constraint /tmp/install/constraints.txt{extra} /tmp/install/rankwise-*.whl",
    ]
    if served is not None and served.model_in_image:
        lines.append(f"COPY --chown={USER_ID}:{USER_ID} model /bundle/model")
    lines += [f"USER {USER_ID}:{USER_ID}", "WORKDIR /home/rankwise"]
    if served is None:
        # A folder that the image lacks is made for root, who alone could write there.
        lines += ["RUN mkdir /home/rankwise/runs", "VOLUME /home/rankwise/runs"]
        lines += ['ENTRYPOINT ["rankwise"]', 'CMD ["--help"]']
        return "\n".join(lines) + "\n"
    check = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{PORT}/readyz', timeout=3)"
    lines += [
        f"EXPOSE {PORT}",
        f'HEALTHCHECK --interval=10s --timeout=5s --start-period=300s CMD ["python", "-c", "{check}"]',
        'ENTRYPOINT ["rankwise"]',
        f"CMD {_json(served.command)}",
    ]
    return "\n".join(lines) + "\n"


def _json(words: list[str]) -> str:
    import json

    return json.dumps(words)
