"""A local stand-in for Compute Engine's interface: policies, templates, managed groups, whose instances run sshd.

https://cloud.google.com/compute/docs/reference/rest/v1
"""

import re
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.launch.fake_machines import Machine
from tests.launch.fake_tpu import free_port, handler

NAMES = {"resourcePolicies", "instanceTemplates", "instanceGroupManagers", "instances"}


class Compute:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[str, dict[str, Any]] = {}  # by path
        self.machines: dict[str, Machine] = {}  # by the path of the instance
        self.log: list[tuple[str, str, Any]] = []
        self.lock = threading.RLock()
        self.port = free_port()
        self.made = 0
        self.last = ("", "")  # kind and target of the last operation
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/compute/v1/"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        for machine in self.machines.values():
            machine.off()

    def calls(self, method: str) -> list[str]:
        """What was created or deleted, by kind and name."""
        found = []
        for each, path, body in self.log:
            if (
                each == method
                and path.rsplit("/", 1 if method == "POST" else 2)[-1 if method == "POST" else -2] in NAMES
            ):
                found.append(
                    f"{path.rsplit('/', 1)[1]}/{body['name']}" if method == "POST" else "/".join(path.split("/")[-2:])
                )
        return found

    def handle(self, method: str, path: str, query: dict[str, str], body: Any) -> Any:
        path = path.removeprefix("compute/v1/")
        self.log.append((method, path, body))
        kind = path.rsplit("/", 1)[-1]
        if method == "GET":
            if path in self.objects:
                return self.objects[path]
            if match := re.fullmatch(r"projects/\w+/aggregated/(\w+)", path):
                scopes: dict[str, Any] = {}
                for at, each in self.objects.items():
                    if at.split("/")[-2] == match[1]:
                        scope = "/".join(at.split("/")[2:-2])
                        scopes.setdefault(scope, {match[1]: []})[match[1]].append(each)
                return {"items": scopes}
            if kind in NAMES:
                return {"items": [each for at, each in self.objects.items() if at.rsplit("/", 1)[0] == path]}
            if match := re.fullmatch(r"projects/\w+/(zones|regions)/([\w-]+)", path):
                return {"name": match[2], "selfLink": self.url + path, "status": "UP"}
            if kind in ("instanceGroups", "autoscalers"):
                return {"items": []}
            if "/images/family/" in path:
                return {"name": "i", "selfLink": f"{self.url}projects/proj/global/images/i"}
            if "/operations/" in path:
                return self.operation(path.rsplit("/operations/")[0])
            return 404, "notFound"
        if method == "POST" and path.endswith("/wait"):
            return self.operation(path.rsplit("/operations/")[0])
        if method == "POST" and kind in NAMES:
            at = f"{path}/{body['name']}"
            if at in self.objects:
                return 409, "alreadyExists"
            scope = path.rsplit("/", 1)[0]
            where = {"zones": "zone", "regions": "region"}.get(scope.split("/")[-2], "scope")
            self.objects[at] = {**body, "selfLink": self.url + at, where: self.url + scope}
            self.last = ("insert", at)
            if kind == "instanceGroupManagers":
                self.grant(path.rsplit("/", 1)[0], body)
        elif method == "DELETE" and path in self.objects:
            self.delete(path)
            self.last = ("delete", path)
        else:
            return 404, "notFound"
        return self.operation(re.match(r"projects/\w+/(?:\w+/[\w-]+|global)(?=/)", path)[0])  # type: ignore[index]

    def operation(self, scope: str) -> dict[str, Any]:
        """One that has ended: the last thing that was asked for."""
        where = scope.split("/")[2:]
        place = {where[0][:-1]: self.url + scope} if len(where) == 2 else {}
        kind, target = self.last
        known = {"kind": "compute#operation", "name": "o", "status": "DONE", "progress": 100, **place}
        links = {"selfLink": f"{self.url}{scope}/operations/o", "targetLink": self.url + target}
        return {**known, **links, "operationType": kind}

    def grant(self, zone: str, group: dict[str, Any]) -> None:
        template = self.objects[
            f"{zone.split('/zones')[0]}/global/instanceTemplates/{group['instanceTemplate'].rsplit('/')[-1]}"
        ]
        about = template["properties"]
        keys = {item["key"]: item["value"] for item in about["metadata"]["items"]}["ssh-keys"]
        slice = int(group["name"].rsplit("-", 1)[1])
        for i in range(group["targetSize"]):
            name = f"{group['baseInstanceName']}-{'zyxw'[i]}{self.made}"
            self.made += 1
            machine = Machine(self.folder / f"{self.made}-{slice}.{i}", f"127.0.{slice + 1}.{i + 1}", self.port, keys)
            link = {"networkIP": f"10.0.{slice}.{i}", "accessConfigs": [{"natIP": machine.address}]}
            at = f"{zone}/instances/{name}"
            self.machines[at] = machine
            self.objects[at] = {
                "name": name,
                "status": "RUNNING",
                "labels": about.get("labels", {}),
                "networkInterfaces": [link],
                "zone": self.url + zone,
                "selfLink": self.url + at,
                "group": group["name"],
            }

    def delete(self, path: str) -> None:
        gone = self.objects.pop(path)
        for at in [at for at, each in self.objects.items() if each.get("group") == gone["name"]]:
            del self.objects[at]
            if at in self.machines:
                self.machines.pop(at).off()
