"""TPU machines by Cloud TPU's queued resources: one request for all slices, granted as a whole.

https://cloud.google.com/tpu/docs/queued-resources. The nodes carry the labels of the launch; the request itself
takes none, but its description of the nodes shows them, before there are any and after they are gone.
"""

from typing import Any

from launch.errors import UserError
from launch.machines import MARKS, Found, Request
from launch.tools import ask
from launch.workers import Worker

WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")  # of a request
STARTING = ("CREATING", "STARTING")  # of a node


class QueuedResource:
    def __init__(self, request: Request) -> None:
        sides = sorted(int(side) for side in request.slice.shape.split("x"))
        if request.slice.generation == "v5p" and (sides[-1] > 2 * sides[0] or any(side & (side - 1) for side in sides)):
            raise UserError(
                f"--topology: of the v5p shapes with {request.slice.chips} chips Cloud TPU gives the most cubic one, "
                f"not {request.slice.shape}; take that, or --route=compute"
            )
        if not request.slice.about.accelerator:
            raise UserError(
                f"--route=queued: Cloud TPU does not offer {request.slice.generation}; take --route=compute"
            )
        self.request = request

    def look_commands(self) -> list[list[str]]:
        return [
            self.request.gcloud("tpus", "queued-resources", "list", "--format=json"),
            self.request.gcloud("tpus", "tpu-vm", "list", "--format=json"),
        ]

    def look(self) -> Found:
        requests, nodes = self.look_commands()
        mine = [each for each in ask(requests) or [] if _base(each["name"]) == self.request.name]
        if not mine:
            return Found(state="absent")
        made = mine[0]
        word = made.get("state", {}).get("state", "unknown")
        if _labels(made) != self.request.labels:
            return Found(state="foreign", word=word)
        if word in WAITING:
            return Found(state="waiting", word=word)
        if word == "ACTIVE":
            return self._nodes([node for node in ask(nodes) or [] if self._mine(node)])
        failure = made["state"].get("failedData", {}).get("error", {}).get("message", "")
        failure = " ".join(failure.split())  # on one line
        return Found(state="broken", word=f"{word}: {failure}" if failure else word, failed=word == "FAILED")

    def _mine(self, node: dict[str, Any]) -> bool:
        """By its last part: the project in front of it may be written by name or by number."""
        return _base(node.get("queuedResource", "")) == self.request.name and _marks(node) == self.request.labels

    def _nodes(self, nodes: list[dict[str, Any]]) -> Found:
        """What the nodes of an active request make of it: anything but ready and healthy is not usable."""
        nodes = sorted(nodes, key=lambda node: _number(node["name"]))
        for node in nodes:
            word = node.get("state", "unknown")
            health = node.get("health", "HEALTHY")
            if word in STARTING:
                return Found(state="waiting", word=f"{_base(node['name'])} {word}", granted=True)
            if word != "READY" or health not in ("HEALTHY", "HEALTH_UNSPECIFIED"):
                word = word if word != "READY" else health
                return Found(state="broken", word=f"{_base(node['name'])} {word}")
        if len(nodes) < self.request.slices:
            return Found(state="waiting", word=f"{len(nodes)} of {self.request.slices} slices are there", granted=True)
        workers = []
        for i, node in enumerate(nodes):
            for j, end in enumerate(node.get("networkEndpoints", [])):
                outside = end.get("accessConfig", {}).get("externalIp", "")
                address = end["ipAddress"] if self.request.internal_ips else outside or end["ipAddress"]
                workers.append(Worker(f"{i}.{j}", address))
        return Found(state="ready", word="ACTIVE", workers=workers)

    def create_commands(self) -> list[list[str]]:
        request, about = self.request, self.request.slice.about
        if about.accelerator == "v4":  # the only one whose shape gcloud takes here
            kind = [f"--type={about.accelerator}", f"--topology={request.slice.shape}"]
        else:
            kind = [f"--accelerator-type={request.slice.accelerator_type}"]
        if request.slices > 1:
            nodes = [f"--node-count={request.slices}", f"--node-prefix={request.name}"]
        else:
            nodes = [f"--node-id={request.name}"]
        flags = [f"--network={request.network}"] if request.network else []
        flags += ["--spot"] if request.spot else []
        flags += ["--internal-ips"] if request.internal_ips else []
        if request.reservation == "default":
            flags.append("--reserved")
        elif request.reservation:
            flags.append(f"--reservation-host-project={request.reservation}")
        labels = ",".join(f"{name}={value}" for name, value in request.labels.items())
        return [
            request.gcloud(
                *["tpus", "queued-resources", "create", request.name, *kind, *nodes],
                *[f"--runtime-version={request.image or about.runtime}", f"--labels={labels}"],
                *[f"--metadata=ssh-keys={request.login}", *flags, "--async", "--quiet"],
            )
        ]

    def delete_commands(self) -> list[list[str]]:
        return [self.request.gcloud("tpus", "queued-resources", "delete", self.request.name, "--force", "--quiet")]


def _base(name: str) -> str:
    return name.rsplit("/", 1)[-1]


def _number(name: str) -> tuple[int, str]:
    """Slices in the order of their numbers: NAME-10 after NAME-9."""
    last = name.rsplit("-", 1)[-1]
    return (int(last) if last.isdigit() else 0, name)


def _labels(made: dict[str, Any]) -> dict[str, str]:
    """The labels of the launch on the nodes that a request describes."""
    specs = made.get("tpu", {}).get("nodeSpec") or [{}]
    return _marks(specs[0].get("node", {}))


def _marks(node: dict[str, Any]) -> dict[str, str]:
    labels = node.get("labels", {})
    return {name: labels[name] for name in MARKS if name in labels}
