"""Frozen settings: dotted overrides, tags, types, JSON both ways, the hash."""

import dataclasses
import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import settings as fuzz
from hypothesis import strategies as st

from transformer.config import Experiment
from transformer.errors import UserError
from transformer.settings import (
    check_types,
    differing,
    digest,
    flat,
    from_dict,
    leaves,
    override,
    parse,
    settings,
    tag_of,
    to_dict,
)


@settings
class Global:
    """No settings of its own."""


@settings
class Sliding:
    window: int = 128
    sink: bool = False


@settings
class Chunked:
    size: int = 64


@settings
class Layer:
    span: Global | Sliding | Chunked = Global()
    dtype: Literal["float32", "bfloat16"] = "float32"
    rate: float = 0.1
    clip: float | None = 1.0
    remat: bool = True


@settings
class Tree:
    steps: int = 10
    layer: Layer = Layer()
    profile: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    names: tuple[str, ...] = ("",)
    note: str = ""


def message(error: pytest.ExceptionInfo[UserError]) -> str:
    """The error's text, which must be one line."""
    text = str(error.value)
    assert text == " ".join(text.splitlines())
    return text


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("stepz", "3", ["config.stepz", "'steps'"]),
        ("layer.dtyp", "float32", ["config.layer.dtyp", "'dtype'"]),
        ("layer.span.windw", "3", ["config.layer.span.windw", "global"]),
        ("layer.span.window", "3", ["config.layer.span.window", "global"]),
        ("steps.more", "3", ["config.steps.more", "plain value"]),
        ("steps.", "3", ["config.steps."]),
        ("layer.span.", "sliding", ["config.layer.span."]),
        ("", "3", ["config."]),
        ("a\nb", "3", ["config.a"]),
        ("layer", "x", ["config.layer", "group of settings", "dtype"]),
        ("layer.span", "slidng", ["config.layer.span", "'slidng'", "'sliding'"]),
        ("layer.dtype", "bfloat", ["config.layer.dtype", "'bfloat'", "'bfloat16'"]),
    ],
)
def test_an_unknown_name_or_value_is_refused_with_the_nearest(name: str, value: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        override(Tree(), {name: value})
    assert all(word in message(error) for word in words), message(error)


def test_a_setting_of_another_tag_is_unknown() -> None:
    with pytest.raises(UserError) as error:
        override(Tree(), {"layer.span": "chunked", "layer.span.window": "3"})
    assert "config.layer.span.window: chunked has no such setting" in message(error)


@pytest.mark.parametrize("spelling", ["layer.span", "layer.span.kind"])
@pytest.mark.parametrize("first", [True, False])
def test_tags_resolve_first_in_any_order_and_either_spelling(spelling: str, first: bool) -> None:
    pairs = [(spelling, "sliding"), ("layer.span.window", "5")]
    changed = override(Tree(), dict(pairs if first else pairs[::-1]))
    assert changed == Tree(layer=Layer(span=Sliding(window=5)))


def test_another_tag_resets_its_record_and_the_same_tag_keeps_it() -> None:
    tree = Tree(layer=Layer(span=Sliding(window=5, sink=True)))
    assert override(tree, {"layer.span": "chunked"}).layer.span == Chunked()
    assert override(override(tree, {"layer.span": "chunked"}), {"layer.span": "sliding"}).layer.span == Sliding()
    assert override(tree, {"layer.span": "sliding"}).layer.span == Sliding(window=5, sink=True)
    assert override(tree, {"layer.span.window": "7"}).layer.span == Sliding(window=7, sink=True)


def test_the_two_spellings_of_one_tag_at_once_are_refused() -> None:
    with pytest.raises(UserError) as error:
        override(Tree(), {"layer.span": "sliding", "layer.span.kind": "chunked"})
    assert "config.layer.span" in message(error)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("3e-4", 0.0003), ("1", 1.0), (".5", 0.5), ("1_000", 1000.0), ("-2E3", -2000.0), ("+1.", 1.0)],
)
def test_numbers_are_parsed_as_numbers(text: str, wanted: float) -> None:
    """C01: 3e-4 is 0.0003, never text."""
    found = parse(text, float, "x")
    assert found == wanted and type(found) is float


