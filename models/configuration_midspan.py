"""The Hugging Face configuration class: config.json holds the model's whole ModelConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from .config import ModelConfig
from .hf_custom import objective_keys, standard_keys


def decode_model(tree: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig that ``tree``, plain dicts as in a configuration file, describes; what it
    leaves out has its default.  ``ValueError`` names an unknown key or component."""
    config: ModelConfig = _decode(ModelConfig, tree)
    return config


def _decode(cls: Any, tree: Mapping[str, Any]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    _known(tree, fields, cls)
    return cls(**{name: _decode_value(fields[name], value) for name, value in tree.items()})


def _known(tree: Mapping[str, Any], fields: Mapping[str, Any], cls: Any) -> None:
    unknown = sorted(set(tree) - set(fields))
    if unknown:
        raise ValueError(f"unknown keys {unknown} of {cls.__qualname__}: allowed are {[*fields]}")


def _decode_value(field: dataclasses.Field[Any], value: Any) -> Any:
    registry = field.metadata.get("registry")
    if registry is not None and isinstance(value, (str, Mapping)):
        rest = {"type": value} if isinstance(value, str) else dict(value)
        return _decode(registry.config_class(rest.pop("type")), rest)
    default: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if dataclasses.is_dataclass(default) and isinstance(value, Mapping):
        return _decode(type(default), value)
    return tuple(value) if isinstance(default, tuple) else value


class MidspanConfig(PretrainedConfig):
    """``model`` is the ModelConfig as plain dicts, ``objective`` the settings that it was trained
    with (by default next-token prediction); everything else follows from them.

    The sizes are repeated under the names that Hugging Face tools look for; one that contradicts
    ``model`` is a ``ValueError``.
    """

    model_type = "midspan"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    def __init__(  # type: ignore[no-untyped-def]
        self, model=None, objective=None, max_position_embeddings=2048, use_cache=None, **kwargs
    ):
        self.model = dict(model or {})
        self.objective = {"type": "causal", **(objective or {})}
        self.max_position_embeddings = max_position_embeddings
        facts = {**standard_keys(decode_model(self.model)), **objective_keys(self.objective)}
        self.use_cache = facts["is_causal"] if use_cache is None else use_cache
        for name, value in facts.items():
            if kwargs.pop(name, value) != value:
                raise ValueError(f"{name} contradicts the model, in which it is {value}")
            setattr(self, name, value)
        super().__init__(**kwargs, tie_word_embeddings=self.tie_word_embeddings)  # type: ignore[call-arg]


def changed(config: Any, tree: Mapping[str, Any]) -> Any:
    """``config``, a dataclass, with what ``tree`` says instead; ``ValueError`` as in
    :func:`decode_model`, or naming every setting that does not go."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    _known(tree, fields, type(config))
    new = dataclasses.replace(
        config, **{name: _decode_value(fields[name], value) for name, value in tree.items()}
    )
    problems = new.problems() if hasattr(new, "problems") else []
    if problems:
        raise ValueError("; ".join(f"{path} {text}" for path, text in problems))
    return new
