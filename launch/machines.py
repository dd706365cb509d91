"""What a way of getting TPU machines must offer, and what it finds when it looks."""

import getpass
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from launch.tools import ToolError, run
from launch.tpus import Slice
from launch.workers import Worker

MARKS = ("launch-name", "launch-owner")  # labels on everything that a launch makes


@dataclass(frozen=True, kw_only=True)
class Request:
    """The machines that are wanted. ``owner`` and ``name`` together mark everything that is made."""

    name: str
    owner: str
    slice: Slice
    slices: int
    zone: str
    project: str = ""
    network: str = ""
    reservation: str = ""
    image: str = ""
    spot: bool = False
    internal_ips: bool = False
    login: str = ""  # USER:PUBLIC KEY, which the machines let in by ssh

    def gcloud(self, *words: str, zone: bool = True) -> list[str]:
        """A gcloud command for this project and zone."""
        where = [f"--zone={self.zone}"] if zone else []
        return ["gcloud", "compute", *words, *where, *([f"--project={self.project}"] if self.project else [])]

    @property
    def labels(self) -> dict[str, str]:
        return dict(zip(MARKS, (self.name, self.owner), strict=True))


@dataclass(frozen=True, kw_only=True)
class Found:
    """What there is under the request's name.

    ``state`` is absent, waiting, ready, broken (preempted, failed, half there: to be deleted and asked for anew) or
    foreign (somebody else's). ``word`` is the cloud's own word for it. ``failed``: it never came to life.
    ``granted``: some machines are there, and cost money, though not all.
    """

    state: str
    word: str = ""
    workers: Sequence[Worker] = ()
    failed: bool = False
    granted: bool = False


class Machines(Protocol):
    """A way of getting machines: Cloud TPU's queued resources, or Compute Engine's managed instance groups."""

    def __init__(self, request: Request) -> None: ...

    def look(self) -> Found:
        """What there is now."""

    def create_commands(self) -> list[list[str]]:
        """Ask for the machines; comes back before they are there."""

    def look_commands(self) -> list[list[str]]:
        """What ``look`` runs."""

    def delete_commands(self) -> list[list[str]]:
        """Delete everything of that name; comes back when it is gone."""


def owner() -> str:
    """Who launches, as a label: gcloud's account, or the login name where gcloud has none."""
    try:
        account = run(["gcloud", "config", "get", "account", "--quiet"]).decode().strip()
    except ToolError:
        account = ""
    return re.sub(r"[^a-z0-9-]+", "-", (account or getpass.getuser()).lower())[:60]
