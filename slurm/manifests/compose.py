"""Docker Compose: a server with Prometheus and Grafana, or a study over two nodes with torchrun.

files = compose_of_server(served)         # {"compose.yaml": ..., "prometheus.yml": ..., "grafana/...": ...}
"""

from typing import Any

from slurm.manifests.dashboard import serving_dashboard
from slurm.manifests.serving import METRICS_PATH, PORT, ContainedServer, escaped

_PROMETHEUS, _GRAFANA = "prom/prometheus:v3.5.0", "grafana/grafana:12.1.1"
_MASTER_PORT = 29500
_ENTRYPOINT = 'RANKWISE_API_KEY="$$(cat /run/secrets/rankwise_key)" exec rankwise "$$@"'
"""Compose replaces `$$` by `$`."""
_MONITORING: dict[str, Any] = {
    "prometheus": {
        "image": _PROMETHEUS,
        "volumes": ["./prometheus.yml:/etc/prometheus/prometheus.yml:ro", "prometheus:/prometheus"],
        "secrets": ["rankwise_key"],
        "restart": "unless-stopped",
        "depends_on": {"server": {"condition": "service_healthy"}},
    },
    "grafana": {
        "image": _GRAFANA,
        "ports": ["127.0.0.1:3000:3000"],
        "volumes": [
            "./grafana/datasources.yml:/etc/grafana/provisioning/datasources/rankwise.yml:ro",
            "./grafana/dashboards.yml:/etc/grafana/provisioning/dashboards/rankwise.yml:ro",
            "./grafana/serving.json:/var/lib/grafana/dashboards/serving.json:ro",
            "grafana:/var/lib/grafana",
        ],
        "restart": "unless-stopped",
        "depends_on": ["prometheus"],
    },
}
"""Services that watch the server: Prometheus, and Grafana with its dashboard."""


def compose_of_server(served: ContainedServer) -> dict[str, Any]:
    """Return the files: mappings are to be written as YAML, texts as they are.

    The token comes from a secret, a file that only the server and Prometheus read. Nothing but the server's port and
    Grafana's, on this machine's loopback address, can be reached from outside.
    """
    compose = {
        "name": f"rankwise-{served.slug}",
        "services": {"server": _server(served), **_MONITORING},
        "secrets": {"rankwise_key": {"file": "./rankwise_key"}},
        "volumes": {"prometheus": {}, "grafana": {}},
    }
    scrape = {
        "job_name": "rankwise",
        "metrics_path": METRICS_PATH,
        "authorization": {"credentials_file": "/run/secrets/rankwise_key"},
        "static_configs": [{"targets": [f"server:{PORT}"]}],
    }
    source = {"name": "Prometheus", "uid": "prometheus", "type": "prometheus", "url": "http://prometheus:9090"}
    provider = {"name": "rankwise", "type": "file", "options": {"path": "/var/lib/grafana/dashboards"}}
    return {
        "compose.yaml": compose,
        "prometheus.yml": {"global": {"scrape_interval": "5s"}, "scrape_configs": [scrape]},
        "grafana/datasources.yml": {"apiVersion": 1, "datasources": [source | {"access": "proxy", "isDefault": True}]},
        "grafana/dashboards.yml": {"apiVersion": 1, "providers": [provider]},
        "grafana/serving.json": serving_dashboard(),
    }


def _server(served: ContainedServer) -> dict[str, Any]:
    """Return the service of the server itself, with what it may not do."""
    server: dict[str, Any] = {
        "build": ".",
        "image": f"rankwise-{served.slug}",
        "entrypoint": ["/bin/sh", "-c", _ENTRYPOINT, "sh"],
        "command": escaped(served.command),
        "ports": [f"127.0.0.1:{PORT}:{PORT}"],
        "secrets": ["rankwise_key"],
        "restart": "unless-stopped",
        "stop_grace_period": "45s",
        "shm_size": "1gb",
        "read_only": True,
        # Docker's are noexec; kernels are compiled for the processor, and loaded, below the home folder.
        "tmpfs": ["/tmp", "/home/rankwise:exec"],
        "security_opt": ["no-new-privileges:true"],
        "cap_drop": ["ALL"],
    }
    if served.gpus:
        device = {"driver": "nvidia", "count": served.gpus, "capabilities": ["gpu"]}
        server["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return server


def compose_of_study(study: str, nodes: int, ranks_per_node: int, gpus: int = 0) -> dict[str, Any]:
    """Return a study's script over nodes: torchrun in each container, meeting at the first by its name."""

    def node(rank: int) -> dict[str, Any]:
        words = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={ranks_per_node}", f"--node-rank={rank}"]
        words += [
            "--rdzv-backend=static",
            "--master-addr=node-0",
            f"--master-port={_MASTER_PORT}",
            "/workspace/train.py",
        ]
        told: dict[str, Any] = {
            "build": ".",
            "image": f"rankwise-{study}",
            "entrypoint": [],
            "command": words,
            "hostname": f"node-{rank}",
            "shm_size": "1gb",
            "environment": {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"},
            "volumes": ["./train.py:/workspace/train.py:ro", "runs:/home/rankwise/runs"],
            "networks": ["ranks"],
        }
        if gpus:
            # By number: a count is the first GPUs of the machine, for every container the same.
            mine = [str(gpu) for gpu in range(rank * gpus, (rank + 1) * gpus)]
            device = {"driver": "nvidia", "device_ids": mine, "capabilities": ["gpu"]}
            told["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
        return told

    services = {f"node-{rank}": node(rank) for rank in range(nodes)}
    compose = {"name": f"rankwise-{study}", "services": services, "networks": {"ranks": {}}, "volumes": {"runs": {}}}
    return {"compose.yaml": compose}
