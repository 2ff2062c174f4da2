"""generate.py: the same text from a run, a checkpoint and an exported folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_tools.tokenizers import byte_tokenizer
from launch import convert, generate
from models import decoding, samplers
from tests.trained import LENGTH, save_run, tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and both kinds of export, with a byte tokenizer and a vocabulary that fits it."""
    folder = tmp_path_factory.mktemp("made")
    save_run(folder / "run", tiny_config(vocab_size=257), tokenizer=True)
    save_run(folder / "mute", tiny_config(vocab_size=257))
    for target in ("llama", "custom"):
        arguments = ["to-hf", str(folder / "run"), str(folder / target), "--target", target]
        assert convert.main([*arguments, "--no-verify", "--max-shard-size", "20KB"]) == 0
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert generate.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_every_kind_of_source_gives_the_same_text(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompt", "It is", "--tokens", 20, "--seed", 4]
    sources = ["run", "run/checkpoints", "run/checkpoints/step_00000003", "llama", "custom"]
    texts = [run(capsys, made / source, *options) for source in sources[:1]]
    for source in sources[1:]:
        extra = ["--tokenizer", made / "run"] if "checkpoints" in source else []
        texts.append(run(capsys, made / source, *options, *extra))
    assert len(set(texts)) == 1
    assert texts[0].startswith("It is") and len(texts[0]) > len("It is\n")
    assert run(capsys, made / "run", *options[:-1], 5) != texts[0]


def test_greedy_text_is_the_models_own(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = byte_tokenizer()
    model = tiny_model(tiny_config(vocab_size=257))
    [expected] = decoding.generate(
        model, [words.encode("Emma")], 12, decoding.Sampling(temperature=0.0), eos=words.eos_id
    )
    text = "Emma" + words.decode(expected) + "\n"
    options = [made / "run", "--prompt", "Emma", "--tokens", 12]
    assert run(capsys, *options, "--greedy") == text
    assert run(capsys, *options, "--temperature", 0, "--seed", 9) == text
    assert run(capsys, *options, "--top-k", 1) == text
    assert run(capsys, *options, "--top-p", 1e-6) == text


def test_several_samples_differ(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, made / "run", "--tokens", 12, "--num-samples", 3, "--seed", 1)
    assert [f"--- {n}" in text for n in (1, 2, 3, 4)] == [True, True, True, False]
    pieces = [piece.split("\n", 1)[1] for piece in text.split("--- ")[1:]]
    assert len(set(pieces)) == 3


def test_beyond_the_trained_length_is_said(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([str(made / "run"), "--tokens", "60", "--greedy"]) == 0
    assert f"more than the {LENGTH} the model was trained on" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["{made}/absent"], "absent: no such folder"),
        (["{made}"], "complete checkpoint"),
        (["{made}/mute"], "its tokenizer was not found: give one with --tokenizer"),
        (["{made}/run", "--step", "9"], "no complete step 9"),
        (["{made}/llama", "--step", "9"], "has no steps"),
        (["{made}/run", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["{made}/run", "--num-samples", "0"], "--num-samples must be at least 1"),
        (["{made}/run", "--temperature", "-1"], "--temperature must not be negative"),
        (["{made}/run", "--top-k", "0", "--top-p", "2"], "--top-k must be at least 1"),
        (["{made}/run", "--top-p", "2"], "--top-p must be in (0, 1]"),
        (["{made}/run", "--tokens", "many"], "invalid int value: 'many'"),
        (["{made}/run", "--device", "gpu"], "--device 'gpu' cannot be used here"),
        (["{made}/run", "--tokenizer", "{made}/mute"], "no such tokenizer file"),
        ([], "required: RUN_OR_CHECKPOINT_OR_HF_FOLDER"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], expected: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main([text.format(made=made) for text in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and len(captured.err.splitlines()) == 1
    assert expected in captured.err


def test_without_transformers(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face folders are read by our own code."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(capsys, made / "custom", "--tokens", 3)


OBJECTIVES: dict[str, dict[str, Any]] = {
    "masked": {"type": "masked"},
    "uniform": {"type": "uniform"},
    "block": {"type": "block", "block_size": 4},
    "eso": {"type": "eso", "alpha0": 0.5, "variant": "B"},
}


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusion")
    for name, objective in OBJECTIVES.items():
        config = tiny_config(vocab_size=258, mask_token=True)
        save_run(folder / name, config, tokenizer=True, objective=objective)
    return folder


@pytest.mark.parametrize("family", OBJECTIVES)
def test_diffusion_has_a_sampler_of_its_own(
    family: str, diffusion: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, model = byte_tokenizer(), tiny_model(tiny_config(vocab_size=258, mask_token=True))
    denoiser = samplers.denoiser_of(model, OBJECTIVES[family])
    config = samplers.default_sampler(denoiser.family)
    expected, report = samplers.sample(
        denoiser, [words.encode("Emma")] * 2, 12, config, eos=words.eos_id, seed=2
    )
    source = str(diffusion / family)
    options = ["--prompt", "Emma", "--tokens", "12", "--seed", "2", "--num-samples", "2"]
    assert generate.main([source, *options]) == 0
    captured = capsys.readouterr()
    for text in expected:
        assert "Emma" + words.decode(text) + "\n" in captured.out
    assert f"of {family} diffusion: {report.calls} forward passes" in captured.err


def test_settings_of_a_sampler(diffusion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def passes(*options: str) -> int:
        assert generate.main([str(diffusion / "masked"), "--tokens", "12", *options]) == 0
        return int(capsys.readouterr().err.split("diffusion: ")[1].split()[0])

    assert passes("--sampler", "remasking", "--steps", "3") == 3
    assert passes("--sampler", "remasking", "--set", "order=random", "--greedy") == 12
    assert passes("--sampler", "soar", "--set", "beam=3", "--set", "threshold=1") == 12
    assert passes("--steps", "2", "--guidance", "1", "--top-k", "5") <= 3
    blocks = ["--sampler", "blocks", "--cache", "dual", "--set", "block_size=6"]
    assert passes(*blocks, "--set", "inner=remasking", "--set", "inner.steps=2") == 4
    # a sampler's own temperature
    texts = [
        run(capsys, diffusion / "masked", "--sampler", "remasking", "--seed", seed, *more)
        for seed, more in ((1, []), (2, []), (1, ["--temperature", 1]))
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("family, arguments, expected", [
    ("masked", ["--sampler", "sor"], "unknown sampler 'sor'"),
    ("masked", ["--sampler", "eso"], "sampler=eso is for eso diffusion"),
    ("uniform", ["--sampler", "soar"], "any token may change"),
    ("block", ["--sampler", "threshold"], "use blocks"),
    ("block", ["--set", "block_size=8"], "trained on blocks of 4"),
    ("eso", ["--cache", "dual"], "cache=dual is for masked"),
    ("uniform", ["--guidance", "1"], "guidance"),
    ("masked", ["--guidance", "nan"], "--guidance must be finite"),
    ("masked", ["--temperature", "nan"], "--temperature must not be negative"),
    ("masked", ["--steps", "3", "--set", "steps=4"], "say the same"),
    ("masked", ["--set", "stepz=3"], "unknown key"),
    ("masked", ["--sampler", "threshold", "--steps", "3"], "sampler.steps"),
    ("masked", ["--sampler", "soar", "--temperature", "1"], "temperature must be 0"),
    ("masked", ["--repetition-penalty", "2"], "repetition_penalty is for autoregressive"),
    ("causal", ["--sampler", "soar", "--steps", "3"], "--sampler, --steps: for diffusion models"),
])  # fmt: skip
def test_samplers_that_do_not_fit(
    family: str, arguments: list[str], expected: str, diffusion: Path, made: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source = made / "run" if family == "causal" else diffusion / family
    assert generate.main([str(source), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and expected in captured.err
    assert "Traceback" not in captured.err


def test_an_autoregressive_model_judges(
    made: Path, diffusion: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line is that of the library, on what is printed; the judge's tokenizer is its own."""
    options = ["--prompt", "It is", "--tokens", "12", "--num-samples", "3"]
    for source in (made / "run", diffusion / "masked"):
        assert generate.main([str(source), *options, "--judge", str(made / "run")]) == 0
        printed = capsys.readouterr()
        (line,) = (text for text in printed.err.splitlines() if text.startswith("judged by "))
        assert "generative perplexity" in line and "unigram entropy" in line
        assert "3 samples of 36 tokens" in line
        assert "judged" not in printed.out
    assert generate.main([str(made / "run"), "--judge", str(diffusion / "masked")]) == 2
    assert "an autoregressive model judges" in capsys.readouterr().err


def test_a_real_process(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "llama", tmp_path / "model")
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "generate.py"), "model", "--prompt", "Emma",
         "--tokens", "4"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Emma")
