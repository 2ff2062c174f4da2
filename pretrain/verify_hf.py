"""Does transformers compute what the training model computes?"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.attention import SequenceContext, Visibility
from models.config import ModelConfig
from models.families import family_of
from models.hf_custom import classes
from models.hf_names import CUSTOM_TARGET, stored_as
from models.transformer import Transformer
from pretrain.decode import decode
from pretrain.objectives.diffusion import Windows
from pretrain.objectives.eso import Eso, side_by_side
from pretrain.trained import TrainedModel, build_model

TOLERANCE = 1e-5  # of a logit, relative to the largest one where that is above 1
_SEQUENCES = 2
_LONGEST = 64


class VerificationError(ValueError):
    """The exported model computes something else; the text says where it first differs."""


@dataclass(frozen=True)
class Verification:
    """Largest logit difference, and mean KL(training model ‖ exported model) in nats/token."""

    version: str
    tokens: int
    largest_difference: float
    divergence: float

    def __str__(self) -> str:
        return (
            f"verified: transformers {self.version} gives the training model's logits on "
            f"{self.tokens} random tokens in float32: largest difference "
            f"{self.largest_difference:.1e}, KL {self.divergence:.1e} nats/token"
        )


@dataclass(frozen=True)
class Reference:
    """What the training model computes of ``ids``: the output of every module with weights, and
    the logits of every prediction depth.  arguments: what the exported model is told besides."""

    config: ModelConfig
    objective: Mapping[str, Any]
    ids: Tensor
    arguments: dict[str, Tensor]
    outputs: dict[str, Tensor]
    logits: list[Tensor]


def require_transformers() -> Any:
    """The transformers package, quiet; ValueError says how to get it or do without."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise VerificationError(
            f'verification needs transformers ({error}): pip install -e ".[hf]", or pass '
            "--no-verify"
        ) from None


def compute_reference(trained: TrainedModel) -> Reference:
    """Run the training model's own code in float32."""
    length = max(1, min(_LONGEST, trained.sequence_length))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(trained.config.vocab_size, (_SEQUENCES, length), generator=generator)
    if trained.config.mask_token:
        hidden = torch.rand(ids.shape, generator=generator) < 0.5
        ids = ids.masked_fill(hidden, trained.config.mask_id)
    ids, context, arguments = _as_in_training(ids, trained)
    model = build_model(trained)
    with recorded(model, lambda name: name) as outputs, torch.inference_mode():
        logits = _depth_logits(model, ids, context)
    return Reference(trained.config, trained.objective, ids, arguments, outputs, logits)


