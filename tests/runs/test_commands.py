"""Every command on a trained run."""

import gzip
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.runs.whole import KEPT, TRAIN, content, done, leaves, refused, run, text
from transformer.parallel.mesh import Mesh, make_mesh
from transformer.run import open_run


@pytest.mark.smoke
def test_a_run_from_text_to_page_with_a_trained_tokenizer(home: Path) -> None:
    """The smallest complete run: train, sample, evaluate, report."""
    changes = ("--config.tokenizer=bpe", "--config.tokenizer.vocab_size=280", "--config.train.steps=3")
    result = done(*TRAIN, *changes, "--workdir=smoke")
    assert result["step"] == 3 and 0 < result["bits_per_byte"] < 10
    assert (home / "smoke" / "tokenizer.model").stat().st_size > 0
    found = run("sample", "--run=smoke", "--prompt=the cat", "--tokens=5", "--temperature=0")
    assert found.status == 0 and found.out.startswith("the cat")
    assert done("evaluate", "--run=smoke", "--cache=cache")["bits_per_byte"] == result["bits_per_byte"]
    assert (home / done("report", "smoke")["report"]).read_text().startswith("<!doctype html>")
    (home / "smoke" / "tokenizer.model").unlink()  # as where a kill came before it was written
    assert done(*TRAIN, *changes, "--workdir=smoke")["bits_per_byte"] == result["bits_per_byte"]


def test_a_run_does_not_go_on_with_other_text(home: Path) -> None:
    """The text behind data.source changed between two starts: refused, and the run's tokenizer is as it was."""
    source, more = home / "shelf", ("--config.data.source=shelf", "--config.tokenizer=bpe", "--config.train.steps=2")
    source.mkdir()
    (source / "one.txt").write_text("the cat sat on the mat and the dog ran over the hill\n" * 200)
    (source / "two.txt").write_text("a bird sang in the tall tree while rain fell all day\n" * 200)
    argv = (*TRAIN, *more, "--config.tokenizer.vocab_size=310", "--workdir=other")
    done(*argv)
    before = (home / "other" / "tokenizer.model").read_bytes()
    (source / "three.txt").write_text("xylophones quiz jovial wizards, vexing them 0123456789\n" * 300)
    assert "was trained on other text" in refused(*argv)
    assert (home / "other" / "tokenizer.model").read_bytes() == before


def test_prompts_and_directories_are_checked_before_any_training(home: Path) -> None:
    long = "--config.train.prompts=short," + "x" * 200
    assert "config.train.prompts: 'xxx" in refused(*TRAIN, "--workdir=bad", long)
    assert "is a URL" in refused("study", "--config=experiment.py", "--workdir=gs://bucket/study")
    assert "is a URL" in refused("runs", "show", "gs://bucket/run")
    assert not (home / "bad").exists() and not (home / "gs:").exists()


def test_the_files_of_a_run(trained: Path) -> None:
    names = {p.name for p in trained.iterdir()}
    assert names == {
        *("config.json", "provenance.json", "metrics.jsonl", "timing.jsonl", "checkpoints", "tensorboard"),
        *("evaluation.json", "samples.json", "report.html"),
    }, "tokenizer.model is absent for bytes, and nothing half-written is left"
    assert any((trained / "tensorboard").iterdir())
    metrics = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    logged = [r for r in metrics if "loss" in r]
    assert [r["step"] for r in logged] == [1, 2, 4, 6, 8, 10, 12]
    assert all({"step", "tokens", "loss", "learning_rate", "grad_norm"} <= r.keys() for r in logged)
    measured = [r for r in metrics if "eval_loss" in r]
    assert [r["step"] for r in measured] == [5, 10, 12]
    assert all({"eval_loss", "perplexity", "bits_per_byte"} <= r.keys() for r in measured)
    timing = [json.loads(line) for line in (trained / "timing.jsonl").read_text().splitlines()]
    assert timing and all({"step", "seconds", "tokens_per_second", "mfu", "memory"} <= r.keys() for r in timing)
    clock = {"seconds", "tokens_per_second", "mfu", "memory", "time"}
    assert not any(clock & r.keys() for r in metrics), "nothing in it depends on the clock"
    origin = json.loads((trained / "provenance.json").read_text())
    assert {"command", "commit", "uncommitted", "versions", "devices", "host", "start", "end"} <= origin.keys()
    assert {"content_hash", "tokenizer_hash"} <= origin.keys()
    assert origin["command"][:2] == ["train", "--config=experiment.py"]
    assert origin["accounting"][0]["dropped"] == 0


