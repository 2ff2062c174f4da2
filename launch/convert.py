"""Convert between runs of this project and Hugging Face folders."""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse

from launch._command import Parser, exit_code_of
from models.hf_names import NATIVE_TARGETS
from pretrain import export, import_hf

EXAMPLES = """\
examples:
  python launch/convert.py to-hf runs/austen-3m exported
  python launch/convert.py to-hf runs/austen-3m exported-bf16 --target custom --dtype bfloat16
  python launch/convert.py from-hf exported start
"""


def parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    top = Parser(prog="convert.py", description=__doc__, epilog=EXAMPLES, formatter_class=shape)
    commands = top.add_subparsers(dest="command", required=True, metavar="to-hf | from-hf")
    to_hf = commands.add_parser(
        "to-hf",
        help="write a trained model as a folder that transformers loads",
        description=export.__doc__,
    )
    add = to_hf.add_argument
    add("source", metavar="RUN_OR_CHECKPOINT", help="run folder, checkpoints folder or checkpoint")
    add("out", type=Path, metavar="OUT", help="folder to make")
    add("--step", type=int, metavar="N", help="which checkpoint of the run (the latest)")
    add(
        "--target",
        default="auto",
        metavar="TARGET",
        help=f"{', '.join(export.TARGETS)}: auto takes a class of transformers where it is exact, "
        "else custom, which carries the model's own code (auto)",
    )
    add(
        "--dtype",
        default="stored",
        metavar="DTYPE",
        help=f"{', '.join(export.DTYPES)}: of the written tensors (stored)",
    )
    add("--max-shard-size", default="5GB", metavar="SIZE", help="largest weight file (5GB)")
    add("--tokenizer", metavar="PATH", help="tokenizer.json or its folder (the run's)")
    add("--drop-mtp", action="store_true", help="leave out multi-token prediction")
    from_hf = commands.add_parser(
        "from-hf",
        help="make a checkpoint to start training from",
        description=import_hf.__doc__,
    )
    add = from_hf.add_argument
    add(
        "source",
        metavar="FOLDER",
        help=f"Hugging Face folder: {', '.join(NATIVE_TARGETS)} or our own",
    )
    add("out", type=Path, metavar="OUT", help="folder to make")
    add(
        "--dtype",
        default="float32",
        metavar="DTYPE",
        help=f"{', '.join(import_hf.DTYPES)}: of the weights in training (float32)",
    )
    add("--vocab-multiple", type=int, metavar="N", help="pad the stored vocabulary to this (128)")
    for command in (to_hf, from_hf):
        command.add_argument(
            "--no-verify",
            action="store_true",
            help="do not compare logits between transformers and the training code",
        )
        command.add_argument("--force", action="store_true", help="replace a model in OUT")
    return top


def run(argv: list[str] | None) -> None:
    options = parser().parse_args(argv)
    if options.command == "to-hf":
        done = export.export_hugging_face(
            options.source,
            options.out,
            target=options.target,
            dtype=options.dtype,
            max_shard_bytes=export.parse_size(options.max_shard_size),
            step=options.step,
            tokenizer=options.tokenizer,
            drop_mtp=options.drop_mtp,
            check=not options.no_verify,
            force=options.force,
        )
        for note in done.notes:
            print(f"note: {note}")
        print(done)
        print(done.verification or "not verified")
        return
    made = import_hf.import_hugging_face(
        options.source,
        options.out,
        dtype=options.dtype,
        vocab_multiple=options.vocab_multiple,
        check=not options.no_verify,
        force=options.force,
    )
    print(made)
    print(made.verification or "not verified")


def main(argv: list[str] | None = None) -> int:
    return exit_code_of(lambda: run(argv))


if __name__ == "__main__":
    raise SystemExit(main())
