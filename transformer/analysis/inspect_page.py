"""The page of `inspect`: the numbers packed small, and the template that draws them.

Attention weights are drawn from 16 bits each, half a step of 1/65,535 from the truth at most; in prompts of more than
EXACT tokens from 8 bits of their square root, at most 0.004 from it. Embedding and position vectors are pictures alone,
in 255 steps. All other numbers have 7 digits.

T positions, D model width, N heads, P blocks that are gone through, Q stages.
"""

import base64
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from transformer.analysis.cost import count_parameters
from transformer.analysis.inspection import Inspection, Token, text_of
from transformer.model.attention import reach
from transformer.pages import write_page
from transformer.settings import tag_of

EXACT = 128  # tokens
LENS = 5  # likely tokens that are shown of the stages before the last


def write_inspection(path: Path, found: list[Inspection], position: int) -> Path:
    """Write the page of one model, or of several side by side; ``position`` of the first is chosen at first."""
    names = [one.run.directory.resolve().name for one in found]
    return write_page(
        path,
        "inspect.html",
        name=" and ".join(names),
        data={"position": position, "models": [packed(one) for one in found]},
    )


def packed(found: Inspection) -> dict[str, Any]:
    """One model's numbers as the page's script reads them."""
    model, said, tokenizer = found.model, found.said, found.run.tokenizer
    exact = len(found.tokens) <= EXACT
    stages = len(said.entropy)
    kept = [said.ids.shape[-1] if q == stages - 1 else LENS for q in range(stages)]
    return {
        "name": found.run.directory.resolve().name,
        "step": found.step,
        "parameters": count_parameters(found.run.experiment)["total"],
        "depth": model.depth,
        "width": model.width,
        "heads": found.weights_PNTS.shape[1],
        "context": model.context,
        "vocabulary": tokenizer.vocab_size,
        "norm": tag_of(type(model.norm)).replace("_", " "),
        "norms": model.norms,
        "parallel": model.parallel,
        "final_norm": model.final_norm,
        "tied": model.tie_embeddings,
        "cap": model.logits_soft_cap,
        "scores": tag_of(type(model.attention.scores)),
        "tokens": [_token(token) for token in found.tokens],
        "named": {i: _spelled(tokenizer.token_bytes(i)) for i in found.likely},
        "blocks": [_block(found, p) for p in range(len(found.weights_PNTS))],
        "attention": _weights(found.weights_PNTS, exact),
        "bits": 16 if exact else 8,
        "signed": bool((found.weights_PNTS < 0).any()),
        "embedding": _picture(found.embedding_TD),
        "places": found.places | {"added": None if found.added_TD is None else _picture(found.added_TD)},
        "norms_of": {
            "attention": _digits(found.attention_PT),
            "mlp": _digits(found.mlp_PT),
            "stream": _digits(found.stream_QT),
            "final": _digits(found.normed_T),
        },
        "ids": [said.ids[q, :, :k].tolist() for q, k in enumerate(kept)],
        "likely": [_digits(said.probabilities[q, :, :k]) for q, k in enumerate(kept)],
        "entropy": _digits(said.entropy),
        "next": _digits(np.nan_to_num(said.next_probability)),
        "rank": said.next_rank.tolist(),
    }


def _token(token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "text": token.text,
        "bytes": token.content.hex(" "),
        "start": token.start,
        "end": token.end,
        "of": token.of,
    }


def _spelled(content: bytes) -> list[str | None]:
    """A token of the vocabulary: its text, or None and its bytes."""
    text = text_of(content)
    return [text] if text is not None else [None, content.hex(" ")]


def _block(found: Inspection, p: int) -> dict[str, Any]:
    model = found.model
    i, loop = p % model.depth, p // model.depth
    span = tag_of(type(model.block(i).attention.span))
    again = f", time {loop + 1}" if model.loops > 1 else ""
    return {"name": f"Block {i + 1}{again}", "span": None if span == "global" else f"{span}, {reach(model, i)}"}


def _weights(weights_PNTS: np.ndarray, exact: bool) -> str:
    """What lies on and below the diagonals, row by row: high bytes, then low ones, then, where there are any, signs."""
    rows, columns = np.tril_indices(weights_PNTS.shape[-1])
    flat = weights_PNTS[:, :, rows, columns].reshape(-1)
    sizes, below = np.clip(np.abs(flat), 0, 1), flat < 0
    steps = np.rint(sizes * 65535 if exact else np.sqrt(sizes) * 255).astype(np.uint16)
    planes = [steps >> 8, steps & 255] if exact else [steps]
    return _text(np.concatenate([*planes, below] if below.any() else planes).astype(np.uint8))


def _picture(x_TD: np.ndarray) -> dict[str, Any]:
    """Numbers as bytes: 128 is zero, 1 and 255 the largest, ``scale``."""
    scale = float(np.abs(x_TD).max()) or 1.0
    return {"scale": float(f"{scale:.4g}"), "bytes": _text((np.rint(x_TD / scale * 127) + 128).astype(np.uint8))}


def _text(x: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(x.tobytes(), 6)).decode()


def _digits(x: np.ndarray) -> Any:
    """Lists of numbers of 7 digits, which is what float32 has."""
    return [_digits(row) for row in x] if x.ndim > 1 else [float(f"{v:.7g}") for v in x.tolist()]
