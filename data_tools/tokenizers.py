"""Load, train and save Hugging Face tokenizers, with the settings that document encoding needs."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data_tools.indexed import token_dtype
from data_tools.manifest import write_atomic

EOS = "<|endoftext|>"
MASK = "<|mask{}|>"
BYTE_VOCABULARY = 257  # the 256 bytes and the end-of-text token: a byte-level BPE without merges
_EOS_NAMES = (EOS, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")


class TokenizerError(ValueError):
    """A tokenizer that is missing, unreadable or unfit for the request."""


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """A `tokenizers.Tokenizer` set to encode documents as plain text.

    Encoding never adds special tokens, never truncates or pads, and text that spells a control
    token (`<|endoftext|>`) is encoded as ordinary characters.
    """

    backend: Tokenizer
    name: str
    sha256: str  # of the canonical JSON without truncation and padding settings
    vocab_size: int  # largest id + 1: what an embedding needs, though some ids may be unused
    eos_id: int | None
    pad_id: int | None
    files: dict[str, bytes]  # tokenizer.json and its companions, as save() writes them

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str], dtype: Any = None) -> list[np.ndarray]:
        """Ids of each text, [tokens] of `dtype` (default: the type for this vocabulary)."""
        dtype = dtype or token_dtype(self.vocab_size)
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        # numpy raises OverflowError for an id that does not fit; it never wraps a Python int.
        return [np.array(encoding.ids, dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def describe(self) -> dict[str, Any]:
        """What a dataset manifest keeps of the tokenizer."""
        fields = ("name", "sha256", "vocab_size", "eos_id")
        return {field: getattr(self, field) for field in fields}

    def save(self, folder: str | Path) -> None:
        """Write files that `transformers` loads offline (AutoTokenizer.from_pretrained)."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            write_atomic(Path(folder) / name, data)


