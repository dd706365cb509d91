"""Cloud TPU machines through the user's own gcloud: ask, wait, copy the code, run, try again, delete."""

import fcntl
import getpass
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from launch import tpus
from launch.arguments import positive, refuse_what_would_be_lost, whole
from launch.attempts import Limits
from launch.compute import InstanceGroups
from launch.errors import UserError
from launch.fits import refuse_unless_it_fits
from launch.job import Job
from launch.machines import Machines, Request, owner
from launch.queued import QueuedResource
from launch.session import Session, Terms, script
from launch.tools import run, say
from launch.workers import SETUP, Bundle, Ssh, Unreached

OPTIONS: Mapping[str, tuple[str | None, str]] = {
    "topology": (None, "one slice, as `plan` takes it: v5e:4x4, v5p:2x2x4, tpu7x:2x2x2"),
    "zone": (None, "the zone that the machines are in, as us-east5-a"),
    "project": ("", "the project that pays; gcloud's own where none is given"),
    "slices": ("1", "how many such slices"),
    "spot": ("false", "cheaper machines that can be taken away at any time"),
    "reservation": ("", "queued: default, or the project that shares one; compute: the reservation's name"),
    "network": ("", "the network of the machines"),
    "internal_ips": ("false", "machines without outside addresses; ssh goes to the inside ones"),
    "route": ("auto", "queued (Cloud TPU), compute (Compute Engine), auto: compute where Cloud TPU has no such TPU"),
    "image": ("", "queued: another runtime version than the usual one; compute: PROJECT/FAMILY"),
    "user": ("", "login name on the machines; by default the one here"),
    "ssh": ("ssh", "the ssh command, with flags of your own (-J HOST, -F FILE)"),
    "ssh_key": ("~/.ssh/google_compute_engine", "the key, made where it is missing; its .pub goes to the machines"),
    "setup": ("", "what to run on each machine first; by default requirements go into .venv there"),
    "wait": ("24", "hours to wait for machines"),
    "attempts": ("20", "how often to try in all, after preemption"),
    "backoff": ("10", "seconds before the second attempt; twice that before the next, up to 10 minutes"),
    "chip_hours": ("inf", "the most to use in this launch"),
    "patience": ("300", "seconds that a worker may not answer before it counts as lost"),
    "poll": ("30", "seconds between looks at the machines"),
    "keep": ("false", "leave the machines when the job has ended"),
    "force": ("false", "launch although the plan says that it does not fit"),
}


def render(job: Job, options: Mapping[str, str]) -> str:
    if options["keep"] != "true":
        refuse_what_would_be_lost(job, ", or --keep")
    session = _session(job, options)
    bundle, crew = session.bundle, session.crew
    arguments = shlex.join(job.arguments)
    key = Path(session.crew.ssh.key)
    make_key = [] if key.exists() else [_key_command(key)]
    worker = crew.ssh.to("ADDRESS", f"{crew.send()} && {crew.remote('begin', bundle.id, bundle.digest)}")
    return f"""\
# Ask for the machines, unless they are there.
{script(session.machines.look_commands())}
{script([*make_key, *session.machines.create_commands()])}
# Look every {session.terms.poll:g} s until all workers are there; they give the ADDRESS of each.
{script(session.machines.look_commands())}
# Send every worker a directory new/ with:
#   worker.py     launch/worker.py
#   code.tar.gz   the code of this checkout, {len(bundle.code)} bytes, SHA-256 {bundle.digest}
#   arguments     of python -m transformer, a NUL after each, as made by
printf '%s\\0' {arguments} > new/arguments
cat > new/setup <<'END'
{bundle.setup.rstrip()}
END
tar -cf - -C new . | {shlex.join(worker)}
# Start it on every worker, and follow what it prints.
{script([crew.ssh.to("ADDRESS", crew.remote("start", bundle.id))])}
{script([crew.ssh.to("ADDRESS", crew.remote("follow", "0"))])}
# At the end{", unless kept" if session.terms.keep else ""}:
{session.deletion()}"""


def submit(job: Job, options: Mapping[str, str]) -> int:
    if options["keep"] != "true":
        refuse_what_would_be_lost(job, ", or --keep")
    _make_key(Path(options["ssh_key"]).expanduser())
    session = _session(job, options)
    slices = session.request.slices
    refuse_unless_it_fits(job.arguments, options["topology"], slices, options["force"] == "true", say)
    return session.run()


def _make_key(key: Path) -> None:
    """Unless it is there; one launch after the other, as those of several arms begin at once."""
    key.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(key.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if not key.exists():
            run(_key_command(key))
    finally:
        os.close(folder)


def status(job: Job, options: Mapping[str, str]) -> str:
    session = _session(job, options)
    found = session.look()
    line = f"{job.name}: {found.word or found.state}"
    if found.state == "ready":
        session.crew.workers = found.workers
        try:
            states = session.crew.each(session.crew.remote("state"))
        except Unreached as error:
            return f"{line}; {error}"
        line += f", {len(states)} workers; job: {', '.join(sorted({each or 'none' for each in states.values()}))}"
    return line


def logs(job: Job, options: Mapping[str, str]) -> int:
    session = _session(job, options)
    found = session.look()
    if found.state != "ready":
        say(f"{job.name} is {found.word or found.state}: there is nobody to ask for what was printed")
        return 1
    session.crew.workers = found.workers
    return session.crew.follow(session.trouble, session.terms.poll)


def stop(job: Job, options: Mapping[str, str]) -> int:
    session = _session(job, options)
    found = session.look()
    if found.state == "absent":
        say(f"{job.name}: there is nothing to stop")
        return 0
    session.crew.workers, session.mine = found.workers, True
    session.end_job()
    return 0 if session.clean_up() else 1


def _session(job: Job, options: Mapping[str, str]) -> Session:
    piece = tpus.parse(options["topology"])
    slices = whole(options, "slices")
    route = options["route"]
    if route not in ("auto", "queued", "compute"):
        raise UserError(f"--route: {route!r} is not one of auto, queued, compute")
    if route == "auto":
        route = "queued" if piece.about.accelerator else "compute"
    zone, project = tpus.zone(options["zone"]), options["project"]
    if route == "compute" and not project:  # a workload policy is named with it
        project = run(["gcloud", "config", "get", "project", "--quiet"]).decode().strip()
    user = options["user"] or getpass.getuser()
    key = Path(options["ssh_key"]).expanduser()
    public = key.with_name(key.name + ".pub")
    request = Request(
        name=job.name,
        owner=owner(),
        slice=piece,
        slices=slices,
        zone=zone,
        project=project,
        network=options["network"],
        reservation=options["reservation"],
        image=options["image"],
        spot=options["spot"] == "true",
        internal_ips=options["internal_ips"] == "true",
        login=f"{user}:{public.read_text().strip() if public.exists() else 'KEY'}",
    )
    machines: Machines = QueuedResource(request) if route == "queued" else InstanceGroups(request)
    terms = Terms(
        limits=Limits(
            attempts=whole(options, "attempts"),
            chip_hours=positive(options, "chip_hours"),
            chips=piece.chips * slices,
            pause=positive(options, "backoff"),
        ),
        wait=positive(options, "wait"),
        poll=positive(options, "poll"),
        keep=options["keep"] == "true",
    )
    ssh = Ssh(
        command=tuple(shlex.split(options["ssh"])), key=str(key), user=user, patience=positive(options, "patience")
    )
    return Session(request, machines, Bundle.of(job.arguments, options["setup"] or SETUP), ssh, terms, say)


def _key_command(key: Path) -> list[str]:
    return ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
