#!/usr/bin/env python3
"""The few gcloud commands that a launch on queued resources uses, without gcloud's second to start.

`test_quick_gcloud_asks_for_the_same` holds it against the real one.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any


def call(method: str, path: str, body: Any = None) -> Any:
    url = os.environ["CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU"] + "v2/" + path
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method)) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"ERROR: (gcloud.{method}) {json.load(error)['error']['message']}")


def main(words: list[str]) -> None:
    flags = {word.partition("=")[0]: word.partition("=")[2] for word in words if word.startswith("--")}
    names = [word for word in words if not word.startswith("--")]
    if names[:2] == ["config", "get"]:
        return
    parent = f"projects/{os.environ['CLOUDSDK_CORE_PROJECT']}/locations/{flags['--zone']}"
    kind, action = names[2:4]
    if action == "list":
        collection = {"queued-resources": "queuedResources", "tpu-vm": "nodes"}[kind]
        print(json.dumps(call("GET", f"{parent}/{collection}").get(collection, [])))
    elif action == "delete":
        call("DELETE", f"{parent}/queuedResources/{names[4]}?force=true")
    elif action == "create":
        labels, metadata = (
            dict(item.split("=", 1) for item in flags[name].split(",")) for name in ("--labels", "--metadata")
        )
        node = {"acceleratorType": flags["--accelerator-type"], "runtimeVersion": flags["--runtime-version"]}
        network = {"enableExternalIps": "--internal-ips" not in flags, "network": flags.get("--network", "default")}
        spec = {"parent": parent, "node": {**node, "labels": labels, "metadata": metadata, "networkConfig": network}}
        spec["node"]["serviceAccount"] = {}
        if "--node-id" in flags:
            spec["nodeId"] = flags["--node-id"]
        else:
            several = {"nodeCount": int(flags["--node-count"]), "nodeIdPrefix": flags["--node-prefix"]}
            spec["multisliceParams"] = several
        body = {"tpu": {"nodeSpec": [spec]}, **({"spot": {}} if "--spot" in flags else {})}
        call("POST", f"{parent}/queuedResources?queuedResourceId={names[4]}", body)


if __name__ == "__main__":
    main(sys.argv[1:])
