"""Continue a text with a trained model: a run, a checkpoint or a Hugging Face folder."""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse

import torch

from data_tools.tokenizers import TextTokenizer, load_tokenizer
from launch._command import Parser, exit_code_of
from models.decoding import Sampling, generate
from pretrain.trained import TrainedModel, build_model, open_trained

EXAMPLES = """\
examples:
  python launch/generate.py runs/austen-3m --prompt "It is a truth" --tokens 100
  python launch/generate.py exported --prompt "It is a truth" --top-p 0.9 --num-samples 3
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
    add("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (1.0)")
    add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="sample from the likeliest with this total chance")
    add(
        "--repetition-penalty", type=float, default=1.0, metavar="F", help="above 1 discourages (1)"
    )
    add("--greedy", action="store_true", help="always the likeliest token")
    add("--seed", type=int, default=0, metavar="N", help="the same seed gives the same text (0)")
    add("--num-samples", type=int, default=1, metavar="N", help="how many texts (1)")
    add("--step", type=int, metavar="N", help="which checkpoint of the run (the latest)")
    add("--tokenizer", metavar="PATH", help="tokenizer.json or its folder (the model's own)")
    add("--device", default="cpu", metavar="NAME", help="cpu, cuda, ... (cpu)")
    return parser


def sampling_of(options: argparse.Namespace) -> Sampling:
    sampling = Sampling(
        temperature=0.0 if options.greedy else options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        repetition_penalty=options.repetition_penalty,
    )
    problems = [f"--{name.replace('_', '-')} {text}" for name, text in sampling.problems()]
    problems += [
        f"--{name} must be at least 1, got {value}"
        for name, value in (("tokens", options.tokens), ("num-samples", options.num_samples))
        if value < 1
    ]
    if problems:
        raise ValueError("; ".join(problems))
    return sampling


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
    sampling, device = sampling_of(options), device_of(options.device)
    trained = open_trained(options.source, options.step)
    words = tokenizer_of(trained, options.tokenizer)
    prompt = words.encode(options.prompt)
    if not prompt:
        if words.eos_id is None:
            raise ValueError("--prompt is empty, and the tokenizer has no end-of-text token to use")
        prompt = [words.eos_id]
    if len(prompt) + options.tokens > trained.sequence_length:
        print(
            f"note: {len(prompt)} + {options.tokens} tokens are more than the "
            f"{trained.sequence_length} the model was trained on",
            file=sys.stderr,
        )
    texts = generate(
        build_model(trained, device=device),
        [prompt] * options.num_samples,
        options.tokens,
        sampling,
        eos=words.eos_id,
        seed=options.seed,
    )
    for number, text in enumerate(texts, 1):
        if options.num_samples > 1:
            print(f"--- {number}")
        print(options.prompt + words.decode(text))


def main(argv: list[str] | None = None) -> int:
    return exit_code_of(lambda: run(argv))


if __name__ == "__main__":
    raise SystemExit(main())
