"""The Hugging Face model classes: a thin shell around the very code that trained the model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .attention import SequenceContext
from .blocks import BLOCKS
from .config import ModelConfig
from .configuration_midspan import MidspanConfig, decode_model
from .declarations import initial_value, named_state, wide_parameters
from .families import family_of
from .hf_context import causal_context, diffusion_context
from .hf_custom import MTP_PARTS
from .transformer import Head, Transformer, unit_names

# The keyword and the output field of the key/value cache were renamed within transformers 5.
_CACHE_FIELD = next(
    field.name
    for field in dataclasses.fields(BaseModelOutputWithPast)
    if field.name in ("cache", "past_key_values")
)


def exported_config(config: MidspanConfig) -> ModelConfig:
    """What the exported weights fit: the model without vocabulary padding.

    A function, because transformers may load configuration_midspan.py twice, once by itself; the
    ModelConfig must be made of the classes that the Transformer beside this file knows.
    """
    return dataclasses.replace(decode_model(config.model), vocab_multiple=1)


class _CacheStore:
    """A transformers cache as the store that our attention layers extend, from slot ``past``."""

    def __init__(self, cache: Any, past: int) -> None:
        self.cache = cache
        self.past = past

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        slots = torch.arange(self.past, self.past + k.shape[2], device=k.device)
        # the early static caches of transformers 5 ask where to write, the later ones know
        keys, values = self.cache.update(k, v, layer, {"cache_position": slots})
        return keys, values


class _MTPLayer(nn.Module):
    """The parts of an MTP block and its norm, under the names that files have for them."""

    def __init__(self, block: nn.Module, norm: nn.Module | None) -> None:
        super().__init__()
        inner = getattr(block, "block", None)
        for name, part in [*block.named_children(), *(inner.named_children() if inner else ())]:
            if part is not inner:
                self.add_module(MTP_PARTS.get(name, name), part)
        if norm is not None:
            self.shared_head = nn.ModuleDict({"norm": norm})


def _mtp_layers(transformer: Transformer) -> nn.ModuleDict:
    """Register the MTP blocks of ``transformer`` as layers behind its last one instead of under
    their own names; it goes on using them."""
    blocks, norms = dict(transformer.mtp.items()), dict(transformer.mtp_norms.items())
    del transformer.mtp, transformer.mtp_norms
    transformer.__dict__.update(mtp=blocks, mtp_norms=norms)
    first = transformer.config.layers - 1
    return nn.ModuleDict(
        {str(first + int(k)): _MTPLayer(block, norms.get(k)) for k, block in blocks.items()}
    )


def _wide_patterns(model: nn.Module) -> set[str]:
    """Regular expressions for what stays in float32 in a model that is loaded in a narrower dtype:
    what training never casts, and state."""
    wide = wide_parameters(model)
    names = [name for name, parameter in model.named_parameters() if parameter in wide]
    names += [name for name, _ in named_state(model)]
    return {re.sub(r"\.\d+\.", r"\\.\\d+\\.", name) + "$" for name in names}


class MidspanPreTrainedModel(PreTrainedModel):
    config_class = MidspanConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False
    _supports_sdpa = True
    _no_split_modules = [BLOCKS.component(name).__name__ for name in BLOCKS.names()]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Weights and state that no file provides: as in training (but for what depends on depth),
        from torch's global generator."""
        state = [(key, module.get_buffer(key)) for key in getattr(module, "state", ())]
        fresh = [
            (key, tensor)
            for key, tensor in (*module.named_parameters(recurse=False), *state)
            if not getattr(tensor, "_is_hf_initialized", False)
        ]
        for key, tensor in fresh:
            value = initial_value(module, key)
            if value is not None:
                tensor.copy_(torch.as_tensor(value))
            elif key.endswith("bias"):
                tensor.zero_()
            elif tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                tensor.normal_(std=decode_model(self.config.model).init.std)
        update_state: Any = getattr(module, "update_state", None)
        if state and fresh:
            update_state(0)


