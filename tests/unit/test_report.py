"""The picture and the page of a run: what they show, and that they stand alone."""

import io
import itertools
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pretrain.metrics import MetricLogger, MetricsConfig
from pretrain.report import loss_figure, spread, write_report
from pretrain.run_folder import RunFolder, read_metrics

REFERENCES = {"order-2 byte model": 2.5, "gzip": 3.0}
BYTES_PER_TOKEN = 4.0


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of 40 logged steps with two evaluations and one health finding."""
    run = RunFolder(tmp_path / "runs" / "tiny")
    run.create()
    config = MetricsConfig(every=1, trackers=())
    log = MetricLogger(run, config, is_main_rank=True, total_steps=40, stream=io.StringIO())
    for step in range(1, 41):
        row = {"loss/train": 2 + 6 / step, "optim/lr": 1e-3 * step, "data/tokens": 512 * step}
        row |= {"time/elapsed_seconds": 100.4 * step, "throughput/tokens_per_second": 12345.6}
        if step == 30:
            row |= {"health/first_sample": 7, "health/last_sample": 9}
        log.log_step(step, row)
        if step % 20 == 0:
            log.log_evaluation(step, {"eval/loss": 2.5, "eval/bits_per_byte": 0.9 + 1 / step})
    log.close()
    run.write_status("finished")
    run.config.write_text("model:\n  norm: {type: rms}  # <b>\n")
    return run


class Tags(HTMLParser):
    """Checks that tags nest, and collects what the page links to and contains."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href")]

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def test_figure_draws_the_logged_figures_in_bits_per_byte(folder) -> None:
    rows = read_metrics(folder.metrics)
    figure = loss_figure(rows, title="tiny", bytes_per_token=BYTES_PER_TOKEN, references=REFERENCES)
    losses, rates = figure.axes
    lines = {line.get_label(): line for line in losses.get_lines()}
    scale = 1 / (math.log(2) * BYTES_PER_TOKEN)
    raw = lines["training, each logged step"]
    assert list(raw.get_xdata()) == list(range(1, 41))
    assert list(raw.get_ydata()) == [scale * row["loss/train"] for row in rows]
    smooth = lines["training, smoothed"]
    assert list(smooth.get_ydata()) == [scale * row["loss/ema"] for row in rows]
    checks = lines["validation"]
    assert list(checks.get_xdata()) == [20, 40]
    assert list(checks.get_ydata()) == pytest.approx([0.95, 0.925], abs=1e-12)
    assert list(lines["health finding"].get_xdata()) == [30]
    flat = [line.get_ydata()[0] for line in losses.get_lines() if len(set(line.get_ydata())) == 1]
    assert set(REFERENCES.values()) <= set(flat)
    low, high = losses.get_ylim()
    assert all(low < value < high for value in REFERENCES.values())
    assert losses.get_ylabel() == "loss, bits/byte"
    assert [list(line.get_ydata()) for line in rates.get_lines()] == [[r["optim/lr"] for r in rows]]


def test_figure_in_nats_where_the_bytes_are_unknown(folder) -> None:
    rows = [{**row, "loss_is_bound": True} for row in read_metrics(folder.metrics)]
    losses = loss_figure(rows, title="tiny").axes[0]
    assert losses.get_ylabel() == "loss (upper bound), nats/token"
    assert any(text.get_text() == "validation: at most 2.500" for text in losses.texts)
    lines = {line.get_label(): line for line in losses.get_lines()}
    assert list(lines["validation"].get_ydata()) == [2.5, 2.5]


def test_labels_stand_right_of_the_data_and_apart() -> None:
    """Whatever their values, in short runs too, and no legend over a curve."""
    close = {"order-2 byte model": 2.75, "gzip -9": 2.76, "xz -9e": 2.74, "other": 2.75}
    far = {"order-2 byte model": 2.75, "gzip -9": 9.0, "xz -9e": 0.1}
    for steps, references in itertools.product((1, 2, 300), (close, far)):
        rows = [{"step": s, "loss/train": 5 + 3 / s, "optim/lr": 1.0} for s in range(1, steps + 1)]
        rows[-1] |= {"eval/loss": 5.0, "eval/bits_per_byte": 2.755}
        figure = loss_figure(rows, title="x", bytes_per_token=2.6, references=references)
        figure.savefig(io.BytesIO(), format="png")  # with its final layout
        axes = figure.axes[0]
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == len(references) + 1
        for one, other in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)
        end, inside = axes.transData.transform((rows[-1]["step"], 0))[0], axes.get_window_extent()
        for box in boxes:
            assert end < box.x0 and box.x1 < inside.x1
            assert inside.y0 <= box.y0 and box.y1 <= inside.y1
        assert axes.get_legend().get_window_extent().y0 >= inside.y1


