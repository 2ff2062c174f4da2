"""Exported = trained: a Hugging Face folder gives the logits of the model that was trained."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from models import hf_names
from models.config import ModelConfig
from models.decoding import Sampling, generate
from models.transformer import Transformer
from parallel.checkpoint_format import open_checkpoint
from pretrain.export import export_hugging_face
from pretrain.export_weights import plan_shards, wide_names, write_shards
from pretrain.import_hf import import_hugging_face
from pretrain.trained import open_trained
from pretrain.verify_hf import VerificationError, compute_reference, verify
from tests.clean_process import run_clean
from tests.hf_cases import NATIVE, target_of
from tests.trained import LENGTH, save_run, tiny_config, tiny_model

pytestmark = pytest.mark.parity


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, local_files_only=True, **options
    ).eval()


def difference(model: Any, trained: Transformer) -> float:
    ids = torch.randint(301, (3, LENGTH), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        logits, expected = model(ids).logits, trained.logits(ids)
    assert expected.std() > 0.3
    return (logits - expected).abs().max().item()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every export is named `model`, so that transformers imports its code only once."""
    return tmp_path_factory.mktemp("exports")


# ----------------------------------------------------------------------------------- logits


SMOKE = ("llama", "llama-yarn", "qwen2", "qwen3", "gemma2-tied", "glm4_moe")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.smoke] * (case in SMOKE)) for case in NATIVE]
)
def test_native_targets(case: str, folders: Path) -> None:
    config = tiny_config(**NATIVE[case])
    trained = save_run(folders / case / "run", config)
    done = export_hugging_face(folders / case / "run", folders / case / "out")
    assert done.target == target_of(case)
    assert done.verification is not None and done.verification.largest_difference <= 1e-5
    model = load(folders / case / "out")
    assert type(model).__module__.startswith("transformers.models.")
    assert difference(model, trained) <= 1e-5


# What differs from a native model only in how its tensors or settings are written down.
REWRITTEN: dict[str, dict[str, Any]] = {
    "llama": {"block": "lns"},
    "qwen3_moe": {
        "block": "lns",
        "attention": {"qk_norm": True},
        "feedforward": {"type": "moe", "experts": 4, "hidden": 24, "balance": {"kind": "global"}},
    },
    "qwen2": {"position": {"type": "ntk", "factor": 3.0}, "attention": {"qkv_bias": True}},
    "olmo2": {
        "block": "reordered",
        "attention": {"qk_norm": True, "qk_norm_span": "projection"},
        "position": {"type": "lerope", "start": {"type": "yarn", "original_length": 16}},
    },
    "qwen3": {"position": "adarope", "attention": {"qk_norm": True}},
    "smollm3": {
        "position": {"type": "rnope", "inner": {"type": "adarope", "temperature": "power"}},
        "layers": 4,
    },
}


@pytest.mark.parametrize("target", REWRITTEN)
def test_what_can_be_rewritten_as_a_native_model(target: str, folders: Path) -> None:
    """The scaling of norms moves into their gains; learned positions that have not moved, and state
    that only training needs, are left out."""
    config = tiny_config(**REWRITTEN[target])
    trained, place = tiny_model(config), folders / f"rewritten {target}"
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if name.endswith((".log_scale", ".beta")):
                parameter.zero_()
    save_run(place / "run", config, trained)
    done = export_hugging_face(place / "run", place / "out")
    assert done.target == target
    assert difference(load(place / "out"), trained) <= 2e-6
    learned = [n for n, _ in trained.named_parameters() if n.endswith((".log_scale", ".beta"))]
    assert bool(learned) == any("left out" in note for note in done.notes)
    import_hugging_face(place / "out", place / "back", check=False)  # nothing is missing
    if learned:
        with torch.no_grad():
            trained.get_parameter(learned[-1])[-1] = 1e-3
        save_run(place / "moved", config, trained)
        assert export_hugging_face(place / "moved", place / "custom").target == "custom"


