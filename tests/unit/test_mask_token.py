"""A mask token for a tokenizer that has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_tools.tokenizers import TokenizerError, byte_tokenizer, load_tokenizer, with_mask_token


@pytest.mark.parametrize("mask_id", [257, 300])
def test_a_mask_token_changes_nothing_else(mask_id: int, tmp_path: Path) -> None:
    words = byte_tokenizer()
    masked = with_mask_token(words, mask_id)
    masked.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "a <|mask|> of ünï-code <|endoftext|>"
    assert loaded.encode(text) == words.encode(text) and loaded.decode(words.encode(text)) == text
    assert loaded.backend.id_to_token(mask_id) == "<|mask|>"
    assert (loaded.vocab_size, loaded.eos_id, loaded.pad_id) == (mask_id + 1, 0, None)
    assert with_mask_token(loaded, mask_id) is loaded
    with pytest.raises(TokenizerError, match="id 65 is to be the mask token's, and is that of 'a'"):
        with_mask_token(words, 65)


def test_a_name_that_is_taken_gets_a_number() -> None:
    words = with_mask_token(byte_tokenizer(), 257)
    again = with_mask_token(words, 258)
    assert again.backend.id_to_token(258) == "<|mask1|>"
    config = json.loads(again.files["tokenizer_config.json"])
    assert config["mask_token"] == "<|mask1|>" and config["eos_token"] == "<|endoftext|>"