def test_labels_are_moved_no_farther_than_needed() -> None:
    assert spread([1.0, 5.0], 0.0, 10.0) == [1.0, 5.0]
    low, high = spread([5.0, 5.1], 0.0, 10.0)
    assert (low + high) / 2 == pytest.approx(5.05) and high - low == pytest.approx(0.55)
    assert spread([0.0, 0.0], 0.0, 10.0) == pytest.approx([0.275, 0.825])


def test_a_long_curve_is_thinned_without_losing_its_spikes() -> None:
    rows = [{"step": s, "loss/train": 2.0 + 0.001 * (s % 7)} for s in range(1, 50_001)]
    rows[31_415] = {"step": 31_416, "loss/train": 9.0}
    rows[100] = {"step": 101, "loss/train": math.nan}
    line = loss_figure(rows, title="long").axes[0].get_lines()[0]
    steps, values = list(line.get_xdata()), list(line.get_ydata())
    assert len(steps) <= 2002
    assert steps == sorted(steps) and (steps[0], steps[-1]) == (1, 50_000)
    assert max(values) == 9.0 and steps[values.index(9.0)] == 31_416
    assert all(map(math.isfinite, values))


def test_page_stands_alone_and_escapes(folder) -> None:
    picture, page = write_report(
        folder,
        bytes_per_token=BYTES_PER_TOKEN,
        references=REFERENCES,
        coverage="8 of 9 sequences",
        sample='<script>alert("1")</script> & more',
        artefacts={"Hugging Face folder": folder.path / "hf"},
    )
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.stat().st_size > 20_000
    text = page.read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "script" not in tags.tags and "img" not in tags.tags
    assert "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt; &amp; more" in text
    outside = [link for link in tags.links if not link.startswith("#")]
    assert outside and not any(re.match(r"\w+:|//", link) for link in outside), outside
    assert "hf" in outside and "metrics.jsonl" in outside
    drawing = text[text.index("<svg") : text.index("</svg>") + len("</svg>")]
    ET.fromstring(drawing)
    assert "order-2 byte model: 2.50" in drawing
    assert "validation (8 of 9 sequences)" in drawing
    for expected in ("eval/bits_per_byte", "0.925", "step 40", "20,480 tokens", "finished"):
        assert expected in text, expected
    assert "norm: {type: rms}  # &lt;b&gt;" in text


def test_final_figures_begin_with_the_losses_in_readable_units(folder) -> None:
    write_report(folder, bytes_per_token=BYTES_PER_TOKEN, references=REFERENCES)
    table = folder.report.read_text().partition("Final figures")[2].partition("</table>")[0]
    cells = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in table.split("</tr>")[:-1]]
    assert cells == [
        ["loss/train", "2.1500", "nats/token", "step 40"],
        ["loss/ema", "2.2328", "nats/token", "step 40"],
        ["eval/loss", "2.5000", "nats/token", "step 40"],
        ["eval/bits_per_byte", "0.9250", "bits/byte", "step 40"],
        ["order-2 byte model", "2.5000", "bits/byte", "reference"],
        ["gzip", "3.0000", "bits/byte", "reference"],
        ["throughput/tokens_per_second", "12,346", "tokens/s", "step 40"],
        ["time/elapsed_seconds", "1:06:56", "h:min:s", "step 40"],
        ["data/tokens", "20,480", "tokens", "step 40"],
        ["optim/lr", "0.04", "", "step 40"],
    ]


def test_report_can_be_made_again_and_leaves_no_scraps(folder) -> None:
    write_report(folder)
    before = {path.name for path in folder.path.iterdir()}
    first = folder.report.read_text()
    write_report(folder)
    assert folder.report.read_text() == first
    assert {path.name for path in folder.path.iterdir()} == before
    assert not [name for name in before if name.endswith(".tmp")]


def test_nothing_to_plot_and_references_without_bytes_are_errors(folder, tmp_path) -> None:
    with pytest.raises(ValueError, match="bytes_per_token"):
        write_report(folder, references=REFERENCES)
    empty = RunFolder(tmp_path / "empty")
    empty.create()
    with pytest.raises(ValueError, match="no such file"):
        write_report(empty)
    empty.metrics.touch()
    with pytest.raises(ValueError, match="no logged training step"):
        write_report(empty)
    assert not folder.report.exists() and not empty.report.exists()
