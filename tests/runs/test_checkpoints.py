"""Checkpoints: what is kept, what is checked before it is read, what is never believed."""

import json
import random
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.runs.whole import KEPT, TRAIN, done, refused, run, state_of
from transformer.errors import UserError
from transformer.parallel.mesh import Mesh, make_mesh
from transformer.run import open_run
from transformer.training import checkpoint
from transformer.training.checkpoint import Checkpoints, Damaged, restore_params, restore_state, saved_steps, verify


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def newest(directory: Path) -> Path:
    folder = directory / "checkpoints"
    return folder / str(saved_steps(folder)[-1])


def saved(directory: Path, keep: int, *given: tuple[int, int | None], of: Path) -> Checkpoints:
    """Save the state of run ``of`` under other steps, each with the best step so far."""
    experiment = open_run(of).experiment
    with jax.set_mesh(make_mesh(Mesh())):
        state, _ = restore_state(newest(of), experiment)
        checkpoints = Checkpoints(directory, keep)
        for step, best in given:
            checkpoints.save(state._replace(step=np.int32(step)), {}, best)
        checkpoints.close()
    return checkpoints


def test_the_best_checkpoint_outlives_newer_ones(trained: Path, tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 2, *((s, min(s, 2)) for s in range(1, 7)), of=trained)
    assert checkpoints.steps == [2, 5, 6]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "5", "6"], "nothing half-deleted is left"


