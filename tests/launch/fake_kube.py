"""A local stand-in for a Kubernetes API with a JobSet controller, whose pods are local processes.

What it knows: create, get, list and delete of the few kinds below, logs (followed), JobSets with a failure policy, Jobs
with a pod failure policy, projected ConfigMaps, and $(NAME) in commands. It refuses fields that JobSet has not.
"""

import base64
import json
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

KINDS = {
    "api/v1": {"pods": "Pod", "configmaps": "ConfigMap"},
    "apis/jobset.x-k8s.io/v1alpha2": {"jobsets": "JobSet"},
}
JOBSET = "jobset.sigs.k8s.io"
FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {
        *{"coordinator", "failurePolicy", "managedBy", "network", "replicatedJobs", "startupPolicy", "successPolicy"},
        *{"suspend", "ttlSecondsAfterFinished", "volumeClaimPolicies"},
    },
    "spec.failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "spec.failurePolicy.rules": {
        *{"action", "name", "onJobFailureMessagePatterns", "onJobFailureReasons", "targetReplicatedJobs"}
    },
    "spec.network": {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"},
    "spec.replicatedJobs": {"dependsOn", "groupName", "name", "replicas", "template"},
}
"""JobSet v1alpha2's own fields; below replicatedJobs.template stands a Job of Kubernetes."""