@pytest.mark.parametrize("target", ["llama", "custom"])
def test_bfloat16_export(target: str, tmp_path: Path) -> None:
    """Rounded once, verified against the equally rounded training model."""
    config = tiny_config(tie_embeddings=True)
    save_run(tmp_path / "run", config)
    done = export_hugging_face(
        tmp_path / "run", tmp_path / "model", target=target, dtype="bfloat16"
    )
    assert done.verification is not None and done.verification.largest_difference <= 1e-5
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    model = load(tmp_path / "model", dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    ids = torch.arange(40)[None]
    ours = tiny_model(config).to(torch.bfloat16)
    with torch.no_grad():
        logits, expected = model(ids).logits.float(), ours.logits(ids).float()
    # transformers rotates in bf16, we in float32
    assert (logits - expected).abs().max() <= (0.0 if target == "custom" else 0.15)


CLEAN = """
import torch, transformers
folder, ids, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
words = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
base = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)
ids = torch.tensor(ids)
with torch.no_grad():
    logits, hidden = model(ids).logits, base(ids).last_hidden_state
words.pad_token = words.eos_token
batch = words(["It is a truth", "No"], return_tensors="pt", padding=True, padding_side="left")
text = model.generate(**batch, max_new_tokens=8, do_sample=False)
torch.save({"logits": logits, "hidden": hidden, "text": text, "prompts": dict(batch)}, out)
"""


WIDE = {
    "norm": "bhyt",
    "position": "adarope",
    "feedforward": {
        "type": "moe",
        "experts": 4,
        "hidden": 24,
        "router": {"type": "lapsum", "learned": True, "final_scale": 0.5, "scale_steps": 9},
    },
    "mtp": {"depth": 1},
}


@pytest.mark.parametrize("kind", ["custom", "glm4_moe"])
def test_what_training_keeps_wide_stays_wide(kind: str, tmp_path: Path) -> None:
    """In files, and in a model that is loaded in a narrow dtype."""
    config = tiny_config(**(WIDE if kind == "custom" else NATIVE["glm4_moe"]))
    trained = save_run(tmp_path / "run", config)
    done = export_hugging_face(tmp_path / "run", tmp_path / "model", dtype="bfloat16")
    assert done.target == kind
    assert done.verification is not None and done.verification.largest_difference <= 1e-5
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    dtypes = {name: tensor.dtype for name, tensor in all_tensors(tmp_path / "model").items()}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
    assert len(wide) == len(wide_names(config))
    model = load(tmp_path / "model", dtype=torch.bfloat16)
    kept = {name for name, t in model.state_dict().items() if t.dtype == torch.float32}
    assert kept == wide
    if kind == "custom":
        split = model.config.expert_budget
        assert sum(split) == pytest.approx(2 * 1.5) and len(set(split)) == 2
        with torch.no_grad():
            loaded = model.state_dict()["model.transformer.blocks.0.attention.position.log_scale"]
            assert loaded.equal(trained.get_parameter("blocks.0.attention.position.log_scale"))
            assert model(torch.arange(40)[None]).logits.isfinite().all()


@pytest.mark.parametrize("target", ["custom", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_a_clean_offline_process_agrees(target: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"attention": {"qk_norm": True}}
    if target == "custom":
        changes |= {"norm": "layer", "position": "partial", "logit_softcap": 9.0}
    config = tiny_config(**changes)
    trained = save_run(tmp_path / "run", config, tokenizer=True)
    export_hugging_face(tmp_path / "run", tmp_path / "model", max_shard_bytes=20_000, check=False)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(tmp_path / "model", elsewhere / "moved")
    shutil.rmtree(tmp_path / "run")
    (elsewhere / "moved" / "config.json").read_text()
    ids = [[5, 300, 7, 7, 12, 99], [1, 2, 3, 4, 5, 6]]
    result = elsewhere / "result.pt"
    run_clean(CLEAN, elsewhere, elsewhere / "moved", json.dumps(ids), result)
    got = torch.load(result)
    with torch.no_grad():
        expected = trained.logits(torch.tensor(ids))
        hidden = trained(torch.tensor(ids), _positions(6))
    assert (got["logits"] - expected).abs().max() <= 1e-5
    assert (got["hidden"] - hidden).abs().max() <= 1e-5
    lengths = got["prompts"]["attention_mask"].sum(-1).tolist()
    rows = [row[-n:] for row, n in zip(got["prompts"]["input_ids"].tolist(), lengths)]
    assert sorted(got["prompts"]) == ["attention_mask", "input_ids"]
    ours = generate(trained, rows, 8, Sampling(temperature=0.0))
    width = got["prompts"]["input_ids"].shape[1]
    eos = 0 if 0 not in rows[0] else None
    assert [_cut(row, eos) for row in got["text"][:, width:].tolist()] == [
        _cut(row, eos) for row in ours
    ]


def _positions(length: int) -> Any:
    from models.attention import SequenceContext

    return SequenceContext(torch.arange(length))


def _cut(row: list[int], eos: int | None) -> list[int]:
    return row[: row.index(eos)] if eos in row else row


# -------------------------------------------------------------------------- the custom class


CUSTOM: dict[str, dict[str, Any]] = {
    "plain": {"attention": {"qk_norm": True}},
    "learned": {
        "norm": "bhyt",
        "position": {"type": "adarope", "reference_length": 3},
        "feedforward": {
            "type": "moe",
            "experts": 4,
            "hidden": 24,
            "router": {"type": "lapsum", "learned": True},
        },
    },
}


@pytest.fixture(scope="module", params=CUSTOM)
def custom(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Transformer]:
    folder = tmp_path_factory.mktemp(request.param)
    config = tiny_config(**CUSTOM[request.param], logit_softcap=20.0)
    trained = save_run(folder / "run", config)
    export_hugging_face(folder / "run", folder / "model", target="custom")
    return load(folder / "model"), trained


def prompts(rows: int, length: int) -> Tensor:
    return torch.randint(1, 301, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"use_cache": True},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 3},
    ],
)
def test_cached_generation_is_uncached_generation(
    options: dict[str, Any], custom: tuple[Any, Transformer]
) -> None:
    model, trained = custom
    ids = prompts(1 if "prompt_lookup_num_tokens" in options else 2, 6)
    text = model.generate(ids, max_new_tokens=20, do_sample=False, **options)
    ours = generate(trained, ids.tolist(), 20, Sampling(temperature=0.0))
    assert text[:, 6:].tolist() == ours
    assert len(set(ours[0])) > 3


