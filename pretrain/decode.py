"""Frozen standard-library dataclasses from YAML files and overrides, and back.

A config class is a frozen dataclass whose fields are bool, int, float, str, Literal, optional,
tuple, list, dict[str, X], other config classes, or a component chosen by name from a registry:

    norm: Any = field(default=RMSNorm.Config(), metadata={"registry": NORMS, "help": "..."})

which a file writes as ``norm: rms`` or ``norm: {type: rms, eps: 1e-6}``. ``type`` is reserved for
that. What a file leaves out keeps the value of the default, one key at a time. A class may check
its fields against each other with ``problems() -> list[(path within the object, message)]``; every
object that could be built is checked, and all problems are raised in one ``ConfigError``.
``shorthands: ClassVar`` of the outermost class (dotted key -> help) names keys that were expanded
before decoding; they are listed among the allowed ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, Union, cast

from pretrain.yaml_text import (
    COMMAND_LINE,
    TYPE_KEY,
    ConfigError,
    Problem,
    Tree,
    combine,
    dump_tree,
    load_yaml_files,
    nearest,
    parse_number,
    parse_overrides,
)

T = TypeVar("T")
_FAILED: Any = object()
_NONE = type(None)
_PLAIN = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_EXACT_INT = 2.0**53


class Choices(Protocol):
    """What a ``registry`` in a field's metadata offers."""

    kind: str

    def names(self) -> tuple[str, ...]: ...
    def config_class(self, name: str) -> type: ...
    def name_of(self, config_class: type) -> str: ...


def load(cls: type[T], paths: Iterable[str | Path], overrides: Iterable[str] = ()) -> T:
    """The config that ``paths`` and then ``overrides``, merged left to right, describe."""
    tree, sources = read_layers(paths, overrides)
    return decode(cls, tree, sources=sources)


def read_layers(
    paths: Iterable[str | Path], overrides: Iterable[str]
) -> tuple[Tree, dict[str, str]]:
    """All files and overrides merged, and which of them gave each path (as ``combine`` does);
    what is wrong with any of them is reported together."""
    problems: list[Problem] = []
    layers: list[tuple[str, Tree]] = []
    try:
        layers += load_yaml_files(paths).items()
    except ConfigError as error:
        problems += error.problems
    try:
        layers.append((COMMAND_LINE, parse_overrides(overrides)))
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return combine(layers)


def decode(cls: type[T], tree: Tree, *, sources: Mapping[str, str] | None = None) -> T:
    """``tree`` as an instance of ``cls``; ``ConfigError`` lists everything that is wrong.

    ``sources`` says where a dotted path was given (a file name or "command line").
    """
    decoder = _Decoder(sources or {}, shorthands_of(cls))
    config = decoder.dataclass(cls, tree, "", None)
    decoder.check_built()
    if decoder.problems:
        raise ConfigError(decoder.problems)
    return cast(T, config)


def validate(config: Any) -> None:
    """Run ``problems()`` of every config object in ``config``; ``ConfigError`` lists all."""
    decoder = _Decoder({})
    decoder.built.append(("", config))
    decoder.check_built()
    if decoder.problems:
        raise ConfigError(decoder.problems)