@pytest.mark.parametrize(("text", "wanted"), [("1e5", 100_000), ("010", 10), ("12.0", 12), ("1_000", 1000)])
def test_whole_numbers_are_parsed_as_whole_numbers(text: str, wanted: int) -> None:
    """C01: 1e5 is 100000 and 010 is ten, not eight."""
    found = parse(text, int, "x")
    assert found == wanted and type(found) is int


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1:30",
        "no",
        "0x10",
        "1.5",
        "1e-1",
        "nan",
        "inf",
        "1e400",
        " 1",
        "1 ",
        "--1",
        "True",
        "1e19",
        "9" * 20,
        "9" * 400,
        "9" * 5000,
    ],
)
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    """C01: 1:30 is not 90. Numbers that do not fit are refused too."""
    with pytest.raises(UserError) as error:
        parse(text, int, "config.steps")
    assert message(error).startswith("config.steps: ")


@pytest.mark.parametrize("text", ["", "1:30", "no", "nan", "-inf", "1e400", "9" * 400, "9" * 5000, "1,5"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse(text, float, "x")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("False", False), ("false", False), ("0", False), ("no", False), ("True", True), ("1", True), ("yes", True)],
)
def test_booleans(text: str, wanted: bool) -> None:
    """C02, C03: text that says false is false, also over a default of true."""
    assert override(Tree(), {"layer.remat": text}).layer.remat is wanted


@pytest.mark.parametrize("value", ["nope", "", "2", "off?", 0, 1, None])
def test_what_is_no_boolean_is_refused(value: Any) -> None:
    """C02: nope is an error."""
    with pytest.raises(UserError):
        parse(value, bool, "x")


def test_false_in_a_file_is_kept() -> None:
    """C03: presence never stands for truth."""
    data = to_dict(Tree())
    data["layer"]["remat"] = False
    assert from_dict(Tree, data).layer.remat is False


def test_tuples_none_and_literals() -> None:
    changed = override(Tree(), {"profile": "10,12", "shares": "1,2.5", "names": "a,b", "layer.clip": "none"})
    assert (changed.profile, changed.shares, changed.names) == ((10, 12), (1.0, 2.5), ("a", "b"))
    assert changed.layer.clip is None
    assert override(Tree(profile=(1,)), {"profile": ""}).profile == ()
    assert override(Tree(), {"layer.clip": "2"}).layer.clip == 2.0
    assert override(Tree(), {"layer.dtype": "bfloat16"}).layer.dtype == "bfloat16"
    for name, value in {"steps": "none", "profile": "1,x", "layer.clip": "x", "note": None, "profile.0": "1"}.items():
        with pytest.raises(UserError):
            override(Tree(), {name: value})


def test_nothing_is_changed_in_place_and_settings_are_frozen() -> None:
    tree = Tree()
    override(tree, {"layer.span": "sliding", "steps": "3"})
    assert tree == Tree()
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.steps = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Tree(stepz=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (Tree(steps="10"), "config.steps"),  # type: ignore[arg-type]
        (Tree(steps=1.0), "config.steps"),  # type: ignore[arg-type]
        (Tree(steps=True), "config.steps"),
        (Tree(profile=[1]), "config.profile"),  # type: ignore[arg-type]
        (Tree(layer=Layer(rate=1)), "config.layer.rate: 1 must be written 1.0"),
        (Tree(layer=Layer(rate=float("nan"))), "config.layer.rate"),
        (Tree(layer=Layer(rate=float("inf"))), "config.layer.rate"),
        (Tree(layer=Layer(remat=0)), "config.layer.remat"),  # type: ignore[arg-type]
        (Tree(layer=Layer(span="sliding")), "config.layer.span"),  # type: ignore[arg-type]
        (Tree(layer=Layer(span=Layer())), "config.layer.span"),  # type: ignore[arg-type]
        (Tree(layer=Global()), "config.layer"),  # type: ignore[arg-type]
        (Tree(layer=Layer(dtype="float16")), "config.layer.dtype"),  # type: ignore[arg-type]
        (Tree(note=3), "config.note"),  # type: ignore[arg-type]
    ],
)
def test_values_written_in_python_are_checked_as_strictly(tree: Tree, words: str) -> None:
    """C01: a wrong type is an error naming the field before any work."""
    with pytest.raises(UserError) as error:
        check_types(tree)
    assert message(error).startswith(words)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (3, "config: "),
        ({"stepz": 3}, "config.stepz"),
        ({"layer": 3}, "config.layer"),
        ({"layer": {"span": "global"}}, "config.layer.span"),
        ({"layer": {"span": {"kind": "slidng"}}}, "config.layer.span"),
        ({"layer": {"span": {"kind": []}}}, "config.layer.span"),
        ({"layer": {"span": {}}}, "config.layer.span"),
        ({"layer": {"span": {"kind": "global", "window": 3}}}, "config.layer.span.window"),
        ({"steps": "x"}, "config.steps"),
        ({"steps": None}, "config.steps"),
        ({"steps": 10**400}, "config.steps"),
        ({"profile": {}}, "config.profile"),
        ({"layer": {"dtype": []}}, "config.layer.dtype"),
    ],
)
def test_bad_json_is_refused_by_name(data: Any, words: str) -> None:
    with pytest.raises(UserError) as error:
        from_dict(Tree, data)
    assert message(error).startswith(words)


