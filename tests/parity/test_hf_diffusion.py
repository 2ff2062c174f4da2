"""Exported = trained, for diffusion: a folder sees, predicts and fills text as training code does,
in a process that has nothing but the folder and transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from models.attention import Visibility
from models.configuration_midspan import MidspanConfig
from models.families import family_of
from models.hf_names import NATIVE_TARGETS, obstacles
from models.modeling_midspan import MidspanForCausalLM
from models.modeling_midspan_diffusion import MidspanForDiffusion
from models.samplers import default_sampler, denoiser_of, sample
from models.transformer import Transformer
from parallel.stage import MicroBatch
from pretrain.decode import decode, encode
from pretrain.export import ExportError, export_hugging_face
from pretrain.import_hf import import_hugging_face
from pretrain.objectives.base import OBJECTIVES, build_objective
from pretrain.objectives.diffusion import Windows
from pretrain.objectives.eso import Eso
from pretrain.trained import TrainedModel, open_trained
from pretrain.verify_hf import VerificationError, compute_reference, verify
from pretrain.yaml_text import parse_yaml
from tests.clean_process import run_clean
from tests.trained import save_run, tiny_config

pytestmark = pytest.mark.parity

LENGTH, SIZE, NEW = 12, 4, 7
ANYTHING = {"norm": "bhyt", "position": "alibi", "tie_embeddings": True, "logit_softcap": 9.0}
UNIFORM = {"mask_token": False}
TOLD = {"block": "adaln", "norm": "layer"}


@dataclass(frozen=True)
class Case:
    """samplers: besides the one that the model asks for."""

    objective: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    samplers: tuple[tuple[str, dict[str, Any]], ...] = ()


def eso(alpha0: float, variant: str) -> dict[str, Any]:
    return {"type": "eso", "alpha0": alpha0, "variant": variant}


BLOCK = {"type": "block", "block_size": SIZE}
CASES = {
    "masked": Case(
        {"type": "masked"}, {"attention": {"qk_norm": True}},
        (("soar", {"beam": 2}), ("threshold", {}), ("first_hitting", {}),
         ("blocks", {"block_size": 3, "inner": {"type": "remasking", "steps": 2}})),
    ),
    "masked, any component": Case({"type": "masked"}, ANYTHING),
    "uniform": Case({"type": "uniform"}, UNIFORM),
    "uniform, told of noise": Case({"type": "uniform"}, {**UNIFORM, **TOLD}),
    "uniform beside a mask token": Case({"type": "uniform"}),
    "block": Case(BLOCK),
    "block, any component": Case(BLOCK, ANYTHING),
    "eso A": Case(eso(1.0, "A")),
    "eso B": Case(eso(1.0, "B")),
    "eso both terms A": Case(eso(0.5, "A"), ANYTHING),
    "eso both terms B": Case(eso(0.5, "B"), TOLD),
}  # fmt: skip

AGAIN = ("masked, any component", "uniform, told of noise")

CLEAN = """
import pathlib, torch, transformers
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
load, out = transformers.AutoModelForMaskedLM.from_pretrained, {}

def padded(x, left, right, value):
    return torch.nn.functional.pad(x, (left, right), value=value)

