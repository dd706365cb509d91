"""Norms: epsilon is a setting and lies where it should; two passes, in float32."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from transformer.model.norms import LayerNorm, Norm, RmsNorm


def norm(kind, x, dtype="float32", bias=False):
    e = small.experiment(norm=kind, dtype=dtype, bias=bias)
    params = {"scale": jnp.ones(x.shape[-1])} | ({"b": jnp.zeros(x.shape[-1])} if bias else {})
    return Norm(e.model).apply({"params": params}, jnp.asarray(x, dtype))


@pytest.mark.parametrize("epsilon", [1e-5, 1e-6])
@pytest.mark.parametrize("kind", [LayerNorm, RmsNorm])
def test_epsilon_is_added_to_the_variance(kind, epsilon):
    """M07: rows of variance 1e-6, where 1e-5 gives 0.3015 and 1e-6 gives 0.7071."""
    x = np.tile([1e-3, -1e-3], 8).astype(np.float32)[None, None]
    found = norm(kind(epsilon=epsilon), x)
    wanted = {1e-5: 0.30151, 1e-6: 0.70711}[epsilon]
    np.testing.assert_allclose(found, np.sign(x) * wanted, rtol=1e-4)


def test_layer_norm_takes_the_mean_off_first_and_rms_norm_does_not():
    x = np.random.default_rng(0).standard_normal((1, 1, 16)).astype(np.float32) + 3
    centred = x - x.mean()
    np.testing.assert_allclose(norm(LayerNorm(), x), centred / x.std(), rtol=1e-4)
    np.testing.assert_allclose(norm(RmsNorm(), x), x / np.sqrt((x**2).mean()), rtol=1e-4)


def test_the_variance_survives_a_large_mean():
    """Two passes: E[x^2] - E[x]^2 in float32 would find a variance of 0 (or below) here."""
    x = (np.random.default_rng(0).standard_normal((1, 1, 16)) + 1e4).astype(np.float32)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(norm(LayerNorm(), x), (exact - exact.mean()) / exact.std(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", [LayerNorm(), RmsNorm()])
def test_bfloat16_is_normed_in_float32(kind):
    """The result is the exact one, rounded once."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 16)) * 3 + 2, jnp.bfloat16)
    found = norm(kind, x, "bfloat16")
    assert found.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64)
    if isinstance(kind, LayerNorm):
        exact = exact - exact.mean()
    np.testing.assert_allclose(np.asarray(found, np.float64), exact / np.sqrt((exact**2).mean()), rtol=2**-8)
