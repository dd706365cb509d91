"""SmolLM 3: Llama with blocks here and there that have no positions (arXiv:2501.18795)."""

import dataclasses
from typing import Any

from transformer.interop import llama, rope
from transformer.interop.common import INV_FREQ, Family, repeated
from transformer.interop.keys import Keys
from transformer.model.config import Model
from transformer.model.positions import None_
from transformer.model.spans import Global, Pattern, is_local


def read(keys: Keys) -> Model:
    """Windows are for blocks without positions there, which is no pattern here."""
    m = llama.read(keys)
    keys.must_be("use_sliding_window", False)
    keys.take("sliding_window")
    if set(keys.take("layer_types") or ()) - {"full_attention"}:
        raise keys.refuse("layer_types", "blocks without positions see everything here")
    every = keys.whole("no_rope_layer_interval", 4)
    rotated = keys.take("no_rope_layers", [int((i + 1) % every != 0) for i in range(m.depth)])
    if not isinstance(rotated, list) or len(rotated) != m.depth or any(x not in (0, 1) for x in rotated):
        raise keys.refuse("no_rope_layers", f"wanted {m.depth} of 0 (no rotary positions) and 1")
    m = dataclasses.replace(
        m,
        positions=rope.read(keys, m.head_size, usual=2_000_000.0),
        tie_embeddings=keys.flag("tie_word_embeddings", True),
    )
    if all(rotated):
        return m
    if not any(rotated):
        return dataclasses.replace(m, positions=None_())
    span = Pattern(blocks=repeated([not x for x in rotated]), local=Global(), rotate_global=False)
    return dataclasses.replace(m, attention=dataclasses.replace(m.attention, span=span))


def write(m: Model) -> dict[str, Any]:
    span = m.attention.span
    if isinstance(span, Pattern):
        rotated = [int(is_local(span, i)) for i in range(m.depth)]
    else:
        rotated = [int(not isinstance(m.positions, None_))] * m.depth
    return llama.write(m) | {
        "no_rope_layers": rotated,
        "no_rope_layer_interval": len(span.blocks) if isinstance(span, Pattern) else 4,  # without effect beside these
        "layer_types": ["full_attention"] * m.depth,
        "use_sliding_window": False,
    }


FAMILY = Family("smollm3", "SmolLM3ForCausalLM", "model.", read, write, llama.ENTRIES, INV_FREQ)
