"""The model's settings. Each part's own settings live with the part."""

import dataclasses
from typing import Literal

from transformer.errors import UserError
from transformer.model import attention, moe, parametrisation, positions, spans
from transformer.model.attention import Attention, kind
from transformer.model.mlp import Geglu, Gelu, Swiglu
from transformer.model.moe import Moe
from transformer.model.norms import LayerNorm, RmsNorm
from transformer.model.parametrisation import Completep, DepthMup, Mup, Standard
from transformer.model.positions import Alibi, Learned, None_, Relative, Rotary, Sinusoidal
from transformer.model.spans import Pattern
from transformer.settings import settings


@settings
class Model:
    """The decoder-only Transformer. Letters: L depth, D width, N heads, H head width, T context."""

    depth: int = 4
    width: int = 192
    heads: int = 6
    head_width: int | None = None  # none: width / heads
    context: int = 256
    attention: Attention = Attention()
    positions: Learned | Sinusoidal | Rotary | Alibi | Relative | None_ = Learned()
    norm: LayerNorm | RmsNorm = LayerNorm()
    norms: Literal["pre", "post", "sandwich", "peri", "after"] = (
        "pre"  # where in a block; peri also norms the embedding
    )
    parallel: bool = False  # attention and MLP of a block read the same stream, and add to it together
    loops: int = 1  # how often the stack is gone through, with the same weights: arXiv:1807.03819
    layer_drop: float = 0.0  # the share of blocks that a training step leaves out: arXiv:1909.11556
    final_norm: bool = True  # between the last block and the unembedding; pre-norm models have it
    mlp: Gelu | Swiglu | Geglu | Moe = Gelu()
    bias: bool = False  # biases in every product, and the shift of LayerNorm
    tie_embeddings: bool = False  # the unembedding is the embedding table, transposed
    scale_embedding: bool = False  # a token's vector times sqrt(width): arXiv:1706.03762, section 3.4
    dropout: float = 0.0  # on the embedding and on what each branch adds to the stream
    init_std: float = 0.02  # GPT-2's; what writes to the stream gets it over sqrt(2 L)
    parametrisation: Standard | Mup | DepthMup | Completep = Standard()  # what changes with the model's size, and how
    logits_soft_cap: float | None = None  # logits s become c tanh(s / c): arXiv:2408.00118, section 2
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; weights are always float32
    stack: Literal["auto", "scan", "unroll"] = "auto"  # auto unrolls up to 8 blocks: faster steps, slower compile
    remat: Literal["none", "full", "dots", "dots_without_batch"] = "none"  # what the backward pass computes again

    @property
    def head_size(self) -> int:
        """H, the width of one head."""
        return self.head_width or self.width // self.heads

    @property
    def rotated_width(self) -> int:
        """How much of a head rotary positions may turn."""
        return kind(self).rotated(self)

    @property
    def matrix_std(self) -> float:
        """Initial std of a block's products."""
        return self.init_std * parametrisation.of_matrices(self).std

    @property
    def residual_std(self) -> float:
        """Initial std of weights that write to the residual stream: GPT-2 report, section 2.3.

        2 L branches add up, so each is scaled by 1/sqrt(2 L) and the stream's variance at
        initialisation does not depend on the depth, nor on the loops over it.
        """
        std = self.init_std / (2 * self.depth * self.loops) ** 0.5
        return std * parametrisation.of_matrices(self, residual=True).std

    @property
    def unrolled(self) -> bool:
        return self.stack == "unroll" or (self.stack == "auto" and self.depth <= 8)

    def block(self, i: int) -> "Model":
        """The settings as they are for block ``i``: its own span, and positions where it has them."""
        span = self.attention.span
        if not isinstance(span, Pattern):
            return self
        own, local = spans.of_block(span, i), spans.is_local(span, i)
        own_attention, positions = dataclasses.replace(self.attention, span=own), self.positions
        if not local and not span.rotate_global:
            positions = None_()
        elif local and span.local_base is not None and isinstance(positions, Rotary):
            positions = Rotary(base=span.local_base, share=positions.share)
        return dataclasses.replace(self, attention=own_attention, positions=positions)


MOST_BLOCKS = 10_000  # what is counted block by block is to end


def check(model: Model) -> None:
    """UserError for sizes that cannot be built."""
    for name in ("depth", "width", "heads", "context", "loops"):
        if getattr(model, name) < 1:
            raise UserError(f"config.model.{name}: {getattr(model, name)} is too small, set 1 or more")
    if model.depth > MOST_BLOCKS:
        raise UserError(f"config.model.depth: {model.depth} is too large, set up to {MOST_BLOCKS:,}")
    if model.head_width is None and model.width % model.heads:
        raise UserError(
            f"config.model.heads: width {model.width} does not divide into {model.heads} heads; "
            f"set config.model.head_width, or a number of heads that divides {model.width}"
        )
    if model.head_width is not None and model.head_width < 1:
        raise UserError(f"config.model.head_width: {model.head_width} is too small, set 1 or more")
    if model.mlp.width is not None and model.mlp.width < 1:
        raise UserError(f"config.model.mlp.width: {model.mlp.width} is too small, set 1 or more, or none")
    if not 0 <= model.dropout < 1:
        raise UserError(f"config.model.dropout: {model.dropout} is not a share from 0 up to but not including 1")
    if model.init_std <= 0:
        raise UserError(f"config.model.init_std: {model.init_std} is not above 0")
    if model.norm.epsilon <= 0:
        raise UserError(f"config.model.norm.epsilon: {model.norm.epsilon} is not above 0")
    if not 0 <= model.layer_drop < 1:
        raise UserError(f"config.model.layer_drop: {model.layer_drop} is not a share from 0 up to but not including 1")
    if model.logits_soft_cap is not None and model.logits_soft_cap <= 0:
        raise UserError(f"config.model.logits_soft_cap: {model.logits_soft_cap} is not above 0; none for no cap")
    if model.parallel and model.norms == "post":
        raise UserError("config.model.parallel: branches side by side have no place for a norm between them; norms=pre")
    span = model.attention.span
    if isinstance(span, Pattern) and not span.rotate_global and not isinstance(model.positions, Rotary | Alibi):
        raise UserError(
            "config.model.attention.span.rotate_global: false needs positions that each block applies for itself: "
            "rotary or alibi"
        )
    attention.check(model)
    if isinstance(model.mlp, Moe):
        moe.check(model.mlp)
    if isinstance(span, Pattern) and span.local_base is not None:
        where = f"config.model.attention.span.local_base: {span.local_base}"
        if not isinstance(model.positions, Rotary):
            raise UserError(f"{where} has no effect here: the positions are not rotary; leave it out")
        if span.local_base <= 1:
            raise UserError(f"{where} is not above 1")
        if Rotary(base=span.local_base, share=model.positions.share) == model.positions:
            raise UserError(f"{where} has no effect here: it is the base of all blocks; leave it out")
    positions.check(model)
    parametrisation.check(model)
