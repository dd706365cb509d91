"""Rotary positions in a config.json: the older keys (rope_theta, rope_scaling) and the newer (rope_parameters)."""

import math
from typing import Any

from transformer.errors import UserError
from transformer.interop.keys import Keys
from transformer.model.positions import Linear, Llama3, Rotary, Unscaled, Yarn


def read(
    keys: Keys,
    head_width: int,
    base_key: str = "rope_theta",
    share_key: str = "",
    share: float = 1.0,
    usual: float = 10_000.0,
) -> Rotary:
    """The rotary settings; ``usual`` is the base where none is given.

    UserError for a scaling that is not here, and where the two styles of keys disagree.
    """
    keys.must_be("rope_interleaved", False)
    new, old = dict(keys.group("rope_parameters")), dict(keys.group("rope_scaling"))
    base = keys.number(base_key, new.get("rope_theta", usual))
    if share_key:
        share = keys.number(share_key, new.get("partial_rotary_factor", share))
    for name, value in (("rope_theta", base), ("partial_rotary_factor", share)):
        if new.pop(name, value) != value:
            raise keys.refuse("rope_parameters", f"its {name} is not the one beside it, {value}")
        old.pop(name, None)
    if "type" in old:
        old.setdefault("rope_type", old["type"])
        old.pop("type")
    if old and new and _plain(old) != _plain(new):
        raise keys.refuse("rope_parameters", f"differs from rope_scaling, {old}")
    return Rotary(base=base, share=_share(share, head_width), scaling=scaling(keys, new or old))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None}


def _share(share: float, head_width: int) -> float:
    """The published code rounds down, ours to the nearest."""
    return share if int(head_width * share) == round(head_width * share) else int(head_width * share) / head_width


def scaling(keys: Keys, values: dict[str, Any]) -> Unscaled | Linear | Yarn | Llama3:
    own = Keys(f"{keys.where}, rope scaling", {k: v for k, v in values.items() if k not in ("rope_theta", "type")})
    kind = own.text("rope_type", "default")
    found: Unscaled | Linear | Yarn | Llama3
    if kind == "default":
        found = Unscaled()
        own.done(["factor"] if values.get("factor") == 1.0 else [])
        return found
    factor = own.number("factor")
    if kind == "linear":
        found = Linear(factor=factor)
    elif kind == "llama3":
        low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
        original = own.whole("original_max_position_embeddings")
        found = Llama3(factor=factor, original_context=original, low=low, high=high)
    elif kind == "yarn":
        original = own.whole("original_max_position_embeddings", keys.whole("max_position_embeddings"))
        usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        sharper = own.number("attention_factor", usual)
        if not (math.isclose(sharper, usual) or sharper == 1):
            raise own.refuse("attention_factor", f"only 1 and the paper's {usual} are here")
        own.must_be("truncate", True)
        fast, slow = own.number("beta_fast", 32.0), own.number("beta_slow", 1.0)
        found = Yarn(
            factor=factor, original_context=original, fast=fast, slow=slow, sharpen=math.isclose(sharper, usual)
        )
    else:
        raise UserError(f"{keys.where}: rotary scaling {kind!r} is not here (there are: linear, llama3, yarn)")
    own.done()
    return found


def write(rotary: Rotary, base_key: str = "rope_theta", share_key: str = "") -> dict[str, Any]:
    """The keys of both styles, saying the same: readers that know one only would fall back to base 10000."""
    scaled, share = write_scaling(rotary.scaling), {share_key: rotary.share} if share_key else {}
    both = scaled or {"rope_type": "default"}
    new = {"rope_theta": rotary.base, **({"partial_rotary_factor": rotary.share} if share_key else {}), **both}
    return {base_key: rotary.base, **share, "rope_scaling": scaled, "rope_parameters": new}


def write_scaling(s: Any) -> dict[str, Any] | None:
    """None for no scaling. One that has no home there comes back as none, which the reader's answer shows."""
    if isinstance(s, Linear):
        return {"rope_type": "linear", "factor": s.factor}
    if isinstance(s, Llama3):
        return {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low,
            "high_freq_factor": s.high,
            "original_max_position_embeddings": s.original_context,
        }
    if isinstance(s, Yarn):
        return {
            "rope_type": "yarn",
            "factor": s.factor,
            "original_max_position_embeddings": s.original_context,
            "beta_fast": s.fast,
            "beta_slow": s.slow,
        } | ({} if s.sharpen else {"attention_factor": 1.0})
    return None
