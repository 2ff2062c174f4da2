"""Offline data preparation: corpora, tokenizers and indexed token files."""
