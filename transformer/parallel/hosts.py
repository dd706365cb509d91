"""Several processes of one job, each with some of the devices: a TPU pod, nodes with GPUs, or one machine for a test.

All of them run the same program and every computation is one of all of them. What one process alone finds out (a
file's content, the clock) the others are told with `agree`; what is written, process 0 writes. JAX's own distributed
runtime connects them. By itself a process is the first and only one, and nothing here costs anything.
"""

import functools
import itertools
import json
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from absl import flags

from transformer.errors import UserError
from transformer.parallel import ending
from transformer.stopping import Asked

T = TypeVar("T")
UNTIMED, TIMED = 2, 10  # steps before the pace is taken, and for it
HEARTBEAT = 30  # seconds without a sign of life after which a process counts as lost
DAY = 24 * 3600 * 1000  # milliseconds; a wait ends earlier where a process is lost
_turns = itertools.count()  # of barriers and agreements, which are the same ones in the same order everywhere


def define(values: flags.FlagValues) -> None:
    """The flags of commands that run on several processes at once."""
    flags.DEFINE_string(
        "coordinator", None, "HOST:PORT of process 0, where a cluster's own settings do not tell", flag_values=values
    )
    flags.DEFINE_integer(
        "processes", None, "how many processes the job has, with --coordinator; 1: by itself", flag_values=values
    )
    flags.DEFINE_integer("process", None, "which of them this one is: 0, 1, ...", flag_values=values)
    flags.DEFINE_integer(
        "step_timeout", 900, "seconds without a finished step after which the job ends; 0: never", flag_values=values
    )


def start(values: flags.FlagValues) -> None:
    """Join the job that the flags or the cluster's own settings describe. Call it before anything else uses JAX.

    Without flags JAX looks for Cloud TPU, GKE, Slurm and Open MPI in environment variables, and asks a network only
    on a TPU VM; where it finds nothing this process is by itself.
    """
    given = {"coordinator": values.coordinator, "processes": values.processes, "process": values.process}
    ending.patience = values.step_timeout
    if values.step_timeout < 0:
        raise UserError(f"--step_timeout: {values.step_timeout} is below 0")
    if values.processes == 1 and values.coordinator is None:
        return
    _check(given)
    import jax

    if values.coordinator is not None and not values.debug:
        ending.silence()
    # Preemption is agreed on by ourselves (`Heard`), and SIGTERM stays ours.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            values.coordinator, values.processes, values.process, heartbeat_timeout_seconds=HEARTBEAT
        )
    except (ValueError, RuntimeError) as error:
        if values.coordinator is None and re.search("coordinator_address|must be called before", str(error)):
            return  # no cluster; or this is a program that has used JAX already, by itself
        raise
    if not values.debug:
        ending.silence()
    from jax._src import distributed  # as Orbax does: there is no public way to the store of keys

    state = distributed.global_state
    assert state.client is not None
    ending.join(state.client, state.process_id, state.num_processes)


def _check(given: dict[str, Any]) -> None:
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if len(missing) == 3:
        return
    if missing:
        raise UserError(f"{', '.join(missing)}: missing; --coordinator, --processes and --process belong together")
    coordinator, processes, process = given.values()
    if not re.fullmatch(r"(.*[^:]|\[.*\]):\d{1,5}", coordinator):
        raise UserError(f"--coordinator: {coordinator!r} is not HOST:PORT, such as 10.0.0.1:1234")
    if processes < 1:
        raise UserError(f"--processes: {processes} is not a number of processes, set 1 or more")
    if not 0 <= process < processes:
        raise UserError(f"--process: {process} is not from 0 to {processes - 1}")


def is_first() -> bool:
    """Whether this is process 0, the one that writes files and speaks."""
    return ending.job is None or ending.job.process == 0


def count() -> int:
    """How many processes the job has."""
    return 1 if ending.job is None else ending.job.processes


def barrier(name: str) -> None:
    """Wait until every process is here."""
    if ending.job is not None:
        ending.job.client.wait_at_barrier(f"transformer/{name}/{next(_turns)}", DAY)


def agree(find: Callable[[], T]) -> T:
    """What process 0 finds, on all processes; ``find`` is called there alone, and its result is fit for JSON.

    Where it raises an error, the job ends with it.
    """
    if ending.job is None:
        return find()
    key = f"transformer/agree/{next(_turns)}"
    if ending.job.process == 0:
        ending.job.client.key_value_set(key, json.dumps(find()))
    return json.loads(ending.job.client.blocking_key_value_get(key, DAY))


def check_mesh(size: int) -> None:
    """UserError where the mesh leaves out devices of a job of several processes: each must have its part in it."""
    import jax

    if count() > 1 and size != len(jax.devices()):
        raise UserError(
            f"config.mesh: has {size} devices, and the {count()} processes have {len(jax.devices())} "
            f"({jax.local_device_count()} each); on several processes a mesh takes all of them"
        )


class Heard:
    """The signal that any process was asked to stop by, known to all of them at the same step.

    At some steps, about one in a second, every process says what it was asked; at the step after that the answer is
    read, which by then is there. By itself a process hears at once.
    """

    def __init__(self, asked: Asked):
        self._asked = asked
        self._said: dict[int, Any] = {}  # arrays of what this process may say
        self._signal: int | None = None
        self._answer: Any = None
        self._steps, self._every, self._begun = 0, 1, 0.0

    @property
    def signal(self) -> int | None:
        """What was agreed on so far; for a process by itself, what it was asked."""
        return self._asked.signal if count() == 1 else self._signal

    def step(self) -> None:
        """Every process calls it once a step; it does not wait for the others' steps."""
        if count() == 1:
            return
        self._steps += 1
        if self._steps == UNTIMED:
            self._begun = time.monotonic()
        if self._steps == UNTIMED + TIMED:  # the same steps on all processes: the clock of one of them decides
            pace = (time.monotonic() - self._begun) / TIMED
            self._every = agree(lambda: max(1, round(1 / max(pace, 1e-4))))
        if self._answer is not None:
            self._take(self._answer)
        self._answer = self._ask() if self._steps % self._every == 0 else None

    def now(self) -> int | None:
        """``signal``, after all processes were asked."""
        if count() > 1:
            self._take(self._ask())
        return self.signal

    def _ask(self) -> Any:
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        mesh, number = jax.sharding.get_mesh(), self._asked.signal or 0
        if number not in self._said:
            shape, layout = (mesh.size,), NamedSharding(mesh, PartitionSpec(mesh.axis_names))
            self._said[number] = jax.make_array_from_callback(
                shape, layout, lambda index: np.full(shape, number, np.int32)[index]
            )
        return _largest()(self._said[number])

    def _take(self, answer: Any) -> None:
        self._signal = self._signal or int(answer) or None


@functools.cache
def _largest() -> Callable[[Any], Any]:
    import jax

    return jax.jit(lambda x: x.max())