def test_leaves_name_every_plain_value_and_every_tag() -> None:
    found = leaves(Tree(layer=Layer(span=Sliding())))
    assert found["layer.span.kind"] == "sliding" and found["layer.span.window"] == 128
    assert found["steps"] == 10 and found["layer.clip"] == 1.0 and "layer" not in found
    assert tag_of(Sliding) == "sliding" and tag_of(type("MultiHead2D", (), {})) == "multi_head2_d"


def test_the_hash_is_the_same_in_every_process() -> None:
    """Golden: it names results on disk, so it may never change for the same settings."""
    tree = Tree(layer=Layer(span=Sliding(window=3), clip=None, rate=3e-4), profile=(1, 2), note="\u00e9")
    text = json.dumps(to_dict(tree), sort_keys=True, separators=(",", ":"))
    assert text == (
        '{"layer":{"clip":null,"dtype":"float32","rate":0.0003,"remat":true,"span":'
        '{"kind":"sliding","sink":false,"window":3}},"names":[""],"note":"\\u00e9","profile":[1,2],"shares":[],"steps":10}'
    )
    assert digest(tree) == "e01703d031f9"


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a setting's type."""
    from transformer import settings as module

    choices = module.members(hint)
    if choices:
        return st.one_of([trees(cls) for cls in choices.values()])
    args = module.typing.get_args(hint)
    if module._is_union(hint):
        plain = values_of(next(a for a in args if a is not type(None)))
        return st.none() | plain.filter(lambda v: not isinstance(v, str) or v.lower() != "none")
    if module.typing.get_origin(hint) is Literal:
        return st.sampled_from(args)
    if module.typing.get_origin(hint) is tuple:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    return {
        bool: st.booleans(),
        int: st.integers(1 - 2**63, 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=5),
    }[hint]


def trees(cls: type) -> st.SearchStrategy[Any]:
    from transformer.settings import hints

    return st.builds(cls, **{name: values_of(hint) for name, hint in hints(cls).items()})


@fuzz(deadline=None)
@given(trees(Experiment))
def test_any_tree_survives_json_and_its_types_check(tree: Experiment) -> None:
    check_types(tree)
    again = from_dict(Experiment, json.loads(json.dumps(to_dict(tree))))
    assert again == tree and digest(again) == digest(tree)
    assert override(Experiment(), {}) == Experiment()


@fuzz(deadline=None)
@given(trees(Tree), st.data())
def test_the_hash_differs_for_every_changed_leaf(tree: Tree, data: st.DataObject) -> None:
    """Also for one that is only a tag: Global() and Chunked() are different settings."""
    other = data.draw(trees(Tree))
    assert (digest(tree) == digest(other)) == (json.dumps(to_dict(tree)) == json.dumps(to_dict(other)))


def test_a_comma_within_a_text_is_written_with_a_backslash() -> None:
    from transformer.config import Experiment

    changed = override(Experiment(), {"train.prompts": r"Hello\, world,Once"})
    assert changed.train.prompts == ("Hello, world", "Once")


@pytest.mark.parametrize("tree", [Experiment(), Tree(), Tree(layer=Layer(span=Sliding(), clip=None), profile=(1, 2))])
def test_what_is_stored_has_the_names_of_the_tree(tree: Any) -> None:
    """Read back from JSON, without the classes."""
    stored = json.loads(json.dumps(to_dict(tree)))
    assert flat(stored) == {k: list(v) if isinstance(v, tuple) else v for k, v in leaves(tree).items()}


plain = st.dictionaries(st.sampled_from("abcd"), st.none() | st.integers(0, 2))


@given(plain, plain)
def test_what_differs_is_what_is_not_in_both(old: dict[str, Any], new: dict[str, Any]) -> None:
    """As sets of pairs; none is a value, and not the same as nothing."""
    found = differing(old, new)
    only = set(old.items()) ^ set(new.items())
    assert list(found) == sorted({name for name, _ in only})
    for name, pair in found.items():
        assert pair == tuple(side.get(name, "absent") for side in (old, new))
