"""Continue a text with a trained model: a run, a checkpoint or a Hugging Face folder."""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from data_tools.tokenizers import TextTokenizer, load_tokenizer
from launch._command import Parser, exit_code_of
from models.ancestral import Ancestral
from models.decoding import Sampling, generate
from models.denoising import SAMPLERS
from models.families import Family, family_of
from models.likelihood import Scoring
from models.samplers import default_sampler, denoiser_of, sample
from pretrain.decode import decode, encode
from pretrain.lm_eval_adapter import TextScorer
from pretrain.sample_quality import require_judge, sample_quality
from pretrain.trained import TrainedModel, build_model, open_trained
from pretrain.yaml_text import merge, parse_overrides

EXAMPLES = f"""\
A diffusion model is sampled by --sampler, one of
  {", ".join(SAMPLERS.names())}
(by default the one that follows the diffusion that it was trained for), whose settings --set gives.

examples:
  python launch/generate.py runs/austen-3m --prompt "It is a truth" --tokens 100
  python launch/generate.py exported --prompt "It is a truth" --top-p 0.9 --num-samples 3
  python launch/generate.py runs/masked --prompt "It is a truth" --steps 32
  python launch/generate.py runs/masked --sampler soar --set beam=3 --set threshold=0.8
  python launch/generate.py runs/masked --num-samples 64 --steps 32 --judge runs/austen-3m
  python launch/generate.py runs/masked --sampler blocks --cache dual \\
      --set block_size=16 --set inner=threshold
"""


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="generate.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="RUN_OR_CHECKPOINT_OR_HF_FOLDER")
    add(
        "--prompt", default="", metavar="TEXT", help="beginning of the text (the end-of-text token)"
    )
    add("--tokens", type=int, default=100, metavar="N", help="most tokens to add (100)")
    add("--temperature", type=float, metavar="T", help="0 is greedy (1.0, or the sampler's own)")
    add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="sample from the likeliest with this total chance")
    add(
        "--repetition-penalty", type=float, default=1.0, metavar="F", help="above 1 discourages (1)"
    )
    add("--greedy", action="store_true", help="always the likeliest token")
    add("--sampler", metavar="NAME", help="of a diffusion model (see below)")
    add("--steps", type=int, metavar="N", help="the same as --set steps=N")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the sampler")
    add("--guidance", type=float, default=0.0, metavar="W",
        help="how much more the prompt counts, in masked diffusion (0)")  # fmt: skip
    add("--cache", choices=("none", "prefix", "dual"), default="none",
        help="of masked diffusion in blocks: faster, not quite the same (none)")  # fmt: skip
    add("--judge", metavar="SOURCE", help="autoregressive model that says how likely the texts are")
    add("--seed", type=int, default=0, metavar="N", help="the same seed gives the same text (0)")
    add("--num-samples", type=int, default=1, metavar="N", help="how many texts (1)")
    add("--step", type=int, metavar="N", help="which checkpoint of the run (the latest)")
    add("--tokenizer", metavar="PATH", help="tokenizer.json or its folder (the model's own)")
    add("--device", default="cpu", metavar="NAME", help="cpu, cuda, ... (cpu)")
    return parser


def check(options: argparse.Namespace) -> None:
    """ValueError for what can never be."""
    problems = [
        f"--{name.replace('_', '-')} {text}" for name, text in sampling_of(options).problems()
    ]
    problems += [
        f"--{name} must be at least 1, got {value}"
        for name, value in (("tokens", options.tokens), ("num-samples", options.num_samples))
        if value < 1
    ]
    if not math.isfinite(options.guidance):
        problems.append(f"--guidance must be finite, got {options.guidance}")
    if options.steps is not None and any(given.startswith("steps=") for given in options.set):
        problems.append("--steps and --set steps= say the same: give one")
    if problems:
        raise ValueError("; ".join(problems))
    if options.sampler is not None:
        SAMPLERS.component(options.sampler)


def sampling_of(options: argparse.Namespace, temperature: float = 1.0) -> Sampling:
    """temperature: where none is given."""
    chosen = temperature if options.temperature is None else options.temperature
    return Sampling(
        temperature=0.0 if options.greedy else chosen,
        top_k=options.top_k,
        top_p=options.top_p,
        repetition_penalty=options.repetition_penalty,
    )


@dataclass(frozen=True)
class _Choice:
    sampler: Any = field(default=Ancestral.Config(), metadata={"registry": SAMPLERS})