def test_K01_an_older_checkpoint_goes_only_when_the_newer_one_is_on_disk(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that fails in the background is an error that names the path, and costs no older checkpoint."""
    saved(tmp_path, 1, (1, None), of=trained)

    def full(self: Checkpoints) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "_seal", full)
    with pytest.raises(OSError, match=r"/2: the checkpoint could not be written: .*No space left"):
        saved(tmp_path, 1, (2, None), of=trained)
    monkeypatch.undo()
    assert saved_steps(tmp_path) == [1]
    assert saved(tmp_path, 1, (2, None), of=trained).steps == [2]


def test_K05_K12_what_this_run_did_not_write_is_left_alone(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "notes.txt").write_text("of a person")
    (tmp_path / "mine").mkdir()
    assert saved(tmp_path, 1, (1, None), (2, None), of=trained).steps == [2]
    assert (tmp_path / "7" / "notes.txt").exists() and (tmp_path / "mine").exists()
    with pytest.raises(Exception, match="already exists"):
        saved(tmp_path, 1, (7, None), of=trained)


def test_K11_what_killed_saves_left_is_removed_and_never_counted(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        (tmp_path / f"{step}{checkpoint.UNFINISHED}" / "params").mkdir(parents=True)
        (tmp_path / f"{step}{checkpoint.UNFINISHED}" / checkpoint.DIGESTS).write_text("{}")
    (tmp_path / f"12{checkpoint.DELETING}").mkdir()
    assert saved_steps(tmp_path) == []
    checkpoints = Checkpoints(tmp_path, KEPT)
    checkpoints.close()
    assert list(tmp_path.iterdir()) == []


def test_what_the_loop_counts_after_a_save_does_not_get_into_it(trained: Path, tmp_path: Path) -> None:
    """D13, R05: saving goes on in the background, while the loop's numbers change: it gets its own."""
    with jax.set_mesh(make_mesh(Mesh())):
        experiment = open_run(trained).experiment
        state, _ = restore_state(newest(trained), experiment)
        checkpoints, numbers = Checkpoints(tmp_path, KEPT), {"tokens": 5}
        checkpoints.save(state, numbers)
        numbers["tokens"] = 6
        checkpoints.close()
        assert restore_state(newest_in(tmp_path), experiment)[1] == {"tokens": 5}


def newest_in(folder: Path) -> Path:
    return folder / str(saved_steps(folder)[-1])


def damage(path: Path, how: str, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[: draw.randrange(len(content))])
    elif how == "lose":
        path.unlink()


def test_a_damaged_checkpoint_is_never_restored(copy: Path) -> None:
    """A flipped bit, a cut or a missing file, in any file of it: the one before is taken, and the message says so.

    The run then ends as one that was never damaged. (Orbax alone restores most flipped bits without a word.)
    """
    whole, metrics = state_of(copy), (copy / "metrics.jsonl").read_bytes()
    path, draw = newest(copy), random.Random(0)
    files = {p: p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file() and p.relative_to(path).parts[1:]}
    files[path / checkpoint.DIGESTS] = (path / checkpoint.DIGESTS).read_bytes()
    assert len(files) > 10
    for file, content in files.items():
        for how in ("flip", "cut", "lose") if content else ("lose",):
            damage(file, how, draw)
            with pytest.raises(Damaged):
                verify(path)
            file.write_bytes(content)
    verify(path)
    (path / "params" / "more").write_text("")
    with pytest.raises(Damaged, match="params/more is not a file of it"):
        verify(path)
    (path / "params" / "more").unlink()

    weights = [file for file in files if file.relative_to(path).parts[0] == "params"]
    damage(max(weights, key=lambda p: len(files[p])), "flip", draw)
    assert f"{path} is damaged: " in refused("sample", f"--run={copy}")
    before = saved_steps(copy / "checkpoints")[-2]
    with jax.set_mesh(make_mesh(Mesh())):
        assert restore_params(copy / "checkpoints", open_run(copy).experiment, str(before))[1] == before
    found = run(*TRAIN, f"--workdir={copy}")
    assert found.status == 0 and "set aside" in found.err and f"going on after step {before}" in found.err, found.err
    assert state_of(copy) == whole and (copy / "metrics.jsonl").read_bytes() == metrics
    assert (copy / "checkpoints" / "12.damaged").is_dir()


def test_when_no_checkpoint_is_whole_the_run_does_not_begin_again(copy: Path) -> None:
    for step in saved_steps(copy / "checkpoints"):
        damage(copy / "checkpoints" / str(step) / "params" / "_METADATA", "flip", random.Random(step))
    names = ", ".join(map(str, reversed(saved_steps(copy / "checkpoints"))))
    for _ in range(2):
        found = run(*TRAIN, f"--workdir={copy}")
        assert found.status == 1
        assert f"none of the checkpoints {names} is whole; remove them to start again" in found.err.splitlines()[-1]
    for step in saved_steps(copy / "checkpoints"):  # as an earlier start left them that found a whole one, lost since
        (copy / "checkpoints" / str(step)).rename(copy / "checkpoints" / f"{step}.damaged")
    found = run(*TRAIN, f"--workdir={copy}")
    assert found.status == 1 and ".damaged is whole; remove them to start again" in found.err.splitlines()[-1]


def test_K06_K15_a_state_saved_on_eight_devices_is_restored_on_one_and_on_four(tmp_path: Path) -> None:
    from tests import small
    from transformer.training.state import init_state

    meshes = (Mesh(data=2, fsdp=2, tensor=2), Mesh(), Mesh(fsdp=2, tensor=2))
    given = []
    for number, mesh in enumerate(meshes):
        experiment = small.experiment(mesh=mesh)
        with jax.set_mesh(make_mesh(mesh)):
            if number == 0:
                state = init_state(experiment)
                checkpoints = Checkpoints(tmp_path, 1)
                checkpoints.save(state, {"tokens": 1})
                checkpoints.close()
            else:
                state, _ = restore_state(newest_in(tmp_path), experiment)
                assert len(state.params["embedding"].sharding.device_set) == (1, 4)[number - 1]
            given.append([np.asarray(x).tobytes() for x in jax.tree.leaves(state)])
    assert given[0] == given[1] == given[2]


def test_K07_K08_other_shapes_names_or_dtypes_are_listed(trained: Path, tmp_path: Path) -> None:
    """Orbax casts a dtype without a word, and its own message on shapes is a page."""
    import dataclasses

    experiment = open_run(trained).experiment
    model = experiment.model
    others = {
        "depth": dataclasses.replace(model, depth=2),
        "width": dataclasses.replace(model, width=32),
        "tie": dataclasses.replace(model, tie_embeddings=True),
    }
    with jax.set_mesh(make_mesh(Mesh())):
        for changed in others.values():
            with pytest.raises(UserError, match=r"does not fit this configuration: \['\w+'\].* wanted "):
                restore_params(trained / "checkpoints", dataclasses.replace(experiment, model=changed), "newest")
        state, _ = restore_state(newest(trained), experiment)
        halves = jax.tree.map(lambda w: np.asarray(w).astype(ml_dtypes.bfloat16), state.params)
        with ocp.StandardCheckpointer() as writer:
            writer.save(tmp_path / "x", halves)
        shutil.rmtree(newest_copy := shutil.copytree(newest(trained), tmp_path / "c" / "5") / "params")
        shutil.copytree(tmp_path / "x", newest_copy)
        with pytest.raises(UserError, match="is bfloat16"):
            checkpoint._read(tmp_path / "c" / "5", params=checkpoint.abstract(lambda: state.params))


def test_which_checkpoint(trained: Path) -> None:
    steps = saved_steps(trained / "checkpoints")
    assert len(steps) in (KEPT, KEPT + 1) and steps[-1] == 12
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    best = min((r["eval_loss"], r["step"]) for r in records if "eval_loss" in r)[1]
    assert done("sample", f"--run={trained}", "--tokens=1", "--checkpoint=best")["step"] == best
    assert "is not newest, best or one of the steps" in refused("sample", f"--run={trained}", "--checkpoint=5x")
