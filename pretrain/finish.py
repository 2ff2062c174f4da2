"""What is made of a finished run: export, text sample, picture, report, and a list of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from data_tools.tokenizers import load_tokenizer
from models.collectives import bind
from models.decoding import Sampling
from models.samplers import continued

from .config import RunConfig
from .data import bytes_per_token, manifests
from .evaluate import validation_blend
from .export import export_hugging_face
from .report import write_report
from .run_folder import RunFolder, read_metrics, write_atomic
from .trained import build_model, find_checkpoint, open_trained

Artefacts = dict[str, Path | str]


def finish(config: RunConfig, folder: RunFolder, started: float) -> None:
    """Main rank, after training.  Everything here can be made again from the checkpoint.
    ``started``: ``time.monotonic()`` when this start of the run began."""
    bind({})  # what follows is this process's own: no axis reaches the other ranks any more
    checkpoint = find_checkpoint(folder.path)
    artefacts: Artefacts = {"checkpoint": checkpoint}
    if config.finish.export != "none":
        artefacts["Hugging Face"] = _export(config, folder, checkpoint)
    sample = _sample(config, folder, checkpoint, artefacts) if config.finish.sample_tokens else ""
    if "tensorboard" in config.metrics.trackers:
        artefacts["TensorBoard"] = folder.events
    ratio = bytes_per_token(config.data.validation) if config.data.validation else None
    references = _references(config) if ratio is not None else {}
    last = _last_evaluation(folder)
    coverage = _coverage(config, last)
    if config.finish.report:
        artefacts["loss curve"], artefacts["report"] = write_report(
            folder,
            bytes_per_token=ratio,
            references=references,
            coverage=coverage,
            sample=sample,
            artefacts=artefacts,
            status="finished",  # once all of this is done
        )
    lines = _learned(last, coverage, references)
    lines |= {name: _short(path) for name, path in artefacts.items()}
    print(f"finished in {_duration(time.monotonic() - started)}")
    for name, text in lines.items():
        print(f"  {name:<13} {text}", flush=True)


def _export(config: RunConfig, folder: RunFolder, checkpoint: Path) -> Path:
    target = folder.path / "huggingface"
    done = export_hugging_face(checkpoint, target, target=config.finish.export, force=True)
    for note in done.notes:
        print(f"note: {note}", flush=True)
    print(f"exported as {done.target}: {done.verification}", flush=True)
    return target


def _sample(config: RunConfig, folder: RunFolder, checkpoint: Path, artefacts: Artefacts) -> str:
    tokenizer = load_tokenizer(config.data.tokenizer_folder)
    beginning = config.finish.prompt or ""
    prompt = tokenizer.encode(beginning) or [tokenizer.eos_id or 0]
    trained = open_trained(checkpoint)
    [ids] = continued(
        build_model(trained), trained.objective, [prompt], config.finish.sample_tokens,
        Sampling(temperature=0.8), eos=tokenizer.eos_id, seed=config.seed,
    )  # fmt: skip
    text = beginning + tokenizer.decode(ids)
    artefacts["sample"] = folder.path / "sample.txt"
    write_atomic(folder.path / "sample.txt", text + "\n")
    print(f"sample:\n{text}", flush=True)
    return text


def _references(config: RunConfig) -> dict[str, float]:
    """Bits per byte that other models of the same text cost, where the dataset records them."""
    sets = manifests(config.data.validation)
    found = sets[0].reference_bits_per_byte if len(sets) == 1 else None
    names = {"order2": "order-2 byte model", "gzip": "gzip -9", "xz": "xz -9e"}
    return {names.get(name, name): value for name, value in (found or {}).items()}


def _last_evaluation(folder: RunFolder) -> dict[str, Any]:
    rows = [row for row in read_metrics(folder.metrics) if "eval/bits_per_byte" in row]
    return rows[-1] if rows else {}


def _coverage(config: RunConfig, last: dict[str, Any]) -> str:
    """What the last evaluation is of; references are of the whole validation text."""
    if not config.data.validation or "eval/sequences" not in last:
        return ""
    used, there = last["eval/sequences"], validation_blend(config)[0].num_samples
    return f"all {used:,} sequences" if used == there else f"{used:,} of {there:,} sequences"


def _learned(last: dict[str, Any], coverage: str, references: dict[str, float]) -> dict[str, str]:
    if not last:
        return {}
    most = "at most " if last.get("loss_is_bound") else ""
    where = f", on {coverage}" if coverage else ""
    lines = {"validation": f"{most}{last['eval/bits_per_byte']:.3f} bits per byte{where}"}
    if references:
        others = ", ".join(f"{name}: {value:.3f}" for name, value in references.items())
        lines["to compare"] = f"{others}, on the whole validation text"
    return lines


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _short(path: Path | str) -> str:
    path = Path(path)
    inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if inside else path)