def _as_in_training(
    ids: Tensor, trained: TrainedModel
) -> tuple[Tensor, SequenceContext, dict[str, Tensor]]:
    """Token ids, in an order that training might have put them in, with the attention that they
    have there; and what the exported model must be told to do the same."""
    positions = torch.arange(ids.shape[1])
    objective, family = trained.objective, family_of(trained.objective)
    if family == "causal":
        return ids, SequenceContext(positions), {}
    if family == "block":
        stage = (positions // objective["block_size"]).expand(ids.shape)
        only_itself = -1 - positions.expand(ids.shape)
        return ids, SequenceContext(positions, Visibility(stage, stage, only_itself)), {}
    if family == "eso":
        eso = Eso(
            decode(Eso.Config, {k: v for k, v in objective.items() if k != "type"}), trained.config
        )
        rows = []
        for row in ids[:, None]:
            one = Windows(row, torch.ones_like(row, dtype=torch.bool), None)
            rows.append(eso.diffused(one, row == trained.config.mask_id, positions.double(), 1.0))
        batch = side_by_side(rows, 0)
        assert batch.positions is not None
        context = SequenceContext(batch.positions, batch.mask)
        return batch.ids, context, {"position_ids": batch.positions}
    noise = torch.linspace(0.01, 5.0, len(ids))[:, None] if family == "uniform" else None
    context = SequenceContext(positions, "bidirectional", noise=noise)
    return ids, context, {} if noise is None else {"noise": noise}


def _depth_logits(model: Transformer, ids: Tensor, context: SequenceContext) -> list[Tensor]:
    assert model.head is not None
    outputs = model.depth_outputs(ids, context)
    return [model.head.logits(hidden) for hidden in outputs]


def verify(folder: Path, target: str, reference: Reference) -> Verification:
    """Load ``folder`` with transformers, offline and in float32, and compare.

    Raises VerificationError.
    """
    transformers = require_transformers()
    model = _load(transformers, folder, target, reference.objective)
    config = reference.config
    own_names = {_hf_module(name, target, config): name for name in reference.outputs}
    own_names.pop("", None)
    with _quiet(transformers), recorded(model, own_names.get) as outputs, torch.inference_mode():
        found = _exported_logits(model, target, reference)
    if found[0].shape != reference.logits[0].shape:
        raise VerificationError(
            f"the {target} export gives logits of shape {list(found[0].shape)}, not "
            f"{list(reference.logits[0].shape)}"
        )
    # The last k positions of depth k have no token to read, and nobody reads them.
    rows = [slice(0, reference.ids.shape[1] - depth) for depth in range(len(found))]
    logits = torch.cat([x[:, span] for x, span in zip(found, rows, strict=True)], 1)
    wanted = torch.cat([x[:, span] for x, span in zip(reference.logits, rows, strict=True)], 1)
    never = logits[..., config.predicted_vocab_size :]
    if never.numel() and never.max() > torch.finfo(never.dtype).min:
        raise VerificationError(f"the {target} export predicts the mask token")
    logits, wanted = (x[..., : config.predicted_vocab_size] for x in (logits, wanted))
    scale = max(1.0, wanted.abs().max().item())
    difference = (logits - wanted).abs().max().item()
    ours, theirs = (x.double().log_softmax(-1) for x in (wanted, logits))
    divergence = (ours.exp() * (ours - theirs)).sum(-1).mean().item()
    if not difference <= TOLERANCE * scale:
        last = "the MTP block or the head" if config.mtp.depth else "the head"
        where, by = first_divergence(reference, outputs) or (last, difference)
        raise VerificationError(
            f"the {target} export computes something else: logits differ by {difference:.1e} "
            f"(allowed {TOLERANCE * scale:.1e}), KL {divergence:.1e} nats/token; the first "
            f"output that differs is that of {where}, by {by:.1e}"
        )
    return Verification(transformers.__version__, reference.ids.numel(), difference, divergence)


def _exported_logits(model: Any, target: str, reference: Reference) -> list[Tensor]:
    """Logits of every prediction depth; those of depth k lack their last k positions in a native
    class."""
    ids, depth = reference.ids, reference.config.mtp.depth
    drafts = depth > 0 and target != CUSTOM_TARGET
    output = model(input_ids=ids, output_hidden_states=drafts, **reference.arguments)
    found = [output.logits]
    if depth and not drafts:
        found += model.depth_logits(ids)[1:]
    elif drafts:
        layers = importlib.import_module("transformers.modeling_layers")
        try:
            draft = layers.MtpModel.from_pretrained(model)
        except Exception as error:  # whatever it is, the block does not load
            text = f"transformers cannot load the MTP block: {error}"
            raise VerificationError(text) from error
        positions = torch.arange(1, ids.shape[1])[None]
        hidden = output.hidden_states[-1][:, :-1]
        hidden = draft.forward_layer(0, hidden, positions, None, input_ids=ids[:, 1:])
        found.append(model.lm_head(hidden))
    return [logits.float() for logits in found]


def first_divergence(reference: Reference, outputs: dict[str, Tensor]) -> tuple[str, float] | None:
    """(module, largest difference) of the first module, in order of execution, that differs, of
    those that have a counterpart in the exported model.  (The MTP block of a native class belongs
    to another model.)"""
    for name, expected in reference.outputs.items():
        if name not in outputs:
            continue
        if outputs[name].numel() != expected.numel():
            return name, float("inf")
        difference = (outputs[name].flatten() - expected.flatten()).abs().max().item()
        if not difference <= TOLERANCE * max(1.0, expected.abs().max().item()):
            return name, difference
    return None


@contextlib.contextmanager
def recorded(model: nn.Module, name_of: Callable[[str], str | None]) -> Iterator[dict[str, Tensor]]:
    """Collect, in order, the first output of every module that owns weights and has a name."""
    outputs: dict[str, Tensor] = {}
    handles = []
    for path, module in model.named_modules():
        name = name_of(path)
        if name and next(module.parameters(recurse=False), None) is not None:
            handles.append(module.register_forward_hook(_saver(outputs, name)))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _saver(outputs: dict[str, Tensor], name: str) -> Callable[..., None]:
    def save(module: nn.Module, arguments: Any, output: Any) -> None:
        if name not in outputs and isinstance(output, Tensor):
            outputs[name] = output.detach().float()

    return save


def _hf_module(name: str, target: str, config: ModelConfig) -> str:
    """The module that gives the same output as ours; "" if there may be none."""
    try:
        places = stored_as(f"{name}.weight", target, config)
    except ValueError:
        return ""
    same = len(places) == 1 and places[0].index is None and places[0].scale == 1
    return places[0].name.removesuffix(".weight") if same else ""


def _load(transformers: Any, folder: Path, target: str, objective: Mapping[str, Any]) -> nn.Module:
    loader = getattr(transformers, [*classes(objective)][-1])
    with _quiet(transformers):
        try:
            model, info = loader.from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=target == CUSTOM_TARGET,
                output_loading_info=True,
            )
        except Exception as error:  # whatever it is, the folder does not load
            raise VerificationError(f"transformers cannot load the folder: {error}") from error
    wrong = {key: sorted(map(str, value)) for key, value in info.items() if value}
    if wrong:
        raise VerificationError(f"transformers loads the folder only in part: {wrong}")
    loaded: nn.Module = model.eval()
    return loaded


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without progress bars and notices, and never on the network."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
