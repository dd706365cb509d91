"""The Kubernetes objects of a job: the exact code in ConfigMaps, and a JobSet that runs it on every host.

https://jobset.sigs.k8s.io/docs, https://cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launch.errors import UserError
from launch.job import Job
from launch.tpus import Slice
from launch.workers import Bundle

PART = 900_000  # bytes of the code in one ConfigMap, of the 1 MiB that one may hold
PARTS = 16
FILES = "/launch"  # where they are seen in a container
PORT = 8476  # of the process that brings the others together

SCRIPT = """\
set -e
folder=$(mktemp -d) && cd "$folder"
cat "$LAUNCH_FILES"/part-* > code.tar.gz
echo "$LAUNCH_SHA256  code.tar.gz" | sha256sum --check --status
mkdir code && tar -xzf code.tar.gz -C code && cd code
bash "$LAUNCH_FILES/setup" || exit 1
"""
RUN = 'exec .venv/bin/python -m transformer "$@"\n'
SEVERAL = (
    'set -- "$@" --coordinator="$LAUNCH_COORDINATOR" --processes="$LAUNCH_HOSTS" --process="$JOB_COMPLETION_INDEX"\n'
)
"""GPU hosts are told of each other; TPU hosts find each other by what GKE puts into their environment."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The nodes that a job asks for: slices of a TPU, or hosts with so many GPUs each."""

    tpu: Slice | None = None
    slices: int = 1
    gpu: str = ""  # GKE's label cloud.google.com/gke-accelerator
    gpus: int = 0  # on each host
    hosts: int = 1
    spot: bool = False

    @property
    def selector(self) -> dict[str, str]:
        if self.tpu:
            labels = {
                "cloud.google.com/gke-tpu-accelerator": self.tpu.about.gke,
                "cloud.google.com/gke-tpu-topology": self.tpu.shape,
            }
        else:
            labels = {"cloud.google.com/gke-accelerator": self.gpu}
        return labels | ({"cloud.google.com/gke-spot": "true"} if self.spot else {})

    @property
    def devices(self) -> dict[str, str]:
        if self.tpu:
            return {"google.com/tpu": str(self.tpu.chips // self.tpu.hosts)}
        return {"nvidia.com/gpu": str(self.gpus)}


def code_maps(job: Job, bundle: Bundle, labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """The code in parts, and the script that sets a host up with the first of them."""
    pieces = [bundle.code[at : at + PART] for at in range(0, len(bundle.code), PART)]
    if len(pieces) > PARTS:
        raise UserError(
            f"the code is {len(bundle.code) / 1e6:.1f} MB packed, and ConfigMaps take {PARTS * PART / 1e6:.1f}: "
            "ignore large files by .gitignore, or keep them in storage"
        )
    maps = []
    for i, piece in enumerate(pieces):
        maps.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": f"{job.name}-code-{i}", "labels": dict(labels)},
                "binaryData": {f"part-{i:03d}": base64.b64encode(piece).decode()},
            }
        )
    maps[0]["data"] = {"setup": bundle.setup}
    return maps


def jobset(
    job: Job, bundle: Bundle, pool: Pool, labels: Mapping[str, str], image: str, attempts: int, account: str = ""
) -> dict[str, Any]:
    """Every host runs the command once; when one fails, all are started anew, up to ``attempts`` in all.

    A user's error (2) fails the JobSet at once. Whatever else ends a pod is tried again: when a host goes away, the
    others see an error of their own, and which of them Kubernetes sees first is chance.
    """
    try:
        arguments = [argument.encode().decode().replace("$", "$$") for argument in job.arguments]  # $(NAME) is expanded
    except UnicodeEncodeError:
        raise UserError("an argument is not UTF-8, which Kubernetes cannot carry") from None
    hosts = pool.tpu.hosts if pool.tpu else pool.hosts
    told = not pool.tpu and hosts > 1
    environment = {"LAUNCH_FILES": FILES, "LAUNCH_SHA256": bundle.digest, "PYTHONUNBUFFERED": "1"}
    environment["JAX_PLATFORMS"] = "tpu,cpu" if pool.tpu else "cuda,cpu"  # one that JAX does not find is an error
    if told:
        environment |= {"LAUNCH_COORDINATOR": f"{job.name}-host-0-0.{job.name}:{PORT}", "LAUNCH_HOSTS": str(hosts)}
    container = {
        "name": "job",
        "image": image,
        "command": ["bash", "-c", (SCRIPT + (SEVERAL if told else "") + RUN).replace("$", "$$"), "launch"],
        "args": arguments,
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "ports": [{"containerPort": port} for port in ((8471, 8080) if pool.tpu else (PORT,))],
        "resources": {"limits": pool.devices, "requests": pool.devices},
        "volumeMounts": [{"name": "code", "mountPath": FILES, "readOnly": True}],
    }
    sources = [{"configMap": {"name": each["metadata"]["name"]}} for each in code_maps(job, bundle, labels)]
    pod = {
        "restartPolicy": "Never",  # what a podFailurePolicy needs
        "terminationGracePeriodSeconds": 60,  # to save a checkpoint
        "nodeSelector": pool.selector,
        "containers": [container],
        "volumes": [{"name": "code", "projected": {"sources": sources}}],
        **({"serviceAccountName": account} if account else {}),
        **({"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]} if not pool.tpu else {}),
    }
    user_error = {"action": "FailJob", "onExitCodes": {"containerName": "job", "operator": "In", "values": [2]}}
    work = {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [user_error]},
        "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
    }
    # One slice takes one pool of nodes whole.
    alone = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": job.name,
            "labels": dict(labels),
            "annotations": {"launch-id": bundle.id, **(alone if pool.tpu and hosts > 1 else {})},
        },
        "spec": {
            "failurePolicy": {
                "maxRestarts": attempts - 1,
                "rules": [{"name": "userError", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {"name": "slice" if pool.tpu else "host", "replicas": pool.slices, "template": {"spec": work}}
            ],
        },
    }
