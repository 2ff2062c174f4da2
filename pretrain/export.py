"""Write a trained model as a Hugging Face folder: streamed, complete, verified, atomic."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import models
from data_tools.tokenizers import TextTokenizer, load_tokenizer, with_mask_token
from models.families import family_of
from models.hf_custom import classes
from models.hf_names import CUSTOM_TARGET, NATIVE_TARGETS, hf_config, native_target, obstacles
from models.lapsum import budget_split
from models.transformer import Transformer
from parallel.expert import expert_layers
from pretrain.decode import encode
from pretrain.export_weights import Shards, as_stored, plan_shards, write_json, write_shards
from pretrain.run_folder import read_metrics
from pretrain.trained import TrainedModel, open_trained, without_learned_positions, without_mtp
from pretrain.verify_hf import Verification, compute_reference, require_transformers, verify
from pretrain.yaml_text import nearest

TARGETS = ("auto", *NATIVE_TARGETS, CUSTOM_TARGET)
DTYPES = ("stored", "float32", "bfloat16", "float16")
DEFAULT_SHARD_BYTES = 5 * 10**9
_CUSTOM = "the folder carries its own code: transformers' {} loads it with trust_remote_code=True"
_STEP_FOLDER = re.compile(r"step_(\d+)")
_RELATIVE_IMPORT = re.compile(r"^\s*from\s+\.(\w+)\s+import", re.MULTILINE)


class ExportError(ValueError):
    """The model was not exported, and nothing was left behind; the text says why."""


@dataclass(frozen=True)
class Export:
    """What was written.  notes: lines that a person should read.  verification: None if skipped."""

    folder: Path
    target: str
    tensors: int
    bytes: int
    files: int
    verification: Verification | None
    notes: tuple[str, ...]

    def __str__(self) -> str:
        size = f"{self.tensors} tensors, {self.bytes / 1e6:,.1f} MB in {self.files} file(s)"
        return f"{self.folder}: {self.target} model, {size}"


def export_hugging_face(
    source: str | Path,
    out: str | Path,
    *,
    target: str = "auto",
    dtype: str = "stored",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    step: int | None = None,
    tokenizer: str | Path | None = None,
    drop_mtp: bool = False,
    check: bool = True,
    force: bool = False,
) -> Export:
    """Write the model of ``source`` (a run folder or checkpoint) into the new folder ``out``.

    Memory is bounded by one shard; checking needs room for the model in float32 besides.

    Args:
        target: one of TARGETS; "auto" is a native class where one is exact, else custom.
        dtype: of the stored tensors, one of DTYPES.
        tokenizer: a tokenizer.json or its folder, instead of the one that the run names.
        drop_mtp: leave out multi-token prediction: the next-token model alone.
        check: load the result with transformers and compare its logits.
        force: replace an ``out`` that is a model folder.

    Raises:
        ExportError, TrainedModelError, CheckpointError, VerificationError: all ValueErrors;
        ``out`` is as it was.
    """
    out = Path(out)
    if max_shard_bytes < 1:
        raise ExportError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    if target not in TARGETS:
        hint = nearest(target, TARGETS)
        raise ExportError(f"target {target!r}: allowed are {', '.join(TARGETS)}{hint}")
    if dtype not in DTYPES:
        raise ExportError(
            f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}{nearest(dtype, DTYPES)}"
        )
    require_free(out, force, "config.json")
    if check:
        require_transformers()
    trained = open_trained(source, step)
    if drop_mtp:
        if not trained.config.mtp.depth:
            raise ExportError(f"{source} has no multi-token prediction that could be dropped")
        trained = without_mtp(trained)
    notes: list[str] = []
    if target != CUSTOM_TARGET and (resting := without_learned_positions(trained)) is not trained:
        trained = resting
        notes.append("learned positions are what they were at the start, and are left out")
    target, reasons = choose_target(trained, target)
    notes += reasons
    words = _find_tokenizer(trained, tokenizer)
    if words is None:
        notes.append("no tokenizer was found: the folder holds none (give one with --tokenizer)")
    shards = plan_shards(trained, target, dtype, max_shard_bytes)
    reference = compute_reference(as_stored(trained, shards)) if check else None
    with published(out) as folder:
        size = write_shards(trained, shards, folder)
        write_configs(trained, target, shards, words, folder)
        if target == CUSTOM_TARGET:
            copy_model_code(folder, classes(trained.objective).values())
        verification = None if reference is None else verify(folder, target, reference)
    tensors = sum(map(len, shards))
    return Export(out, target, tensors, size, len(shards), verification, tuple(notes))


def choose_target(trained: TrainedModel, wanted: str) -> tuple[str, list[str]]:
    """(target, notes); ExportError lists why the wanted one cannot represent the model."""
    loader = list(classes(trained.objective))[-1]
    custom = _CUSTOM.format(loader)
    if wanted == "auto":
        native, reasons = native_target(trained.config, trained.objective)
        if native is not None:
            return native, []
        return CUSTOM_TARGET, [f"no native class is exact: {'; '.join(reasons)}", custom]
    reasons = obstacles(trained.config, wanted, trained.objective)
    if reasons:
        drop = ", or leave multi-token prediction out with --drop-mtp"
        raise ExportError(
            f"{wanted} cannot represent this model exactly: {'; '.join(reasons)}. "
            "Use --target custom, which carries the model's own code"
            + (drop if trained.config.mtp.depth else "")
        )
    return wanted, [custom] if wanted == CUSTOM_TARGET else []


# ------------------------------------------------------------------------------ other files


def write_configs(
    trained: TrainedModel, target: str, shards: Shards, words: TextTokenizer | None, folder: Path
) -> None:
    """config.json, generation_config.json and the tokenizer's files."""
    dtypes = {tensor.dtype for shard in shards for tensor in shard if not tensor.wide}
    widest = str(max(dtypes, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
    ids: dict[str, int | None] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if words is not None:
        ids = _save_tokenizer(words, trained, folder)
    version = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = {"transformers_version": importlib.metadata.version("transformers")}
    config = hf_config(
        trained.config,
        target,
        dtype=widest,
        sequence_length=trained.sequence_length,
        tree=encode(trained.config),
        objective=trained.objective,
    )
    facts = {**_budget(trained), **_active_experts(trained)}
    write_json(folder / "config.json", {**config, **facts, **ids, **version})
    if family_of(trained.objective) != "causal":
        return  # its own generate has its own defaults
    # Where no token is for padding, a batch of prompts is filled with eos; only here, because
    # in config.json it would also keep eos from being trained.
    filler = ids["eos_token_id"] if ids["pad_token_id"] is None else ids["pad_token_id"]
    generation = {**ids, "pad_token_id": filler}
    generation = {key: value for key, value in generation.items() if value is not None}
    if not config["use_cache"]:
        generation["use_cache"] = False
    write_json(folder / "generation_config.json", {**generation, **version})


def _budget(trained: TrainedModel) -> dict[str, list[float]]:
    """What a learned budget gives each layer with experts, for people: the model makes it anew."""
    eta = "shared.budget.eta"
    if eta not in trained.shapes:
        return {}
    with torch.device("meta"):
        budget: Any = Transformer(trained.config).shared["budget"]
    split = budget_split(trained.weights[eta], budget.total, budget.most)
    return {"expert_budget": [round(k, 6) for k in split.tolist()]}


def _active_experts(trained: TrainedModel) -> dict[str, list[float]]:
    """Mean active experts of each layer that has some, as last logged up to the checkpoint's step;
    nothing where the checkpoint is in no run folder."""
    layers, log = expert_layers(trained.config), trained.path.parent.parent / "metrics.jsonl"
    step = _STEP_FOLDER.fullmatch(trained.path.name)
    if not layers or step is None or not log.is_file():
        return {}
    names = [f"experts/{layer}/active" for layer in layers]
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(ValueError):  # a damaged log is no reason to keep a model back
        rows = read_metrics(log)
    rows = [row for row in rows if row["step"] <= int(step[1]) and names[0] in row]
    found = [rows[-1].get(name) for name in names] if rows else []
    return {"experts_active": [round(x, 4) for x in found if x is not None]} if found else {}


def _find_tokenizer(trained: TrainedModel, given: str | Path | None) -> TextTokenizer | None:
    place = trained.tokenizer if given is None else Path(given)
    if place is None:
        return None
    words = load_tokenizer(place)
    if words.vocab_size > trained.config.vocab_size:
        raise ExportError(
            f"the tokenizer {place} has ids up to {words.vocab_size - 1}, the model a vocabulary "
            f"of {trained.config.vocab_size}: it is another model's tokenizer"
        )
    return with_mask_token(words, trained.config.mask_id) if trained.config.mask_token else words


def _save_tokenizer(
    words: TextTokenizer, trained: TrainedModel, folder: Path
) -> dict[str, int | None]:
    """Write the tokenizer's files; returns the ids of its special tokens."""
    words.save(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # Other classes add their own rules to what tokenizer.json says.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["model_max_length"] = trained.sequence_length
    write_json(path, config)
    bos = config.get("bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    return {
        "bos_token_id": None if bos is None else words.backend.token_to_id(bos),
        "eos_token_id": words.eos_id,
        "pad_token_id": words.pad_id,
    }


def copy_model_code(folder: Path, entries: Iterable[str]) -> None:
    """Copy the files of ``entries`` (file.Class) that transformers asks for, and every file of
    models/ they need.

    transformers 5.0 copies only what the file that it asks for imports itself; so each names all
    the rest, in lines that are never executed.
    """
    source = Path(models.__file__ or "").parent
    files = {entry.split(".")[0] for entry in entries}
    for entry in sorted(files):
        waiting, needed = [entry], set[str]()
        while waiting:
            name = waiting.pop()
            code = (source / f"{name}.py").read_text(encoding="utf-8")
            new = set(_RELATIVE_IMPORT.findall(code)) - needed
            needed |= new
            waiting += new
        for name in needed - files:
            shutil.copyfile(source / f"{name}.py", folder / f"{name}.py")
        code = (source / f"{entry}.py").read_text(encoding="utf-8")
        lines = [f"    from .{name} import __doc__  # noqa\n" for name in sorted(needed)]
        text = f"{code}\n\n# For loaders that look no further than this file.\nif False:\n"
        (folder / f"{entry}.py").write_text(text + "".join(lines), encoding="utf-8")


# ------------------------------------------------------------------------------- publishing


def require_free(out: Path, force: bool, mark: str) -> None:
    """ExportError unless ``out`` is free, or is a folder with the file ``mark`` and forced."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() and not force:
        raise ExportError(f"{out} exists: choose another folder, or replace it with --force")
    if out.exists() and not (out / mark).is_file():
        raise ExportError(f"{out} has no {mark}, so it is not a model that --force may replace")


@contextlib.contextmanager
def published(out: Path) -> Iterator[Path]:
    """A new folder that becomes ``out`` when the block ends well, and vanishes when it does not."""
    parent = out.resolve().parent
    aside = parent / f".{out.name}.tmp-{os.getpid()}"
    # The same last name as in the end: transformers keys its copy of the code by it.
    work = aside / out.resolve().name
    try:
        try:
            work.mkdir(parents=True)
            yield work
            _replace(out, work, aside / "replaced")
        except OSError as error:
            raise ExportError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _replace(out: Path, new: Path, old: Path) -> None:
    """Give ``new`` the name ``out``; what had it before becomes ``old``, or stays on failure."""
    if out.exists():
        out.rename(old)
    try:
        new.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise


def parse_size(text: str) -> int:
    """Bytes that "5GB", "200MB", "64KB" or a plain number means."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMGT]?B|)", text.strip().upper())
    size = int(float(match[1]) * units[match[2]]) if match else 0
    if size < 1:
        raise ExportError(f"size {text!r}: expected a positive number with B, KB, MB, GB or TB")
    return size