@pytest.mark.parametrize("static", [False, True])
def test_a_left_padded_batch_generates_what_each_prompt_does(
    static: bool, custom: tuple[Any, Transformer]
) -> None:
    model, _ = custom
    options = {"cache_implementation": "static"} if static else {}
    ids = prompts(3, 9)
    lengths = [9, 4, 1]
    mask = torch.tensor([[0] * (9 - n) + [1] * n for n in lengths])
    batch = model.generate(ids, attention_mask=mask, max_new_tokens=15, do_sample=False, **options)
    for row, length in enumerate(lengths):
        alone = model.generate(ids[row : row + 1, 9 - length :], max_new_tokens=15, do_sample=False)
        assert batch[row, 9:].tolist() == alone[0, length:].tolist()


def test_beam_search_keeps_each_beams_cache(custom: tuple[Any, Transformer]) -> None:
    model, _ = custom
    ids = prompts(2, 5)
    beams = [
        model.generate(ids, max_new_tokens=10, num_beams=4, do_sample=False, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(*beams)


@pytest.mark.parametrize("side", ["left", "right"])
def test_masked_logits(side: str, custom: tuple[Any, Transformer]) -> None:
    model, trained = custom
    ids = prompts(2, 8)
    mask = torch.ones_like(ids)
    real = slice(3, 8) if side == "left" else slice(0, 5)
    mask[1] = 0
    mask[1, real] = 1
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        whole, part = trained.logits(ids), trained.logits(ids[1:, real])
    assert logits.isfinite().all()
    assert (logits[0] - whole[0]).abs().max() <= 1e-5
    assert (logits[1, real] - part[0]).abs().max() <= 1e-5
    assert (whole[1, real] - part[0]).abs().max() > (1e-2 if side == "left" else -1)


@pytest.mark.parametrize("keyword", ["past_key_values", "cache"])
def test_the_cache_is_accepted_under_both_names(
    keyword: str, custom: tuple[Any, Transformer]
) -> None:
    model, trained = custom
    ids = prompts(2, 8)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        first = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
        cache = first.get("cache", first.get("past_key_values"))
        rest = model(ids[:, 5:], attention_mask=mask, **{keyword: cache}, return_dict=False)
        assert model(ids, use_cache=False).get("cache") is None
    assert (torch.cat([first.logits, rest[0]], 1) - whole)[mask.bool()].abs().max() <= 1e-5
    assert (whole[0] - trained.logits(ids)[0]).abs().max() <= 1e-5


def test_loss_hidden_states_and_kept_logits(custom: tuple[Any, Transformer]) -> None:
    model, trained = custom
    ids = prompts(2, 8)
    labels = ids.clone()
    labels[0, :4] = -100
    output = model(ids, labels=labels, output_hidden_states=True)
    logits = trained.logits(ids)
    targets = labels[:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
    assert abs(output.loss.item() - expected.item()) <= 1e-6
    share = model(ids, labels=labels, num_items_in_batch=20).loss
    assert abs(share.item() * 20 - expected.item() * 11) <= 1e-4
    output.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    assert len(output.hidden_states) == 3
    assert torch.equal(output.hidden_states[0], trained.embedding(ids))  # type: ignore[misc]
    assert (output.hidden_states[-1] - trained(ids, _positions(8))).abs().max() <= 1e-5
    assert torch.equal(model(ids, logits_to_keep=2).logits, output.logits[:, -2:])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, "inputs_embeds is not supported"),
        ({"output_attentions": True}, "output_attentions is not supported"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask has shape"),
        ({"past_key_values": ((torch.zeros(1), torch.zeros(1)),)}, "must be a transformers Cache"),
        ({"memory": torch.zeros(1)}, "unknown arguments of forward: memory"),
    ],
)
def test_what_forward_cannot_do_is_refused(
    arguments: dict[str, Any], message: str, custom: tuple[Any, Transformer]
) -> None:
    with pytest.raises(ValueError, match=message):
        custom[0](prompts(1, 4), **arguments)


def test_a_fine_tuned_copy_is_saved_and_loaded(
    custom: tuple[Any, Transformer], tmp_path: Path
) -> None:
    """save_pretrained of the loaded model writes code and weights that load again."""
    model, trained = custom
    model.save_pretrained(tmp_path / "again")
    assert difference(load(tmp_path / "again"), trained) <= 1e-5
    fresh = transformers.AutoModelForCausalLM.from_config(model.config, trust_remote_code=True)
    assert all(p.isfinite().all() for p in fresh.parameters())
    assert 0.015 < fresh.lm_head.weight.std() < 0.025


# ------------------------------------------------------------------------------- round trips


def model_tensors(folder: Path) -> dict[str, Tensor]:
    stored = open_checkpoint(next((folder / "checkpoints").glob("step_*")))
    return {name: stored[name] for name in stored if name.startswith("model/")}


@pytest.mark.parametrize("case", [*NATIVE, "custom"])
def test_ours_to_hugging_face_to_ours_is_bitwise(case: str, tmp_path: Path) -> None:
    changes = NATIVE.get(case, {"norm": "layer", "block": "post", "vocab_multiple": 50})
    save_run(tmp_path / "run", tiny_config(**changes))
    export_hugging_face(tmp_path / "run", tmp_path / "model", max_shard_bytes=30_000, check=False)
    import_hugging_face(tmp_path / "model", tmp_path / "back", check=case in ("qwen2", "custom"))
    before, after = model_tensors(tmp_path / "run"), model_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        if "gemma" in case and ("norm" in name or "embedding" in name):
            assert (tensor - after[name]).abs().max() <= 3e-7, name  # γ − 1 and √hidden round
        else:
            assert torch.equal(tensor, after[name]), name
    # a native config.json has no place for the precision of the residual stream
    first, last = (open_trained(tmp_path / name).config for name in ("run", "back"))
    assert last == dataclasses.replace(first, residual_dtype=last.residual_dtype)
    assert open_trained(tmp_path / "back").sequence_length == LENGTH


FOREIGN: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama-bf16": {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 5e5}},
    "Qwen2-bf16": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Olmo2": {},
    "SmolLM3": {"no_rope_layer_interval": 2},
    "Gemma2-bf16": {"attn_logit_softcapping": None},
    "Gemma3Text-bf16": {"final_logit_softcapping": 9.0, "tie_word_embeddings": False},
    "Mixtral-bf16": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 5, "moe_intermediate_size": 24, "num_experts_per_tok": 2,
                 "mlp_only_layers": [0], "norm_topk_prob": True, "head_dim": 16},
    "Qwen3Moe-bf16": {"num_experts": 5, "moe_intermediate_size": 24, "num_experts_per_tok": 2,
                      "head_dim": 16},
    "Glm4Moe": {"n_routed_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2,
                "attention_bias": True, "num_mtp_layers": 0},
    "Glm4Moe-bf16": {"n_routed_experts": 6, "moe_intermediate_size": 24, "num_experts_per_tok": 3,
                     "n_shared_experts": 2, "first_k_dense_replace": 1, "use_qk_norm": True,
                     "num_mtp_layers": 0, "rope_parameters": {"rope_type": "default",
                     "rope_theta": 1e4, "partial_rotary_factor": 1.0}, "head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_hugging_face_to_ours_to_hugging_face_is_bitwise(case: str, tmp_path: Path) -> None:
    """A model that transformers made and saved, in each class: every bit comes back."""
    kind, _, short = case.partition("-")
    dtype = torch.bfloat16 if short else torch.float32
    torch.manual_seed(0)
    gemma = kind.startswith("Gemma")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=211,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=None,
        **({"head_dim": 8, "query_pre_attn_scalar": 8} if gemma else {}),
        **({"layer_types": ["full_attention"] * 3} if gemma else {}),
        **FOREIGN[case],
    )
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    for name, tensor in theirs.state_dict().items():  # also those that start at zero or one
        # gains of Gemma must be far enough from zero for 1 + w to keep their digits
        tensor.add_(torch.randn_like(tensor) * 0.02 + 0.3 * (gemma and "norm" in name))
    theirs.save_pretrained(tmp_path / "first")
    theirs = type(theirs).from_pretrained(tmp_path / "first", dtype=dtype)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    import_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    stored = str(dtype).removeprefix("torch.")
    done = export_hugging_face(tmp_path / "ours", tmp_path / "again", dtype=stored)
    assert done.target == theirs.config.model_type
    before = all_tensors(tmp_path / "theirs")
    after = all_tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name