def load_tokenizer(path: str | Path, eos_token: str | None = None) -> TextTokenizer:
    """Load a `tokenizer.json` file or a folder that holds one.

    The end-of-text token is `eos_token`, or the one in the tokenizer_config.json beside the file,
    or the only special token with a common name for it; else the tokenizer has none.

    Raises:
        TokenizerError: nothing there, not a fast tokenizer, or an unknown `eos_token`.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        hint = ""
        if path.is_dir() and any(path.glob("*.model")):
            hint = "; a SentencePiece model must first be converted to tokenizer.json"
        raise TokenizerError(f"{file}: no such tokenizer file{hint}")
    files = {"tokenizer.json": file.read_bytes()}
    for name in _COMPANIONS:
        if (file.parent / name).is_file():
            files[name] = (file.parent / name).read_bytes()
    name = file.parent.resolve().name if file.name == "tokenizer.json" else file.stem
    return _from_files(files, name, str(file), eos_token)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (EOS,)
) -> TextTokenizer:
    """Train a byte-level BPE; the same texts always give the same tokenizer.

    The special tokens take the first ids and the first of them ends a document. Every text can be
    encoded and decoded without loss. A small corpus may give fewer than `vocab_size` tokens.

    Raises:
        TokenizerError: `vocab_size` is too small for the bytes and the special tokens.
    """
    check_vocabulary(vocab_size, len(special_tokens))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    name = f"bpe-{backend.get_vocab_size()}"
    files = {"tokenizer.json": (backend.to_str(pretty=True) + "\n").encode()}
    return _from_files(files, name, name, special_tokens[0])


def check_vocabulary(vocab_size: int, specials: int = 1) -> None:
    """Raises: TokenizerError if no byte-level BPE of this size can be trained and stored."""
    if vocab_size < 256 + specials:
        raise TokenizerError(
            f"vocabulary size {vocab_size} is too small: at least {256 + specials} "
            f"(256 bytes and {specials} special)"
        )
    token_dtype(vocab_size)


def byte_tokenizer() -> TextTokenizer:
    """One token per UTF-8 byte and an end-of-text token, as an ordinary tokenizer.json."""
    return dataclasses.replace(train_tokenizer([], BYTE_VOCABULARY), name="bytes")


def with_mask_token(tokenizer: TextTokenizer, mask_id: int) -> TextTokenizer:
    """The same tokenizer whose mask token has id `mask_id`, which no other token has.

    Raises:
        TokenizerError: that id cannot be given to a token of this kind of tokenizer.
    """
    backend = tokenizer.backend
    config = json.loads(tokenizer.files["tokenizer_config.json"])
    named = _token(config, "mask_token")
    if named is not None and backend.token_to_id(named) == mask_id:
        return tokenizer
    if mask_id < tokenizer.vocab_size:
        raise TokenizerError(
            f"{tokenizer.name}: id {mask_id} is to be the mask token's, and is that of "
            f"{backend.id_to_token(mask_id)!r}: the model has another tokenizer"
        )
    names = (MASK.format(number or "") for number in itertools.count())
    name = next(name for name in names if backend.token_to_id(name) is None)
    content = json.loads(tokenizer.files["tokenizer.json"])
    content["added_tokens"].append(
        {"id": mask_id, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
    )  # fmt: skip
    words = content["model"].get("vocab")
    if mask_id != tokenizer.vocab_size and isinstance(words, dict):
        # An added token takes the id behind all others, unless the vocabulary itself names another.
        words.update((token["content"], token["id"]) for token in content["added_tokens"])
    files = {**tokenizer.files, "tokenizer.json": _encoded(content)}
    for file in _COMPANIONS:
        if file in files:
            files[file] = _encoded({**json.loads(files[file]), "mask_token": name})
    eos = None if tokenizer.eos_id is None else backend.id_to_token(tokenizer.eos_id)
    changed = _from_files(files, tokenizer.name, tokenizer.name, eos)
    before = backend.get_vocab(with_added_tokens=True)
    if changed.backend.get_vocab(with_added_tokens=True) != {**before, name: mask_id}:
        raise TokenizerError(
            f"{tokenizer.name}: its {tokenizer.vocab_size:,} ids leave a gap to the mask token's, "
            f"{mask_id}, and its kind can have none"
        )
    return changed


def _encoded(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def audit(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[str]:
    """Properties that surprise people, as one sentence each.

    Args:
        texts: a sample on which the round trip through ids is checked.
    """
    warnings = []
    if tokenizer.eos_id is None:
        warnings.append("no end-of-text token: documents cannot be told apart in the stream")
    elif tokenizer.eos_id == tokenizer.pad_id:
        warnings.append(
            "padding and end of text share an id: code that masks padding also drops the loss of "
            "the end-of-text token"
        )
    unused = tokenizer.vocab_size - tokenizer.backend.get_vocab_size()
    if unused:
        warnings.append(f"{unused:,} ids below the vocabulary size belong to no token")
    with_specials = tokenizer.backend.encode("a", add_special_tokens=True).ids
    if len(with_specials) != len(tokenizer.encode("a")):
        warnings.append(
            "the tokenizer would add special tokens to every text; they are left out of documents"
        )
    lossy = sum(tokenizer.decode(tokenizer.encode(text)) != text for text in texts)
    if lossy:
        warnings.append(
            f"{lossy} of {len(texts)} sample documents do not survive encoding and decoding: bits "
            "per byte are an optimistic bound"
        )
    return warnings


def _from_files(
    files: dict[str, bytes], name: str, place: str, eos_token: str | None
) -> TextTokenizer:
    try:
        content = json.loads(files["tokenizer.json"])
        backend = Tokenizer.from_str(files["tokenizer.json"].decode())
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{place}: not a tokenizer.json: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # neither this nor the two above survives pickling
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise TokenizerError(f"{place}: the vocabulary is empty")
    config = _config(files, place)
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    if eos_token is None:
        eos_token = _token(config, "eos_token")
    if eos_token is None:
        known = [token for token in _EOS_NAMES if token in special]
        eos_token = known[0] if len(known) == 1 else None
    if eos_token is not None and eos_token not in vocabulary:
        raise TokenizerError(
            f"{place}: the end-of-text token {eos_token!r} is not in the vocabulary"
        )
    pad_token = _token(config, "pad_token")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**18,
        **config,
    }
    if eos_token is not None:
        config["eos_token"] = eos_token
    return TextTokenizer(
        backend=backend,
        name=name,
        sha256=_canonical_hash(content),
        vocab_size=max(vocabulary.values()) + 1,
        eos_id=None if eos_token is None else vocabulary[eos_token],
        pad_id=vocabulary.get(pad_token) if pad_token else None,
        files={**files, "tokenizer_config.json": _encoded(config)},
    )


def _canonical_hash(content: dict[str, Any]) -> str:
    """Hash of what decides the ids, independent of spacing and key order."""
    kept = {key: value for key, value in content.items() if key not in ("truncation", "padding")}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _config(files: dict[str, bytes], place: str) -> dict[str, Any]:
    """tokenizer_config.json, with what only special_tokens_map.json says filled in."""
    merged: dict[str, Any] = {}
    for name in reversed(_COMPANIONS):
        try:
            content = json.loads(files.get(name, b"{}"))
        except ValueError as error:
            raise TokenizerError(f"{place}: {name} beside it is not JSON: {error}") from None
        if name == "special_tokens_map.json":
            content = {key: content[key] for key in ("eos_token", "pad_token") if key in content}
        merged.update({key: value for key, value in content.items() if value is not None})
    return merged


def _token(config: dict[str, Any], key: str) -> str | None:
    value = config.get(key)
    return value.get("content") if isinstance(value, dict) else value
