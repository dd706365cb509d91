"""One prompt through every box of a trained model: the numbers behind the page, the terminal's view and the JSON.

T positions, S key positions, D model width, N heads, V vocabulary, P blocks that are gone through (a stack in loops
counts each time), Q stages at which the model is asked what comes next: before the first block and behind each.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer.analysis.watch import end, look
from transformer.config import Experiment
from transformer.data.tokenizer import Tokenizer
from transformer.errors import UserError
from transformer.generation.sample import encode_prompts
from transformer.model.config import Model
from transformer.model.positions import Alibi, Relative, Rotary, scaled_speeds
from transformer.model.scores import alibi_slopes, bucket
from transformer.parallel.rules import put
from transformer.run import Run
from transformer.settings import tag_of

MOST = 20  # likely next tokens that are kept of each distribution


class Said(NamedTuple):
    """What a model says comes next, at each stage and position, [Q, T]; the likeliest first, [Q, T, MOST]."""

    ids: Any
    probabilities: Any
    entropy: Any  # bits
    next_probability: Any  # of the token that is next in the prompt; NaN at its last position
    next_rank: Any  # 1: no token was likelier; 0 at the last position


class Token(NamedTuple):
    """A token of the prompt, and the bytes of the prompt from ``start`` up to ``end`` that it stands for.

    ``text`` is None for a special token, and for bytes that are only a part of a character: ``of`` is then the text
    of the characters that they are part of.
    """

    id: int
    text: str | None
    content: bytes
    start: int
    end: int
    of: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """One pass, in float32. ``places`` says what stands for the positions (see `positions_of`)."""

    run: Run
    step: int
    prompt: str
    tokens: list[Token]
    embedding_TD: np.ndarray
    added_TD: np.ndarray | None
    places: dict[str, Any]
    weights_PNTS: np.ndarray  # see `watch.attention_weights`
    attention_PT: np.ndarray  # length of what attention adds to the stream
    mlp_PT: np.ndarray
    stream_QT: np.ndarray  # length of the stream, at each stage
    normed_T: np.ndarray  # behind the final norm
    said: Said

    @property
    def model(self) -> Model:
        return self.run.experiment.model

    @property
    def likely(self) -> list[int]:
        """Every token that is named anywhere."""
        return sorted({int(i) for i in self.said.ids.reshape(-1)} | {token.id for token in self.tokens})


def inspect(run: Run, params: Any, step: int, prompt: str) -> Inspection:
    """Read ``prompt`` behind the start token and keep all there is to see. UserError where it exceeds the context."""
    experiment, tokenizer = run.experiment, run.tokenizer
    (ids,) = encode_prompts(run, [prompt])
    ids_T = np.array(ids, np.int32)
    if len(ids_T) > experiment.model.context:
        raise UserError(
            f"--prompt: {len(ids_T)} tokens (with the start) exceed the context of {experiment.model.context} of "
            f"{run.directory}; shorten it"
        )
    seen, said = _pass(experiment.program, params, ids_T)
    blocks = [jax.tree.map(lambda x: np.asarray(x)[0], one) for one in seen.blocks_P]
    streams_QTD = np.stack([np.asarray(seen.start_BTD)[0], *(one.stream_BTD for one in blocks)])
    said = Said(*(np.asarray(x) for x in said))
    return Inspection(
        run=run,
        step=step,
        prompt=prompt,
        tokens=tokens_of(tokenizer, ids_T),
        embedding_TD=np.asarray(params["embedding"])[ids_T],
        added_TD=None if seen.added_BTD is None else np.asarray(seen.added_BTD)[0],
        places=positions_of(experiment.model, params, len(ids_T)),
        weights_PNTS=np.stack([one.weights_BNTS for one in blocks]),
        attention_PT=_length(np.stack([one.attention_BTD for one in blocks])),
        mlp_PT=_length(np.stack([one.mlp_BTD for one in blocks])),
        stream_QT=_length(streams_QTD),
        normed_T=_length(np.asarray(seen.normed_BTD)[0]),
        said=said,
    )


@functools.partial(jax.jit, static_argnums=0)
def _pass(experiment: Experiment, params: Any, ids_T: jax.Array) -> Any:
    """What is seen on the way, and what the model would say at each stage."""
    seen = look(experiment, params, ids_T[None])
    streams = (seen.start_BTD, *(one.stream_BTD for one in seen.blocks_P))
    streams_Q1TD = jnp.stack([put(x, None, None, None) for x in streams])
    next_T = jnp.append(ids_T[1:], -1)

    def say(stream_1TD: jax.Array) -> Said:
        logits_TV = put(end(experiment, params, put(stream_1TD, "batch", "time", "stream"))[0], None, None)
        log_p_TV = jax.nn.log_softmax(logits_TV)
        top_Tk, ids_Tk = jax.lax.top_k(log_p_TV, min(MOST, experiment.vocab_size))
        hit_TV = jnp.arange(experiment.vocab_size)[None] == next_T[:, None]
        true_T = jnp.where(hit_TV, log_p_TV, 0.0).sum(-1)
        known_T = next_T >= 0
        return Said(
            ids=ids_Tk,
            probabilities=jnp.exp(top_Tk),
            entropy=-(jnp.exp(log_p_TV) * log_p_TV).sum(-1) / math.log(2),
            next_probability=jnp.where(known_T, jnp.exp(true_T), jnp.nan),
            next_rank=jnp.where(known_T, 1 + (log_p_TV > true_T[:, None]).sum(-1), 0),
        )

    return seen, jax.lax.map(say, streams_Q1TD)  # one stage after the other: each has a whole table of logits


def _length(x_TD: np.ndarray) -> np.ndarray:
    length: np.ndarray = np.sqrt(np.square(x_TD).sum(-1))
    return length


def tokens_of(tokenizer: Tokenizer, ids_T: np.ndarray) -> list[Token]:
    """The start token and the prompt's own, with the bytes that each stands for.

    These are the prompt's bytes but for what an imported tokenizer adds or leaves out.
    """
    whole = b"".join(tokenizer.token_bytes(i) for i in ids_T.tolist())
    # At which byte each character begins, and where the last ends; a byte that is no character counts as one.
    letters = whole.decode(errors="surrogateescape")
    starts = np.cumsum([0, *(len(letter.encode(errors="surrogateescape")) for letter in letters)])
    found, place = [], 0
    for i in ids_T.tolist():
        content = tokenizer.token_bytes(i)
        after = place + len(content)
        text = of = None
        if content:
            first, last = np.searchsorted(starts, place, "right") - 1, np.searchsorted(starts, after, "left")
            around = whole[starts[first] : starts[last]].decode(errors="replace")
            text, of = (around, None) if around.encode() == content else (None, around)
        found.append(Token(i, text, content, place, after, of))
        place = after
    return found


def positions_of(model: Model, params: Any, length: int) -> dict[str, Any]:
    """What tells the model where a token stands, by kind; positions are 0 to ``length`` - 1.

    rotary: ``speeds``, the angle from one position to the next of each pair of numbers of a head. alibi: ``slopes``, by
    which each head's scores fall with the distance. relative: ``table`` [block, bucket, head] is added to the scores,
    ``buckets`` [length] is which row of it is for each distance. ``without``: numbers of blocks that have none of it.
    """
    positions = model.positions
    found: dict[str, Any] = {"kind": tag_of(type(positions))}
    if isinstance(positions, Rotary):
        found["speeds"] = scaled_speeds(positions, positions.features(model.head_size)).tolist()
        found["features"] = positions.features(model.head_size)
    if isinstance(positions, Alibi):
        found["slopes"] = alibi_slopes(model.heads).tolist()
    if isinstance(positions, Relative):
        table = np.asarray(params["blocks"]["attention"]["distances"])
        found["table"] = table.reshape(*table.shape[:2], -1).tolist()
        found["buckets"] = np.asarray(bucket(jnp.arange(length), positions.buckets, positions.farthest)).tolist()
    kinds = [type(model.block(i).positions) for i in range(model.depth)]
    found["without"] = [i for i, kind in enumerate(kinds) if kind is not type(positions)]
    return found


def as_dict(found: Inspection) -> dict[str, Any]:
    """Everything, for JSON: numbers as they are. Attention rows end at the position itself; token texts are None for
    special tokens and for parts of characters, whose bytes say what they are."""
    model, said, tokenizer = found.model, found.said, found.run.tokenizer

    def named(i: int) -> dict[str, Any]:
        content = tokenizer.token_bytes(i)
        return {"id": i, "text": text_of(content), "bytes": content.hex(" ")}

    def answer(q: int, t: int) -> dict[str, Any]:
        known = said.next_rank[q, t] > 0
        p = float(said.next_probability[q, t])
        top = zip(said.ids[q, t].tolist(), said.probabilities[q, t].tolist(), strict=True)
        return {
            "top": [named(i) | {"probability": p} for i, p in top],
            "entropy_bits": float(said.entropy[q, t]),
            "next": named(found.tokens[t + 1].id)
            | {"probability": p, "rank": int(said.next_rank[q, t]), "surprise_bits": -math.log2(p) if p else math.inf}
            if known
            else None,
        }

    def block(p: int) -> dict[str, Any]:
        own = model.block(p % model.depth)
        return {
            "block": p % model.depth + 1,
            "loop": p // model.depth + 1,
            "span": tag_of(type(own.attention.span)),
            "attention": [[row[: t + 1].tolist() for t, row in enumerate(head)] for head in found.weights_PNTS[p]],
            "attention_norm": found.attention_PT[p].tolist(),
            "mlp_norm": found.mlp_PT[p].tolist(),
            "stream_norm": found.stream_QT[p + 1].tolist(),
        }

    length, (stages, _) = len(found.tokens), said.entropy.shape
    return {
        "run": str(found.run.directory),
        "step": found.step,
        "prompt": found.prompt,
        "tokens": [t._asdict() | {"content": t.content.hex(" ")} for t in found.tokens],
        "embedding": found.embedding_TD.tolist(),
        "positions": found.places | {"added": None if found.added_TD is None else found.added_TD.tolist()},
        "embedding_norm": found.stream_QT[0].tolist(),
        "blocks": [block(p) for p in range(len(found.weights_PNTS))],
        "lens": [[answer(q, t) for t in range(length)] for q in range(stages - 1)],
        "final_norm": found.normed_T.tolist(),
        "distribution": [answer(stages - 1, t) for t in range(length)],
    }


def text_of(content: bytes) -> str | None:
    """The text that a token's bytes are; None for none, and for bytes that are no UTF-8 by themselves."""
    try:
        return content.decode() or None
    except UnicodeDecodeError:
        return None
