"""What a harness asks of a model, against float64 sums over logits that are computed one text at a time; and tasks of
lm-evaluation-harness on local files, where that is installed."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from tests.interop.test_hostile import run as command
from transformer.analysis.requests import Requests
from transformer.config import Experiment
from transformer.data.tokenizer import Bytes, ByteTokenizer
from transformer.errors import UserError
from transformer.files import CHECKPOINTS
from transformer.generation.sampling import Sampling
from transformer.jsons import write_json
from transformer.model.masks import causal
from transformer.model.transformer import Transformer
from transformer.parallel.mesh import Mesh, make_mesh
from transformer.run import Run
from transformer.settings import to_dict
from transformer.training.checkpoint import Checkpoints

CONTEXT, V, END = 24, 257, 256
GREEDY = Sampling(temperature=0.0)
needs_harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")

EXPERIMENT = Experiment(model=small.experiment(context=CONTEXT, heads=2).model, tokenizer=Bytes())
PARAMS = small.weights(EXPERIMENT)


def asked(tokenizer=None) -> Requests:
    run = Run(Path("nowhere"), EXPERIMENT, tokenizer or ByteTokenizer())
    return Requests(run, jax.tree.map(jnp.asarray, PARAMS))


@small.jit
def _logits(params, tokens_1T):
    model = Transformer(EXPERIMENT.model, V)
    return model.apply({"params": params}, tokens_1T, jnp.arange(CONTEXT)[None], causal(CONTEXT))[0][0]


def log_probabilities(ids: list[int]) -> np.ndarray:
    """Of every token behind these ids, float64 [V]: by a text that is computed alone."""
    assert 0 < len(ids) <= CONTEXT
    tokens_1T = np.zeros((1, CONTEXT), np.int32)
    tokens_1T[0, : len(ids)] = ids
    logits_V = np.asarray(_logits(PARAMS, tokens_1T), np.float64)[len(ids) - 1]
    return logits_V - np.log(np.exp(logits_V - logits_V.max()).sum()) - logits_V.max()


def likelihood(before: list[int], scored: list[int]) -> tuple[float, bool]:
    """Token by token: the sum, and whether each is the likeliest."""
    total, greedy, ids = 0.0, True, [*before]
    first = max(len(before) + len(scored) - 1 - CONTEXT, 0)  # what is read is one less than there is
    for token in scored:
        found_V = log_probabilities(ids[first:])
        total, greedy, ids = total + found_V[token], greedy and found_V.argmax() == token, [*ids, token]
    return total, bool(greedy)


def added(ids: list[int], count: int) -> str:
    """What greedy choice adds, by reading the whole again for every token."""
    ids = [*ids]
    first = len(ids)
    while len(ids) < first + count and END not in ids[first:]:
        ids.append(int(log_probabilities(ids).argmax()))
    return ByteTokenizer().decode(ids[first:])


PAIRS = [
    ("Question: a\nAnswer:", " yes"),
    ("Question: a\nAnswer: ", "yes"),  # the same, with the blank on the other side
    ("", "first"),
    ("ab", "c"),
    (" \n", "d"),
    ("a long context that loses its beginning, and the start", " token"),
    ("just fits the context, x", "y"),
    ("x", "exactly the context long"),
    ("four letters caf\u00e9", " \U0001f469"),
]


def test_a_continuation_is_as_likely_as_its_tokens_one_by_one():
    requests = asked()
    found = requests.continuations(PAIRS)
    for (context, continuation), (total, greedy) in zip(PAIRS, found, strict=True):
        blanks = len(context) - len(context.rstrip())
        context, continuation = context[: len(context) - blanks], context[len(context) - blanks :] + continuation
        wanted = likelihood([END, *context.encode()], list(continuation.encode()))
        assert total == pytest.approx(wanted[0], rel=1e-5) and greedy is wanted[1], context
    assert found[0] == found[1]
    assert requests.shortened == sum(len((a + b).encode()) > CONTEXT for a, b in PAIRS) == 3


def test_greedy_is_told_from_likely():
    """The likeliest continuation is greedy, and is not when its last or its first token is another."""
    logits = [log_probabilities([END, *b"ab"])]
    first = int(logits[0].argmax())
    second = int(log_probabilities([END, *b"ab", first]).argmax())

    class Ids(ByteTokenizer):  # text that is ids, so that any token may be written
        def encode(self, text):
            return np.array([ord(letter) for letter in text], np.int32)

    other = "a" if second != ord("a") else "b"
    texts = {chr(first) + chr(second): True, chr(first) + other: False, other + chr(second): False}
    found = asked(Ids()).continuations([("ab", text) for text in texts])
    assert [one.greedy for one in found] == list(texts.values())


class Pieces(ByteTokenizer):
    """The longest of some pieces first."""

    pieces = ("a", "b", "ab", ": y", ":", " ", "y", "es")

    def encode(self, text):
        ids = []
        while text:
            piece = max((p for p in self.pieces if text.startswith(p)), key=len)
            ids.append(self.pieces.index(piece))
            text = text[len(piece) :]
        return np.array(ids, np.int32)


@pytest.mark.parametrize(
    "context, continuation, ids, scored",
    [
        ("a", "b", [2], 1),  # one piece is both: it is the continuation's
        ("a:", " yes", [0, 3, 7], 1),
        ("a: ", "yes", [0, 3, 7], 1),
        ("a:", " es", [0, 4, 5, 7], 2),
        ("", "ab", [2], 1),
    ],
)
def test_a_piece_that_spans_the_border(context, continuation, ids, scored):
    """E01: both are encoded as one text, and the continuation always has a token."""
    assert asked(Pieces()).encode_pair(context, continuation) == ([END, *ids], scored)


@pytest.mark.parametrize("length", [0, 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT, 3 * CONTEXT + 5])
def test_a_text_is_scored_in_windows_each_token_once(length):
    text = ("The quick brown fox; " * 9)[:length]
    ids = [END, *text.encode()]
    wanted = 0.0
    for t in range(1, len(ids)):
        window = (t - 1) // CONTEXT
        first = min(window * CONTEXT, max(len(ids) - 1 - CONTEXT, 0))  # the last reaches back
        wanted += log_probabilities(ids[first:t])[ids[t]]
    assert asked().texts([text, "other", text])[::2] == [pytest.approx(wanted, rel=1e-5, abs=1e-9)] * 2


def test_what_a_model_goes_on_with():
    """Prompts of several lengths, one too long; and the texts that end a continuation."""
    prompts, new = ["a", "To be, or", "The quick brown fox jumps over the lazy dog"], 6
    requests = asked()
    found = requests.go_on(prompts, GREEDY, new)
    for prompt, text in zip(prompts, found, strict=True):
        ids = [END, *prompt.encode()][-(CONTEXT - new) :]
        assert text == added(ids, new)
    assert requests.shortened == 1
    stop = found[1][2:4]
    at = found[1].index(stop)
    assert requests.go_on(prompts, GREEDY, new, ("nowhere", stop, ""))[1] == found[1][:at]
    drawn = requests.go_on(["a"] * 3, Sampling(temperature=2.0), new)
    assert len(set(drawn)) == 3, "each row draws for itself"


class Unmarked(ByteTokenizer):
    starts = ()


@pytest.mark.parametrize(
    "ask, told",
    [
        (lambda r: r.continuations([("a", "")]), "the continuation of 'a' is empty"),
        (lambda r: r.continuations([("a", "x" * (CONTEXT + 1))]), f"a continuation of {CONTEXT + 1} tokens has 2"),
        (lambda r: r.go_on(["a"], GREEDY, CONTEXT), f"{CONTEXT} new tokens are asked for, and the model's context is"),
        (lambda r: r.go_on(["a"], Sampling(temperature=-1.0), 2), "--temperature: -1.0 is not a number of 0 or more"),
        (lambda r: asked(Unmarked()).continuations([("", "a")]), "a continuation of 1 tokens has 0 before it"),
        (lambda r: asked(Unmarked()).go_on([""], GREEDY, 2), "have no token that starts a text"),
    ],
)
def test_what_cannot_be_answered_is_refused(ask, told):
    with pytest.raises(UserError, match=told.replace("(", r"\(")):
        ask(asked())


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A run, three tasks of one's own, and some that cannot be done."""
    folder = tmp_path_factory.mktemp("harness")
    with jax.set_mesh(make_mesh(Mesh())):
        checkpoints = Checkpoints(folder / "run" / CHECKPOINTS, keep=1)
        checkpoints.save_params(PARAMS)
        checkpoints.close()
    write_json(folder / "run" / "config.json", to_dict(EXPERIMENT))
    tasks = folder / "tasks"
    tasks.mkdir()
    rows = {
        "choices": [{"q": f"{a} and {a}", "choices": [f"{2 * a}", "no", "yes!"], "answer": a % 3} for a in range(7)],
        "texts": [{"text": "The quick brown fox jumps over the lazy dog. " * n} for n in (1, 2)],
        "greedy": [{"q": q, "a": added([END, *q.encode()], 3)} for q in ("ab", "cd")] + [{"q": "ef", "a": "wrong"}],
    }
    ask = "doc_to_text: '{{q}}'\n"
    greedy = ask + "output_type: generate_until\ndoc_to_target: '{{a}}'\nmetric_list: [{metric: exact_match}]\n"
    kinds = {
        "choices": ask + "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: answer\n"
        "fewshot_split: test\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
        "texts": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: bits_per_byte}]\n",
        "greedy": greedy + "generation_kwargs: {max_gen_toks: 3, do_sample: false}\n",
        "beams": greedy + "generation_kwargs: {max_gen_toks: 3, num_beams: 4}\n",
        "fixed": greedy + "num_fewshot: 0\n",
        "lost": greedy,
    }
    for name, yaml in kinds.items():
        file = tasks / f"{name if name in rows else 'greedy'}.jsonl"
        if name in rows:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        data = tasks / "lost" if name == "lost" else file
        kwargs = f"{{data_files: {{test: '{data}'}}, cache_dir: '{folder}'}}"
        start = f"task: own_{name}\ndataset_path: json\ndataset_kwargs: {kwargs}\ntest_split: test\n"
        (tasks / f"{name}.yaml").write_text(start + yaml)
    return folder


