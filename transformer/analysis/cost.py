"""The bill of a configuration, by part: parameters, FLOPs, score tables, cache, training memory.

All by formula, from the settings alone; tests hold the parameters to the built model's own count.
Letters as in the model: L depth, D width, T context, V vocabulary, N heads, H head width.
"""

from typing import Any

import jax.numpy as jnp

from transformer.config import Experiment
from transformer.model.attention import kernels_for_training, kind, reach
from transformer.model.config import Model
from transformer.model.kernels import KERNELS
from transformer.model.norms import LayerNorm
from transformer.model.positions import Learned
from transformer.tables import human
from transformer.training.loss import NUMBERS
from transformer.training.optimizer import Muon

FLOAT32 = 4
FLOPS_FORMULA = (
    "forward: 2 per weight of every product (a lookup is none, and of a mixture's experts those count that a token "
    "goes through) plus attention's products over whole score tables; "
    "training: 3 times forward; nothing extra for rematerialisation (arXiv:2204.02311, appendix B)"
)


def cost(experiment: Experiment) -> dict[str, Any]:
    """The whole bill. Parameters are counts, FLOPs are per token at full context, memory is in bytes."""
    parameters = count_parameters(experiment)
    forward = forward_flops(experiment)
    return {
        "parameters": parameters,
        "flops_per_token": {
            **forward,
            "forward": sum(forward.values()),
            "training": 3 * sum(forward.values()),
            "formula": FLOPS_FORMULA,
        },
        "score_tables": score_tables(experiment),
        "cache": cache(experiment),
        "training_memory": training_memory(experiment),
        "in_words": in_words(experiment),
    }


def count_parameters(experiment: Experiment) -> dict[str, int]:
    """By part; ``block`` is one block, ``total`` everything, ``active`` what one token meets of that."""
    m, V = experiment.model, experiment.vocab_size
    table = V * m.width
    parts = {
        "embedding": table,
        "positions": m.context * m.width if isinstance(m.positions, Learned) else 0,
        "block": block_matrices(m) + block_rest(m),
        "embedding_norm": norm_weights(m) if m.norms == "peri" else 0,
        "final_norm": norm_weights(m) if m.final_norm else 0,
        "unembedding": 0 if m.tie_embeddings else table,
    }
    blocks = m.depth * parts["block"]
    total = sum(parts.values()) - parts["block"] + blocks
    return {**parts, "blocks": blocks, "total": total, "active": total - m.depth * m.mlp.idle(m.width, m.bias)}


def table_share(experiment: Experiment) -> float:
    """The share of all weights that embedding and unembedding have together."""
    parts = count_parameters(experiment)
    return (parts["embedding"] + parts["unembedding"]) / parts["total"]


def block_matrices(m: Model) -> int:
    """Weights of one block's products, without biases and norms: 12 D^2 for the tutorial's block."""
    return kind(m).matrices(m) + m.mlp.matrices(m.width)


def block_active(m: Model) -> int:
    """Those of ``block_matrices`` that one token meets: of a mixture's experts only some."""
    return block_matrices(m) - m.mlp.idle(m.width)


def norm_weights(m: Model) -> int:
    return m.width * (2 if m.bias and isinstance(m.norm, LayerNorm) else 1)


def block_rest(m: Model) -> int:
    """Weights of one block that are no product's: biases, norms, and what scores have of their own."""
    biases = m.mlp.biases(m.width) if m.bias else 0
    norms = 4 if m.norms in ("sandwich", "peri") else 2
    return kind(m).rest(m) + biases + norms * norm_weights(m)


def forward_flops(experiment: Experiment) -> dict[str, float]:
    """Per token at full context, two for each multiply-add, by part."""
    m = experiment.model
    return {
        "blocks": 2 * m.loops * m.depth * block_active(m),
        "attention_tables": 2 * m.loops * sum(kind(m).products(m, reach(m, i)) for i in range(m.depth)),
        "unembedding": 2 * experiment.vocab_size * m.width,
    }


def training_flops(experiment: Experiment) -> float:
    """Per token, forward and backward."""
    return 3 * sum(forward_flops(experiment).values())


def score_tables(experiment: Experiment) -> dict[str, int]:
    """Bytes of the float32 score tables that the plain kernel writes: N T^2 numbers, or twice that, for one row."""
    m = experiment.model
    row = kind(m).tables * m.heads * m.context**2 * FLOAT32
    rows = experiment.train.batch // experiment.train.accumulate
    return {
        "one_block_one_row": row,
        "all_blocks_one_row": m.depth * row,
        "rows_at_once": rows,
        "one_block": rows * row,
        "all_blocks": m.depth * rows * row,
    }


def cache(experiment: Experiment) -> dict[str, int]:
    """Bytes that one generated token adds to the key/value cache, and those of a whole context.

    A block with a window or chunks keeps no more than that many tokens, and a recurrent one a float32 state alone.
    ``int8``: of ``--int8_cache``, where the kind of attention has one, a byte for each number and a float32 scale for
    each head's key and value.
    """
    m, row = experiment.model, kind(experiment.model)
    if row.recurrent is not None:
        return {"bytes_per_token": 0, "bytes_per_context": m.loops * m.depth * row.recurrent(m) * FLOAT32}
    tokens = {"bytes_per_token": row.cache_numbers(m) * jnp.dtype(m.dtype).itemsize}
    if row.cache_scales is not None:
        tokens["int8_bytes_per_token"] = row.cache_numbers(m) + FLOAT32 * row.cache_scales(m)
    kept = sum(reach(m, i) for i in range(m.depth))
    return {
        **{name: m.loops * m.depth * token for name, token in tokens.items()},
        **{name.replace("token", "context"): m.loops * kept * token for name, token in tokens.items()},
    }


