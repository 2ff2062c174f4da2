"""YAML files and ``key=value`` overrides as plain nested dicts, merged left to right.

The dialect is YAML with fewer surprises: only ``true``/``false`` are booleans (``on`` and ``no``
are text), ``1e-3`` is a number, ``010`` and ``1:30`` are text, and a key given twice is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Tree = dict[str, Any]
COMMAND_LINE = "command line"
TYPE_KEY = "type"


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config: dotted path, what is wrong, and where it was given."""

    path: str
    message: str
    source: str = ""

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return (
            f"{self.path}{where}: {self.message}" if self.path else f"{self.source}: {self.message}"
        )


class ConfigError(ValueError):
    """Every problem of a config at once; ``str()`` is one line per problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems]
        if len(lines) > 1:
            lines = [f"{len(lines)} problems in the configuration", *("  " + x for x in lines)]
        super().__init__("\n".join(lines))


def nearest(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known name closest to ``name``, or nothing."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"[-+]?(?:(?:0|[1-9][0-9_]*)(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
_RESOLVERS = (
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own attribute)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                raise yaml.MarkedYAMLError(
                    problem="a key must be text (put it in quotes)",
                    problem_mark=key_node.start_mark,
                )
            if key_node.value in seen:
                first = seen[key_node.value]
                raise yaml.MarkedYAMLError(
                    problem=f"key {key_node.value!r} is given twice (lines {first} and {line})",
                    problem_mark=key_node.start_mark,
                )
            seen[key_node.value] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever either dialect would not read back as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))


def parse_number(text: str) -> int | float | None:
    """The number that ``text`` spells in this dialect (``1_000``, ``1e-3``), or None."""
    if _INT.match(text):
        return int(text)
    if _FLOAT.match(text):
        return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    return None


def parse_yaml(text: str, source: str) -> Any:
    """The value of one YAML document; ``ConfigError`` says where in ``source`` it is broken."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = source
        if mark is not None and source != COMMAND_LINE:
            where = f"{source}, line {mark.line + 1}, column {mark.column + 1}"
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise ConfigError([Problem("", f"cannot be read as YAML: {reason}", where)]) from None


def dump_tree(tree: Tree) -> str:
    """YAML text that ``parse_yaml`` (and any YAML 1.1 reader) turns back into ``tree``."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _read_file(name: str) -> Tree:
    path = Path(name)
    if not path.is_file():
        folder = path.parent
        present = [p.name for p in folder.glob("*.y*ml")] if folder.is_dir() else []
        what = "is a folder, not a file" if path.is_dir() else "no such file"
        raise ConfigError([Problem("", what + nearest(path.name, present), name)])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("", f"cannot be read: {error}", name)]) from None
    tree = parse_yaml(text, name)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        message = f"must hold 'key: value' pairs, not a {type(tree).__name__}"
        raise ConfigError([Problem("", message, name)])
    return tree


def load_yaml_files(paths: Iterable[str | Path]) -> dict[str, Tree]:
    """File name -> its content, in the given order; problems of all files are reported together."""
    layers: dict[str, Tree] = {}
    problems: list[Problem] = []
    for path in paths:
        try:
            layers[str(path)] = _read_file(str(path))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return layers


def parse_overrides(overrides: Iterable[str]) -> Tree:
    """``["a.b=1", "a.c=[x, y]"]`` -> ``{"a": {"b": 1, "c": ["x", "y"]}}``; values are YAML."""
    tree: Tree = {}
    problems: list[Problem] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = key.split(".")
        if not equals or not all(part.strip() == part != "" for part in parts):
            message = f"given {text!r}; an override is written key=value, like model.layers=4"
            problems.append(Problem("", message, COMMAND_LINE))
            continue
        try:
            branch = parse_yaml(value, COMMAND_LINE)
        except ConfigError as error:
            problems += [
                Problem(key, f"{p.message}; given {value!r}", p.source) for p in error.problems
            ]
            continue
        for part in reversed(parts):
            branch = {part: branch}
        tree = merge(tree, branch)
    if problems:
        raise ConfigError(problems)
    return tree


def merge(left: Mapping[str, Any], right: Mapping[str, Any]) -> Tree:
    """``right`` laid over ``left``, key by key and in depth; neither is changed.

    A component is either ``name`` or ``{type: name, ...}``. Naming another type drops the
    old component's keys, for they belong to the old type; naming the same one keeps them.
    """
    merged: Tree = dict(left)
    for key, new in right.items():
        merged[key] = _merge_value(merged[key], new) if key in merged else new
    return merged


def _merge_value(old: Any, new: Any) -> Any:
    if isinstance(old, str) and isinstance(new, dict):
        old = {TYPE_KEY: old}
    if isinstance(new, str) and isinstance(old, dict) and TYPE_KEY in old:
        new = {TYPE_KEY: new}
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    if TYPE_KEY in old and old[TYPE_KEY] != new.get(TYPE_KEY, old[TYPE_KEY]):
        return new
    return merge(old, new)


def combine(layers: Iterable[tuple[str, Tree]]) -> tuple[Tree, dict[str, str]]:
    """All layers merged, and for each dotted path the name of the last layer that gave it."""
    tree: Tree = {}
    sources: dict[str, str] = {}
    for name, layer in layers:
        tree = merge(tree, layer)
        sources.update(dict.fromkeys(_paths(layer), name))
    return tree, sources


def _paths(tree: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