class _Decoder:
    def __init__(self, sources: Mapping[str, str], shorthands: Iterable[str] = ()) -> None:
        self.sources = sources
        self.shorthands = shorthands
        self.problems: list[Problem] = []
        self.built: list[tuple[str, Any]] = []  # (path, object), innermost first

    def fail(self, path: str, message: str) -> Any:
        self.problems.append(Problem(path, message, self.source(path)))
        return _FAILED

    def source(self, path: str) -> str:
        return source_of(path, self.sources)

    def wrong(self, path: str, value: Any, expected: str, names: Iterable[str] = ()) -> Any:
        hint = nearest(value, names) if isinstance(value, str) else ""
        return self.fail(path, f"given {show_value(value)}; expected {expected}{hint}")

    def check_built(self) -> None:
        """Cross-field checks of everything that was built, defaults included, each once."""
        checked: set[str] = set()
        for top, outer in self.built:
            for path, item in list(_objects(outer, top)):
                if path in checked or not hasattr(item, "problems"):
                    continue
                checked.add(path)
                for where, message in item.problems():
                    self.fail(join_path(path, where), message)

    def value(self, kind: Any, value: Any, path: str, base: Any, registry: Choices | None) -> Any:
        """``value`` as a ``kind``; ``base`` is the default that it partly overrides, if any."""
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin in (Union, types.UnionType):
            return self.union(kind, value, path, base, registry)
        if origin is Literal:
            for allowed in args:
                if type(value) is type(allowed) and value == allowed:
                    return allowed
            return self.wrong(
                path, value, expected_text(kind), [a for a in args if isinstance(a, str)]
            )
        if origin in (tuple, list):
            return self.sequence(kind, value, path, registry)
        if origin is dict:
            return self.mapping(kind, value, path, registry)
        if registry is not None:
            return self.component(registry, value, path, base)
        if dataclasses.is_dataclass(kind):  # null unsets a section
            return self.dataclass(cast(type, kind), {} if value is None else value, path, base)
        if kind is Any:
            return value
        assert kind in _PLAIN or kind is _NONE, f"{path}: fields of type {kind} are not supported"
        converted = _plain(kind, value)
        return self.wrong(path, value, expected_text(kind)) if converted is _FAILED else converted

    def union(self, kind: Any, value: Any, path: str, base: Any, registry: Choices | None) -> Any:
        options = typing.get_args(kind)
        if value is None and _NONE in options:
            return None
        options = tuple(option for option in options if option is not _NONE)
        for option in sorted(options, key=lambda option: type(value) is not option):
            trial = _Decoder(self.sources, self.shorthands)
            result = trial.value(option, value, path, base, registry)
            inside = all(problem.path != path for problem in trial.problems)
            if not trial.problems or (inside and len(options) == 1):
                self.problems += trial.problems
                self.built += trial.built
                return result
        names = [a for option in options for a in typing.get_args(option) if isinstance(a, str)]
        metadata = {} if registry is None else {"registry": registry}
        return self.wrong(path, value, expected_text(kind, metadata), names)

    def sequence(self, kind: Any, value: Any, path: str, registry: Choices | None) -> Any:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if not isinstance(value, (list, tuple)):
            return self.wrong(path, value, expected_text(kind))
        if origin is list or args[-1] is Ellipsis:
            args = (args[0],) * len(value)
        elif len(args) != len(value):
            return self.wrong(path, value, expected_text(kind))
        items = [
            self.value(arg, item, f"{path}[{index}]", None, registry)
            for index, (arg, item) in enumerate(zip(args, value))
        ]
        return _FAILED if _FAILED in items else origin(items)

    def mapping(self, kind: Any, value: Any, path: str, registry: Choices | None) -> Any:
        if not isinstance(value, Mapping):
            return self.wrong(path, value, expected_text(kind))
        item_kind = typing.get_args(kind)[1]
        items = {
            key: self.value(item_kind, item, join_path(path, key), None, registry)
            for key, item in value.items()
        }
        return _FAILED if _FAILED in items.values() else items

    def component(self, registry: Choices, value: Any, path: str, base: Any) -> Any:
        names = registry.names()
        given = {TYPE_KEY: value} if isinstance(value, str) else value
        default = registry.name_of(type(base)) if dataclasses.is_dataclass(base) else None
        if not isinstance(given, Mapping) or (default is None and TYPE_KEY not in given):
            expected = f"{_a(registry.kind)} ({', '.join(names)}) or a mapping with its 'type'"
            return self.wrong(path, value, expected, names)
        name = given.get(TYPE_KEY, default)
        if name not in names:
            where = path if isinstance(value, str) else join_path(path, TYPE_KEY)
            return self.wrong(where, name, f"{_a(registry.kind)}: one of {', '.join(names)}", names)
        cls = registry.config_class(name)
        rest = {key: item for key, item in given.items() if key != TYPE_KEY}
        elsewhere = {
            key: f"; it belongs to {registry.kind} {other!r}"
            for other in names
            for key in fields_of(registry.config_class(other))
        }
        of = f" of {registry.kind} {name!r}"
        return self.dataclass(cls, rest, path, base, of=of, elsewhere=elsewhere)

    def dataclass(
        self,
        cls: type,
        value: Any,
        path: str,
        base: Any,
        *,
        of: str = "",
        elsewhere: Mapping[str, str] | None = None,
    ) -> Any:
        if not isinstance(value, Mapping):
            return self.wrong(path, value, f"a mapping with {', '.join(fields_of(cls))}")
        fields = fields_of(cls)
        short = [key for key in self.shorthands if key.rpartition(".")[0] == path]
        names = [*(key.rpartition(".")[2] for key in short), *fields]
        failed = False
        for key in value:
            if key not in fields:
                hint = nearest(key, names) or (elsewhere or {}).get(key) or _moved(cls, key, path)
                if ":" in key and value[key] is None:
                    hint = "; YAML wants a space behind a colon"
                allowed = f"allowed are {', '.join(names)}" if names else "it takes no keys"
                self.fail(join_path(path, key), f"unknown key{of}; {allowed}{hint}")
                failed = True
        arguments: dict[str, Any] = {}
        for name, (field, kind) in fields.items():
            where, default = join_path(path, name), default_of(field)
            if type(base) is cls:
                default = getattr(base, name)
            if name in value:
                registry = field.metadata.get("registry")
                arguments[name] = self.value(kind, value[name], where, default, registry)
            elif default is dataclasses.MISSING:
                arguments[name] = self.fail(
                    where, f"required: {expected_text(kind, field.metadata)}"
                )
            else:
                arguments[name] = default
        if failed or _FAILED in arguments.values():
            return _FAILED
        try:
            config = cls(**arguments)
        except ValueError as error:
            return self.fail(path or cls.__name__, str(error))
        self.built.append((path, config))
        return config


