"""Google Kubernetes Engine through kubectl: a JobSet on TPU slices or GPU nodes of a cluster that is there."""

import getpass
import json
import re
import shlex
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from launch import tpus
from launch.arguments import positive, refuse_what_would_be_lost, whole
from launch.errors import UserError
from launch.fits import refuse_unless_it_fits
from launch.interrupts import Stopped, interruptible
from launch.job import Job
from launch.jobset import Pool, code_maps, jobset
from launch.machines import MARKS
from launch.tools import ToolError, ask, pass_on, reading, run, say
from launch.workers import SETUP, Bundle

OPTIONS: Mapping[str, tuple[str | None, str]] = {
    "image": (None, "the container image: one with bash, tar and Python 3.11 or newer"),
    "topology": ("", "a TPU slice, as `plan` takes it: v5e:4x4"),
    "slices": ("1", "how many such slices"),
    "gpu": ("", "or GPU nodes, by GKE's name for them: nvidia-h100-80gb"),
    "gpus": ("8", "GPUs on each of them"),
    "hosts": ("1", "how many such nodes"),
    "spot": ("false", "nodes that can be taken away at any time"),
    "context": ("", "of kubectl; its current one where none is given"),
    "namespace": ("default", "of the cluster"),
    "service_account": ("", "Kubernetes' name of the account that reads and writes storage"),
    "setup": ("", "what to run on each host first; by default requirements go into .venv there"),
    "attempts": ("10", "how often to try in all"),
    "poll": ("5", "seconds between looks at the job"),
    "keep": ("false", "leave the JobSet, and with it its logs, when the job has ended"),
    "force": ("false", "launch although the plan says that it does not fit"),
}
POD = "jobset.sigs.k8s.io/jobset-name"


def render(job: Job, options: Mapping[str, str]) -> str:
    refuse_what_would_be_lost(job)
    launch = Launch(job, options)
    code = "\n".join(
        f"#   ConfigMap {each['metadata']['name']}, its {', '.join(each['binaryData'])}" for each in launch.maps
    )
    return f"""\
# Only where no JobSet of that name is there.
{shlex.join(launch.get)}
# The code, {len(launch.bundle.code)} bytes, SHA-256 {launch.bundle.digest}, as
{code}
# by {shlex.join([*launch.kubectl, "create", "-f", "-"])}
{shlex.join([*launch.kubectl, "create", "-f", "-"])} <<'END'
{_readable(launch.manifest)}
END
# Until it has ended:
{shlex.join(launch.get)}
{shlex.join(launch.pods)}
{shlex.join([*launch.kubectl, "logs", "--follow", "POD"])}
# At the end{", unless kept" if launch.keep else ""}:
{launch.deletion()}"""


def submit(job: Job, options: Mapping[str, str]) -> int:
    refuse_what_would_be_lost(job)
    launch = Launch(job, options)
    if launch.pool.tpu:
        force = options["force"] == "true"
        refuse_unless_it_fits(job.arguments, options["topology"], launch.pool.slices, force, say)
    with interruptible(launch.left, say) as interrupts:
        status, cleaned = 1, True
        try:
            launch.start()
            status = launch.follow()
        except Stopped as stopped:
            status = stopped.status
        except ToolError as error:
            say(str(error))
        finally:
            interrupts.cleaning = True
            if launch.mine and not (launch.keep and status < 128):
                try:
                    launch.delete()
                except ToolError as error:
                    say(f"{error}\n{launch.left()}")
                    cleaned = False
    return status if cleaned else status or 1


def status(job: Job, options: Mapping[str, str]) -> str:
    launch = Launch(job, options)
    found = launch.look()
    if not found:
        return f"{job.name}: absent"
    known = found.get("status", {})
    pods = [pod.get("status", {}).get("phase", "?") for pod in ask(launch.pods)["items"]]
    counts = ", ".join(f"{pods.count(phase)} {phase}" for phase in sorted(set(pods)))
    state = known.get("terminalState") or "not ended"
    return f"{job.name}: {state}, {known.get('restarts', 0)} restarts; pods: {counts or 'none'}"


def logs(job: Job, options: Mapping[str, str]) -> int:
    launch = Launch(job, options)
    if not launch.look():
        say(f"{job.name}: there is no such JobSet")
        return 1
    return launch.follow()


def stop(job: Job, options: Mapping[str, str]) -> int:
    launch = Launch(job, options)
    if launch.look():
        launch.delete()
    else:
        say(f"{job.name}: there is nothing to stop")
    return 0