def training_memory(experiment: Experiment) -> dict[str, int | str]:
    """Bytes on one device, unsharded. Activations are an estimate: what the backward pass needs of each product."""
    m, train = experiment.model, experiment.train
    total = count_parameters(experiment)["total"]
    matrices = m.depth * block_matrices(m)
    # AdamW keeps two moments of every weight; Muon one of the matrices.
    moments = 2 * total - matrices if isinstance(train.optimizer, Muon) else 2 * total
    tokens = train.batch // train.accumulate * m.context
    number = jnp.dtype(m.dtype).itemsize
    stream = 4 * m.width + kind(m).activations(m) + m.mlp.kept(m.width)
    linear = all(KERNELS[kernel].linear for kernel in kernels_for_training(m))
    # Scores and weights of every key; or one sum for each query.
    tables = FLOAT32 * kind(m).tables * m.heads * (1 if linear else 2 * m.context)
    block, depth = tokens * (stream * number + tables), m.depth * m.loops
    kept = {
        "none": depth * block,
        "full": depth * tokens * m.width * number + block,
        "dots": depth * block,
        "dots_without_batch": depth * tokens * stream * number + tokens * tables,
    }[m.remat]
    logits = 2 * min(tokens * experiment.vocab_size, NUMBERS) * FLOAT32
    parts = {
        "weights": total * FLOAT32,
        "gradients": total * FLOAT32,
        "moments": moments * FLOAT32,
        "activations": kept,
        "logits": logits,
    }
    return {**parts, "total": sum(parts.values())}


def in_words(experiment: Experiment) -> list[str]:
    m, V = experiment.model, experiment.vocab_size
    table, block, active = V * m.width, block_matrices(m), block_active(m)
    tables = score_tables(experiment)
    met = f", of which a token meets {active:,}" if active < block else ""
    parameters = count_parameters(experiment)
    both = "the unembedding is the same table" if m.tie_embeddings else "and the unembedding as many again"
    return [
        f"One embedding table of {V:,} entries of width {m.width} has {table:,} weights, {both}. "
        f"A block has {block:,} in its matrices{met}, so one table costs as much as {table / block:.1f} blocks.",
        f"The {m.depth} blocks are {parameters['blocks'] / parameters['total']:.0%} of all "
        f"{parameters['total']:,} parameters.",
        f"Every block writes a score table of {kind(m).tables * m.heads} heads x {m.context} x {m.context} for each "
        f"row: {human(tables['one_block_one_row'])}, {human(tables['all_blocks_one_row'])} in all blocks. "
        f"Twice the context makes it four times that."
        if kind(m).tables
        else f"No block writes a score table: all remember {human(cache(experiment)['bytes_per_context'])} of a "
        f"text, however long.",
    ]


def text(experiment: Experiment) -> str:
    """The bill as a person reads it."""
    bill = cost(experiment)
    p, f, m = bill["parameters"], bill["flops_per_token"], experiment.model
    lines = [f"{'part':<28}{'parameters':>16}{'forward FLOPs/token':>22}"]
    rows = [
        ("embedding", p["embedding"], 0),
        ("positions", p["positions"], 0),
        (f"{m.depth} blocks of {p['block']:,}", p["blocks"], f["blocks"]),
        ("  their score tables", 0, f["attention_tables"]),
        *([("embedding norm", p["embedding_norm"], 0)] if p["embedding_norm"] else []),
        ("final norm", p["final_norm"], 0),
        ("unembedding" + (" (tied)" if m.tie_embeddings else ""), p["unembedding"], f["unembedding"]),
        ("in all", p["total"], f["forward"]),
        *([("that one token meets", p["active"], 0)] if p["active"] < p["total"] else []),
    ]
    lines += [f"{name:<28}{count:>16,}{flops:>22,.0f}" for name, count, flops in rows]
    memory, tables = bill["training_memory"], bill["score_tables"]
    lines += [
        "",
        f"training: {f['training']:,.0f} FLOPs per token; {experiment.train.batch * m.context:,} tokens a step",
        f"score tables (plain kernel): {human(tables['one_block'])} a block, {human(tables['all_blocks'])} in all, "
        f"for {tables['rows_at_once']} rows at once",
        f"cache: {human(bill['cache']['bytes_per_token'])} a token, "
        f"{human(bill['cache']['bytes_per_context'])} a full context"
        + (f" ({human(bill['cache']['int8_bytes_per_context'])} in int8)" if kind(m).cache_scales else ""),
        "training memory: " + ", ".join(f"{name} {human(size)}" for name, size in memory.items()),
        "",
        *bill["in_words"],
        f"FLOPs: {FLOPS_FORMULA}.",
    ]
    return "\n".join(lines)
