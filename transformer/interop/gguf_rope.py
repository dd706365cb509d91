"""Llama 3's rotary scaling in a GGUF file: a tensor with a divisor for each angle.

The settings that made it are not in the file. Published models differ in the factor alone, which the slowest angle
shows; that these settings give all the others is checked, so the scaling is exact or refused.
"""

from typing import Any

import numpy as np

from transformer.errors import UserError
from transformer.interop.rope import write_scaling
from transformer.model.positions import Llama3, Rotary, scaled_speeds, speeds

NAME = "rope_freqs.weight"


def scaling(where: str, divisors_H: np.ndarray, head_width: int, base: float) -> dict[str, Any] | None:
    """``rope_scaling`` as a config.json has it, None where nothing is scaled. UserError for other divisors than Llama
    3's, and for another number of them than pairs in a head."""
    if divisors_H.shape != (head_width // 2,):
        raise UserError(
            f"{where}: {NAME} has the shape {list(divisors_H.shape)}, the heads have {head_width // 2} pairs"
        )
    if np.all(divisors_H == 1):
        return None
    found = Llama3(factor=float(divisors_H[-1])) if divisors_H[-1] > 0 else Llama3()
    wanted_H = speeds(head_width, base) / scaled_speeds(Rotary(base=base, scaling=found), head_width)
    if not np.allclose(divisors_H, wanted_H, rtol=1e-4, atol=0):
        raise UserError(
            f"{where}: {NAME} is not the scaling of Llama 3 (factor {found.factor:g}, from a context of "
            f"{found.original_context}), and other divisors are not here"
        )
    return write_scaling(found)
