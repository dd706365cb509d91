"""Settings as frozen dataclasses: overrides by dotted name, types checked, JSON both ways, a hash.

A setting's type is one of: bool, int, float, str, Literal[...], tuple[X, ...], X | None, another
settings class, or a *tagged union* of settings classes (``Global | Sliding``), of which one member
may be str: text that is no tag. A tag is the class name in snake case; it is written
``attention.span=sliding`` or ``attention.span.kind=sliding`` on the command line and
``{"kind": "sliding", ...}`` in JSON.
"""

import dataclasses
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, dataclass_transform

from transformer.errors import UserError, did_you_mean

T = TypeVar("T")
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_LARGEST = 1 << 63  # whole numbers fit into 64 bits
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass with slots: a mistyped name is an error wherever it is written."""
    return dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls)


def tag_of(cls: type) -> str:
    """MultiHead -> multi_head. An underscore at the end, as in None_, is for Python alone."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower().rstrip("_")


def members(hint: Any) -> dict[str, type]:
    """The settings classes of a type, by tag: several for a tagged union, one for a plain record, else none."""
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    return {tag_of(c): c for c in options if dataclasses.is_dataclass(c) and isinstance(c, type)}


def takes_text(hint: Any) -> bool:
    """Whether a tagged union also takes text that is no tag."""
    return _is_union(hint) and str in typing.get_args(hint)


def hints(cls: Any) -> dict[str, Any]:
    """Field name -> type, with string annotations resolved."""
    return {k: v for k, v in typing.get_type_hints(cls).items() if k in {f.name for f in dataclasses.fields(cls)}}


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Every plain value of a settings tree by dotted name; a tagged record also has its ``kind``."""
    found: dict[str, Any] = {}
    for name, hint in hints(type(tree)).items():
        value, where = getattr(tree, name), f"{path}{name}"
        if dataclasses.is_dataclass(value):
            if _is_union(hint):
                found[f"{where}.kind"] = tag_of(type(value))
            found.update(leaves(value, where + "."))
        else:
            found[where] = value
    return found


def flat(data: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The values of ``to_dict(tree)`` by the names that they have in ``leaves(tree)``; the classes are not needed."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        found |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return found


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Names whose values differ, with both values; "absent" stands for that of a side that lacks the name."""
    return {
        name: (old.get(name, "absent"), new.get(name, "absent"))
        for name in sorted(old.keys() | new.keys())
        if (name in old) != (name in new) or old[name] != new[name]
    }


def override(tree: T, changes: Mapping[str, Any], path: str = "config") -> T:
    """A copy of ``tree`` with dotted names changed.

    Text is parsed to the field's type; other values are checked against it. Tags resolve first and
    reset their record to the new tag's defaults, whatever the order. Raises UserError for an unknown
    name, an unknown tag or a wrong type, each with the nearest valid name.
    """
    cls = type(tree)
    known = hints(cls)
    groups: dict[str, dict[str, Any]] = {}
    for dotted, value in changes.items():
        head, dot, rest = dotted.partition(".")
        if dot and not rest:
            raise UserError(f"{path}.{dotted}: ends with a dot, where a name is missing")
        if head not in known:
            owner = tag_of(cls)
            none = "" if known else "; it has none, leave this out"
            raise UserError(f"{path}.{head}: {owner} has no such setting{did_you_mean(head, known)}{none}")
        groups.setdefault(head, {})[rest] = value
    new: dict[str, Any] = {}
    for head, group in groups.items():
        where, hint, old = f"{path}.{head}", known[head], getattr(tree, head)
        if not members(hint):
            extra = next((rest for rest in group if rest), None)
            if extra is not None:
                raise UserError(f"{where}.{extra}: {head} is a plain value and has no settings of its own")
            new[head] = parse(group[""], hint, where)
            continue
        record = old
        if _is_union(hint) and "" in group and "kind" in group:
            raise UserError(f"{where}: is given twice, as {where} and as {where}.kind")
        for spelling in ("", "kind"):
            if spelling == "kind" and (not _is_union(hint) or "kind" in _names(record)):
                break
            if (
                spelling == ""
                and takes_text(hint)
                and isinstance(group.get(""), str)
                and group[""] not in members(hint)
            ):
                record = group.pop("")
            elif spelling in group:
                record = _retag(group.pop(spelling), hint, record, where)
        if isinstance(record, str) and group:
            raise UserError(f"{where}.{next(iter(group))}: {record!r} is a plain value and has no settings of its own")
        new[head] = record if isinstance(record, str) else override(record, group, where)
    return dataclasses.replace(tree, **new)  # type: ignore[type-var]


def _names(record: Any) -> Mapping[str, Any]:
    return {} if isinstance(record, str) else hints(type(record))