class MidspanModel(MidspanPreTrainedModel):
    """Token ids to hidden states."""

    def __init__(self, config: MidspanConfig) -> None:
        super().__init__(config)
        model = exported_config(config)
        units = [name for name in unit_names(model) if name != "head"]
        self.transformer = Transformer(model, units, attention_backend="sdpa")
        if model.mtp.depth:
            self.layers = _mtp_layers(self.transformer)
        self._keep_in_fp32_modules_strict = _wide_patterns(self)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        assert self.transformer.embedding is not None
        return self.transformer.embedding

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        cache_position: Tensor | None = None,
        noise: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hidden states [B, S, D] after the final norm.

        input_ids: int64 [B, S], the tokens that follow the ``past`` ones in the cache.
        attention_mask: [B, past + S], 0 where a token is padding, on either side; or
        [B, 1, S, keys], boolean (True = may attend) or additive.  position_ids: [B, S];
        by default they count the tokens that are no padding.  noise: of a model that is told how
        much there is, σ = −log α of each token [B, S], or [B, 1] for all of a sequence alike.

        A diffusion model has no cache, and its tokens see what they saw in training: all others
        (masked, uniform), their block of positions and those before it (block), or, of an Eso-LM,
        what became known before them: first the tokens that are no mask, in the order of their
        slots (variant A: all of them at once), then the masks.  For another order, put the tokens
        into it and give their position_ids.
        """
        _refuse(kwargs, inputs_embeds, output_attentions)
        if input_ids is None:
            raise ValueError("input_ids is required")
        cache = past_key_values if cache is None else cache
        context: SequenceContext
        if family_of(self.config.objective) == "causal":
            if cache is not None and not isinstance(cache, Cache):
                raise ValueError(
                    f"a cache must be a transformers Cache, not {type(cache).__name__}"
                )
            if use_cache is None:
                use_cache = self.config.use_cache and not self.training
            if use_cache and cache is None:
                cache = DynamicCache()
            past = 0 if cache is None else int(cache.get_seq_length())
            store = None if cache is None else _CacheStore(cache, past)
            context = causal_context(input_ids, attention_mask, position_ids, store, past)
        else:
            self._refuse_cache(use_cache, cache)
            context = diffusion_context(
                input_ids, attention_mask, position_ids,
                self.transformer.config, self.config.objective,
            )  # fmt: skip
        context.noise = self._noise(noise, input_ids)
        with _recorded(self.transformer, bool(output_hidden_states)) as states:
            hidden = self.transformer(input_ids, context)
        output = BaseModelOutputWithPast(last_hidden_state=hidden)
        return finish(self, output, cache if use_cache else None, states, return_dict)

    def _noise(self, noise: Tensor | None, ids: Tensor) -> Tensor | None:
        batch, length = ids.shape
        if noise is None:
            if self.config.objective["type"] == "uniform" and "noise" in self.transformer.shared:
                raise ValueError(
                    "noise is required: this model is told how much of it its input has, "
                    "sigma = -log alpha"
                )
            return None
        if tuple(noise.shape) not in ((batch, length), (batch, 1)):
            raise ValueError(f"noise has shape {tuple(noise.shape)}, not {(batch, length)}")
        return noise.to(ids.device)

    def _refuse_cache(self, use_cache: bool | None, cache: Any) -> None:
        if use_cache or cache is not None:
            raise ValueError(
                f"a model of {self.config.objective['type']} diffusion has no cache (use_cache, "
                "past_key_values): its tokens also see others that come behind them or change"
            )


class MidspanWithHead(MidspanPreTrainedModel):
    """The model and its output head, under the names that files have for them."""

    def __init__(self, config: MidspanConfig) -> None:
        super().__init__(config)
        self.model = MidspanModel(config)
        model = exported_config(config)
        tied = self.model.transformer.embedding if model.tie_embeddings else None
        self.lm_head = Head(model, tied)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        tied = self.config.tie_word_embeddings
        return self.model.get_input_embeddings() if tied else self.lm_head


class MidspanForCausalLM(MidspanWithHead, GenerationMixin):
    """Token ids to logits over the vocabulary, in at least float32."""

    def __init__(self, config: MidspanConfig) -> None:
        if family_of(config.objective) != "causal":
            raise ValueError(
                f"this is a model of {config.objective['type']} diffusion, which does not generate "
                "from left to right: load it with AutoModelForMaskedLM"
            )
        super().__init__(config)

    def depth_logits(self, input_ids: Tensor) -> list[Tensor]:
        """Logits [B, S, V] of every prediction depth k for whole sequences int64 [B, S]: position i
        predicts token i + k + 1.  The last k positions of depth k miss tokens to read."""
        context = SequenceContext(torch.arange(input_ids.shape[1], device=input_ids.device))
        outputs = self.model.transformer.depth_outputs(input_ids, context)
        return [self.lm_head.logits(hidden) for hidden in outputs]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits [B, S, V], of the last ``logits_to_keep`` positions if that is not 0.

        labels: int64 [B, S], shifted here, -100 where nothing is predicted; the loss is the mean
        over the predicted tokens, or their sum over ``num_items_in_batch``.  The other arguments
        are those of :meth:`MidspanModel.forward`.
        """
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            cache=cache,
            return_dict=True,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head.logits(output.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = token_loss(logits[:, :-1], labels[:, 1:], num_items_in_batch)
        result = CausalLMOutputWithPast(loss=loss, logits=logits)
        states = output.hidden_states
        return finish(self, result, getattr(output, _CACHE_FIELD), states, return_dict)


def _refuse(kwargs: dict[str, Any], inputs_embeds: Any, output_attentions: Any) -> None:
    """An argument that would change the result but is not understood must not be swallowed."""
    if inputs_embeds is not None:
        raise ValueError("inputs_embeds is not supported: give input_ids")
    if output_attentions:
        raise ValueError("output_attentions is not supported: attention weights are never formed")
    unknown = sorted(name for name, value in kwargs.items() if value is not None)
    if unknown:
        raise ValueError(f"unknown arguments of forward: {', '.join(unknown)}")


@contextmanager
def _recorded(transformer: Transformer, wanted: bool) -> Iterator[list[Tensor]]:
    """The residual stream after the embedding and after every block; the last one is normalised,
    as in every Hugging Face decoder."""
    states: list[Tensor] = []
    handles = []
    if wanted:
        assert transformer.embedding is not None
        units = [transformer.embedding, *transformer.blocks.values()]
        for unit in units:
            handles.append(unit.register_forward_hook(lambda *call: states.append(call[2])))
        if transformer.final_norm is not None:
            handles.append(
                transformer.final_norm.register_forward_hook(
                    lambda *call: states.__setitem__(-1, call[2])
                )
            )
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def finish(
    model: PreTrainedModel, output: Any, cache: Any, states: Any, return_dict: bool | None
) -> Any:
    """Add what else there is, in the order of the output's fields, and unpack it if asked for."""
    if cache is not None:
        output[_CACHE_FIELD] = cache
    if states:
        output["hidden_states"] = tuple(states)
    wanted = model.config.return_dict if return_dict is None else return_dict
    return output if wanted else output.to_tuple()


def token_loss(logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
    """Cross-entropy of logits [B, S, V], the mean over labels [B, S] that are not -100 or the sum
    over ``count``."""
    rows, targets = logits.flatten(0, 1), labels.flatten().to(logits.device)
    if count is None:
        return nn.functional.cross_entropy(rows, targets)
    return nn.functional.cross_entropy(rows, targets, reduction="sum") / count
