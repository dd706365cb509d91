"""One job on TPU machines, from asking for them to deleting them."""

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launch.attempts import LOST, Limits, attempts
from launch.errors import UserError
from launch.interrupts import Stopped, interruptible
from launch.machines import Found, Machines, Request
from launch.tools import ToolError, run
from launch.workers import Bundle, Crew, Ssh, Unreached

STARTS = 900.0  # seconds from the first host being there to all of them
LOOKS = 4  # looks at the machines that may fail in a row: gcloud, the network or the cloud has its moments


class Spent(Exception):
    """The cap on chip-hours is reached."""


class Meter:
    """Seconds for which machines were held, by the time between ready and deleted."""

    def __init__(self) -> None:
        self._before, self._since = 0.0, 0.0

    def start(self) -> None:
        self._since = self._since or time.monotonic()

    def stop(self) -> None:
        self._before, self._since = self.seconds(), 0.0

    def seconds(self) -> float:
        return self._before + (time.monotonic() - self._since if self._since else 0.0)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How long to wait, how often to look, and what stays at the end."""

    limits: Limits
    wait: float  # hours
    poll: float  # seconds
    keep: bool


class Session:
    def __init__(
        self, request: Request, machines: Machines, bundle: Bundle, ssh: Ssh, terms: Terms, say: Callable[[str], None]
    ) -> None:
        self.request, self.machines, self.bundle, self.terms, self.say = request, machines, bundle, terms, say
        self.crew = Crew(request.name, ssh, say)
        self.meter = Meter()
        self.mine = False  # whether something may be there that is this launch's to delete
        self.failures = 0  # requests in a row that came to nothing

    def run(self) -> int:
        """Attempts until the job has ended, then the clean-up; the job's exit status."""
        with interruptible(self.left, self.say) as interrupts:
            try:
                status = attempts(self.attempt, self.terms.limits, self.say, clock=self.meter.seconds)
            except Stopped as stopped:
                status = stopped.status
                self.end_job()
            except ToolError as error:
                self.say(str(error))
                status = 1
            finally:
                interrupts.cleaning = True
                cleaned = self.clean_up()
        return status if cleaned else status or 1

    def attempt(self) -> int:
        """One attempt, from whatever is there now; LOST where the machines went away or did not come to life."""
        try:
            found = self.obtain()
            if found.state != "ready":
                return LOST if self.failures < 2 else 1
            self.meter.start()
            self.crew.workers = found.workers
            self.say(f"{len(found.workers)} workers: sending the code, SHA-256 {self.bundle.digest[:12]}")
            try:
                self.crew.begin(self.bundle)
            except UserError:  # it runs something else, which is not to be ended
                self.mine = False
                raise
            status = self.crew.follow(self.trouble, self.terms.poll)
        except Unreached as error:
            self.say(str(error))
            self.delete()  # machines that do not answer are not asked again
            return LOST
        except Spent:
            self.say(f"{self.hours():.3g} of {self.terms.limits.chip_hours:g} chip-hours are used")
            self.end_job()
            return 143
        if status == LOST:
            self.after_loss()
        return status

    def after_loss(self) -> None:
        """Delete what is left of machines that went away; what somebody else deleted is not asked for again."""
        found = self.look()
        if found.state == "waiting":  # half deleted, it may be
            time.sleep(self.terms.poll)
            found = self.look()
        if found.state == "absent":
            self.mine = False
            raise ToolError(f"{self.request.name} was deleted by someone else; it is not asked for again")
        if found.state != "ready":
            self.delete()

    def obtain(self) -> Found:
        """Machines that are ready: those of this name that are there, or new ones."""
        found = self.look()
        if found.state == "broken":
            self.mine = True
            self.say(f"{self.request.name} is {found.word}: deleting it, to ask anew")
            self.delete()
            found = self.look()
        if found.state == "absent":
            self.mine = True
            self.say(f"asking for {self.request.slices} x {self.request.slice} in {self.request.zone}")
            for command in self.machines.create_commands():
                run(command)
        elif not self.mine:
            self.mine = True
            self.say(f"{self.request.name} is there already: going on with it")
        return self.await_ready()

    def await_ready(self) -> Found:
        begun, first, word = time.monotonic(), 0.0, ""
        while True:
            found = self.look()
            waited = time.monotonic() - begun
            if found.word != word:
                word = found.word
                self.say(f"{self.request.name}: {word} after {waited:.0f} s")
            if found.state == "ready":
                self.failures = 0
                return found
            if found.state != "waiting":
                self.failures = self.failures + 1 if found.failed else 0
                self.delete()
                return found
            if found.granted:
                self.meter.start()
                first = first or waited
                if waited - first > STARTS:
                    raise ToolError(f"{self.request.name}: {word}, {STARTS / 60:.0f} minutes after the first was there")
            if waited > 3600 * self.terms.wait:
                raise ToolError(f"no machines within {self.terms.wait:g} hours (--wait)")
            time.sleep(self.terms.poll)

    def trouble(self) -> str:
        """Why the machines cannot go on with the job; empty where they can."""
        if self.hours() >= self.terms.limits.chip_hours:
            raise Spent
        found = self.look()
        return "" if found.state == "ready" else f"{self.request.name} is {found.word or found.state}"

    def look(self) -> Found:
        """What is there now; UserError where it is somebody else's."""
        for left in reversed(range(LOOKS)):
            try:
                found = self.machines.look()
                break
            except ToolError as error:
                if not left:
                    raise
                self.say(f"{error}; looking again")
                time.sleep(self.terms.poll)
        if found.state == "foreign":
            self.mine = False
            raise UserError(f"--name: a {self.request.name} is there that this launch did not make; take another name")
        return found

    def hours(self) -> float:
        """Chip-hours used so far."""
        return self.meter.seconds() / 3600 * self.terms.limits.chips

    def end_job(self) -> None:
        """Ask the job to save a checkpoint and end."""
        if self.crew.workers:
            self.say("asking the job to save and end")
            try:
                self.crew.stop()
            except Unreached as error:
                self.say(str(error))

    def delete(self) -> None:
        """Delete what is there, if it is this launch's, and nothing else."""
        if self.look().state != "absent":
            for command in self.machines.delete_commands():
                try:
                    run(command)
                except ToolError as error:
                    if "not found" not in str(error).lower().replace("_", " "):
                        raise
        if self.crew.following:
            self.crew.following.close()
        self.crew.workers = ()
        self.meter.stop()
        self.mine = False

    def clean_up(self) -> bool:
        """Whether nothing is left, or what is left was to be kept."""
        if not self.mine:
            return True
        if self.terms.keep:
            self.say(f"{self.request.name} is kept (--keep); this deletes it:\n{self.deletion()}")
            return True
        self.say(f"deleting {self.request.name}")
        try:
            self.delete()
        except (ToolError, UserError) as error:
            self.say(f"{error}\n{self.left()}")
            return False
        return True

    def left(self) -> str:
        """What leaving at once leaves behind."""
        if not self.mine:
            return "nothing is left behind"
        return f"{self.request.name} may still be there, and cost money; this deletes it:\n{self.deletion()}"

    def deletion(self) -> str:
        return script(self.machines.delete_commands())


def script(commands: Sequence[Sequence[str]]) -> str:
    """Commands as a shell reads them, one a line."""
    return "\n".join(shlex.join(command) for command in commands)
