"""The model's settings. Each part's own settings live with the part."""

from typing import Literal

from transformer.errors import UserError
from transformer.model.attention import Attention, kind
from transformer.model.mlp import Gelu, Swiglu
from transformer.model.norms import LayerNorm, RmsNorm
from transformer.model.positions import Learned, Rotary, Sinusoidal
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
    positions: Learned | Sinusoidal | Rotary = Learned()
    norm: LayerNorm | RmsNorm = LayerNorm()
    final_norm: bool = True  # between the last block and the unembedding; pre-norm models have it
    mlp: Gelu | Swiglu = Gelu()
    bias: bool = False  # biases in every product, and the shift of LayerNorm
    tie_embeddings: bool = False  # the unembedding is the embedding table, transposed
    dropout: float = 0.0  # on the embedding and on what each branch adds to the stream
    init_std: float = 0.02  # GPT-2's; what writes to the stream gets it over sqrt(2 L)
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; weights are always float32
    stack: Literal["auto", "scan", "unroll"] = "auto"  # auto unrolls up to 8 blocks: faster steps, slower compile
    remat: Literal["none", "full", "dots", "dots_without_batch"] = "none"  # what the backward pass computes again

    @property
    def head_size(self) -> int:
        """H, the width of one head."""
        return self.head_width or self.width // self.heads

    @property
    def residual_std(self) -> float:
        """Initial std of weights that write to the residual stream: GPT-2 report, section 2.3.

        2 L branches add up, so each is scaled by 1/sqrt(2 L) and the stream's variance at
        initialisation does not depend on the depth.
        """
        return self.init_std / (2 * self.depth) ** 0.5

    @property
    def unrolled(self) -> bool:
        return self.stack == "unroll" or (self.stack == "auto" and self.depth <= 8)


def check(model: Model) -> None:
    """UserError for sizes that cannot be built."""
    for name in ("depth", "width", "heads", "context"):
        if getattr(model, name) < 1:
            raise UserError(f"config.model.{name}: {getattr(model, name)} is too small, set 1 or more")
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
    if isinstance(model.positions, Rotary) and model.head_size % 2:
        raise UserError(f"config.model.positions: rotary needs an even head width, found {model.head_size}")
    if isinstance(model.positions, Sinusoidal) and model.width % 2:
        raise UserError(f"config.model.positions: sinusoidal needs an even width, found {model.width}")
    if not isinstance(model.positions, Learned) and model.positions.base <= 1:
        raise UserError(f"config.model.positions.base: {model.positions.base} is not above 1")
    kind(model).check(model)
