"""Configs as text that a person can read: every key of a class with its default, type and meaning;
of one config what differs from the defaults."""

from __future__ import annotations

import dataclasses
import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pretrain.decode import (
    Choices,
    default_of,
    encode,
    expected_text,
    fields_of,
    join_path,
    shorthands_of,
    show_value,
)


@dataclass(frozen=True)
class _Row:
    key: str
    default: str
    meaning: str


def describe(cls: type, width: int = 100) -> str:
    """All keys of ``cls`` in aligned columns: dotted key, default, type and help.

    Keys that only one component of a registry has carry its name in brackets.
    """
    rows = list(_rows(cls, "", None, ""))
    for key, about in shorthands_of(cls).items():
        section = key.rpartition(".")[0] + "."
        first = next(i for i, row in enumerate(rows) if row.key.startswith(section))
        rows.insert(first, _Row(key, "null", about))
    key_width = min(max(len(row.key) for row in rows), 36)
    default_width = min(max(len(row.default) for row in rows), 16)
    indent = " " * (key_width + default_width + 6)
    lines = []
    for row in rows:
        head = f"  {row.key:<{key_width}}  {row.default:<{default_width}}"
        if len(head) > len(indent) - 2:
            lines.append(head.rstrip())
            head = ""
        text = textwrap.wrap(row.meaning, max(width - len(indent), 30)) or [""]
        lines.append(f"{head:<{len(indent)}}{text[0]}".rstrip())
        lines += [indent + line for line in text[1:]]
    return "\n".join(lines) + "\n"


def describe_changes(config: Any, width: int = 100) -> str:
    """What differs from the defaults of the class, as ``key=value``, section by section."""
    changed = list(_changes(encode(type(config)()), encode(config), ""))
    lines: list[str] = []
    for _, group in itertools.groupby(changed, lambda change: change[0].partition(".")[0]):
        words = [f"{p}={v if isinstance(v, str) else json.dumps(v)}" for p, v in group]
        while words:  # filled by hand: a value may hold spaces
            line = words.pop(0)
            while words and len(line) + len(words[0]) + 2 <= width - 2:
                line += f"  {words.pop(0)}"
            lines.append(f"  {line}")
    return "\n".join(lines)


def _changes(default: Any, tree: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    known = default if isinstance(default, Mapping) else {}
    for key, value in tree.items():
        where = join_path(path, key)
        if isinstance(value, Mapping):
            yield from _changes(known.get(key), value, where)
        elif key not in known or known[key] != value:
            yield where, value


def _rows(
    cls: Any, path: str, base: Any, tag: str, inside: tuple[Choices, ...] = ()
) -> Iterator[_Row]:
    """``inside``: registries whose components are being described: one that nests its own kind does
    not describe them all again."""
    for name, (field, kind) in fields_of(cls).items():
        default = getattr(base, name) if type(base) is cls else default_of(field)
        registry = field.metadata.get("registry")
        where, about = join_path(path, name), field.metadata.get("help", "")
        if dataclasses.is_dataclass(kind) and registry is None:
            yield from _rows(kind, where, default, tag, inside)
            continue
        prefix = f"[{tag}] " if tag else ""
        allowed = expected_text(kind, field.metadata)
        meaning = prefix + (f"{about} ({allowed})" if about else allowed)
        yield _Row(where, _default_text(default, registry), meaning)
        if registry is not None and registry not in inside:
            for component in registry.names():
                config = registry.config_class(component)
                yield from _rows(config, where, default, component, (*inside, registry))


def _default_text(default: Any, registry: Choices | None) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if registry is not None and dataclasses.is_dataclass(default):
        return registry.name_of(type(default))
    if isinstance(default, str):
        return default or "''"
    return show_value(list(default) if isinstance(default, tuple) else default)