def all_tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


# ----------------------------------------------------------------------------------- shards


def test_shards_are_bounded_and_complete(tmp_path: Path) -> None:
    trained = save_run(tmp_path / "run", tiny_config())
    done = export_hugging_face(tmp_path / "run", tmp_path / "model", max_shard_bytes=12_000)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("model/*.safetensors"))
    assert done.files == len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    named: dict[str, str] = {}
    for file in files:
        content = load_file(file)
        named |= dict.fromkeys(content, file.name)
        size = sum(tensor.nbytes for tensor in content.values())
        assert size <= 12_000 or len(content) == 1
    assert index["weight_map"] == named
    unpadded = 2 * (384 - 301) * 32
    total = sum(p.numel() for p in trained.parameters()) - unpadded
    assert index["metadata"] == {"total_parameters": total, "total_size": total * 4}
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in files) or os.umask(0o022) != 0o022


def test_one_shard_is_in_memory_at_a_time(tmp_path: Path) -> None:
    save_run(tmp_path / "run", tiny_config(layers=6))
    trained = open_trained(tmp_path / "run")
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    class Watched(Mapping[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            nonlocal most
            tensor = trained.weights[name]
            alive.add(tensor)
            most = max(most, sum(t.nbytes for t in alive))
            return tensor

        def __iter__(self) -> Iterator[str]:
            return iter(trained.weights)

        def __len__(self) -> int:
            return len(trained.weights)

    shards = plan_shards(trained, "llama", "stored", 60_000)
    size = write_shards(dataclasses.replace(trained, weights=Watched()), shards, tmp_path)
    assert size > 240_000 and len(shards) > 4
    assert most <= 60_000 + 49_152  # a shard, and the tensor that is being read


# ----------------------------------------------------------------------------- verification


def edit_weights(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")


def edit_config(folder: Path, change: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))


def swap_q_and_k(tensors: dict[str, Tensor]) -> None:
    q, k = (f"model.layers.1.self_attn.{x}_proj.weight" for x in "qk")
    tensors[q], tensors[k] = tensors[k], tensors[q]


def interleave_rotation(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            split = tensor.view(-1, 2, 4, tensor.shape[1])
            tensors[name] = split.transpose(1, 2).reshape(tensor.shape)


SABOTAGE: dict[str, tuple[Any, Any, str]] = {
    "q and k": (edit_weights, swap_q_and_k, "blocks.1.attention.q_proj"),
    "interleaved rotation": (edit_weights, interleave_rotation, "blocks.0.attention.q_proj"),
    "rotation base": (
        edit_config,
        lambda c: [c.pop("rope_theta"), c["rope_parameters"].update(rope_theta=500.0)],
        "blocks.0.attention.o_proj",
    ),
    "eps": (edit_config, lambda c: c.update(rms_norm_eps=0.01), "blocks.0.attention_norm"),
    "one weight": (
        edit_weights,
        lambda t: t["model.layers.1.mlp.up_proj.weight"][0, 0].add_(1.0),
        "blocks.1.feedforward.up_proj",
    ),
    "head": (edit_weights, lambda t: t["lm_head.weight"].roll(1, 0), "the head"),
}


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    save_run(folder / "run", tiny_config(attention={"kv_heads": 4}))
    export_hugging_face(folder / "run", folder / "model", check=False)
    return folder


@pytest.mark.parametrize("case", SABOTAGE)
def test_a_wrong_export_is_caught_and_located(case: str, native: Path, tmp_path: Path) -> None:
    edit, change, where = SABOTAGE[case]
    shutil.copytree(native / "model", tmp_path / "model")
    if case == "head":
        edit(tmp_path / "model", lambda t: t.update({"lm_head.weight": change(t)}))
    else:
        edit(tmp_path / "model", change)
    reference = compute_reference(open_trained(native / "run"))
    assert verify(native / "model", "llama", reference).largest_difference <= 1e-5
    with pytest.raises(VerificationError) as error:
        verify(tmp_path / "model", "llama", reference)
    assert f"the first output that differs is that of {where}, by" in str(error.value)
    assert "nats/token" in str(error.value)


def test_a_custom_export_with_another_config_is_caught(tmp_path: Path) -> None:
    save_run(tmp_path / "run", tiny_config(norm="layer"))
    export_hugging_face(tmp_path / "run", tmp_path / "model", check=False)
    reference = compute_reference(open_trained(tmp_path / "run"))
    edit_config(tmp_path / "model", lambda c: c["model"].update(logit_softcap=3.0))
    with pytest.raises(VerificationError, match="differs is that of the head"):
        verify(tmp_path / "model", "custom", reference)
    edit_config(tmp_path / "model", lambda c: c["model"].update(block={"type": "post"}))
    with pytest.raises(VerificationError, match="loads the folder only in part"):
        verify(tmp_path / "model", "custom", reference)


def test_a_wrong_name_table_stops_the_export(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command, with a mistake in the converter itself: nothing is published."""
    table = dict(hf_names.NATIVE["llama"].table)
    q, k = (f"blocks.*.attention.{x}_proj.weight" for x in "qk")
    table[q], table[k] = table[k], table[q]
    monkeypatch.setattr(type(hf_names.NATIVE["llama"]), "table", table)
    with pytest.raises(VerificationError):
        export_hugging_face(native / "run", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_missing_and_unused_weights_are_caught(native: Path, tmp_path: Path) -> None:
    reference = compute_reference(open_trained(native / "run"))
    name = "model.layers.0.mlp.up_proj.weight"
    for change in (lambda t: t.pop(name), lambda t: t.update({f"{name}.extra": t[name].clone()})):
        folder = tmp_path / "model"
        shutil.copytree(native / "model", folder)
        edit_weights(folder, change)
        with pytest.raises(VerificationError, match="only in part"):
            verify(folder, "llama", reference)
        shutil.rmtree(folder)


def test_sizes_of_the_ladder_are_native() -> None:
    from models.config import SIZES
    from pretrain.decode import decode

    for name, tree in SIZES.items():
        config = decode(ModelConfig, tree)
        assert hf_names.native_target(config) == ("llama", []), name