def _plain(kind: type, value: Any) -> Any:
    """``value`` as bool, int, float, str or None, or ``_FAILED``; nothing is rounded."""
    if kind in (int, float) and isinstance(value, str):
        value = parse_number(value)
    if isinstance(value, bool) != (kind is bool):
        return _FAILED
    if kind is int and isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT_INT:
        return int(value)
    if kind is float and isinstance(value, (int, float)):
        return _FAILED if math.isnan(value) else float(value)
    return value if isinstance(value, kind) else _FAILED


@functools.cache
def fields_of(cls: Any) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Key -> (field, resolved type), in order of definition."""
    hints = typing.get_type_hints(cls)
    fields = {f.name: (f, hints[f.name]) for f in dataclasses.fields(cls) if f.init}
    assert TYPE_KEY not in fields, f"{cls.__name__}: the key {TYPE_KEY!r} names components"
    return fields


def shorthands_of(cls: Any) -> Mapping[str, str]:
    """Keys of the class that are expanded before decoding, and what they stand for."""
    found: Mapping[str, str] = getattr(cls, "shorthands", {})
    return found


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _objects(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every dataclass instance inside ``config``, itself included, with its path."""
    if dataclasses.is_dataclass(config):
        yield path, config
        for field in dataclasses.fields(config):
            yield from _objects(getattr(config, field.name), join_path(path, field.name))
    elif isinstance(config, (list, tuple)):
        for index, item in enumerate(config):
            yield from _objects(item, f"{path}[{index}]")
    elif isinstance(config, dict):
        for key, item in config.items():
            yield from _objects(item, join_path(path, key))


def _moved(cls: Any, key: str, path: str) -> str:
    """A hint when ``key`` stands one or more levels deeper: ``lr`` for ``optimizer.lr``."""
    for name, (_, kind) in fields_of(cls).items():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            if key in fields_of(kind):
                return f"; did you mean {join_path(path, f'{name}.{key}')!r}?"
            if deeper := _moved(kind, key, join_path(path, name)):
                return deeper
    return ""


def source_of(path: str, sources: Mapping[str, str]) -> str:
    """Which file, or the command line, gave ``path`` or the nearest section around it."""
    while path and path not in sources:
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return sources.get(path, "")


def join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def show_value(value: Any) -> str:
    text = {None: "null", True: "true", False: "false"}.get(value) if _is_word(value) else None
    text = text or repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def expected_text(kind: Any, metadata: Mapping[str, Any] = types.MappingProxyType({})) -> str:
    """The allowed values of a type, in words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        words = [expected_text(arg, metadata) for arg in args if arg is not _NONE]
        return " or ".join(words + ["null"] * (_NONE in args))
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(str(arg) for arg in args)
    if origin is tuple and args[-1] is not Ellipsis:
        return f"a list of {len(args)}: {', '.join(expected_text(arg, metadata) for arg in args)}"
    if origin in (tuple, list):
        return f"a list, each {expected_text(args[0], metadata)}"
    if origin is dict:
        return f"a mapping, each value {expected_text(args[1], metadata)}"
    if "registry" in metadata:
        registry: Choices = metadata["registry"]
        return f"{_a(registry.kind)}: one of {', '.join(registry.names())}"
    if dataclasses.is_dataclass(kind):
        return "a mapping"
    return _PLAIN.get(kind, "anything")


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def encode(config: Any) -> Tree:
    """``config`` as plain dicts and lists, components with their ``type``; inverse of decode."""
    return cast(Tree, _encode(config, None))


def _encode(value: Any, registry: Choices | None) -> Any:
    if dataclasses.is_dataclass(value):
        tree = {} if registry is None else {TYPE_KEY: registry.name_of(type(value))}
        for field in dataclasses.fields(value):
            if field.init:
                inner = _encode(getattr(value, field.name), field.metadata.get("registry"))
                tree[field.name] = inner
        return tree
    if isinstance(value, (list, tuple)):
        return [_encode(item, registry) for item in value]
    if isinstance(value, Mapping):
        return {key: _encode(item, registry) for key, item in value.items()}
    return value


def dump_yaml(config: Any) -> str:
    """YAML text of a config object; loading it gives an equal object."""
    return dump_tree(encode(config))


def diff(a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    """(path, value in a, value in b) wherever two configs (or their trees) differ.

    A key that only one of them has shows as None in the other.
    """
    return list(_diff(_tree(a), _tree(b), ""))


def _tree(config: Any) -> Any:
    return encode(config) if dataclasses.is_dataclass(config) else config


def _diff(a: Any, b: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            yield from _diff(a.get(key), b.get(key), join_path(path, key))
    elif a != b or type(a) is not type(b):
        yield path, a, b
