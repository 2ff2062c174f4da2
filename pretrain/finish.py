"""What is made of a finished run: export, text sample, picture, report, and one last line."""

from __future__ import annotations

from pathlib import Path

from .config import RunConfig
from .data import bytes_per_token, manifests
from .report import write_report
from .run_folder import write_atomic
from .state import find_checkpoint
from .trainer import Trainer


def references(config: RunConfig) -> dict[str, float]:
    """Bits per byte that other models of the same text cost, where the dataset records them."""
    sets = manifests(config.data.validation)
    found = sets[0].reference_bits_per_byte if len(sets) == 1 else None
    return dict(found or {})


def finish(config: RunConfig, trainer: Trainer) -> None:
    """Main rank, after training.  Everything here can be made again from the checkpoint."""
    folder = trainer.folder
    checkpoint = find_checkpoint(folder.path)
    artefacts: dict[str, Path | str] = {"checkpoint": checkpoint}
    sample = ""
    if config.finish.export != "none":
        from .export import export_checkpoint

        target = folder.path / "huggingface"
        line = export_checkpoint(
            checkpoint, target, target=config.finish.export, force=True, verify=True
        )
        print(line, flush=True)
        artefacts["Hugging Face"] = target
    if config.finish.sample_tokens:
        from .export import sample_text

        sample = sample_text(
            checkpoint, config.finish.prompt, config.finish.sample_tokens, seed=config.seed
        )
        path = folder.path / "sample.txt"
        write_atomic(path, sample + "\n")
        print(f"sample: {sample}", flush=True)
        artefacts["sample"] = path
    known = references(config)
    ratio = bytes_per_token(config.data.validation) if config.data.validation else None
    if ratio is None:
        known = {}
    if config.finish.report:
        picture, report = write_report(
            folder, bytes_per_token=ratio, references=known, sample=sample, artefacts=artefacts
        )
        artefacts |= {"loss curve": picture, "report": report}
    final = trainer.logger.last_row.get("eval/bits_per_byte")
    if final is not None and known:
        others = ", ".join(f"{name} {value:.3f}" for name, value in known.items())
        print(f"bits per byte of the validation text: this model {final:.3f}; {others}")
    if "tensorboard" in config.metrics.trackers:
        artefacts["TensorBoard"] = folder.events
    places = "; ".join(f"{name}: {_short(path)}" for name, path in artefacts.items())
    print(f"finished. {places}", flush=True)


def _short(path: Path | str) -> str:
    path = Path(path)
    inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if inside else path)