class Launch:
    """One JobSet."""

    def __init__(self, job: Job, options: Mapping[str, str]) -> None:
        if bool(options["topology"]) == bool(options["gpu"]):
            raise UserError("--topology or --gpu: give one of them, for TPU slices or for GPU nodes")
        self.pool = Pool(
            tpu=tpus.parse(options["topology"]) if options["topology"] else None,
            slices=whole(options, "slices") if options["topology"] else 1,
            gpu=options["gpu"],
            gpus=whole(options, "gpus"),
            hosts=whole(options, "hosts"),
            spot=options["spot"] == "true",
        )
        self.job, self.poll, self.keep = job, positive(options, "poll"), options["keep"] == "true"
        person = re.sub(r"[^a-z0-9]+", "-", getpass.getuser().lower()).strip("-")[:60] or "nobody"
        self.labels = dict(zip(MARKS, (job.name, person), strict=True))
        setup = options["setup"] or (SETUP if self.pool.tpu else SETUP.replace("[tpu,", "[cuda,"))
        self.bundle = Bundle.of(job.arguments, setup)
        self.maps = code_maps(job, self.bundle, self.labels)
        self.manifest = jobset(
            *(job, self.bundle, self.pool, self.labels, options["image"]),
            attempts=whole(options, "attempts"),
            account=options["service_account"],
        )
        context = [f"--context={options['context']}"] if options["context"] else []
        self.kubectl = ["kubectl", *context, f"--namespace={options['namespace']}"]
        self.get = [*self.kubectl, "get", "jobset", job.name, "--ignore-not-found", "--output=json"]
        self.pods = [*self.kubectl, "get", "pods", f"--selector={POD}={job.name}", "--output=json"]
        self.mine = False
        self.readers: dict[str, threading.Thread] = {}
        self.ends: list[tuple[str, int]] = []  # of the newest attempt that has any: when, and with what

    def look(self) -> dict[str, Any] | None:
        """The JobSet of this name; UserError where it is somebody else's."""
        found: dict[str, Any] | None = ask(self.get)
        labels = (found or {}).get("metadata", {}).get("labels", {})
        if found and {mark: labels.get(mark) for mark in MARKS} != self.labels:
            raise UserError(f"--name: a JobSet {self.job.name} is there that this launch did not make")
        return found

    def start(self) -> None:
        """Make the JobSet, or find it."""
        found = self.look()
        if found:
            same = found["metadata"].get("annotations", {}).get("launch-id") == self.bundle.id
            ended = found.get("status", {}).get("terminalState")
            if not same and not ended:
                raise UserError(
                    f"{self.job.name} runs with other code or other arguments; stop it first, or take another --name"
                )
            self.mine = True
            if same and ended != "Failed":
                say(f"{self.job.name} is there already: going on with it")
                return
            self.delete()
        self.mine = True
        run(self._delete_maps())  # of a launch that was cut short
        say(f"making JobSet {self.job.name}; the code is SHA-256 {self.bundle.digest[:12]}")
        for each in [*self.maps, self.manifest]:
            run([*self.kubectl, "create", "-f", "-"], stdin=json.dumps(each).encode())

    def follow(self) -> int:
        """Print what every pod prints until the JobSet has ended; 0, or the exit status of the last attempt."""
        restarts = 0
        while True:
            found = self.look()
            if found is None:
                raise ToolError(f"{self.job.name} was deleted by someone else")
            self._read_pods()
            known = found.get("status", {})
            if known.get("restarts", 0) > restarts:
                restarts = known["restarts"]
                say(f"{self.job.name}: restart {restarts}")
            if known.get("terminalState"):
                self._read_pods()
                for reader in self.readers.values():
                    reader.join(timeout=10.0)
                say(f"{self.job.name}: {known['terminalState']}")
                if known["terminalState"] == "Completed":
                    return 0
                return decisive(self.ends)
            time.sleep(self.poll)

    def _read_pods(self) -> None:
        ends = []
        for pod in ask(self.pods)["items"]:
            name, labels = pod["metadata"]["name"], pod["metadata"].get("labels", {})
            for container in pod.get("status", {}).get("containerStatuses", []):
                if ended := container.get("state", {}).get("terminated"):
                    ends.append((ended.get("finishedAt", ""), ended["exitCode"]))
            if name in self.readers or pod.get("status", {}).get("phase") == "Pending":
                continue
            place = [
                labels.get(f"{kind}-index", "0")
                for kind in ("jobset.sigs.k8s.io/job", "batch.kubernetes.io/job-completion")
            ]
            self.readers[name] = threading.Thread(target=self._print, args=(name, ".".join(place)), daemon=True)
            self.readers[name].start()
        self.ends = ends or self.ends  # pods of earlier attempts are gone

    def _print(self, pod: str, place: str) -> None:
        process = reading([*self.kubectl, "logs", "--follow", pod])
        assert process.stdout is not None
        for line in process.stdout:
            pass_on(place, line)
        process.wait()

    def delete(self) -> None:
        """Delete the JobSet and the code, if they are this launch's; its pods have a minute to save."""
        if self.look():
            run([*self.kubectl, "delete", "jobset", self.job.name, "--ignore-not-found"])
        run(self._delete_maps())
        self.mine = False

    def _delete_maps(self) -> list[str]:
        selector = ",".join(f"{name}={value}" for name, value in self.labels.items())
        return [*self.kubectl, "delete", "configmaps", f"--selector={selector}"]

    def deletion(self) -> str:
        jobset = [*self.kubectl, "delete", "jobset", self.job.name]
        return f"{shlex.join(jobset)}\n{shlex.join(self._delete_maps())}"

    def left(self) -> str:
        if not self.mine:
            return "nothing is left behind"
        return f"JobSet {self.job.name} may still be there; this deletes it:\n{self.deletion()}"


def decisive(ends: Iterable[tuple[str, int]]) -> int:
    """The exit status of an attempt whose pods ended so: 2 of any, else the first failure, from which others follow.

    Within a second, all that times are told in, a signal's comes before what its peers made of it.
    """
    failures = sorted((when, -status) for when, status in ends if status)
    if any(status == -2 for _, status in failures):
        return 2
    return -failures[0][1] if failures else 1


def _readable(manifest: Mapping[str, Any]) -> str:
    """As YAML where PyYAML is installed, else as JSON; kubectl takes both."""
    try:
        import yaml
    except ImportError:
        return json.dumps(manifest, indent=2)
    return str(yaml.safe_dump(dict(manifest), sort_keys=False, width=1000)).rstrip()
