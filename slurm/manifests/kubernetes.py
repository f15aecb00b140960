"""Kubernetes: a Deployment with probes and autoscaling, or an Indexed Job with torchrun; kustomize overlays for GPUs.

files = kubernetes_of_server(served, image="registry/rankwise-tiny:1")     # {"base/deployment.yaml": {...}, ...}
files = kubernetes_of_script("strong", "registry/rankwise:1", nodes=2, ranks_per_node=1)
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from configs.serving.settings import API_KEY_VARIABLE
from slurm.manifests.dockerfile import USER_ID
from slurm.manifests.serving import PORT, ContainedServer, escaped

_MASTER_PORT = 29500
_SECURITY = {"runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID,
             "seccompProfile": {"type": "RuntimeDefault"}}  # fmt: skip
_CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_SHM = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
_SHM_MOUNT = {"name": "shm", "mountPath": "/dev/shm"}
_CACHE, _CACHE_MOUNT = {"name": "cache", "emptyDir": {}}, {"name": "cache", "mountPath": "/home/rankwise/cache"}
_ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "eth0",
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_DEBUG": "WARN",
    "OMP_NUM_THREADS": "1",
}


def kubernetes_of_server(
    served: ContainedServer, image: str, replicas: int = 1, max_replicas: int = 4
) -> dict[str, Any]:
    """Return the files of a server. The token is a Secret named `<name>-key` with the field `key`, made beforehand.

    The autoscaler follows the queue by the metric `vllm_num_requests_waiting` of the pods, which an adapter such as
    prometheus-adapter gives to Kubernetes.
    """
    name, labels = served.slug, _labels(served.slug)
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(PORT), "prometheus.io/path": "/metrics"}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {
                "metadata": {"labels": labels, "annotations": annotations},
                "spec": {
                    "terminationGracePeriodSeconds": 45,
                    "securityContext": _SECURITY,
                    "containers": [_server_container(served, image)],
                    "volumes": [_SHM, _CACHE],
                },
            },
        },
    }
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    files = {
        "deployment.yaml": deployment,
        "service.yaml": _service(name, {"selector": labels, "ports": ports}),
        "autoscaler.yaml": _autoscaler(name, replicas, max(replicas, max_replicas)),
    }
    gpus = max(1, served.gpus or served.tp * served.pp * served.dp)
    args = escaped(served.model_copy(update={"gpus": gpus}).command)
    return _with_overlays(files, deployment, "server", gpus, args)


def _server_container(served: ContainedServer, image: str) -> dict[str, Any]:
    """Return the container of a server, with its probes; the token comes from the Secret."""
    key = {"name": API_KEY_VARIABLE, "valueFrom": {"secretKeyRef": {"name": f"{served.slug}-key", "key": "key"}}}
    ready = {"httpGet": {"path": "/readyz", "port": "http"}}
    alive = {"httpGet": {"path": "/healthz", "port": "http"}}
    weights = served.weights_bytes >> 30
    return {
        "name": "server",
        "image": image,
        "args": escaped(served.command),
        "env": [key],
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": ready | {"periodSeconds": 5, "failureThreshold": 120},
        "readinessProbe": ready | {"periodSeconds": 5, "timeoutSeconds": 3},
        "livenessProbe": alive | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3},
        "resources": _resources("1", 2 + weights, 8 + 2 * weights),
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [_SHM_MOUNT, _CACHE_MOUNT],
    }


def _autoscaler(name: str, min_replicas: int, max_replicas: int) -> dict[str, Any]:
    """Return what adds a replica where more than four requests wait for each."""
    waiting = {"metric": {"name": "vllm_num_requests_waiting"}, "target": {"type": "AverageValue", "averageValue": "4"}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name, "labels": _labels(name)},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": min_replicas,
            "maxReplicas": max_replicas,
            "metrics": [{"type": "Pods", "pods": waiting}],
        },
    }


def kubernetes_of_script(name: str, image: str, nodes: int, ranks_per_node: int) -> dict[str, Any]:
    """Return an Indexed Job: a pod for each node, torchrun in each, meeting at pod 0 by the headless Service.

    A pod asks for 1 GiB a rank (4 at least) and is ended beyond 4 GiB a rank (16 at least).
    """
    labels = _labels(name)
    words = [
        "torchrun",
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks_per_node}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--rdzv-backend=static",
        f"--master-addr={name}-0.{name}",
        f"--master-port={_MASTER_PORT}",
        "/workspace/train.py",
    ]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    environment = [
        {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        *({"name": key, "value": value} for key, value in _ENVIRONMENT.items()),
    ]
    container = {
        "name": "ranks",
        "image": image,
        "command": words,
        "env": environment,
        "ports": [{"name": "rendezvous", "containerPort": _MASTER_PORT}],
        "resources": _resources(str(ranks_per_node), max(4, ranks_per_node), max(16, 4 * ranks_per_node)),
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [_SHM_MOUNT, {"name": "script", "mountPath": "/workspace", "readOnly": True}],
    }
    job = _job(name, labels, container, [_SHM, {"name": "script", "configMap": {"name": f"{name}-script"}}])
    job["spec"] |= {"completions": nodes, "parallelism": nodes, "completionMode": "Indexed"}
    job["spec"]["template"]["spec"] |= {"subdomain": name}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": name},
        "ports": [{"name": "rendezvous", "port": _MASTER_PORT}],
    }
    files = {"job.yaml": job, "service.yaml": _service(name, spec)}
    return _with_overlays(files, job, "ranks", ranks_per_node, None)


def kubernetes_of_study(
    name: str,
    image: str,
    gpus: int = 1,
    files: Mapping[str, str] = MappingProxyType({"study.yaml": "study.yaml"}),
    memory_bytes: int = 0,
) -> dict[str, Any]:
    """Return a Job that runs a study, whose run folder is on a claim; the study is a ConfigMap, made beforehand.

    gpus: those of its overlay `gpu`. files: key in the ConfigMap -> place beside the study, of all that it names.
    memory_bytes: what all ranks of its largest cell take; the Job asks for 4 GiB and is ended beyond 16 at least.
    """
    needed = -(-memory_bytes >> 30)
    labels = _labels(name)
    container = {
        "name": "study",
        "image": image,
        "args": ["run", "/study/study.yaml", "--runs", "/home/rankwise/runs", "--no-calibrate"],
        "resources": _resources("2", max(4, 2 + needed), max(16, 8 + 2 * needed)),
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [
            _SHM_MOUNT,
            _CACHE_MOUNT,
            {"name": "study", "mountPath": "/study", "readOnly": True},
            {"name": "runs", "mountPath": "/home/rankwise/runs"},
        ],
    }
    items = [{"key": key, "path": path} for key, path in files.items()]
    volumes = [
        _SHM,
        _CACHE,
        {"name": "study", "configMap": {"name": f"{name}-study", "items": items}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": f"{name}-runs"}},
    ]
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{name}-runs", "labels": labels},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}},
    }
    job = _job(name, labels, container, volumes)
    return _with_overlays({"job.yaml": job, "claim.yaml": claim}, job, "study", gpus, None)


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "rankwise", "app.kubernetes.io/instance": name}


def _service(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": _labels(name)}, "spec": spec}


def _resources(cores: str, request_gib: int, limit_gib: int) -> dict[str, Any]:
    """Return what a container asks a node for, and where it is ended: loading may hold weights twice."""
    return {"requests": {"cpu": cores, "memory": f"{request_gib}Gi"}, "limits": {"memory": f"{limit_gib}Gi"}}


def _job(name: str, labels: dict[str, str], container: dict[str, Any], volumes: list[Any]) -> dict[str, Any]:
    """Return a Job that is not tried again: a study resumes when the Job is deleted and applied again."""
    spec = {"restartPolicy": "Never", "securityContext": _SECURITY, "containers": [container], "volumes": volumes}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {"backoffLimit": 0, "template": {"metadata": {"labels": labels}, "spec": spec}},
    }


def _with_overlays(
    files: dict[str, Any], main: dict[str, Any], container: str, gpus: int, args: list[str] | None
) -> dict[str, Any]:
    """Return base and overlays for kustomize: `cpu` is the base, `gpu` adds GPUs to the main object."""
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    patched: dict[str, Any] = {"name": container, "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    patched |= {} if args is None else {"args": args}
    patch = {
        "apiVersion": main["apiVersion"],
        "kind": main["kind"],
        "metadata": {"name": main["metadata"]["name"]},
        "spec": {"template": {"spec": {"containers": [patched]}}},
    }
    return {
        **{f"base/{name}": content for name, content in files.items()},
        "base/kustomization.yaml": head | {"resources": list(files)},
        "overlays/cpu/kustomization.yaml": head | {"resources": ["../../base"]},
        "overlays/gpu/kustomization.yaml": head | {"resources": ["../../base"], "patches": [{"path": "gpus.yaml"}]},
        "overlays/gpu/gpus.yaml": patch,
    }
