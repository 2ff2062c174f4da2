"""Tokenizers as documents need them, and dataset preparation without the usual defects."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf
from tokenizers import decoders, models, pre_tokenizers, processors

from data_tools import dataset, indexed, tokenize, tokenizers
from data_tools.blend import WindowSampler
from data_tools.corpus import ReadOptions, find_files
from data_tools.indexed import IndexedReader
from data_tools.manifest import Manifest, text_bytes
from data_tools.request import Request, status
from data_tools.tokenizers import EOS, TextTokenizer, TokenizerError

HARD = ["", " ", "x <|endoftext|> y", "三つ — ünïcode 🙂\u200d\ufeff", "a\r\n\tb\0c", "\u0300e"]


def novel(chapters: int = 12) -> list[str]:
    files, options = find_files(["austen"])
    return list(tokenize.read_texts(files[:1], options))[:chapters]


@pytest.fixture(scope="module")
def bpe() -> TextTokenizer:
    return tokenizers.train_tokenizer(novel(), 600)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def request(*files: Path, tokenizer: TextTokenizer | int = 300, **options: object) -> Request:
    return Request(files, ReadOptions(), tokenizer, **options)  # type: ignore[arg-type]


def make(asked: Request, out: Path, workers: int = 1, force: bool = False) -> dict[str, Manifest]:
    return dataset.prepare(asked, out, workers=workers, force=force, say=lambda line: None)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents(folder: Path, split: str) -> list[str]:
    """The texts of a split, decoded, in stored order; checks that each ends with one EOS."""
    tokenizer = tokenizers.load_tokenizer(folder)
    reader = IndexedReader(folder / split)
    found = []
    for start, length in zip(reader.document_offsets, reader.lengths):
        ids = reader.read(int(start), int(length)).tolist()
        assert ids.count(tokenizer.eos_id) == 1
        assert ids[-1] == tokenizer.eos_id
        found.append(tokenizer.decode(ids[:-1]))
    return found


# Tokenizers


def test_training_is_deterministic_and_lossless(bpe: TextTokenizer) -> None:
    with tokenize.tokenizer_threads(True):
        again = tokenizers.train_tokenizer(novel(), 600)
    assert again.files == bpe.files
    assert again.sha256 == bpe.sha256
    assert (bpe.vocab_size, bpe.eos_id) == (600, 0)
    assert tokenizers.train_tokenizer(novel(11), 600).sha256 != bpe.sha256
    for text in HARD + novel(2):
        assert bpe.decode(bpe.encode(text)) == text
    assert tokenizers.audit(bpe, HARD) == []


def test_byte_tokenizer_has_one_token_per_byte() -> None:
    tokenizer = tokenizers.byte_tokenizer()
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eos_id) == ("bytes", 257, 0)
    for text in HARD:
        assert len(tokenizer.encode(text)) == len(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_transformers_loads_the_saved_folder_offline(bpe: TextTokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    bpe.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert (theirs.eos_token, theirs.eos_token_id, len(theirs)) == (EOS, 0, 600)
    text = novel(1)[0]
    assert theirs(text)["input_ids"] == bpe.encode(text)
    assert theirs.decode(theirs(text)["input_ids"]) == text
    ours = tokenizers.load_tokenizer(tmp_path)
    assert (ours.sha256, ours.eos_id) == (bpe.sha256, 0)


def test_text_that_spells_a_control_token_stays_text(bpe: TextTokenizer) -> None:
    ids = bpe.encode(f"a{EOS}b")
    assert bpe.eos_id not in ids
    assert bpe.decode(ids) == f"a{EOS}b"
    assert all(bpe.eos_id not in batch for batch in bpe.encode_batch([f"a{EOS}b", EOS]))


def special_tokenizer(folder: Path, **changes: object) -> Path:
    """A small tokenizer with everything that goes wrong: BOS, truncation, padding, id gaps."""
    backend = hf.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "far": 9}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<s>", "</s>"])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    if changes:
        (folder / "tokenizer_config.json").write_text(json.dumps(changes))
    return folder


def test_no_token_is_added_cut_or_padded(tmp_path: Path) -> None:
    tokenizer = tokenizers.load_tokenizer(special_tokenizer(tmp_path / "t"))
    assert tokenizer.encode("a b a b a b") == [1, 2, 1, 2, 1, 2]
    assert [ids.tolist() for ids in tokenizer.encode_batch(["a", "b a b a"])] == [[1], [2, 1, 2, 1]]


def test_vocabulary_size_is_the_largest_id_plus_one(tmp_path: Path) -> None:
    tokenizer = tokenizers.load_tokenizer(special_tokenizer(tmp_path / "t"))
    largest = max(tokenizer.backend.get_vocab().values())
    assert tokenizer.vocab_size == largest + 1 == 10
    assert tokenizer.backend.get_vocab_size() == 6
    assert "4 ids below the vocabulary size" in " ".join(tokenizers.audit(tokenizer, []))


def test_audit_names_what_surprises(tmp_path: Path) -> None:
    same = special_tokenizer(tmp_path / "t", eos_token="</s>", pad_token={"content": "</s>"})
    warnings = " ".join(tokenizers.audit(tokenizers.load_tokenizer(same), ["a b", "a"]))
    assert "padding and end of text share an id" in warnings
    assert "would add special tokens" in warnings
    assert "1 of 2 sample documents do not survive" in warnings


def test_end_of_text_token_is_found_or_asked_for(tmp_path: Path) -> None:
    guessed = tokenizers.load_tokenizer(special_tokenizer(tmp_path / "a"))
    assert guessed.backend.id_to_token(guessed.eos_id or 0) == "</s>"
    chosen = tokenizers.load_tokenizer(tmp_path / "a", eos_token="b")
    assert chosen.eos_id == 2
    configured = tokenizers.load_tokenizer(special_tokenizer(tmp_path / "b", eos_token="far"))
    assert configured.eos_id == 9
    with pytest.raises(TokenizerError, match="end-of-text token 'zz' is not in the vocabulary"):
        tokenizers.load_tokenizer(tmp_path / "a", eos_token="zz")
    backend = hf.Tokenizer(models.WordLevel({"a": 0}, "a"))
    backend.save(str(tmp_path / "none.json"))
    nameless = tokenizers.load_tokenizer(tmp_path / "none.json")
    assert (nameless.eos_id, nameless.name) == (None, "none")
    with pytest.raises(ValueError, match="names no end-of-text token"):
        request(tmp_path / "none.json", tokenizer=nameless)
    request(tmp_path / "none.json", tokenizer=nameless, append_eos=False)


def test_unusable_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(TokenizerError, match="no such tokenizer file"):
        tokenizers.load_tokenizer(tmp_path / "x")
    (tmp_path / "x" / "spiece.model").touch()
    with pytest.raises(TokenizerError, match="SentencePiece"):
        tokenizers.load_tokenizer(tmp_path / "x")
    for content in ("", "{}", "[]", '{"model": 3}'):
        (tmp_path / "x" / "tokenizer.json").write_text(content)
        with pytest.raises(TokenizerError, match="not a tokenizer"):
            tokenizers.load_tokenizer(tmp_path / "x")
    for size in (0, 256):
        with pytest.raises(TokenizerError, match="at least 257"):
            tokenizers.train_tokenizer([], size)


def test_hash_ignores_spacing_and_padding_but_not_merges(tmp_path: Path) -> None:
    folder = special_tokenizer(tmp_path / "t")
    first = tokenizers.load_tokenizer(folder).sha256
    content = json.loads((folder / "tokenizer.json").read_text())
    content["padding"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=7))
    assert tokenizers.load_tokenizer(folder).sha256 == first
    content["model"]["vocab"]["c"] = 3
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert tokenizers.load_tokenizer(folder).sha256 != first


# Datasets


def test_every_document_is_stored_once_in_one_split(tmp_path: Path, bpe: TextTokenizer) -> None:
    texts = [f"document {i} {'word ' * (i % 50)}" for i in range(400)] + HARD
    kept = [text for text in texts if text.strip()]
    made = make(request(write_jsonl(tmp_path / "a.jsonl", texts), tokenizer=bpe), tmp_path / "out")
    train, validation = (documents(tmp_path / "out", split) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(kept)
    assert train != sorted(train, key=kept.index)  # shuffled
    assert 5 <= len(validation) <= 40
    for split, stored in (("train", train), ("validation", validation)):
        manifest = indexed.verify(tmp_path / "out" / split)
        assert manifest == made[split]
        sizes = [len(text.encode()) for text in stored]
        assert text_bytes(tmp_path / "out" / split).tolist() == sizes
        assert manifest.text_bytes == sum(sizes)
        assert manifest.tokenizer == bpe.describe()
        assert manifest.split["empty_documents"] == 2
        assert len(manifest.sources) == 1


def test_empty_text_does_not_become_an_empty_document(tmp_path: Path) -> None:
    texts = ["a", "", "\n\n", "b", "c"]
    asked = request(write_jsonl(tmp_path / "a.jsonl", texts), validation_fraction=0.0)
    manifest = make(asked, tmp_path / "out")["train"]
    assert manifest.documents == 3
    assert manifest.split["empty_documents"] == 2
    assert (IndexedReader(tmp_path / "out" / "train").lengths == 2).all()


def test_documents_are_not_glued_without_eos(tmp_path: Path, bpe: TextTokenizer) -> None:
    texts = ["first", "second", "third"]
    asked = request(
        write_jsonl(tmp_path / "a.jsonl", texts),
        tokenizer=bpe,
        append_eos=False,
        validation_fraction=0.0,
    )
    assert make(asked, tmp_path / "out")["train"].append_eos is False
    reader = IndexedReader(tmp_path / "out" / "train")
    spans = zip(reader.document_offsets, reader.lengths)
    assert sorted(bpe.decode(reader.read(int(s), int(n)).tolist()) for s, n in spans) == texts
    sample = WindowSampler(reader, reader.num_tokens - 1, seed=0).sample(0)
    assert (~sample.label_mask).sum() == 2


def test_loss_of_the_end_of_text_token_is_kept(tmp_path: Path) -> None:
    # Tools that mask padding lose it when padding and end of text share an id.
    path = write_jsonl(tmp_path / "a.jsonl", ["ab", "cde", "f"])
    make(
        request(path, tokenizer=tokenizers.byte_tokenizer(), validation_fraction=0.0),
        tmp_path / "o",
    )
    reader = IndexedReader(tmp_path / "o" / "train")
    sample = WindowSampler(reader, reader.num_tokens - 1, seed=0).sample(0)
    assert (sample.tokens[1:][sample.label_mask] == 0).sum() == 3


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_same_bytes(
    tmp_path: Path, bpe: TextTokenizer, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text[i : i + 3000] for text in novel(20) for i in range(0, len(text), 3000)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    make(request(path, tokenizer=bpe, append_eos=True), tmp_path / "one")
    make(request(path, tokenizer=bpe, append_eos=True), tmp_path / "many", workers)
    assert contents(tmp_path / "one") == contents(tmp_path / "many")


def test_shards_in_memory_are_bounded(
    tmp_path: Path, bpe: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An unbounded queue reads the whole corpus into memory as fast as the disk allows.
    path = write_jsonl(tmp_path / "a.jsonl", ["word " * 13_200] * 40)  # one shard each
    read = done = worst = 0
    original = tokenize.read_texts

    def counting(files: list[Path], options: ReadOptions) -> Iterator[str]:
        nonlocal read
        for text in original(files, options):
            read += 1
            yield text

    def advance(characters: int) -> None:
        nonlocal done, worst
        worst = max(worst, read - done)
        done += 1

    monkeypatch.setattr(tokenize, "read_texts", counting)
    bpe.save(tmp_path / "t")
    (tmp_path / "s").mkdir()
    settings = tokenize.ShardSettings(str(tmp_path / "t"), str(tmp_path / "s"), True, 0)
    shards, _ = tokenize.encode_corpus([path], ReadOptions(), settings, 2, advance)
    assert (shards, done) == (40, 40)
    assert worst <= 2 + 2


def test_split_files_equal_one_file_compressed_or_not(tmp_path: Path, bpe: TextTokenizer) -> None:
    import gzip

    texts = [f"document {i}" for i in range(100)]
    write_jsonl(tmp_path / "all.jsonl", texts)
    write_jsonl(tmp_path / "1.jsonl", texts[:37])
    second = write_jsonl(tmp_path / "2.jsonl", texts[37:])
    (tmp_path / "2.jsonl.gz").write_bytes(gzip.compress(second.read_bytes()))
    make(request(tmp_path / "all.jsonl", tokenizer=bpe), tmp_path / "a")
    make(request(tmp_path / "1.jsonl", tmp_path / "2.jsonl.gz", tokenizer=bpe), tmp_path / "b")
    for name in ("train.bin", "train.idx", "validation.bin", "validation.idx"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_validation_is_not_the_end_of_a_sorted_file(tmp_path: Path, bpe: TextTokenizer) -> None:
    texts = [f"{source} {i}" for source in ("en", "it", "zh") for i in range(300)]
    asked = request(
        write_jsonl(tmp_path / "a.jsonl", texts), tokenizer=bpe, validation_fraction=0.2
    )
    make(asked, tmp_path / "out")
    held_out = documents(tmp_path / "out", "validation")
    for source in ("en", "it", "zh"):
        assert 35 <= sum(text.startswith(source) for text in held_out) <= 90


def test_equal_documents_share_a_split_and_the_seed_moves_it(
    tmp_path: Path, bpe: TextTokenizer
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [f"text {i % 50}" for i in range(200)])
    splits = []
    for seed in (0, 1):
        out = tmp_path / f"out{seed}"
        make(request(path, tokenizer=bpe, seed=seed, validation_fraction=0.3), out)
        train, held_out = set(documents(out, "train")), set(documents(out, "validation"))
        assert not train & held_out
        splits.append(held_out)
    assert splits[0] != splits[1]


def test_order_and_split_do_not_depend_on_the_tokenizer(tmp_path: Path, bpe: TextTokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(100)])
    make(request(path, tokenizer=bpe), tmp_path / "a")
    make(request(path, tokenizer=tokenizers.byte_tokenizer()), tmp_path / "b")
    for split in ("train", "validation"):
        assert documents(tmp_path / "a", split) == documents(tmp_path / "b", split)


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_neither_split_is_ever_empty(tmp_path: Path, fraction: float) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    made = make(request(path, validation_fraction=fraction), tmp_path / "out")
    assert {split: m.documents for split, m in made.items()} == (
        {"train": 2, "validation": 1} if fraction < 0.5 else {"train": 1, "validation": 2}
    )
    write_jsonl(tmp_path / "b.jsonl", ["same", "same"])
    with pytest.raises(ValueError, match=r"2 document\(s\) with one text cannot be split"):
        make(request(tmp_path / "b.jsonl"), tmp_path / "b")


def test_trained_tokenizer_does_not_see_validation_text(tmp_path: Path) -> None:
    texts = [f"{i} common words" for i in range(200)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    make(request(path, tokenizer=400, validation_fraction=0.3), tmp_path / "out")
    train = documents(tmp_path / "out", "train")
    own = tokenizers.train_tokenizer(sorted(train, key=texts.index), 400)
    assert tokenizers.load_tokenizer(tmp_path / "out").sha256 == own.sha256
    assert own.sha256 != tokenizers.train_tokenizer(texts, 400).sha256


def test_output_is_made_again_when_its_sources_change(tmp_path: Path, bpe: TextTokenizer) -> None:
    # Caches keyed by the path alone go on serving the old text.
    path = write_jsonl(tmp_path / "a.jsonl", ["old 1", "old 2", "old 3"])
    asked, out = request(path, tokenizer=bpe), tmp_path / "out"
    make(asked, out)
    before = contents(out)
    os.utime(path)  # a new time stamp on the same text
    assert status(asked, out) == "current"
    write_jsonl(path, ["new 1", "new 2", "new 3"])  # the same size
    assert status(asked, out) == "changed"
    make(asked, out)
    assert {text[:3] for text in documents(out, "train")} == {"new"}
    assert status(asked, out) == "current"
    write_jsonl(path, ["old 1", "old 2", "old 3"])
    make(asked, out)
    again = contents(out)
    assert again["train.bin"] == before["train.bin"]
    (out / "train.bin").write_bytes(b"")
    assert status(asked, out) == "changed"
    make(asked, out)
    assert (out / "train.bin").read_bytes() == before["train.bin"]


class Stop(KeyboardInterrupt):
    """An interruption at a chosen moment."""


def stop_after(function: Callable, calls: int) -> Callable:
    left = calls

    def wrapped(*args: object, **kwargs: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise Stop
        return function(*args, **kwargs)

    return wrapped


def interrupted(
    tmp_path: Path, patch: pytest.MonkeyPatch, module: object, name: str, calls: int
) -> int:
    """Interrupt a run, finish it, compare it with an undisturbed one; shards encoded at last."""
    texts = novel(20)
    path = tmp_path / "a.jsonl"
    asked = request(path if path.exists() else write_jsonl(path, texts), tokenizer=300)
    shards = len(list(tokenize.cut_shards(iter(texts), tokenize.shard_characters(asked.files))))
    assert shards >= 4
    if not (tmp_path / "undisturbed").exists():
        make(asked, tmp_path / "undisturbed")
    out = tmp_path / f"out{calls}"
    with patch.context() as stopping:
        stopping.setattr(module, name, stop_after(getattr(module, name), calls))
        with pytest.raises(Stop):
            make(asked, out)
    assert not out.exists()
    finished = len(list(Path(f"{out}.partial").glob("shards/*.npy")))
    encoded = 0
    original = tokenize.encode_shard

    def counting(*args: object) -> None:
        nonlocal encoded
        encoded += 1
        original(*args)  # type: ignore[arg-type]

    with patch.context() as watching:
        watching.setattr(tokenize, "encode_shard", counting)
        make(asked, out)
    assert encoded == shards - finished
    assert contents(out) == contents(tmp_path / "undisturbed")
    assert not Path(f"{out}.partial").exists()
    return encoded


@pytest.mark.parametrize(
    "module, name, calls, left",
    [
        (tokenizers, "train_tokenizer", 0, 5),
        (tokenize, "encode_shard", 3, 2),
        (tokenize.shutil, "copyfileobj", 2, 0),
        (dataset, "_write_split", 1, 0),
        (dataset, "_publish", 0, 0),
    ],
)
def test_interrupted_run_continues_to_the_same_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: object,
    name: str,
    calls: int,
    left: int,
) -> None:
    assert interrupted(tmp_path, monkeypatch, module, name, calls) == left


def test_run_interrupted_at_any_rename_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for calls in (0, 2, 5, 9, 12, 16):
        interrupted(tmp_path, monkeypatch, os, "replace", calls)


def test_interrupted_publication_keeps_a_complete_copy(
    tmp_path: Path, bpe: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    make(request(path, tokenizer=bpe), tmp_path / "out")
    other = request(path, tokenizer=bpe, seed=1)
    make(other, tmp_path / "expected")
    real, calls = os.replace, 0

    def stop_between(source: Path, target: Path) -> None:
        nonlocal calls
        if Path(source).name == "final":
            raise Stop
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(dataset.os, "replace", stop_between)
        with pytest.raises(Stop):
            make(other, tmp_path / "out", force=True)
    assert not (tmp_path / "out").exists()
    make(other, tmp_path / "out", force=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_two_runs_do_not_write_the_same_folder(tmp_path: Path, bpe: TextTokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    asked = request(path, tokenizer=bpe)
    errors = []

    def second_run(line: str) -> None:
        if not errors:
            with pytest.raises(ValueError, match="another process is preparing") as caught:
                make(asked, tmp_path / "out")
            errors.append(caught.value)

    dataset.prepare(asked, tmp_path / "out", workers=1, say=second_run)
    assert errors
    assert documents(tmp_path / "out", "train")


def test_work_folder_of_somebody_else_is_left_alone(tmp_path: Path, bpe: TextTokenizer) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.tex").write_text("precious")
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    with pytest.raises(ValueError, match="did not make"):
        make(request(path, tokenizer=bpe), tmp_path / "out")
    assert (tmp_path / "out.partial" / "thesis.tex").read_text() == "precious"


def test_large_vocabulary_is_stored_wide(tmp_path: Path) -> None:
    # 65,536 tokens fit 16 bits, but Megatron's readers expect 32 from 65,500 on.
    for size, dtype in ((65_499, np.uint16), (65_500, np.int32), (65_600, np.int32)):
        folder = tmp_path / str(size)
        vocabulary = {f"w{i}": i for i in range(size - 1)} | {"</s>": size - 1}
        backend = hf.Tokenizer(models.WordLevel(vocabulary, "w0"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.add_special_tokens(["</s>"])
        folder.mkdir()
        backend.save(str(folder / "tokenizer.json"))
        tokenizer = tokenizers.load_tokenizer(folder)
        path = write_jsonl(tmp_path / "a.jsonl", [f"w{size - 2} w5"])
        asked = request(path, tokenizer=tokenizer, validation_fraction=0.0)
        make(asked, tmp_path / f"out{size}")
        reader = IndexedReader(tmp_path / f"out{size}" / "train")
        assert reader.dtype == dtype
        assert reader.read(0, 3).tolist() == [size - 2, 5, size - 1]