def unknown_fields(value: Any, path: str = "") -> list[str]:
    if isinstance(value, list):
        return [found for each in value for found in unknown_fields(each, path)]
    if path not in FIELDS:
        return []
    found = [f"{path}.{name}" for name in value if name not in FIELDS[path]]
    return found + [each for name in value for each in unknown_fields(value[name], f"{path}.{name}".strip("."))]


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}  # by kind and name
        self.processes: dict[str, subprocess.Popen[bytes]] = {}  # by pod
        self.log: list[tuple[str, str]] = []
        self.lock = threading.RLock()
        self.open = True
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        threading.Thread(target=self.control, daemon=True).start()

    def close(self) -> None:
        self.open = False
        self.server.shutdown()
        self.server.server_close()
        for process in self.processes.values():
            process.kill()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [each for (found, _), each in self.objects.items() if found == kind]

    def pods(self, jobset: str) -> list[dict[str, Any]]:
        return [pod for pod in self.of("pods") if pod["metadata"]["labels"].get(f"{JOBSET}/jobset-name") == jobset]

    def create(self, kind: str, made: dict[str, Any]) -> Any:
        name = made["metadata"]["name"]
        if (kind, name) in self.objects:
            return 409, "AlreadyExists", f'{kind} "{name}" already exists'
        if kind == "jobsets" and (unknown := unknown_fields(made)):
            return 422, "Invalid", f"unknown fields: {unknown}"
        made["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": "default", "resourceVersion": "1"}
        self.objects[kind, name] = made
        if kind == "jobsets":
            made["status"] = {"restarts": 0}
            self.start(made)
        return made

    def start(self, jobset: dict[str, Any]) -> None:
        for work in jobset["spec"]["replicatedJobs"]:
            for i in range(work["replicas"]):
                for j in range(work["template"]["spec"]["parallelism"]):
                    self.start_pod(jobset["metadata"]["name"], work, i, j)

    def start_pod(self, jobset: str, work: dict[str, Any], i: int, j: int) -> None:
        spec = work["template"]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        name = f"{jobset}-{work['name']}-{i}-{j}-{uuid.uuid4().hex[:5]}"
        disk = self.folder / name
        disk.mkdir(parents=True)
        paths = {}
        for mount in container["volumeMounts"]:  # a container has its own root; here the path is another one
            paths[mount["mountPath"]] = str(disk / mount["name"])
            self.project(disk / mount["name"], next(v for v in spec["volumes"] if v["name"] == mount["name"]))
        given = {each["name"]: each["value"] for each in container["env"]}
        environment = {**given, "JOB_COMPLETION_INDEX": str(j)}
        words = [expand(word, environment) for word in [*container["command"], *container["args"]]]
        environment |= {name: paths.get(value, value) for name, value in given.items()}
        with open(disk / "log", "wb") as log:
            self.processes[name] = subprocess.Popen(
                words,
                env={**os.environ, **environment, "WHO": f"{i}.{j}", "TMPDIR": str(disk)},
                cwd="/",
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        index = {f"{JOBSET}/job-index": str(i), "batch.kubernetes.io/job-completion-index": str(j)}
        self.objects["pods", name] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "labels": {f"{JOBSET}/jobset-name": jobset, **index}},
            "spec": {**spec, "policy": work["template"]["spec"].get("podFailurePolicy", {"rules": []})},
            "status": {
                "phase": "Running",
                "containerStatuses": [{"name": container["name"], "state": {"running": {}}}],
            },
        }

    def project(self, folder: Path, volume: dict[str, Any]) -> None:
        folder.mkdir()
        for source in volume["projected"]["sources"]:
            found = self.objects["configmaps", source["configMap"]["name"]]
            for name, text in found.get("data", {}).items():
                (folder / name).write_text(text)
            for name, packed in found.get("binaryData", {}).items():
                (folder / name).write_bytes(base64.b64decode(packed))

    def control(self) -> None:
        """What the controllers and the kubelet do."""
        while self.open:
            time.sleep(0.05)
            with self.lock:
                for jobset in self.of("jobsets"):
                    if "terminalState" not in jobset["status"]:
                        self.look_after(jobset)

    def look_after(self, jobset: dict[str, Any]) -> None:
        pods, failed = self.pods(jobset["metadata"]["name"]), ""
        for pod in pods:
            status = self.processes[pod["metadata"]["name"]].poll()
            if status is None or pod["status"]["phase"] != "Running":
                continue
            status = 128 - status if status < 0 else status
            pod["status"]["phase"] = "Failed" if status else "Succeeded"
            ended = {"exitCode": status, "finishedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            pod["status"]["containerStatuses"][0]["state"] = {"terminated": ended}
            if status and not failed:
                rules = [rule["onExitCodes"]["values"] for rule in pod["spec"]["policy"]["rules"]]
                failed = "PodFailurePolicy" if any(status in values for values in rules) else "BackoffLimitExceeded"
        if failed:
            policy = jobset["spec"]["failurePolicy"]
            final = any(failed in rule["onJobFailureReasons"] for rule in policy.get("rules", []))
            self.end(pods)
            if final or jobset["status"]["restarts"] >= policy["maxRestarts"]:
                jobset["status"]["terminalState"] = "Failed"
            else:
                for pod in pods:
                    del self.objects["pods", pod["metadata"]["name"]]
                jobset["status"]["restarts"] += 1
                self.start(jobset)
        elif all(pod["status"]["phase"] == "Succeeded" for pod in pods):
            jobset["status"]["terminalState"] = "Completed"

    def end(self, pods: list[dict[str, Any]]) -> None:
        running = [self.processes[pod["metadata"]["name"]] for pod in pods]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, number)
            until = time.monotonic() + 2
            while time.monotonic() < until and any(process.poll() is None for process in running):
                time.sleep(0.02)

    def delete(self, kind: str, name: str) -> Any:
        if (kind, name) not in self.objects:
            return 404, "NotFound", f'{kind} "{name}" not found'
        if kind == "jobsets":
            pods = self.pods(name)
            self.end(pods)
            for pod in pods:
                del self.objects["pods", pod["metadata"]["name"]]
        return self.objects.pop((kind, name))

    def handle(self, method: str, path: str, query: dict[str, str], body: Any) -> Any:
        if path == "api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "apis":
            version = {"groupVersion": "jobset.x-k8s.io/v1alpha2", "version": "v1alpha2"}
            group = {"name": "jobset.x-k8s.io", "versions": [version], "preferredVersion": version}
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
        if path == "openapi/v3":
            return {"paths": {version: {"serverRelativeURL": f"/openapi/v3/{version}"} for version in KINDS}}
        if path.startswith("openapi/v3/"):
            return openapi(path.removeprefix("openapi/v3/"))
        if path in KINDS:
            verbs = ["create", "delete", "deletecollection", "get", "list", "watch"]
            resources = [
                {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
                for name, kind in KINDS[path].items()
            ]
            version = path.split("/", 1)[1]
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        self.log.append((method, path))
        match = re.fullmatch(r"(api/v1|apis/[^/]+/[^/]+)/namespaces/default/([a-z]+)(?:/([^/]+))?", path)
        if not match or match[2] not in KINDS.get(match[1], {}):
            return 404, "NotFound", f"no {path}"
        version, kind, name = match.groups()
        if method == "POST":
            return self.create(kind, body)
        if method == "DELETE":
            return self.delete(kind, name)
        if name is None:
            wanted = [term.split("=") for term in query.get("labelSelector", "").split(",") if term]
            names = [term.split("=")[1] for term in query.get("fieldSelector", "").split(",") if term]
            items = [
                each
                for each in self.of(kind)
                if all(each["metadata"].get("labels", {}).get(label) == value for label, value in wanted)
                and (not names or each["metadata"]["name"] in names)
            ]
            version = version.removeprefix("apis/").removeprefix("api/")
            return {"kind": f"{KINDS[match[1]][kind]}List", "apiVersion": version, "metadata": {}, "items": items}
        return self.objects.get((kind, name)) or (404, "NotFound", f'{kind} "{name}" not found')


def openapi(version: str) -> dict[str, Any]:
    """As much as tells kubectl that this server checks fields itself."""
    paths = {}
    for name, kind in KINDS[version].items():
        group = version.split("/")[1] if version.startswith("apis") else ""
        patch = {
            "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
            "responses": {},
            "x-kubernetes-group-version-kind": {"group": group, "version": version.rsplit("/", 1)[1], "kind": kind},
        }
        paths[f"/{version}/namespaces/{{namespace}}/{name}/{{name}}"] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.32"}, "paths": paths}


def expand(word: str, environment: dict[str, str]) -> str:
    """As Kubernetes does in a container's command: $(NAME) is a variable, $$ a dollar."""
    known = {f"$({name})": value for name, value in environment.items()}
    return re.sub(r"\$\$|\$\([^)]*\)", lambda found: "$" if found[0] == "$$" else known.get(found[0], found[0]), word)


def handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            if match := re.fullmatch(r"/api/v1/namespaces/default/pods/([^/]+)/log", url.path):
                return self.follow(match[1])
            with cluster.lock:
                known = json.loads(body) if body.startswith(b"{") else None
                answer, code = cluster.handle(self.command, url.path.strip("/"), query, known), 200
            if isinstance(answer, tuple):
                code, reason, message = answer
                answer = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
                answer |= {"reason": reason, "message": message}
            sent = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)
            return None

        def follow(self, pod: str) -> None:
            """The log until the pod ends."""
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Connection", "close")
            self.end_headers()
            with open(cluster.folder / pod / "log", "rb") as log:
                while True:
                    over = cluster.processes[pod].poll() is not None
                    self.wfile.write(log.read())
                    if over:
                        break
                    time.sleep(0.05)
            self.close_connection = True

        do_GET = do_POST = do_DELETE = answer

    return Handler
