"""Turn a Hugging Face folder into a checkpoint from which training can start."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from data_tools.tokenizers import load_tokenizer
from models.families import family_of
from models.hf_names import target_of
from parallel.checkpoint import CheckpointManager
from pretrain.decode import encode, validate
from pretrain.export import ExportError, published, require_free
from pretrain.trained import build_model, open_trained, read_json, stored_tensors
from pretrain.verify_hf import Verification, compute_reference, require_transformers, verify
from pretrain.yaml_text import dump_tree

DTYPES = ("float32", "float64")
MODEL_FILE = "model.yaml"


@dataclass(frozen=True)
class Import:
    """What was written.  verification: None if skipped."""

    folder: Path
    tensors: int
    verification: Verification | None

    def __str__(self) -> str:
        return (
            f"{self.folder}: {self.tensors} tensors as step 0; to start from it: "
            f"launch/pretrain.py RECIPE {self.folder / MODEL_FILE} "
            f"checkpoint.init_from={self.folder}"
        )


def import_hugging_face(
    source: str | Path,
    out: str | Path,
    *,
    dtype: str = "float32",
    vocab_multiple: int | None = None,
    check: bool = True,
    force: bool = False,
) -> Import:
    """Write the model of the Hugging Face folder ``source`` into the new folder ``out``.

    ``out`` holds ``checkpoints/step_00000000`` with the weights alone, ``model.yaml`` with the
    model configuration (and the objective of a diffusion model), and the tokenizer if ``source``
    has one.  The whole model is in memory.

    Args:
        dtype: of the weights, one of DTYPES: what training stores.
        vocab_multiple: pad the vocabulary to this multiple, with zeros (128 if the source names
            none).
        check: compare the logits with those of transformers.
        force: replace an ``out`` that an import made.

    Raises:
        ExportError, TrainedModelError, CheckpointError, VerificationError: all ValueErrors;
        ``out`` is as it was.
    """
    source, out = Path(source), Path(out)
    if dtype not in DTYPES:
        raise ExportError(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
    require_free(out, force, MODEL_FILE)
    if check:
        require_transformers()
    if source.is_dir() and not (source / "config.json").is_file():
        raise ExportError(f"{source} is not a Hugging Face folder: it has no config.json")
    trained = open_trained(source)
    if vocab_multiple is not None:
        config = dataclasses.replace(trained.config, vocab_multiple=vocab_multiple)
        validate(config)
        trained = dataclasses.replace(trained, config=config)
    verification = None
    if check:
        reference = compute_reference(trained)
        verification = verify(source, target_of(read_json(source / "config.json")), reference)
    model = build_model(trained, getattr(torch, dtype))
    tensors = {f"model/{name}": tensor.detach() for name, tensor in stored_tensors(model)}
    tree, objective = {"model": encode(trained.config)}, dict(trained.objective)
    with published(out) as folder:
        manager = CheckpointManager(folder / "checkpoints", asynchronous=False)
        try:
            training = {"sequence_length": trained.sequence_length}
            run = {**tree, "training": training, "objective": objective}
            manager.save(0, tensors, {"config": run})
        finally:
            manager.close()
        if family_of(objective) != "causal":
            tree["objective"] = objective
        (folder / MODEL_FILE).write_text(dump_tree(tree), encoding="utf-8")
        if trained.tokenizer is not None:
            load_tokenizer(trained.tokenizer).save(folder)
    return Import(out, len(tensors), verification)