def test_the_newest_checkpoints_and_the_best_are_kept(trained: Path) -> None:
    steps = sorted(int(p.name) for p in (trained / "checkpoints").iterdir())
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    measured = {r["step"]: r["eval_loss"] for r in records if "eval_loss" in r}
    improved = {s for s in measured if measured[s] == min(loss for t, loss in measured.items() if t <= s)}
    saved = sorted({4, 8, 12} | improved)  # every fourth step, and each new best
    assert steps == sorted({*saved[-KEPT:], min(measured, key=measured.__getitem__)})
    assert done("sample", f"--run={trained}", "--tokens=1", "--checkpoint=best")["step"] in steps
    assert done("sample", f"--run={trained}", "--tokens=1", f"--checkpoint={steps[0]}")["step"] == steps[0]
    assert "is not newest, best or one of the steps" in refused("sample", f"--run={trained}", "--checkpoint=5")


def test_the_same_command_again_does_nothing_more(trained: Path) -> None:
    before = content(trained)
    result = done(*TRAIN, "--workdir=run")
    assert result["step"] == 12
    after = content(trained)
    same = {name for name in before if not name.startswith("tensorboard")}
    assert {name: after[name] for name in same} == {name: before[name] for name in same}


def test_every_command_on_a_run_prints_one_json_object(trained: Path) -> None:
    texts = [s["text"] for s in done("sample", "--run=run", "--prompt=the ", "--prompt=a", "--tokens=9")["samples"]]
    assert len(texts) == 2
    evaluated = done("evaluate", "--run=run", "--cache=cache")
    assert evaluated == json.loads((trained / "evaluation.json").read_text())
    for name in ("loss", "perplexity", "bits_per_byte", "window", "stride", "protocol", "tokens", "bytes"):
        assert name in evaluated, "E02, E05: unit, protocol and prefix are in the result"
    assert "start token" in evaluated["protocol"]
    (trained.parent / "held.txt").write_text("the cat sat\n")
    own = done("evaluate", "--run=run", "--text=held.txt", "--stride=32", "--cache=cache")
    assert (own["bytes"], own["stride"], own["documents"]) == (12, 32, 1)
    assert done("report", "run")["report"] == "run/report.html"


def test_the_whole_model_of_a_run_is_seen_and_taken_apart(trained: Path) -> None:
    """inspect draws one prompt, on a page, in the terminal and as JSON; ablate leaves its figure in the run's page."""
    seen = done("inspect", "--run=run", "--prompt=the cat", "--out=page.html", "--compare=run", "--position=2")
    page = (trained.parent / "page.html").read_text()
    assert page.startswith("<!doctype html>") and '"position": 2' in page
    assert seen["page"] == "page.html" and [len(model["tokens"]) for model in seen["models"]] == [8, 8]
    [first, second] = seen["models"]
    assert first == second and first["distribution"][3]["next"]["text"] == " " and first["step"] == 12
    drawn = run("inspect", "--run=run", "--prompt=the cat")
    assert drawn.status == 0 and "the prompt ends here" in drawn.out and "block 1" in drawn.out
    assert "--prompt=TEXT is missing" in refused("inspect", "--run=run")
    assert "--position: 8 is not one of the prompt's positions, 0 to 7" in refused(
        "inspect", "--run=run", "--prompt=the cat", "--position=8"
    )
    assert "--prompt: 41 tokens (with the start) exceed the context of 32 of run" in refused(
        "inspect", "--run=run", f"--prompt={'x' * 40}", "--out=long.html"
    )
    assert "is not a page's name" in refused("inspect", "--run=run", "--prompt=a", "--out=page")
    assert "is not a directory" in refused("inspect", "--run=run", "--prompt=a", "--out=nowhere/page.html")
    assert not (trained.parent / "long.html").exists()

    before = content(trained)
    found = done("ablate", "--run=run", "--cache=cache", "--windows=4")
    assert found["windows"] == 4 and {one["kind"] for one in found["changes"]} == {
        *("block", "attention", "mlp", "head", "cut")
    }, "one block has no neighbour"
    assert found == json.loads((trained / "ablation.json").read_text())
    assert "What each part is worth" in (trained / "report.html").read_text()
    assert "--windows: 0 is too small" in refused("ablate", "--run=run", "--windows=0")
    changed = {name for name, data in content(trained).items() if before.get(name) != data}
    assert changed == {"ablation.json", "report.html"}
    (trained / "ablation.json").unlink()
    done("report", "run")


def test_the_same_seed_and_the_slow_way_give_the_same_text(trained: Path) -> None:
    def sampled(*more: str) -> list[Any]:
        return done("sample", "--run=run", "--prompt=the ", "--prompt=a", "--tokens=12", *more)["samples"]

    assert sampled() == sampled("--seed=0") == sampled("--no_cache")
    assert sampled("--seed=1") != sampled() and sampled("--seed=4294967295") != sampled()
    alone = run("sample", "--run=run", "--prompt=the ", "--tokens=12")
    assert alone.status == 0 and alone.out == f"the {sampled()[0]['text']}\n", "streamed"