def sampler_of(options: argparse.Namespace, family: Family) -> Any:
    """The config that --sampler, --steps and --set describe."""
    chosen = encode(_Choice(default_sampler(family)))
    if options.sampler is not None:
        chosen = {"sampler": {"type": options.sampler}}
    settings = [] if options.steps is None else [f"sampler.steps={options.steps}"]
    settings += [f"sampler.{setting}" for setting in options.set]
    return decode(_Choice, merge(chosen, parse_overrides(settings))).sampler


def diffuse(
    trained: TrainedModel, prompts: Sequence[Sequence[int]], eos: int | None,
    options: argparse.Namespace, device: torch.device,
) -> list[list[int]]:  # fmt: skip
    """Texts of a diffusion model; how much work they were goes to stderr."""
    config = sampler_of(options, family_of(trained.objective))
    drawn = options.top_k is not None or options.top_p is not None
    own = SAMPLERS.build(config).sampling.temperature
    sampling = sampling_of(options, 1.0 if drawn else own)
    model = build_model(trained, device=device)
    denoiser = denoiser_of(model, trained.objective, options.guidance, options.cache)
    texts, report = sample(
        denoiser, prompts, options.tokens, config, sampling, eos=eos, seed=options.seed
    )
    print(
        f"sampler {SAMPLERS.name_of(type(config))} of {denoiser.family} diffusion: {report.calls} "
        f"forward passes ({report.sequences} sequences) for {len(texts)} x {options.tokens} tokens",
        file=sys.stderr,
    )
    return texts


def refuse_diffusion(options: argparse.Namespace, trained: TrainedModel) -> None:
    """ValueError if an option was given that an autoregressive model does not have."""
    plain = parser().parse_args([""])
    names = ("sampler", "steps", "set", "guidance", "cache")
    given = [f"--{name}" for name in names if getattr(options, name) != getattr(plain, name)]
    if given:
        raise ValueError(
            f"{', '.join(given)}: for diffusion models, and {trained.path} is autoregressive "
            f"(objective {trained.objective['type']})"
        )


def tokenizer_of(trained: TrainedModel, given: str | None) -> TextTokenizer:
    place = trained.tokenizer if given is None else Path(given)
    if place is None:
        raise ValueError(f"{trained.path}: its tokenizer was not found: give one with --tokenizer")
    words = load_tokenizer(place)
    if words.vocab_size > trained.config.vocab_size:
        raise ValueError(
            f"the tokenizer {place} has {words.vocab_size} ids, the model a vocabulary of "
            f"{trained.config.vocab_size}: it is another model's tokenizer"
        )
    return words


def judge_of(options: argparse.Namespace, device: torch.device) -> TextScorer | None:
    """The model that --judge names, with its own tokenizer."""
    if options.judge is None:
        return None
    trained = open_trained(options.judge)
    require_judge(trained)
    return TextScorer(
        trained, build_model(trained, device=device), tokenizer_of(trained, None), Scoring()
    )


def device_of(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name!r} cannot be used here: {reason}") from None
    return device


def run(argv: list[str] | None) -> None:
    options = parser().parse_args(argv)
    check(options)
    device = device_of(options.device)
    trained = open_trained(options.source, options.step)
    causal = family_of(trained.objective) == "causal"
    if causal:
        refuse_diffusion(options, trained)
    words, judge = tokenizer_of(trained, options.tokenizer), judge_of(options, device)
    prompt = words.encode(options.prompt)
    if not prompt:
        if words.eos_id is None:
            raise ValueError("--prompt is empty, and the tokenizer has no end-of-text token to use")
        prompt = [words.eos_id]
    prompts = [prompt] * options.num_samples
    if causal:
        model, sampling = build_model(trained, device=device), sampling_of(options)
        texts = generate(
            model, prompts, options.tokens, sampling, eos=words.eos_id, seed=options.seed
        )
    else:
        texts = diffuse(trained, prompts, words.eos_id, options, device)
    if len(prompt) + options.tokens > trained.sequence_length:
        print(
            f"note: {len(prompt)} + {options.tokens} tokens are more than the "
            f"{trained.sequence_length} the model was trained on",
            file=sys.stderr,
        )
    for number, text in enumerate(texts, 1):
        if options.num_samples > 1:
            print(f"--- {number}")
        print(options.prompt + words.decode(text))
    if judge is not None:
        quality = sample_quality(judge, texts, words, words.encode(options.prompt))
        print(f"judged by {options.judge}: {quality}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    return exit_code_of(lambda: run(argv))


if __name__ == "__main__":
    raise SystemExit(main())
