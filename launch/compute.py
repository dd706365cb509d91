"""TPU machines by Compute Engine: for each slice a managed instance group whose workload policy gives its shape.

The way that Google names for tpu7x and after: https://cloud.google.com/compute/docs/tpus. A group, the template of
its machines and the policy have no labels of their own, so the mark of the launch is their description.
"""

import re
from typing import Any

from launch.errors import UserError
from launch.machines import Found, Request
from launch.tools import ask, ask_all
from launch.tpus import region
from launch.workers import Worker

STARTING = ("PENDING", "PROVISIONING", "STAGING")  # of an instance
PORT = 8081  # of the process that brings slices together


class InstanceGroups:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.groups = [f"{request.name}-{i}" for i in range(request.slices)]
        self.several = request.slice.hosts > 1  # one host has no shape that a policy could ask for
        self.mark = " ".join(f"{name}={value}" for name, value in request.labels.items())

    def look_commands(self) -> list[list[str]]:
        request = self.request
        lists = [
            request.gcloud("instance-groups", "managed", "list", f"--zones={request.zone}", zone=False),
            request.gcloud("instance-templates", "list", zone=False),
            request.gcloud("resource-policies", "list", f"--regions={region(request.zone)}", zone=False),
            request.gcloud("instances", "list", f"--zones={request.zone}", zone=False),
        ]
        return [[*command, "--format=json"] for command in lists]

    def look(self) -> Found:
        *lists, instances = self.look_commands()
        groups, templates, policies = (found or [] for found in ask_all(lists))
        names = {*self.groups, self.request.name}
        pieces = [piece for piece in [*groups, *templates, *policies] if piece["name"] in names]
        if any(piece.get("description") != self.mark for piece in pieces):
            return Found(state="foreign")
        if not pieces:
            return Found(state="absent")
        if len(pieces) < self.request.slices + 1 + self.several:
            return Found(state="broken", word="INCOMPLETE")
        return self._instances([each for each in ask(instances) or [] if each.get("labels") == self.request.labels])

    def _instances(self, instances: list[dict[str, Any]]) -> Found:
        wanted = self.request.slices * self.request.slice.hosts
        for each in instances:
            if each["status"] not in (*STARTING, "RUNNING"):
                return Found(state="broken", word=f"{each['name']} {each['status']}")
        ready = sum(each["status"] == "RUNNING" for each in instances)
        if ready < wanted:
            return Found(state="waiting", word=f"{ready} of {wanted} hosts run", granted=ready > 0)
        workers = []
        for i, group in enumerate(self.groups):
            own = [each for each in instances if re.fullmatch(rf"{group}-\w+", each["name"])]
            for j, each in enumerate(sorted(own, key=lambda each: each["name"])):
                workers.append(Worker(f"{i}.{j}", self._address(each), self._environment(i, instances)))
        return Found(state="ready", word="RUNNING", workers=workers)

    def _address(self, instance: dict[str, Any]) -> str:
        link = instance["networkInterfaces"][0]
        outside = (link.get("accessConfigs") or [{}])[0].get("natIP", "")
        return link["networkIP"] if self.request.internal_ips else outside or link["networkIP"]

    def _environment(self, slice: int, instances: list[dict[str, Any]]) -> dict[str, str]:
        """Within a slice the hosts find each other by themselves; several slices are told of each other."""
        if self.request.slices == 1:
            return {}
        first = min(
            (each for each in instances if each["name"].startswith(f"{self.groups[0]}-")), key=lambda e: e["name"]
        )
        return {
            "MEGASCALE_COORDINATOR_ADDRESS": f"{first['networkInterfaces'][0]['networkIP']}:{PORT}",
            "MEGASCALE_NUM_SLICES": str(self.request.slices),
            "MEGASCALE_SLICE_ID": str(slice),
        }

    def create_commands(self) -> list[list[str]]:
        request = self.request
        project, slash, family = request.image.partition("/")
        if not slash:
            raise UserError("--image: the compute route needs PROJECT/FAMILY of an image with the TPU's drivers")
        commands = []
        if self.several:
            commands.append(
                request.gcloud(
                    *["resource-policies", "create", "workload-policy", request.name, "--type=high-throughput"],
                    *[f"--accelerator-topology={request.slice.shape}", f"--region={region(request.zone)}"],
                    f"--description={self.mark}",
                    zone=False,
                )
            )
        flags = [f"--network={request.network}"] if request.network else []
        flags += ["--no-address"] if request.internal_ips else []
        if request.spot:
            flags += ["--provisioning-model=SPOT", "--instance-termination-action=DELETE"]
        if request.reservation:
            flags += ["--reservation-affinity=specific", f"--reservation={request.reservation}"]
        labels = ",".join(f"{name}={value}" for name, value in request.labels.items())
        commands.append(
            request.gcloud(
                *["instance-templates", "create", request.name, f"--machine-type={request.slice.machine_type}"],
                *["--maintenance-policy=TERMINATE", f"--image-project={project}", f"--image-family={family}"],
                *["--boot-disk-size=100GB", "--scopes=cloud-platform", f"--labels={labels}"],
                *[f"--metadata=ssh-keys={request.login}", f"--description={self.mark}", *flags],
                zone=False,
            )
        )
        policy = f"projects/{request.project}/regions/{region(request.zone)}/resourcePolicies/{request.name}"
        for group in self.groups:
            commands.append(
                request.gcloud(
                    *["instance-groups", "managed", "create", group, f"--size={request.slice.hosts}"],
                    *[f"--template={request.name}", f"--base-instance-name={group}"],
                    *["--default-action-on-vm-failure=do-nothing", f"--description={self.mark}"],
                    *([f"--workload-policy={policy}"] if self.several else []),
                )
            )
        return commands

    def delete_commands(self) -> list[list[str]]:
        request = self.request
        commands = [request.gcloud("instance-groups", "managed", "delete", group, "--quiet") for group in self.groups]
        commands.append(request.gcloud("instance-templates", "delete", request.name, "--quiet", zone=False))
        if self.several:
            where = f"--region={region(request.zone)}"
            commands.append(request.gcloud("resource-policies", "delete", request.name, where, "--quiet", zone=False))
        return commands
