"""A local stand-in for Cloud TPU's interface (https://cloud.google.com/tpu/docs/reference/rest): queued resources.

The states that a request goes through are scripted: it takes the next one each time that it is looked at. Nodes of
an active request have an sshd for each of their workers.
"""

import json
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.launch.fake_machines import Machine

GRANTED = ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
HOSTS = {"v5litepod-4": 1, "v5litepod-16": 2}  # two hosts stand for the four of a real v5litepod-16


class Cloud:
    """``scripts`` holds the states of each creation in turn; the last one serves all that follow."""

    def __init__(self, folder: Path, scripts: list[list[str]]) -> None:
        self.folder, self.scripts = folder, scripts
        self.requests: dict[str, dict[str, Any]] = {}
        self.states: dict[str, list[str]] = {}  # still to come
        self.nodes: dict[str, dict[str, Any]] = {}
        self.machines: dict[str, list[Machine]] = {}  # by node
        self.log: list[tuple[str, str, Any]] = []
        self.made = 0
        self.delay = 0.0  # seconds that a creation or deletion takes to be answered
        self.refuse = ""  # why creations are refused
        self.silent: set[str] = set()  # workers that never come up
        self.lock = threading.RLock()
        self.port = free_port()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        for name in list(self.machines):
            self.off(name)

    def calls(self, method: str) -> list[str]:
        """The paths that were called with a method, in order."""
        return [path for found, path, _ in self.log if found == method]

    def handle(self, method: str, path: str, query: dict[str, str], body: Any) -> Any:
        """The answer as JSON, or an error's number and word."""
        self.log.append((method, path, body))
        if match := re.fullmatch(r"v2/(projects/\w+/locations/[\w-]+)/(queuedResources|nodes)", path):
            parent, kind = match.groups()
            if method == "POST":
                time.sleep(self.delay)
                if self.refuse:
                    return 429, self.refuse
                return self.create(f"{parent}/queuedResources/{query['queuedResourceId']}", body)
            if kind == "nodes":
                return {"nodes": list(self.nodes.values())}
            for name in list(self.requests):
                self.advance(name)
            return {"queuedResources": list(self.requests.values())}
        name = path.removeprefix("v2/")
        if "/operations/" in name:
            return operation(name)
        if name not in self.requests:
            return 404, "NOT_FOUND"
        if method == "DELETE":
            time.sleep(self.delay)
            return self.delete(name)
        return self.requests[name]

    def create(self, name: str, body: dict[str, Any]) -> Any:
        if name in self.requests:
            return 409, "ALREADY_EXISTS"
        self.requests[name] = {**body, "name": name, "state": {"state": "CREATING"}}
        self.states[name] = list(self.scripts[min(self.made, len(self.scripts) - 1)])
        self.made += 1
        return operation(f"{name.partition('/queuedResources')[0]}/operations/create-{self.made}")

    def advance(self, name: str) -> None:
        if self.states.get(name):
            word = self.states[name].pop(0)
            self.requests[name]["state"] = {"state": word}
            if word == "FAILED":
                self.requests[name]["state"]["failedData"] = {"error": {"code": 8, "message": "no such\nluck"}}
            if word == "ACTIVE":
                self.grant(name)

    def grant(self, name: str) -> None:
        (spec,) = self.requests[name]["tpu"]["nodeSpec"]
        several = spec.get("multisliceParams")
        prefix = (several or {}).get("nodeIdPrefix", "")
        names = [f"{prefix}-{i}" for i in range(several["nodeCount"])] if several else [spec["nodeId"]]
        for i, node in enumerate(names):
            machines = []
            for j in range(HOSTS[spec["node"]["acceleratorType"]]):
                disk = self.folder / f"{self.made}-{i}.{j}"
                machines.append(
                    Machine(disk, f"127.0.{i + 1}.{j + 1}", self.port, spec["node"]["metadata"]["ssh-keys"])
                )
                if f"{i}.{j}" in self.silent:
                    machines[-1].off()
            ends = [
                {"ipAddress": f"10.0.{i}.{j}", "port": 8470, "accessConfig": {"externalIp": machine.address}}
                for j, machine in enumerate(machines)
            ]
            full = f"{name.partition('/queuedResources')[0]}/nodes/{node}"
            known = {"name": full, "state": "READY", "queuedResource": name, "networkEndpoints": ends}
            self.nodes[full] = {**spec["node"], **known}
            self.machines[full] = machines

    def preempt(self, node: int = 0) -> None:
        """Take one slice away, as happens to spot machines; the others of its request go with it."""
        with self.lock:
            self.off(list(self.nodes)[node])
            for each in self.nodes.values():
                each["state"] = "PREEMPTED"
            for request in self.requests.values():
                request["state"] = {"state": "SUSPENDED"}

    def off(self, node: str) -> None:
        for machine in self.machines.pop(node, []):
            machine.off()

    def delete(self, name: str) -> Any:
        for node in [node for node, known in self.nodes.items() if known["queuedResource"] == name]:
            self.off(node)
            del self.nodes[node]
        del self.requests[name]
        return operation(f"{name.partition('/queuedResources')[0]}/operations/delete-{self.made}")


def operation(name: str) -> dict[str, Any]:
    return {"name": name, "done": True, "response": {"@type": "type.googleapis.com/google.protobuf.Empty"}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def handler(cloud: Any) -> type[BaseHTTPRequestHandler]:
    """HTTP in front of ``cloud.handle``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            with cloud.lock:
                answer, code = cloud.handle(self.command, url.path.lstrip("/"), query, body), 200
            if isinstance(answer, tuple):
                code, word = answer
                answer = {"error": {"code": code, "status": word, "message": f"{word}: {url.path}"}}
            sent = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_POST = do_DELETE = answer

    return Handler