for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    asked = torch.load(folder / "asked.pt")
    model, info = load(folder / "model", trust_remote_code=True, output_loading_info=True)
    assert not any(info.values()), (folder.name, info)
    assert not model.can_generate()
    found = out[folder.name] = {}
    with torch.no_grad():
        found["step"] = model(**asked["step"]).logits
        plain = asked["plain"]
        found["plain"] = model(**plain).logits
        base = transformers.AutoModel.from_pretrained(folder / "model", trust_remote_code=True)
        states = model(**plain, output_hidden_states=True).hidden_states
        found["hidden"] = base(**plain).last_hidden_state.equal(states[-1]), len(states)
        for side, left, right in (("left", 5, 0), ("right", 0, 5)):
            ids = padded(plain["input_ids"], left, right, 7)
            mask = padded(torch.ones_like(plain["input_ids"]), left, right, 0)
            logits = model(**{**plain, "input_ids": ids, "attention_mask": mask}).logits
            found[side] = logits[:, left : left + plain["input_ids"].shape[1]]
        if asked["again"]:
            model.save_pretrained(folder / "again" / "model")
            again = load(folder / "again" / "model", trust_remote_code=True)
            found["again"] = again(**plain).logits
    prompts, length = asked["prompts"], max(map(len, asked["prompts"]))
    found["texts"] = {}
    for side in ("left", "right"):
        gaps = [length - len(row) for row in prompts]
        rows = [[7] * n + row if side == "left" else row + [7] * n for row, n in zip(prompts, gaps)]
        mask = [[0] * n + [1] * len(row) for row, n in zip(prompts, gaps)]
        mask = torch.tensor([row if side == "left" else row[::-1] for row in mask])
        options = {"attention_mask": mask, "max_new_tokens": asked["new"], "seed": 5}
        for name, settings in asked["samplers"]:
            text = model.generate(
                torch.tensor(rows), sampler=name, sampler_options=settings, **options)
            assert text[:, :length].tolist() == rows
            found["texts"][side, name] = text[:, length:].tolist()
    text = model.generate(torch.tensor(prompts[:1]), max_new_tokens=asked["new"], seed=5)
    found["alone"] = text[:, len(prompts[0]) :].tolist()
    words = transformers.AutoTokenizer.from_pretrained(folder / "model", trust_remote_code=True)
    of_model = getattr(model.config, "mask_token_id", None)
    found["mask"] = words.mask_token, words.mask_token_id, of_model
    found["causal"] = model.config.is_causal, model.config.use_cache
    if words.mask_token:
        found["spelled"] = words("a" + words.mask_token + "b")["input_ids"]
try:
    transformers.AutoModelForCausalLM.from_pretrained(folder / "model", trust_remote_code=True)
    refused = ""
except ValueError as error:
    refused = str(error)
torch.save({"results": out, "refused": refused}, sys.argv[2])
"""


def objective_of(tree: dict[str, Any], model: Any) -> tuple[Any, dict[str, Any]]:
    """The objective, and its settings with all their values."""
    kind = OBJECTIVES.config_class(tree["type"])
    config: Any = decode(kind, {key: value for key, value in tree.items() if key != "type"})
    return build_objective(config, model), {"type": tree["type"], **encode(config)}


def tokens() -> Tensor:
    return torch.randint(1, 300, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def logits_of(model: Transformer, batch: MicroBatch) -> Tensor:
    with torch.no_grad():
        return model.logits(batch.ids, batch.context())


def as_arguments(batch: MicroBatch) -> dict[str, Tensor]:
    """What a forward pass of the exported model is told to be that of a training step."""
    found = {"input_ids": batch.ids}
    if isinstance(batch.mask, Visibility):
        visible = batch.mask.dense()
        if batch.documents is not None:
            visible = visible & (batch.documents[:, :, None] == batch.documents[:, None])[:, None]
        found["attention_mask"] = visible
    if batch.positions is not None:
        found["position_ids"] = batch.positions
    if batch.noise is not None:
        found["noise"] = batch.noise
    return found


def plain_call(
    objective: Any, trained: Transformer, batch: MicroBatch, step: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """A forward pass of a text that is noised in part, without any word on who sees whom; the
    training model's logits of it, and where they must agree, bool [B, S]."""
    config = trained.config
    clean = tokens()[:, 1:]
    if family_of({"type": OBJECTIVES.name_of(type(objective.config))}) == "block":
        ids = torch.cat([clean[:, :-SIZE], batch.ids[:, LENGTH - SIZE : LENGTH]], 1)
        there = torch.arange(LENGTH) >= LENGTH - SIZE
        return {"input_ids": ids}, step[:, :LENGTH], there.expand(ids.shape)
    if isinstance(objective, Eso):
        hidden = torch.rand(clean.shape, generator=torch.Generator().manual_seed(1)) < 0.5
        expected = torch.empty(*clean.shape, config.vocab_size)
        for row in range(len(clean)):
            one = Windows(clean[row : row + 1], torch.ones(1, LENGTH, dtype=torch.bool), None)
            order = torch.arange(LENGTH, dtype=torch.float64)
            ordered = objective.diffused(one, hidden[row : row + 1], order, 1.0)
            assert ordered.positions is not None
            expected[row, ordered.positions[0]] = logits_of(trained, ordered)[0]
        return {"input_ids": clean.masked_fill(hidden, config.mask_id)}, expected, hidden | True
    call = {key: value for key, value in as_arguments(batch).items() if key != "attention_mask"}
    return call, step, torch.ones(batch.ids.shape, dtype=torch.bool)


PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """(what we computed and what the clean process found, by case; the folder of all of it)."""
    folder = tmp_path_factory.mktemp("diffusion")
    ours: dict[str, dict[str, Any]] = {}
    for number, case in enumerate(CASES.values()):
        config = tiny_config(**{"mask_token": True, **case.model})
        objective, tree = objective_of(case.objective, config)
        place = folder / "all" / f"{number:02d}"
        trained = save_run(place.parent.parent / "runs" / place.name, config, objective=tree,
                           tokenizer=True)  # fmt: skip
        run = folder / "runs" / place.name
        done = export_hugging_face(run, place / "model", check=False)
        assert done.target == "custom" and f"objective={tree['type']}" in done.notes[0]
        batch = objective.evaluation_batch(tokens(), None, [0, 1])
        step = logits_of(trained, batch)
        plain, expected, where = plain_call(objective, trained, batch, step)
        samplers = [(None, {}), *case.samplers]
        torch.save(
            {"step": as_arguments(batch), "plain": plain, "prompts": PROMPTS, "new": NEW,
             "samplers": samplers, "again": number in map([*CASES].index, AGAIN)},
            place / "asked.pt",
        )  # fmt: skip
        text, _ = sample(
            denoiser_of(trained, tree), PROMPTS, NEW, default_sampler(family_of(tree)), eos=0,
            seed=5,
        )  # fmt: skip
        ours[place.name] = {"expected step": step, "expected": expected, "where": where,
                            "text": text, "config": config}  # fmt: skip
    out = folder / "result.pt"
    run_clean(CLEAN, folder, folder / "all", out)
    found = torch.load(out)
    results = {
        name: {**found["results"][key], **ours[key]} for name, key in zip(CASES, ours, strict=True)
    }
    return {"refused": found["refused"], **results}, folder


def difference(found: Tensor, wanted: Tensor, predicted: int) -> float:
    """Relative to the largest logit; the mask token has the lowest there is in both."""
    assert found.shape == wanted.shape
    assert (found[..., predicted:] == torch.finfo(found.dtype).min).all()
    found, wanted = found[..., :predicted], wanted[..., :predicted]
    assert wanted.std() > 0.1
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)).item()


@pytest.mark.parametrize("case", CASES)
def test_the_folder_computes_what_a_training_step_does(
    case: str, exported: tuple[dict[str, Any], Path]
) -> None:
    found = exported[0][case]
    predicted = found["config"].predicted_vocab_size
    assert difference(found["step"], found["expected step"], predicted) <= 1e-5


@pytest.mark.parametrize("case", CASES)
def test_by_itself_it_sees_what_was_seen_in_training(
    case: str, exported: tuple[dict[str, Any], Path]
) -> None:
    """With nothing but ids (and noise): the attention follows from the objective."""
    found = exported[0][case]
    where, predicted = found["where"], found["config"].predicted_vocab_size
    assert difference(found["plain"][where], found["expected"][where], predicted) <= 1e-5
    assert found["hidden"] == (True, 3) and found["causal"] == (False, False)


@pytest.mark.parametrize("case", CASES)
def test_padding_changes_nothing(case: str, exported: tuple[dict[str, Any], Path]) -> None:
    found = exported[0][case]
    predicted = found["config"].predicted_vocab_size
    for side in ("left", "right"):
        assert difference(found[side], found["plain"], predicted) <= 1e-5


@pytest.mark.parametrize("case", AGAIN)
def test_a_copy_that_transformers_saves_is_the_same(
    case: str, exported: tuple[dict[str, Any], Path]
) -> None:
    found = exported[0][case]
    assert found["again"].equal(found["plain"])


