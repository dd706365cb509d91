"""Preparing: the split, the cache, and the same text for every tokenizer."""

import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.data.conftest import prose
from transformer.data import corpora
from transformer.data import prepare as prepare_module
from transformer.data.loader import Loader
from transformer.data.prepare import Data, Prepared, prepare
from transformer.data.store import TokenStore
from transformer.data.tokenizer import Bpe, Bytes, Unigram
from transformer.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """30 documents, two of them the same as two others."""
    path = tmp_path / "texts"
    path.mkdir()
    for i in range(30):
        (path / f"{i:02}.txt").write_text(prose(i % 28, 200 + i % 28), encoding="utf-8")
    return path


def pieces_of(store: TokenStore, prepared: Prepared) -> list[bytes]:
    return [prepared.tokenizer.decode_bytes(store.piece(i)) for i in range(store.pieces)]


def manifest(prepared: Prepared, source: int = 0) -> list[dict[str, object]]:
    path = prepared.directory / f"source_{source}.manifest.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def text_of(prepared: Prepared) -> list[list[bytes]]:
    return [pieces_of(store, prepared) for store in (*prepared.train, *prepared.validation)]


def test_every_byte_is_stored_once_and_T08_each_piece_starts_with_one_end_of_text(folder: Path, tmp_path: Path) -> None:
    prepared = prepare(Data(source=str(folder), piece_bytes=512), Bpe(vocab_size=290), tmp_path / "cache")
    end = prepared.tokenizer.end_id
    found: dict[int, bytes] = {}
    for store in (prepared.train[0], prepared.validation[0]):
        for i in range(store.pieces):
            ids = store.piece(i)
            last = bool(store.is_last_P[i])
            assert ids[0] == end and (ids[-1] == end) == last and (ids == end).sum() == 1 + last
            content = prepared.tokenizer.decode_bytes(ids)
            assert len(content) == store.source_bytes_P[i]
            found[int(store.document_P[i])] = found.get(int(store.document_P[i]), b"") + content
    names = [str(record["name"]) for record in manifest(prepared)]
    assert {names[i]: content for i, content in found.items()} == {p.name: p.read_bytes() for p in folder.iterdir()}


def test_D17_D18_the_split_is_by_content_and_never_overlaps(folder: Path, tmp_path: Path) -> None:
    sides = None
    for seed in range(20):
        prepared = prepare(Data(source=str(folder), seed=seed), Bytes(), tmp_path / f"cache{seed % 2}")
        train, validation = text_of(prepared)
        assert not set(train) & set(validation) and len(validation) in (3, 4, 5)
        assert sides in (None, (train, validation)), "the same split whatever the seed"
        sides = train, validation
    by_hash: dict[object, set[object]] = {}
    for record in manifest(prepared):
        by_hash.setdefault(record["sha256"], set()).add(record["split"])
    assert len(by_hash) == 28 and all(len(split) == 1 for split in by_hash.values())