def test_a_draft_and_an_int8_cache(trained: Path) -> None:
    """A draft that is the run itself: every proposal is accepted, the text is that without it. The int8 cache costs
    next to nothing, but something."""
    greedy = ("sample", "--run=run", "--prompt=the ", "--prompt=a", "--tokens=12", "--temperature=0")
    alone, drafted = done(*greedy), done(*greedy, "--draft=run", "--proposals=3", "--piece=3")
    assert drafted.pop("acceptance") == 1.0 and "acceptance" not in alone
    assert alone.pop("tokens_per_second") > 0 and drafted.pop("tokens_per_second") > 0
    assert alone == drafted
    exact = json.loads((trained / "evaluation.json").read_text())
    found = done("evaluate", "--run=run", "--cache=cache", "--int8_cache")
    assert found["cache"] == "int8" and 0 < abs(found["loss"] - exact["loss"]) < 1e-3


def test_init_from_starts_at_step_0_with_the_weights_of_another_run(trained: Path, home: Path) -> None:
    """C06: an init source is no resume source."""
    from transformer.training.loop import first_state

    experiment = open_run(trained).experiment
    changed = {"train": {**vars_of(experiment.train), "init_from": "run"}}
    fresh = rebuilt(experiment, changed)
    with jax.set_mesh(make_mesh(Mesh())):
        state = first_state(fresh, open_run(trained).tokenizer)
    assert int(state.step) == 0
    for a, b in zip(jax.tree.leaves(state.params), leaves(trained), strict=True):
        assert np.asarray(a).tobytes() == b.tobytes()
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(state.opt_state)), "fresh moments"
    for other in ("model.width=32", "model.positions=sinusoidal", "model.norm.epsilon=1e-3"):
        line = refused(*TRAIN, "--workdir=bad", "--config.train.init_from=run", f"--config.{other}")
        assert "config.train.init_from" in line and other.partition("=")[0] in line and not (home / "bad").exists()
    free = "--config.model.attention.kernel=plain"  # the weights do not depend on it
    result = done(*TRAIN, "--workdir=more", "--config.train.init_from=run", "--config.train.steps=2", free)
    assert result["step"] == 2 and result["loss"] < 4.5, "it went on from what was learnt"


def vars_of(record: Any) -> dict[str, Any]:
    import dataclasses

    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


def rebuilt(experiment: Any, changes: dict[str, dict[str, Any]]) -> Any:
    import dataclasses

    return dataclasses.replace(
        experiment, **{name: type(getattr(experiment, name))(**values) for name, values in changes.items()}
    )


def test_text_from_everywhere(home: Path) -> None:
    """Nine sources in one run of the real command: each is read, whole, and gets its share."""
    import fsspec
    import pyarrow
    import pyarrow.parquet
    import zstandard

    folder = home / "sources"
    (folder / "many" / "deep").mkdir(parents=True)
    (folder / "plain.txt").write_text(text(1))
    (folder / "many" / "a.txt").write_text(text(2))
    (folder / "many" / "deep" / "b.md").write_text(text(3))
    (folder / "many" / "c.bin").write_bytes(b"\x00")
    for i in (4, 5):
        (folder / f"globbed_{i}.txt").write_text(text(i))
    lines = ["".join(json.dumps({"text": t}) + "\n" for t in (text(s), text(s + 1))).encode() for s in (10, 20, 30)]
    (folder / "a.jsonl").write_bytes(lines[0])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[1]))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines[2]))
    pyarrow.parquet.write_table(pyarrow.table({"text": [text(40), text(41)]}), folder / "d.parquet")
    (folder / "e.txt").write_text(text(50))
    with fsspec.open("memory://here/f.txt", "wb") as file:
        file.write(text(60).encode())
    sources = [
        *("sources/plain.txt", "sources/many", "sources/globbed_*.txt", "sources/a.jsonl", "sources/b.jsonl.gz"),
        *("sources/c.jsonl.zst", "sources/d.parquet", (folder / "e.txt").as_uri(), "memory://here/f.txt"),
    ]
    wanted = [[1], [2, 3], [4, 5], [10, 11], [20, 21], [30, 31], [40, 41], [50], [60]]
    result = done(
        *TRAIN,
        "--workdir=everywhere",
        "--config.data.source=" + ",".join(sources),
        "--config.train.steps=2",
        "--config.train.prompts=",
    )
    origin = json.loads((home / "everywhere" / "provenance.json").read_text())
    found = origin["data"]["sources"]
    assert [s["name"] for s in found] == sources
    for source, seeds in zip(found, wanted, strict=True):
        size = source["train"]["bytes"] + source["validation"]["bytes"]
        assert size == sum(len(text(s).encode()) for s in seeds), source["name"]
    assert result["bytes"] == sum(s["validation"]["bytes"] for s in found)
    assert len(origin["accounting"]) == 9 and sum(a["share"] for a in origin["accounting"]) == pytest.approx(1)