@pytest.mark.parametrize("case", CASES)
def test_it_fills_text_as_our_samplers_do(case: str, exported: tuple[dict[str, Any], Path]) -> None:
    """Whichever side is padded; behind the end of a text comes more of its end."""
    found = exported[0][case]
    predicted = found["config"].predicted_vocab_size
    wanted = [text + [0] * (NEW - len(text)) for text in found["text"]]
    assert found["texts"]["left", None] == found["texts"]["right", None] == wanted
    assert found["alone"] == wanted[:1]
    assert len(found["texts"]) == 2 * (1 + len(CASES[case].samplers))
    for (_, name), texts in found["texts"].items():
        assert all(0 <= token < predicted for text in texts for token in text), name
        assert len(set(texts[0])) > 2 and texts == found["texts"]["left", name]


@pytest.mark.parametrize("case", CASES)
def test_its_tokenizer_knows_the_mask_token(
    case: str, exported: tuple[dict[str, Any], Path]
) -> None:
    found = exported[0][case]
    if found["config"].mask_token:
        assert found["mask"] == ("<|mask|>", 300, 300) and found["spelled"] == [65, 300, 66]
    else:
        assert found["mask"] == (None, None, None)


def test_it_does_not_become_an_autoregressive_model(
    exported: tuple[dict[str, Any], Path],
) -> None:
    assert "AutoModelForCausalLM" in exported[0]["refused"]


def load(folder: Path) -> Any:
    return transformers.AutoModelForMaskedLM.from_pretrained(
        folder, trust_remote_code=True, local_files_only=True
    ).eval()


@pytest.fixture(scope="module")
def told(exported: tuple[dict[str, Any], Path]) -> Any:
    """A model that is told of noise."""
    number = [*CASES].index("uniform, told of noise")
    return load(exported[1] / "all" / f"{number:02d}" / "model")


IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"use_cache": True}, "uniform diffusion has no cache"),
        ({"past_key_values": transformers.DynamicCache()}, "uniform diffusion has no cache"),
        ({"noise": None}, "noise is required"),
        ({"noise": torch.zeros(1, 3)}, "noise has shape"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask has shape"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "must be boolean"),
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, "inputs_embeds is not supported"),
        ({"logits_to_keep": 1}, "unknown arguments of forward: logits_to_keep"),
    ],
)
def test_what_forward_cannot_do_is_refused(
    arguments: dict[str, Any], message: str, told: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        told(IDS, **{"noise": torch.ones(1, 1), **arguments})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_beams": 2}, "does not have num_beams"),
        ({"generation_config": transformers.GenerationConfig()}, "not have generation_config"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"sampler": "threshold"}, "sampler=threshold is for masked"),
        ({"sampler": "ancestrale"}, "did you mean 'ancestral'"),
        ({"sampler_options": {"step": 3}}, r"unknown keys \['step'\]"),
        ({"sampler_options": {"steps": 0}}, "steps must be positive"),
        ({"top_p": 3.0}, "top_p must be in"),
        ({"cache": "dual"}, "cache=dual is for masked diffusion"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask has shape"),
    ],
)
def test_what_generate_cannot_do_is_refused(
    arguments: dict[str, Any], message: str, told: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        told.generate(IDS, **{"max_new_tokens": 3, **arguments})


def test_the_generation_of_transformers_is_out_of_reach(told: Any) -> None:
    """Although from_pretrained mixes it in."""
    assert not told.can_generate() and isinstance(told, transformers.GenerationMixin)
    with pytest.raises(ValueError, match="has no continuous batching"):
        told.generate_batch([[5, 6]])


def test_the_other_class_is_refused() -> None:
    model = encode(tiny_config(mask_token=True))
    with pytest.raises(ValueError, match=r"masked diffusion.*AutoModelForMaskedLM"):
        MidspanForCausalLM(MidspanConfig(model, {"type": "masked"}))
    with pytest.raises(ValueError, match=r"autoregressive.*AutoModelForCausalLM"):
        MidspanForDiffusion(MidspanConfig(model))
    with pytest.raises(ValueError, match="is_causal contradicts"):
        MidspanConfig(model, {"type": "masked"}, is_causal=True)


def test_it_can_be_trained_there(told: Any) -> None:
    labels = torch.tensor([[-100, 6, -100, 8]])
    output = told(IDS, noise=torch.ones(1, 1), labels=labels)
    rows = output.logits[0, [1, 3]]
    expected = torch.nn.functional.cross_entropy(rows, torch.tensor([6, 8]))
    assert abs(output.loss.item() - expected.item()) <= 1e-6
    share = told(IDS, noise=torch.ones(1, 4), labels=labels, num_items_in_batch=4).loss
    assert abs(share.item() - expected.item() / 2) <= 1e-5
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in told.parameters())
    told.zero_grad()


