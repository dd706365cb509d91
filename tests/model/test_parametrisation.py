"""Every row of the table in docs/parametrisations.md, held to what initial weights, optimizers and logits do."""

import dataclasses
import functools
import re
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small
from tests.test_house import program
from transformer import config
from transformer.errors import UserError
from transformer.model import layers
from transformer.model.attention import Attention
from transformer.model.grouped import Grouped
from transformer.model.layers import by_declaration, declared_leaves
from transformer.model.mlp import Swiglu
from transformer.model.parametrisation import Completep, DepthMup, Mup, Standard
from transformer.model.positions import Relative
from transformer.training import optimizer as optimizers
from transformer.training.optimizer import Adamw, Muon
from transformer.training.state import declarations, init_params, optimizer

PAGE = Path(__file__).parents[2] / "docs" / "parametrisations.md"
ROW = re.compile(r"^\| ([a-zA-Z ]+) \| (\w[\w ]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.M)
KINDS = {"mup": Mup, "depth_mup": DepthMup, "completep": Completep}
N, L, H = 4, 8, 2  # the model's width, depth and head width over the base's

PLACES = {
    "embedding": "embedding",
    "positions": "positions/table",
    "unembedding": "unembedding",
    "final norm": "final_norm/.*",
    "matrices that read the stream": "blocks/(attention/(query|key|value|gate)|mlp/(up|gate))/w",
    "matrices that write to the stream": "blocks/(attention/out|mlp/down)/w",
    "biases of blocks": "blocks/.*(/b|sinks)",
    "norms of blocks": "blocks/.*scale",
    "matrices of blocks under Muon": "blocks/.*/w",
}
FORWARD = ("output of each branch", "logits", "attention scores")


def table() -> dict[tuple[str, str], dict[str, float]]:
    """The factors by (of what, factor of), with n, l and h put in."""
    found = {}
    for of, what, *cells in ROW.findall(PAGE.read_text(encoding="utf-8")):
        if of != "of what":
            values = [eval(cell.replace("^", "**"), {"n": N, "l": L, "h": H}) for cell in cells]
            found[of, what] = dict(zip(KINDS, values, strict=True))
    return found


TABLE = table()
ROWS = [(*row, name) for row in TABLE if row[0] not in FORWARD for name in KINDS]


def sized(name: str | None, **more):
    """A model n times as wide and l times as deep as its base, with weights of every role."""
    settings = {
        "depth": L,
        "width": 8 * N,
        "heads": 4,
        "attention": Attention(projection=Grouped(kv_heads=2), gate=True, qk_norm="head"),
        "bias": True,
        "mlp": Swiglu(width=24),
        "stack": "scan",
    }
    kind = Standard()
    if name is not None:
        depth = {} if name == "mup" else {"base_depth": 1}
        kind = KINDS[name](base_width=8, base_head_width=8 * N // 4 // H, **depth)
    return small.experiment(**settings | {"parametrisation": kind} | more)


@functools.cache
def initial(name: str | None):
    """Of every weight, a constant: the std that it would be drawn with (that it is, tests/model/test_init.py says)."""

    def constant(std: float):
        return lambda key, shape, dtype: jnp.full(shape, std, dtype)

    with mock.patch.object(layers.nn.initializers, "normal", constant):
        return declared_leaves(small.jit(lambda: init_params(sized(name)))())


@functools.cache
def update(name: str | None, what: str, muon: bool):
    """The direction of a first step in which nothing but the rate, the epsilon or the decay decides its size.

    AdamW works on single numbers, so each weight is two of them; and Muon's direction has a size of its own, as signs.
    """
    epsilon = {"learning rate": 1e-20, "epsilon": 1e9, "decay": 1e-20}[what]
    kind = Muon(epsilon=epsilon) if muon else Adamw(epsilon=epsilon)
    e = sized(name)
    train = {"weight_decay": 0.1 if what == "decay" else 0.0, "optimizer": kind}
    e = dataclasses.replace(e, train=dataclasses.replace(e.train, **train))

    params, gradients = (jax.tree.map(lambda x: x.ravel()[:2], small.weights(e, seed)) for seed in (0, 1))
    if what == "decay":
        gradients = jax.tree.map(np.zeros_like, gradients)
    transformation = optimizer(e)
    with mock.patch.object(optimizers, "orthogonal", lambda w, momentum, rms: jnp.sign(momentum)):
        directions, _ = transformation.update(gradients, transformation.init(params), params)
    return declared_leaves(directions)


@pytest.mark.parametrize(("of", "what", "name"), ROWS)
def test_a_row_of_the_table(of, what, name):
    """The factor between this parametrisation and the standard one, of every weight that the row is of."""
    muon = of.endswith("under Muon")
    if what == "initial std":
        found, wanted = initial(name), initial(None)
    else:
        found, wanted = update(name, what, muon), update(None, what, muon)
    factor = TABLE[of, what][name]
    if what == "decay":  # which acts through the learning rate
        factor *= TABLE[of, "learning rate"][name]
    if what == "epsilon":  # so large that it is what is divided by
        factor = TABLE[of, "learning rate"][name] / factor
    weights = [path for path in wanted if re.fullmatch(PLACES[of], path)]
    assert weights
    for path in weights:
        assert np.asarray(wanted[path]).any()
        assert small.far(found[path], factor * np.asarray(wanted[path])) < 1e-4, path


def test_the_table_has_a_row_for_every_weight_and_every_factor():
    """Adding a role, or a kind of attention with weights of its own, means adding a row (or a reason)."""
    e = sized("completep", positions=Relative(), attention=Attention(gate=True, qk_norm="width"))
    assert len(ROWS) == 3 * (len(TABLE) - len(FORWARD)) and {of for of, _ in TABLE} == {*PLACES, *FORWARD}
    no_row = [p for p in declared_leaves(declarations(e)) if not any(re.fullmatch(x, p) for x in PLACES.values())]
    assert no_row == ["blocks/attention/distances"]  # relative positions: as biases


@pytest.mark.parametrize(("name", "tied"), [("depth_mup", False), ("completep", False), ("completep", True)])
def test_the_forward_pass_is_the_standard_one_of_weights_that_the_factors_are_multiplied_into(name, tied):
    """Branches: the last matrix and bias of each; logits: the unembedding; scores: the queries' norm."""
    e, standard = (sized(x, tie_embeddings=tied) for x in (name, None))
    params, rows = small.weights(e), small.batch(e, rows=2)
    factor = {of: TABLE[of, "forward pass"][name] for of in FORWARD}

    def fold(path: str) -> float:
        if re.fullmatch("blocks/(attention/out|mlp/down)/[wb]", path):
            return factor["output of each branch"]
        return factor["attention scores"] if path == "blocks/attention/query_norm/scale" else 1.0

    names = iter(declared_leaves(declarations(e)))
    folded = by_declaration(lambda w, x: x * np.float32(fold(next(names))), declarations(e), params)
    found = np.asarray(small.compiled_logits(e, params, rows))
    wanted = np.asarray(small.compiled_logits(standard, folded, rows)) * factor["logits"]  # linear in the unembedding
    real = rows.segments_BT > 0
    assert small.far(found[real], wanted[real]) < 1e-5
    plain = np.asarray(small.compiled_logits(standard, params, rows))
    assert small.far(plain[real], wanted[real]) > 0.1


@pytest.mark.parametrize("name", KINDS)
def test_at_the_base_sizes_the_program_is_the_standard_one(name):
    """Initialisation and training step, as text: equal to the bit."""
    model = {"depth": 3, "width": 32, "heads": 4, "bias": True, "stack": "scan"}
    depth = {} if name == "mup" else {"base_depth": 3}
    base = KINDS[name](base_width=32, base_head_width=8, **depth)
    assert program(small.experiment(parametrisation=base, **model)) == program(small.experiment(**model))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parametrisation": Mup(base_width=0)}, "parametrisation.base_width: 0 is too small"),
        ({"parametrisation": Mup(base_head_width=0)}, "parametrisation.base_head_width: 0 is too small"),
        ({"parametrisation": DepthMup(base_depth=0)}, "parametrisation.base_depth: 0 is too small"),
        ({"parametrisation": Completep(), "norms": "sandwich"}, "pre-norm blocks, not of norms=sandwich"),
        ({"parametrisation": DepthMup(), "loops": 2}, "gone through in loops"),
    ],
)
def test_what_has_no_rule_is_refused(settings, words):
    with pytest.raises(UserError, match=words):
        config.check(small.experiment(**settings))
    config.check(small.experiment(**settings | {"parametrisation": Standard()}))
