"""The settings of a whole experiment: each decides the hash, and what is wrong is met in one line."""

from typing import Any

from hypothesis import given
from hypothesis import settings as fuzz
from hypothesis import strategies as st

from transformer.config import Experiment
from transformer.errors import UserError
from transformer.settings import check_types, digest, from_dict, leaves, override, to_dict


def test_the_hash_of_an_experiment_differs_for_each_of_its_leaves() -> None:
    base = Experiment()
    seen = {digest(base)}
    for name, value in leaves(base).items():
        for text in ["true", "false"] if isinstance(value, bool) else ["3", "0.25", "3,4", "plain", *KINDS]:
            try:
                changed = override(base, {name: text})
            except UserError:
                continue
            if changed != base:
                seen.add(digest(changed))
                break
        else:
            raise AssertionError(f"no other value was found for {name}")
    assert len(seen) == len(leaves(base)) + 1


KINDS = [
    "fixed",
    "mup",
    "sliding",
    "sigmoid",
    "qkv",
    "head",
    "post",
    "bfloat16",
    "scan",
    "full",
    "swiglu",
    "rotary",
    "rms_norm",
    "multi_query",
    "bytes",
    "linear",
    "muon",
]
names = st.lists(
    st.sampled_from(["model", "train", "steps", "attention", "projection", "kind", "positions", "", "depth", "x", "\n"])
    | st.text(max_size=4),
    max_size=5,
).map(".".join)
texts = st.text(max_size=8) | st.sampled_from([*KINDS, "1", "none", "9" * 500, "1e999", "-1", "true", ",", "1,,2"])


@fuzz(deadline=None)
@given(st.dictionaries(names | st.sampled_from(sorted(leaves(Experiment()))), texts, max_size=4))
def test_no_override_ever_raises_anything_but_a_user_error(changes: dict[str, str]) -> None:
    try:
        changed = override(Experiment(), changes)
    except UserError as error:
        assert len(str(error).splitlines()) == 1
    else:
        check_types(changed)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@fuzz(deadline=None)
@given(st.sampled_from(sorted(leaves(Experiment()))), json_values)
def test_no_damaged_json_ever_raises_anything_but_a_user_error(name: str, value: Any) -> None:
    data = to_dict(Experiment())
    *path, last = name.split(".")
    group = data
    for part in path:
        group = group[part]
    group[last] = value
    try:
        check_types(from_dict(Experiment, data))
    except UserError as error:
        assert len(str(error).splitlines()) == 1