# ------------------------------------------------------------------------- export and import


@pytest.mark.parametrize("kind", ["masked", "uniform", "block", "eso"])
def test_no_native_class_is_taken_for_diffusion(kind: str, tmp_path: Path) -> None:
    """The very model that is a llama with another objective."""
    config = tiny_config()
    for target in NATIVE_TARGETS:
        assert f"objective={kind}" in obstacles(config, target, {"type": kind})[0]
    _, tree = objective_of({"type": kind}, config)
    save_run(tmp_path / "run", config, objective=tree)
    with pytest.raises(ExportError, match=f"objective={kind} .the class is autoregressive"):
        export_hugging_face(tmp_path / "run", tmp_path / "out", target="llama")
    assert not (tmp_path / "out").exists()


def test_no_native_class_has_a_mask_token(tmp_path: Path) -> None:
    save_run(tmp_path / "run", tiny_config(mask_token=True))
    with pytest.raises(ExportError, match=r"mask_token=true .llama would predict it"):
        export_hugging_face(tmp_path / "run", tmp_path / "out", target="llama")
    done = export_hugging_face(tmp_path / "run", tmp_path / "out")
    assert done.target == "custom" and done.verification is not None


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "masked": ({"type": "block", "block_size": 4}, "o_proj"),
    "block": ({"type": "block", "block_size": 5}, "o_proj"),
    "eso A": ({"type": "eso", "alpha0": 1.0, "variant": "B"}, "o_proj"),
    "eso B": ({"type": "masked"}, "o_proj"),
    "uniform, told of noise": ({"type": "block", "block_size": 4}, "o_proj"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_the_wrong_attention_is_caught(
    case: str, exported: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """Verification passes what was exported, and not the same weights under another objective."""
    number = [*CASES].index(case)
    run, folder = exported[1] / "runs" / f"{number:02d}", tmp_path / "model"
    done = export_hugging_face(run, folder)
    assert done.verification is not None and done.verification.largest_difference <= 1e-5
    reference = compute_reference(open_trained(run))
    content = json.loads((folder / "config.json").read_text())
    content["objective"] = CHANGED[case][0]
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(VerificationError, match=f"differs is that of .*{CHANGED[case][1]}"):
        verify(folder, "custom", reference)


@pytest.mark.parametrize("case", ["masked", "uniform", "block", "eso both terms A"])
def test_what_it_was_trained_for_comes_back(
    case: str, exported: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    number = [*CASES].index(case)
    first = open_trained(exported[1] / "runs" / f"{number:02d}")
    folder = exported[1] / "all" / f"{number:02d}" / "model"
    assert open_trained(folder).objective == json.loads(json.dumps(first.objective))
    done = import_hugging_face(folder, tmp_path / "back")
    assert done.verification is not None and done.verification.largest_difference <= 1e-5
    back = open_trained(tmp_path / "back")
    assert same(first, back)
    tree = parse_yaml((tmp_path / "back" / "model.yaml").read_text(), "model.yaml")
    assert tree["objective"] == json.loads(json.dumps(first.objective))
    export_hugging_face(tmp_path / "back", tmp_path / "again", check=False)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name


def same(first: TrainedModel, second: TrainedModel) -> bool:
    assert first.config == second.config
    assert first.objective == second.objective or json.dumps(first.objective) == json.dumps(
        second.objective
    )
    return all(first.weights[name].equal(second.weights[name]) for name in first.shapes)
