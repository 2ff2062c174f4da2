"""Reading corpora: exact text, bounded memory, and errors that name file and line."""

import gzip
import hashlib
import json
import math
import re
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data_tools import corpus
from data_tools.corpus import CorpusError, ReadOptions

TEXTS = ["one", "two\nlines\r\n", "三つ — ünïcode 🙂", " ", "", "<|endoftext|>"]


def texts(path: Path, **options: object) -> list[str]:
    return [t for t, _ in corpus.read_documents(path, ReadOptions(**options))]  # type: ignore[arg-type]


def zstd(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def jsonl(rows: list[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, key: row}).encode() + b"\n" for row in rows)


def test_bundled_novels_are_what_their_readme_says() -> None:
    files, options = corpus.find_files(["austen"])
    readme = (files[0].parent / "README.md").read_text()
    rows = re.findall(r"`(\w+\.txt)` \|[^|]*\|[^|]*\| ([\d,]+) \| `(\w{64})`", readme)
    assert [path.name for path in files] == [name for name, _, _ in rows]
    total = 0
    for path, (_, size, digest) in zip(files, rows):
        data = path.read_bytes()
        assert len(data) == int(size.replace(",", ""))
        assert hashlib.sha256(data).hexdigest() == digest
        documents = [text for text, _ in corpus.read_documents(path, options)]
        assert "".join(documents).encode() == data  # nothing is lost between chapters
        total += len(data)
    assert total >= 4_000_000
    assert f"{total:,} bytes" in readme
    assert (files[0].parent / "LICENSE").is_file()
    chapters = [t for path in files for t, _ in corpus.read_documents(path, options)]
    assert len(chapters) == 269
    assert min(map(len, chapters)) > 3000


def test_text_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    for name, pack in (("a.txt", bytes), ("a.txt.gz", gzip.compress), ("a.txt.zst", zstd)):
        data = "".join(TEXTS).encode()
        (tmp_path / name).write_bytes(pack(data))
        assert [t.encode() for t in texts(tmp_path / name)] == [data]


def test_separator_and_start_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("title\n# 1\nx\n# 2\ny\n# 3\n")
    assert texts(path, start="# .") == ["title\n# 1\nx\n", "# 2\ny\n", "# 3\n"]
    assert texts(path, separator="# .") == ["title\n", "x\n", "y\n"]
    assert texts(path, start="#") == ["title\n# 1\nx\n# 2\ny\n# 3\n"]  # whole lines only
    places = [place for _, place in corpus.read_documents(path, ReadOptions(start="# ."))]
    assert places == [f"{path}:1", f"{path}:4", f"{path}:6"]
    with pytest.raises(CorpusError, match="not both"):
        ReadOptions(start="a", separator="b")
    with pytest.raises(CorpusError, match="not a regular expression"):
        ReadOptions(start="(")


@pytest.mark.parametrize("suffix, pack", [("", bytes), (".gz", gzip.compress), (".zst", zstd)])
def test_jsonl(tmp_path: Path, suffix: str, pack: object) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(jsonl(TEXTS) + b"\n  \n" + jsonl(["last"]).rstrip()))  # type: ignore[operator]
    assert texts(path) == [*TEXTS, "last"]
    path.write_bytes(pack(jsonl(TEXTS)) + pack(jsonl(["joined"])))  # type: ignore[operator]
    if suffix:
        assert texts(path) == [*TEXTS, "joined"]  # concatenated members are one file
    path.write_bytes(pack(jsonl(TEXTS, "body")))  # type: ignore[operator]
    assert texts(path, text_key="body") == TEXTS


def test_parquet(tmp_path: Path) -> None:
    table = pyarrow.table({"text": TEXTS * 200, "n": range(len(TEXTS) * 200)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    assert texts(tmp_path / "a.parquet") == TEXTS * 200


@pytest.mark.parametrize(
    "name, data, message",
    [
        ("a.jsonl", jsonl(["x"]) + b"{oops\n", r"a\.jsonl:2: not JSON"),
        ("a.jsonl", jsonl(["x"]) + b'["x"]\n', r"a\.jsonl:2: expected a JSON object, got list"),
        ("a.jsonl", b'{"txt": "x", "n": 1}\n', r"a\.jsonl:1: no field 'text'; fields: 'txt', 'n'"),
        ("a.jsonl", b'{"text": null}\n', r"a\.jsonl:1: field 'text' is NoneType, not a string"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl:1: .*lone surrogate"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b"\n", r"a\.jsonl:1: not JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl:2: not UTF-8"),
        ("a.txt", b"fine\n\xc3\n", r"a\.txt:2: not UTF-8"),
        ("a.jsonl.gz", b"not gzip", r"a\.jsonl\.gz: cannot be read"),
        ("a.jsonl.gz", gzip.compress(jsonl(TEXTS * 99))[:-9], r"a\.jsonl\.gz: cannot be read"),
        ("a.jsonl.zst", zstd(jsonl(TEXTS * 99))[:-9], r"a\.jsonl\.zst: cannot be read: Truncated"),
        ("a.jsonl.zst", b"not zstd", r"a\.jsonl\.zst: cannot be read"),
        ("a.parquet", b"PAR1 no", r"a\.parquet: cannot be read as parquet"),
    ],
)
def test_unreadable_input_is_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorpusError, match=message):
        texts(tmp_path / name)


def test_parquet_columns_and_nulls_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), path)
    with pytest.raises(CorpusError, match="no column 'text'; columns: 'body'"):
        texts(path)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None]}), path)
    with pytest.raises(CorpusError, match=r"a\.parquet:2: field 'text' is NoneType"):
        texts(path)


