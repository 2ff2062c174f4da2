"""A config class as text that a person can read: every key, its default, type and meaning."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pretrain.decode import Choices, default_of, expected_text, fields_of, join_path, show_value


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


def _rows(cls: Any, path: str, base: Any, tag: str) -> Iterator[_Row]:
    for name, (field, kind) in fields_of(cls).items():
        default = getattr(base, name) if type(base) is cls else default_of(field)
        registry = field.metadata.get("registry")
        where, about = join_path(path, name), field.metadata.get("help", "")
        if dataclasses.is_dataclass(kind) and registry is None:
            yield from _rows(kind, where, default, tag)
            continue
        prefix = f"[{tag}] " if tag else ""
        allowed = expected_text(kind, field.metadata)
        meaning = prefix + (f"{about} ({allowed})" if about else allowed)
        yield _Row(where, _default_text(default, registry), meaning)
        if registry is not None:
            yield from _component_rows(registry, where, default)


def _component_rows(registry: Choices, path: str, default: Any) -> Iterator[_Row]:
    for name in registry.names():
        yield from _rows(registry.config_class(name), path, default, name)


def _default_text(default: Any, registry: Choices | None) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if registry is not None and dataclasses.is_dataclass(default):
        return registry.name_of(type(default))
    if isinstance(default, str):
        return default or "''"
    return show_value(list(default) if isinstance(default, tuple) else default)
