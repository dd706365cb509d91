"""Several runs at once: a step of each in turn, each on a device of its own as far as there are devices.

A lane is an ordinary run. Steps are dispatched and not waited for, so that devices work side by side; each lane ends
bit for bit as it would alone, as its program is the one that a run by itself would have.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import jax

from transformer.config import Experiment
from transformer.parallel import hosts
from transformer.parallel.mesh import all_devices, make_mesh, sizes
from transformer.stopping import Stop, deferred
from transformer.training.loop import Say, training


def train_together(
    experiments: Sequence[Experiment], workdirs: Sequence[Path], cache: Path, argv: list[str], say: Say
) -> list[Exception | None]:
    """`loop.train` of several runs; what each ended with, None where it was trained.

    Raises Stop, after every run has saved, where a signal asked to.
    """
    devices = all_devices()
    meshes = []
    for i, experiment in enumerate(experiments):
        single = math.prod(sizes(experiment.mesh).values()) == 1
        meshes.append(make_mesh(experiment.mesh, devices[i % len(devices) :] if single else devices))
        hosts.check_mesh(meshes[-1].size)
    lanes = [training(e, w, cache, argv, say) for e, w in zip(experiments, workdirs, strict=True)]
    ended: list[Exception | None] = [None] * len(lanes)
    going, stopped = list(range(len(lanes))), None
    with deferred() as asked:
        while going:
            for i in tuple(going):
                try:
                    with jax.set_mesh(meshes[i]):
                        next(lanes[i])
                    continue
                except StopIteration:
                    pass
                except Stop as stop:  # the others hear of it, and save
                    stopped, asked.signal = stop, stop.status - 128
                except Exception as error:
                    if hosts.count() > 1 and not isinstance(error, FloatingPointError):
                        raise  # it may be this process's alone, and the others wait for it
                    ended[i] = error
                going.remove(i)
    if stopped is not None:
        raise stopped
    return ended