def test_document_too_long_for_memory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\n" * 60)
    (tmp_path / "b.txt").write_text("é" * 60)
    (tmp_path / "c.jsonl").write_bytes(jsonl(["short", "é" * 60]))
    (tmp_path / "d.jsonl").write_bytes(jsonl(["x" * 1000]))
    for name in ("a.txt", "b.txt", "c.jsonl", "d.jsonl"):
        with pytest.raises(CorpusError, match=rf"{name}:\d: a document is longer than 100 bytes"):
            texts(tmp_path / name, max_document_bytes=100)
    assert len(texts(tmp_path / "a.txt", max_document_bytes=120)) == 1


def test_memory_does_not_grow_with_a_big_jsonl(tmp_path: Path) -> None:
    row = json.dumps({"text": "word " * 2000}) + "\n"
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", compresslevel=1) as file:
        for _ in range(4000):
            file.write(row)
    tracemalloc.start()
    count = sum(1 for _ in corpus.read_documents(tmp_path / "a.jsonl.gz", ReadOptions()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 4000
    assert peak < 4 << 20  # of 40 MB


def test_finding_files(tmp_path: Path) -> None:
    for name in ("b/z.jsonl.gz", "b/a.txt", "a.parquet", "README.md", "x.json", "LICENSE.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = [str(p.relative_to(tmp_path)) for p in corpus.find_files([str(tmp_path)])[0]]
    assert found == ["a.parquet", "b/a.txt", "b/z.jsonl.gz"]
    for inputs, message in [
        (["austin"], "did you mean the bundled corpus 'austen'"),
        ([str(tmp_path / "x.json")], "unknown file type; known: .txt"),
        ([str(tmp_path / "nothing")], "no such file"),
        ([str(tmp_path / "b" / "a.txt")] * 2, "named more than once"),
        ([str(tmp_path / "b"), str(tmp_path / "b" / "a.txt")], "named more than once"),
    ]:
        with pytest.raises(CorpusError, match=message):
            corpus.find_files(inputs)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match="no text, JSONL or parquet file"):
        corpus.find_files([str(tmp_path / "empty")])


def reference_order_two(train: list[bytes], document: bytes) -> float:
    """The docstring's formula, one byte at a time."""

    def count(context: bytes, byte: int | None) -> int:
        wanted = context + (b"" if byte is None else bytes([byte]))
        extra = 1 if byte is None else 0  # a context counts only where a byte follows it
        return sum(
            data[i : i + len(wanted)] == wanted
            for data in train
            for i in range(len(data) - len(wanted) + 1 - extra)
        )

    def probability(context: bytes, byte: int) -> float:
        if not context:
            return (count(b"", byte) + 1) / (sum(map(len, train)) + 256)
        lower = probability(context[1:], byte)
        n, d = count(context, None), sum(count(context, b) > 0 for b in range(256))
        return (count(context, byte) + d * lower) / (n + d) if n else lower

    return sum(
        -math.log2(probability(document[max(0, i - 2) : i], byte))
        for i, byte in enumerate(document)
    )


def test_reference_costs_follow_their_definition() -> None:
    train, validation = ["abracadabra", "a cab, é", "b"], ["abra cab", "zé", "b"]
    costs = corpus.reference_bits_per_byte(train, validation)
    coded = [text.encode() for text in validation]
    bits = sum(reference_order_two([t.encode() for t in train], data) for data in coded)
    assert costs["order2"] == pytest.approx(bits / sum(map(len, coded)), rel=1e-12)
    joined = b"".join(coded)
    assert costs["gzip"] == 8 * len(gzip.compress(joined, 9)) / len(joined)
    for texts_ in ([], [""]):
        with pytest.raises(CorpusError):
            corpus.reference_bits_per_byte(texts_, validation)
        with pytest.raises(CorpusError):
            corpus.reference_bits_per_byte(train, texts_)


def test_reference_costs_are_in_order_on_real_text() -> None:
    files, options = corpus.find_files(["austen"])
    chapters = [text for text, _ in corpus.read_documents(files[0], options)]
    costs = corpus.reference_bits_per_byte(chapters[5:], chapters[:5])
    assert 2.0 < costs["xz"] < costs["gzip"] < 3.5
    assert 2.0 < costs["order2"] < 3.5