def test_D17_identical_documents_stay_together(tmp_path: Path) -> None:
    """Many copies of few texts, also across sources: no text is on both sides."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(12):
            (tmp_path / name / f"{i}.txt").write_text(prose(i % 4 if name == "a" else 3 + i % 6, 50))
    data = Data(source=f"{tmp_path / 'a'},{tmp_path / 'b'}", validation=0.3, weights=(10.0, 1.0))
    prepared = prepare(data, Bytes(), tmp_path / "cache")
    held = {t for store in prepared.validation for t in pieces_of(store, prepared)}
    trained = {t for store in prepared.train for t in pieces_of(store, prepared)}
    assert held and trained and not held & trained and len(held | trained) == 9


def test_documents_of_unequal_size_keep_to_the_share_of_bytes(tmp_path: Path) -> None:
    """Whatever the hashes say: never nearly all of the text, because one document is nearly all of it."""
    for case in range(8):
        folder = tmp_path / str(case)
        folder.mkdir()
        for i, words in enumerate((4000, 150, 150, 3000)):
            (folder / f"{i}.txt").write_text(prose(10 * case + i, words))
        prepared = prepare(Data(source=str(folder), validation=0.1), Bytes(), tmp_path / "cache")
        total = sum(len(p.read_bytes()) for p in folder.iterdir())
        assert 0.01 < prepared.validation[0].source_bytes / total <= 0.1
    said: list[str] = []
    halves = tmp_path / "halves"
    halves.mkdir()
    for i, words in enumerate((1000, 1200)):
        (halves / f"{i}.txt").write_text(prose(i, words))
    prepared = prepare(Data(source=str(halves)), Bytes(), tmp_path / "cache", said.append)
    assert len(b"".join(text_of(prepared)[1])) == (halves / "0.txt").stat().st_size
    assert any("more than data.validation=0.1 of the bytes; the smallest, 4" in line for line in said), said


def test_a_single_document_loses_its_end(tmp_path: Path) -> None:
    text = prose(1, 20_000)
    (tmp_path / "a.txt").write_text(text)
    prepared = prepare(Data(source=str(tmp_path / "a.txt"), validation=0.2), Bytes(), tmp_path / "cache")
    train, validation = (b"".join(pieces) for pieces in text_of(prepared))
    assert (train + validation).decode() == text
    assert 0.15 < len(validation) / len(text) <= 0.2
    assert prepared.train[0].is_last_P.sum() == 0 and prepared.validation[0].is_last_P.sum() == 1


def test_shakespeare_holds_out_its_four_works(user_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "downloads").mkdir()
    shutil.copy(user_cache / "downloads" / corpora.ARCHIVE, tmp_path / "downloads")
    prepared = prepare(Data(), Bytes(), tmp_path)
    assert {r["name"] for r in manifest(prepared) if r["split"] == "validation"} == corpora.HELD_OUT
    assert prepared.validation[0].source_bytes == 520_877 and prepared.train[0].source_bytes == 4_536_321
    with pytest.raises(UserError, match=r"data\.validation: 0\.2 has no effect"):
        prepare(Data(validation=0.2), Bytes(), tmp_path)


def test_every_tokenizer_and_context_reads_the_same_text_in_the_same_order(folder: Path, tmp_path: Path) -> None:
    made = [
        prepare(Data(source=str(folder), piece_bytes=256), config, tmp_path / "cache")
        for config in (Bytes(), Bpe(vocab_size=290), Unigram(vocab_size=284))
    ]
    assert len({p.content_hash for p in made}) == 1 and len({p.tokenizer.fingerprint for p in made}) == 3
    assert text_of(made[0]) == text_of(made[1]) == text_of(made[2])
    orders = [Loader(p.train, (), 5, 4, c).packings[0].order(2)[0] for p, c in zip(made, (16, 32, 64), strict=True)]
    assert all((order == orders[0]).all() for order in orders)


def test_the_tokenizer_is_trained_on_the_training_split_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = prepare_module.tokenizer_training.train, []

    def spy(config: Bpe, texts: Iterator[str], size: int) -> object:
        seen.extend(texts)
        assert sum(map(len, seen)) == size
        return real(config, seen, size)

    monkeypatch.setattr(prepare_module.tokenizer_training, "train", spy)
    prepared = prepare(Data(source=str(folder), piece_bytes=256), Bpe(vocab_size=290), tmp_path / "cache")
    assert [text.encode() for text in seen] == pieces_of(prepared.train[0], prepared)


def test_the_second_call_comes_from_the_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, config = Data(source=str(folder)), Bpe(vocab_size=290)
    first = prepare(data, config, tmp_path / "cache")
    monkeypatch.setattr(prepare_module, "_build", None)
    second = prepare(data, config, tmp_path / "cache")
    assert second.report == first.report and second.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert second.report["tokenizer"]["skipped"] == 0
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [first.directory.name]


def test_whatever_changes_the_result_changes_the_entry(folder: Path, tmp_path: Path) -> None:
    def entry(tokenizer: Bytes | Bpe = Bytes(), **changes: object) -> str:  # noqa: B008
        return prepare(Data(source=str(folder), **changes), tokenizer, tmp_path / "cache").directory.name  # type: ignore

    first = entry()
    assert entry(seed=3) == first
    others = [
        entry(validation=0.3),
        entry(piece_bytes=100),
        entry(Bpe(vocab_size=290)),
        entry(Bpe(vocab_size=284)),
    ]
    (folder / "00.txt").write_text(prose(99))
    others.append(entry())
    os.utime(folder / "01.txt", ns=(1, 1))
    others.append(entry())
    assert len({first, *others}) == 7


def _child(arguments: tuple[str, str]) -> str:
    source, cache = arguments
    return prepare(Data(source=source), Bpe(vocab_size=290), Path(cache)).tokenizer.fingerprint


def test_several_processes_prepare_at_once(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        prints = pool.map(_child, [(str(folder), str(cache))] * 4, chunksize=1)
    assert len(set(prints)) == 1
    (entry,) = cache.iterdir()
    assert re.fullmatch("prepared-[0-9a-f]{16}", entry.name)


def test_a_failure_leaves_nothing_and_debris_of_a_killed_process_is_cleared(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(UserError, match="at most"):
        prepare(Data(source=str(folder)), Bpe(vocab_size=60_000), cache)
    assert list(cache.iterdir()) == []
    dead = cache / prepare_module._mine().replace(str(os.getpid()), "4194999")
    alive = cache / prepare_module._mine().replace(str(os.getpid()), str(os.getppid()))
    for path in (dead, alive):
        path.mkdir()
    prepare(Data(source=str(folder)), Bytes(), cache)
    assert not dead.exists() and alive.exists()


@pytest.mark.parametrize(
    "part", ["source_0.manifest.jsonl", "source_0.train", "source_0.validation", "tokenizer.model"]
)
@pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
def test_D18_a_damaged_entry_is_refused(folder: Path, tmp_path: Path, part: str, damage: str) -> None:
    data, config = Data(source=str(folder)), Bpe(vocab_size=290)
    entry = prepare(data, config, tmp_path / "cache").directory
    path = entry / part
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else content[:60] + b"?" + content[61:])
    with pytest.raises(UserError) as caught:
        prepare(data, config, tmp_path / "cache")
    assert str(entry) in str(caught.value) and "\n" not in str(caught.value)


def test_T10_a_store_of_another_entry_is_refused(folder: Path, tmp_path: Path) -> None:
    data = Data(source=str(folder))
    entries = [prepare(data, config, tmp_path / "cache").directory for config in (Bytes(), Bpe(vocab_size=290))]
    shutil.copy(entries[0] / "source_0.train", entries[1] / "source_0.train")
    with pytest.raises(UserError, match=r"source_0\.train: written with another tokenizer"):
        prepare(data, Bpe(vocab_size=290), tmp_path / "cache")
    shutil.copy(entries[0] / "source_0.validation", entries[0] / "source_0.train")
    with pytest.raises(UserError, match=r"source_0\.train: is not the store that belongs here"):
        prepare(data, Bytes(), tmp_path / "cache")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weights": (1.0, 2.0)}, "2 weights for 1 sources"),
        ({"source": "python_prose,python_code", "weights": (1.0,)}, "1 weights for 2 sources"),
        ({"source": "python_prose,python_code", "weights": (1.0, 0.0)}, "above 0"),
        ({"source": "python_prose,"}, "empty name"),
        ({"validation": 0.0}, "data.validation: 0.0"),
        ({"validation": 1.0}, "data.validation: 1.0"),
        ({"piece_bytes": 8}, "at least 64"),
        ({"source": "python_prose", "text_field": "body"}, "text_field: 'body' has no effect"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        prepare(Data(**changes), Bytes(), tmp_path)  # type: ignore[arg-type]


def test_D16_texts_that_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UserError, match=r"has 5 bytes.* data\.piece_bytes below 5"):
        prepare(Data(source=str(tmp_path / "a.txt")), Bytes(), tmp_path / "cache")
    (tmp_path / "same").mkdir()
    for i in range(3):
        (tmp_path / "same" / f"{i}.txt").write_text("same")
    with pytest.raises(UserError, match=r"all 3 documents .* are the same"):
        prepare(Data(source=str(tmp_path / "same")), Bytes(), tmp_path / "cache")
    (tmp_path / "b.txt").write_text(prose(0))
    twice = f"{tmp_path / 'b.txt'},{tmp_path / 'b.txt'}"
    with pytest.raises(UserError, match="also in"):
        prepare(Data(source=twice), Bytes(), tmp_path / "cache")
    (tmp_path / "e.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="holds no text"):
        prepare(Data(source=str(tmp_path / "e.jsonl")), Bytes(), tmp_path / "cache")


def test_D16_a_file_of_newlines(tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_text("\n" * 300)
    prepared = prepare(Data(source=str(tmp_path / "n.txt"), piece_bytes=64), Bytes(), tmp_path / "cache")
    with pytest.raises(UserError, match=r"\d+ tokens found .* 513 needed"):
        Loader(prepared.train, (), 0, 8, 512)


def test_text_that_changes_while_read_is_noticed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = prepare_module.split.write_manifests

    def then_change(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        (folder / "05.txt").write_text(prose(77))

    monkeypatch.setattr(prepare_module.split, "write_manifests", then_change)
    with pytest.raises(UserError, match=r"05\.txt changed while"):
        prepare(Data(source=str(folder)), Bytes(), tmp_path / "cache")


def test_a_mixture_has_one_store_per_source(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": prose(i, 40)}) + "\n" for i in range(100, 140)))
    data = Data(source=f"{folder}, {tmp_path / 'b.jsonl'}", weights=(1.0, 3.0))
    prepared = prepare(data, Bytes(), tmp_path / "cache")
    assert len(prepared.train) == len(prepared.validation) == 2
    assert [s["train"]["documents"] + s["validation"]["documents"] for s in prepared.report["sources"]] == [
        30,
        40,
    ]
    loader = Loader(prepared.train, data.weights, data.seed, 8, 32)
    assert np.isfinite(loader.batch_at(0).weights_BT).all() and loader.shares == (0.25, 0.75)