def measured(home: Path, tasks: str, *more: str):
    return command("evaluate", f"--run={home / 'run'}", f"--tasks={tasks}", f"--tasks_path={home / 'tasks'}", *more)


@needs_harness
@pytest.mark.filterwarnings("ignore")  # of the libraries that the harness brings
def test_tasks_on_local_files_give_what_the_logits_say(home, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, out, err = measured(home, "own_choices,own_texts,own_greedy", "--json")
    assert status == 0, err
    result = json.loads(out)
    found = {(row["task"], row["metric"]): row for row in result["results"]}
    right, normed = [], []
    for a in range(7):
        choices = [f"{2 * a}", "no", "yes!"]
        sums = [likelihood([END, *f"{a} and {a}".encode()], list(f" {c}".encode()))[0] for c in choices]
        right.append(int(np.argmax(sums)) == a % 3)
        normed.append(int(np.argmax([s / len(c) for s, c in zip(sums, choices, strict=True)])) == a % 3)
    assert found["own_choices", "acc"]["value"] == pytest.approx(np.mean(right))
    assert found["own_choices", "acc_norm"]["value"] == pytest.approx(np.mean(normed))
    assert found["own_choices", "acc"]["questions"] == 7 and found["own_choices", "acc"]["shots"] == 0
    spread = np.std(right, ddof=1) / math.sqrt(7)
    assert found["own_choices", "acc"]["standard_error"] == pytest.approx(spread)
    texts = ["The quick brown fox jumps over the lazy dog. " * n for n in (1, 2)]
    bits = -sum(asked().texts(texts)) / math.log(2) / sum(map(len, texts))
    assert found["own_texts", "bits_per_byte"]["value"] == pytest.approx(bits, rel=1e-6)
    assert found["own_greedy", "exact_match"]["value"] == pytest.approx(2 / 3)
    assert result["shortened"] == 0 and result["step"] == 0
    status, out, err = measured(home, "own_choices", "--limit=1", "--shots=2")
    assert status == 0, err
    assert out.splitlines()[1].split()[:2] == ["own_choices", "acc"] and out.splitlines()[1].split()[-2:] == ["2", "1"]
    assert "3 requests shortened" in out


@needs_harness
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "tasks, more, told",
    [
        ("own_beams", (), "--tasks: a task asks for num_beams=4 in generation, which is not here"),
        ("own_lost", (), "--tasks: own_lost cannot be loaded: FileNotFoundError"),
        ("own_fixed", ("--shots=2",), "--shots: own_fixed is defined without examples; leave it out"),
        ("own_choices", ("--shots=-1",), "--shots: -1 is too small, set 0 or more"),
        ("", (), "--tasks: names none"),
        ("own_choices", ("--limit=0",), "--limit: 0 is too small, set 1 or more"),
        ("own_choices", ("--limit=1", "--shots=10"), "--shots: own_choices cannot have 10 examples"),  # E07
    ],
)
def test_a_task_that_cannot_be_done_is_one_line(home, monkeypatch, tasks, more, told):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, out, err = measured(home, tasks, *more)
    assert status == 2 and not out and told in err.splitlines()[-1], err


@needs_harness
@pytest.mark.exhaustive  # the harness reads all of its own tasks first
@pytest.mark.filterwarnings("ignore")
def test_an_unknown_task_is_one_line(home):
    status, _, err = measured(home, "own_choises")
    assert status == 2 and "--tasks: 'own_choises' is not known (did you mean 'own_choices'?)" in err.splitlines()[-1]


@pytest.mark.parametrize(
    "flags, told",
    [
        (("--tasks=a",), "--tasks: needs the package lm-eval, which is not installed (the extra harness)"),
        (("--tasks=a", "--text=b"), "--text: has no effect on --tasks"),
        (("--tasks=a", "--stride=3"), "--stride: has no effect on --tasks"),
        (("--limit=3",), "--limit: has no effect without --tasks"),
        (("--tasks_path=.",), "--tasks_path: has no effect without --tasks"),
    ],
)
def test_flags_of_the_harness_alone_and_without_it(flags, told, monkeypatch):
    for name in ("lm_eval", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "transformer.analysis.harness", raising=False)
    monkeypatch.delattr("transformer.analysis.harness", raising=False)
    status, _, err = command("evaluate", "--run=nowhere", *flags)
    assert status == 2 and told in err, err
