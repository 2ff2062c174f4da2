"""The Hugging Face class of diffusion language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput

from .configuration_midspan import MidspanConfig, changed
from .decoding import Sampling
from .denoising import SAMPLERS, Report
from .families import family_of
from .likelihood import Estimate, Request, Scoring, likelihoods
from .modeling_midspan import (
    MidspanWithHead,
    finish,
    token_loss,
)
from .samplers import default_sampler, denoiser_of, sample


class MidspanForDiffusion(MidspanWithHead):
    """Token ids, some of which are masks or noise, to logits over the vocabulary, in at least
    float32.  ``generate`` is this project's own, by the samplers of the model's diffusion."""

    def __init__(self, config: MidspanConfig) -> None:
        if family_of(config.objective) == "causal":
            raise ValueError(
                f"this model is autoregressive (objective {config.objective['type']}): load it "
                "with AutoModelForCausalLM"
            )
        super().__init__(config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        noise: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits [B, S, V] of the token in each slot; a mask token has the lowest there is.

        labels: int64 [B, S], the tokens of these very slots, -100 where none is judged; the loss
        is the mean of their cross-entropy, or the sum over ``num_items_in_batch``, without the
        weights of the likelihood bound.  The other arguments are those of
        :meth:`MidspanModel.forward`.
        """
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            noise=noise,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head.logits(output.last_hidden_state)
        loss = None if labels is None else token_loss(logits, labels, num_items_in_batch)
        result = MaskedLMOutput(loss=loss, logits=logits)
        return finish(self, result, None, output.hidden_states, return_dict)

    @classmethod
    def can_generate(cls) -> bool:
        """Whether transformers' own generation fits: it would go from left to right.  (Transformers
        derives a class with its mixin from remote ones that have a ``generate``.)"""
        return False

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("a diffusion model has no continuous batching: use generate")

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 64,
        sampler: str | None = None,
        sampler_options: Mapping[str, Any] | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        do_sample: bool | None = None,
        seed: int = 0,
        guidance: float = 0.0,
        cache: Any = "none",
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        return_report: bool = False,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Report]:
        """The prompts and ``max_new_tokens`` more, int64 [B, S + max_new_tokens].

        input_ids: int64 [B, S]; S may be 0.  attention_mask: [B, S], 0 on padding, on either side.
        sampler, sampler_options: name and settings, by default those that follow the diffusion that
        the model was trained for.  temperature: None for the sampler's own; ``do_sample=False`` is
        temperature 0.  seed: the same one gives the same text.  guidance, cache: of masked
        diffusion.  Behind eos_token_id, which ends a text, and for which None means the one in the
        configuration, comes pad_token_id.  return_report: also give what it took.

        ``ValueError``: settings that do not go with the model, or arguments of other ``generate``s,
        which would be ignored here.
        """
        unknown = sorted(name for name, value in kwargs.items() if value is not None)
        if unknown:
            raise ValueError(
                f"generate of a diffusion model does not have {', '.join(unknown)}: it fills text "
                "with a sampler, not from left to right"
            )
        if input_ids is None or input_ids.dim() != 2:
            raise ValueError("input_ids is required, int64 [B, S]; S may be 0")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        eos = _given(eos_token_id, self.config, "eos_token_id")
        pad = _given(pad_token_id, self.config, "pad_token_id")
        config = sampler_config(self.config.objective, sampler, sampler_options or {})
        if do_sample is False:
            temperature = 0.0
        denoiser = denoiser_of(
            self.model.transformer, self.config.objective, guidance, cache, self.lm_head
        )
        texts, report = sample(
            denoiser, _prompts(input_ids, attention_mask), max_new_tokens, config,
            sampling_of(config, temperature, top_k, top_p), eos=eos, seed=seed,
        )  # fmt: skip
        filler = [eos if pad is None else pad] * max_new_tokens
        rows = [(text + [eos] * (len(text) < max_new_tokens) + filler)[:max_new_tokens]
                for text in texts]  # fmt: skip
        new = torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)
        ids = torch.cat([input_ids, new], 1)
        return (ids, report) if return_report else ids

    def log_likelihood(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        **options: Any,
    ) -> list[Estimate]:
        """Estimates of log p(answer | prompt), token ids both, as lower bounds with their standard
        errors; ``options`` are those of :class:`Scoring` (draws, seed, batch, guidance, ...)."""
        pairs = zip(prompts, answers, strict=True)
        return likelihoods(
            self.model.transformer, self.config.objective,
            [Request(tuple(prompt), tuple(answer)) for prompt, answer in pairs],
            self.config.max_position_embeddings, Scoring(**options), self.lm_head,
        )  # fmt: skip


def sampler_config(
    objective: Mapping[str, Any], name: str | None, options: Mapping[str, Any]
) -> Any:
    """The config of sampler ``name``, or of the one that ``objective`` asks for."""
    if name is None:
        config = default_sampler(family_of(objective))
    else:
        config = SAMPLERS.config_class(name)()
    return changed(config, options)


def sampling_of(
    config: Any, temperature: float | None, top_k: int | None, top_p: float | None
) -> Sampling:
    """What is asked for, and else as the sampler has it."""
    if temperature is None:
        plain = top_k is None and top_p is None
        temperature = SAMPLERS.build(config).sampling.temperature if plain else 1.0
    sampling = Sampling(temperature, top_k, top_p)
    problems = [f"{name} {text}" for name, text in sampling.problems()]
    if problems:
        raise ValueError("; ".join(problems))
    return sampling


def _given(token: int | None, config: Any, name: str) -> int | None:
    found: int | None = getattr(config, name, None) if token is None else token
    return found


def _prompts(ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Without padding."""
    if attention_mask is None:
        found: list[list[int]] = ids.tolist()
        return found
    if attention_mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, not {tuple(ids.shape)}"
        )
    return [row[real].tolist() for row, real in zip(ids, attention_mask.to(ids.device).bool())]