def _retag(value: Any, hint: Any, record: Any, where: str) -> Any:
    choices = members(hint)
    if any(type(value) is c for c in choices.values()):
        return value
    if not isinstance(value, str) or not _is_union(hint):
        inner = next(iter(choices.values()))
        raise UserError(f"{where}: is a group of settings, set one of: {', '.join(hints(inner))}")
    if value not in choices:
        raise UserError(f"{where}: {value!r} is not valid{did_you_mean(value, choices)}")
    return record if type(record) is choices[value] else choices[value]()


def parse(value: Any, hint: Any, where: str) -> Any:
    """``value`` (text from a command line, or a Python value) as the type ``hint``; UserError where it is not."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if _is_union(hint):
        inner = [a for a in args if a is not type(None)]
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        return parse(value, inner[0], where)
    if origin is Literal:
        if value not in args:
            raise UserError(f"{where}: {value!r} is not valid{did_you_mean(str(value), map(str, args))}")
        return value
    if origin is tuple:
        if isinstance(value, str):
            value = [part.replace("\\,", ",") for part in re.split(r"(?<!\\),", value)] if value else ()
        if not isinstance(value, tuple | list):
            raise _wrong(value, "a tuple", where)
        return tuple(parse(v, args[0], where) for v in value)
    if hint is str:
        if not isinstance(value, str):
            raise _wrong(value, "text", where)
        return value
    if hint is bool:
        if isinstance(value, str) and value.lower() in _BOOLS:
            return _BOOLS[value.lower()]
        if not isinstance(value, bool):
            raise _wrong(value, "true or false", where)
        return value
    number = as_number(value)
    if hint is int:
        if number is None or abs(number) >= _LARGEST or not float(number).is_integer():
            raise _wrong(value, "a whole number", where)
        return int(number)
    assert hint is float, f"{where}: settings cannot have the type {hint}"
    if number is None or not math.isfinite(number):
        raise _wrong(value, "a number", where)
    return float(number)


def as_number(value: Any) -> int | float | None:
    """A number, or text that is one, where it is finite and a whole one fits into 64 bits; None otherwise."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if abs(value) < _LARGEST else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return None
    digits = value.replace("_", "")
    return int(digits) if re.fullmatch(r"[+-]?\d{1,19}", digits) else _finite(float(digits))


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _wrong(value: Any, wanted: str, where: str) -> UserError:
    huge = isinstance(value, int) and value.bit_length() > 64  # Python does not even print the largest ones
    return UserError(f"{where}: {'a number that large' if huge else repr(value)} is not {wanted}")


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def check_types(tree: Any, path: str = "config") -> None:
    """Check values written in Python files as strictly as those from the command line."""
    for name, hint in hints(type(tree)).items():
        value, where = getattr(tree, name), f"{path}.{name}"
        choices = members(hint)
        if choices:
            if isinstance(value, str) and takes_text(hint):
                continue
            if type(value) not in choices.values():
                raise UserError(f"{where}: {value!r} is not one of: {', '.join(choices)}")
            check_types(value, where)
        else:
            parsed = parse(value, hint, where)
            if type(parsed) is not type(value) or parsed != value:
                raise UserError(f"{where}: {value!r} must be written {parsed!r}")


def to_dict(tree: Any) -> dict[str, Any]:
    """The tree as JSON-ready values."""
    out: dict[str, Any] = {}
    for name, hint in hints(type(tree)).items():
        value = getattr(tree, name)
        if dataclasses.is_dataclass(value):
            tag = {"kind": tag_of(type(value))} if _is_union(hint) else {}
            out[name] = tag | to_dict(value)
        else:
            out[name] = list(value) if isinstance(value, tuple) else value
    return out


def from_dict(cls: type[T], data: Any, path: str = "config") -> T:
    """The inverse of ``to_dict``. Every name must be known and every value of the right type.

    A missing name has its default: a setting that is added later must default to what was done before it.
    """
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a group of settings, found {data!r}")
    known = hints(cls)
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name not in known:
            raise UserError(f"{path}.{name}: {tag_of(cls)} has no such setting{did_you_mean(name, known)}")
        where, hint = f"{path}.{name}", known[name]
        choices = members(hint)
        if not choices:
            values[name] = parse(value, hint, where)
            continue
        if isinstance(value, str) and takes_text(hint):
            values[name] = value
            continue
        inner = next(iter(choices.values()))
        if _is_union(hint):
            if not isinstance(value, dict) or str(value.get("kind")) not in choices:
                raise UserError(f"{where}: {value!r} needs a kind, one of: {', '.join(choices)}")
            inner, value = choices[str(value["kind"])], {k: v for k, v in value.items() if k != "kind"}
        values[name] = from_dict(inner, value, where)
    return cls(**values)


def digest(tree: Any) -> str:
    """A short hash of every value in the tree, the same in every process and version of Python."""
    text = json.dumps(to_dict(tree), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
