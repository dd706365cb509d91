"""The table of families, by the model_type of their config.json."""

from transformer.errors import UserError, did_you_mean
from transformer.interop import gemma, gpt2, gpt_neox, llama, olmo2, phi3, qwen, smollm3
from transformer.interop.common import Family
from transformer.interop.keys import Keys
from transformer.model import config as model_config
from transformer.model.config import Model

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        gpt2.FAMILY,
        gpt_neox.FAMILY,
        llama.FAMILY,
        llama.MISTRAL,
        qwen.FAMILY,
        qwen.QWEN3,
        gemma.FAMILY,
        gemma.GEMMA2,
        gemma.GEMMA3,
        olmo2.FAMILY,
        phi3.FAMILY,
        smollm3.FAMILY,
    )
}


def read(keys: Keys) -> tuple[Family, Model, int]:
    """The family, the model and the vocabulary of a config.json. UserError for what is not here, by name."""
    kind = keys.text("model_type", "")
    if kind not in FAMILIES:
        raise UserError(
            f"{keys.where}: model_type={kind!r} is not a family that is known{did_you_mean(kind, FAMILIES)}"
        )
    family = FAMILIES[kind]
    model, vocab_size = family.read(keys), keys.whole("vocab_size")
    keys.done()
    try:
        model_config.check(model)
    except UserError as error:
        raise UserError(f"{keys.where}: {error}") from error
    return family, model, vocab_size
