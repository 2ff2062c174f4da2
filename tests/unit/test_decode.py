"""Config files and overrides become dataclasses, and every wrong input is named."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from models.registry import Registry
from pretrain.decode import ConfigError, decode, diff, dump_yaml, encode, load, validate
from pretrain.describe import describe, describe_changes
from pretrain.yaml_text import (
    combine,
    dump_tree,
    load_yaml_files,
    merge,
    parse_overrides,
    parse_yaml,
)

NORMS = Registry("norm")


@NORMS.register("rms")
class Rms:
    @dataclass(frozen=True)
    class Config:
        eps: float = field(default=1e-5, metadata={"help": "added to the mean square"})
        affine: bool = True


@NORMS.register("layer")
class Layer:
    @dataclass(frozen=True)
    class Config:
        eps: float = 1e-5
        bias: bool = True


@NORMS.register("tanh")
class Tanh:
    @dataclass(frozen=True)
    class Config:
        alpha: float = 0.5

        def problems(self) -> list[tuple[str, str]]:
            return [] if self.alpha > 0 else [("alpha", f"given {self.alpha}; must be above 0")]


def choice(text: str = "") -> dict[str, Any]:
    return {"registry": NORMS, "help": text}


@dataclass(frozen=True)
class Model:
    width: int = field(default=64, metadata={"help": "width of the residual stream"})
    heads: int = 4
    activation: Literal["swiglu", "gelu"] = "swiglu"
    window: int | None = None
    norm: Any = field(default=Rms.Config(1e-6), metadata=choice("before each sublayer"))
    final_norm: Any | None = field(default=None, metadata=choice("after the last block"))
    extra: tuple[Any, ...] = field(default=(), metadata=choice())

    def problems(self) -> list[tuple[str, str]]:
        if self.width % self.heads:
            return [("heads", f"given {self.heads}; must divide width {self.width}")]
        return []


@dataclass(frozen=True)
class Optimizer:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ValueError(f"lr must not be negative, given {self.lr}")


@dataclass(frozen=True)
class Run:
    name: str
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=2e-3))
    steps: int = 100
    save: bool = True
    stages: list[int] = field(default_factory=list)
    sources: dict[str, float] = field(default_factory=dict)
    micro: int | Literal["auto"] = "auto"
    ladder: tuple[Optimizer, ...] = ()


def run(*overrides: str) -> Run:
    return load(Run, [], ["name=test", *overrides])


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        run(*overrides)
    return [str(problem) for problem in caught.value.problems]


def the_problem(*overrides: str) -> str:
    found = problems(*overrides)
    assert len(found) == 1, found
    return found[0]


# --- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override, path, expected",
    [
        ("steps=1_000", "steps", 1000),
        ("steps=4e6", "steps", 4_000_000),
        ("steps='1_000'", "steps", 1000),
        ("optimizer.lr=1e-3", "optimizer.lr", 0.001),
        ("optimizer.lr='1e-3'", "optimizer.lr", 0.001),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("optimizer.lr=.inf", "optimizer.lr", math.inf),
        ("optimizer.clip=null", "optimizer.clip", None),
        ("optimizer.clip=", "optimizer.clip", None),
        ("optimizer.betas=[0.8, 0.9]", "optimizer.betas", (0.8, 0.9)),
        ("save=false", "save", False),
        ("stages=[1, 2]", "stages", [1, 2]),
        ("sources={a: 1, b: 0.5}", "sources", {"a": 1.0, "b": 0.5}),
        ("sources.a=2", "sources", {"a": 2.0}),
        ("micro=auto", "micro", "auto"),
        ("micro=4", "micro", 4),
        ("model.window=128", "model.window", 128),
        ("model.activation=gelu", "model.activation", "gelu"),
        ("name=on", "name", "on"),
        ("name=Et*3|(tt|)*29,m|L", "name", "Et*3|(tt|)*29,m|L"),
        ("name=a=b", "name", "a=b"),
        ("ladder=[{lr: 1}, {lr: 2}]", "ladder", (Optimizer(lr=1.0), Optimizer(lr=2.0))),
    ],
)
def test_a_value_is_read_as_its_field_type(override: str, path: str, expected: object) -> None:
    value: Any = run(override)
    for name in path.split("."):
        value = getattr(value, name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    "override, message",
    [
        ("steps=1.5", "steps (command line): given 1.5; expected an integer"),
        ("steps=true", "steps (command line): given true; expected an integer"),
        ("steps=010", "steps (command line): given '010'; expected an integer"),
        ("steps=1e300", "steps (command line): given 1e+300; expected an integer"),
        ("steps=null", "steps (command line): given null; expected an integer"),
        ("save=1", "save (command line): given 1; expected true or false"),
        ("save=off", "save (command line): given 'off'; expected true or false"),
        ("name=3", "name (command line): given 3; expected text"),
        ("optimizer.lr=fast", "optimizer.lr (command line): given 'fast'; expected a number"),
        ("optimizer.lr=.nan", "optimizer.lr (command line): given nan; expected a number"),
        (
            "optimizer.clip=none",
            "optimizer.clip (command line): given 'none'; expected a number or null",
        ),
        (
            "optimizer.betas=[0.9]",
            "optimizer.betas (command line): given [0.9]; expected a list of 2: a number, a number",
        ),
        (
            "stages=[1, x]",
            "stages[1] (command line): given 'x'; expected an integer",
        ),
        ("stages=3", "stages (command line): given 3; expected a list, each an integer"),
        ("sources=3", "sources (command line): given 3; expected a mapping, each value a number"),
        ("sources.a=x", "sources.a (command line): given 'x'; expected a number"),
        (
            "model.activation=swiglo",
            "model.activation (command line): given 'swiglo'; expected one of swiglu, gelu; "
            "did you mean 'swiglu'?",
        ),
        ("micro=aut", "micro (command line): given 'aut'; expected an integer or auto; "
         "did you mean 'auto'?"),
        ("optimizer=3", "optimizer (command line): given 3; expected a mapping with lr, betas, "
         "clip"),
        ("optimizer.lr=-1", "optimizer (command line): lr must not be negative, given -1.0"),
        ("ladder=[{lr: x}]", "ladder[0].lr (command line): given 'x'; expected a number"),
    ],
)  # fmt: skip
def test_a_wrong_value_says_where_what_and_what_is_allowed(override: str, message: str) -> None:
    assert the_problem(override) == message


def test_a_required_key_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"^name: required: text$"):
        load(Run, [])


# --- unknown keys -----------------------------------------------------------------------------


def test_an_unknown_key_names_the_nearest_one() -> None:
    assert the_problem("model.widht=3") == (
        "model.widht (command line): unknown key; allowed are width, heads, activation, window, "
        "norm, final_norm, extra; did you mean 'width'?"
    )


def test_a_colon_without_a_space_is_pointed_to() -> None:
    assert the_problem("model={width:3}").endswith("; YAML wants a space behind a colon")


def test_a_key_of_a_deeper_level_is_pointed_to() -> None:
    assert "did you mean 'optimizer.betas'?" in the_problem("betas=[0.9, 0.9]")
    assert "did you mean" not in the_problem("qqq=1")


def test_a_key_of_another_component_is_explained() -> None:
    found = the_problem("model.norm.type=tanh", "model.norm.eps=1")
    assert found.startswith("model.norm.eps (command line): unknown key of norm 'tanh'; allowed")
    assert "it belongs to norm" in found


# --- components -------------------------------------------------------------------------------


def test_a_component_is_chosen_by_name_or_mapping() -> None:
    assert run("model.norm=layer").model.norm == Layer.Config()
    assert run("model.norm={type: layer, bias: false}").model.norm == Layer.Config(bias=False)
    assert run("model.final_norm=tanh").model.final_norm == Tanh.Config()
    assert run("model.extra=[rms, {type: tanh, alpha: 2}]").model.extra == (
        Rms.Config(),
        Tanh.Config(alpha=2.0),
    )


def test_what_is_left_out_keeps_the_value_of_the_default_instance() -> None:
    assert run("model.norm.affine=false").model.norm == Rms.Config(eps=1e-6, affine=False)
    assert run("model.norm.type=rms").model.norm == Rms.Config(eps=1e-6)
    assert run("optimizer.clip=2").optimizer == Optimizer(lr=2e-3, clip=2.0)


@pytest.mark.parametrize(
    "override, start",
    [
        (
            "model.norm=layr",
            "model.norm (command line): given 'layr'; expected a norm: one of layer, rms, tanh; "
            "did you mean 'layer'?",
        ),
        ("model.norm.type=layr", "model.norm.type (command line): given 'layr'; expected a norm"),
        ("model.norm=3", "model.norm (command line): given 3; expected a norm (layer, rms, tanh)"),
        ("model.final_norm.eps=1", "model.final_norm (command line): given {'eps': 1}; expected"),
        ("model.norm.type=[rms]", "model.norm.type (command line): given ['rms']; expected a norm"),
    ],
)
def test_a_wrong_component_is_refused(override: str, start: str) -> None:
    assert the_problem(override).startswith(start)


# --- merging ----------------------------------------------------------------------------------


def test_naming_another_type_drops_the_old_components_keys(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("name: a\nmodel:\n  norm: {type: rms, eps: 1e-3, affine: false}\n")
    assert load(Run, [file]).model.norm == Rms.Config(1e-3, False)
    assert load(Run, [file], ["model.norm.type=layer"]).model.norm == Layer.Config()
    assert load(Run, [file], ["model.norm=layer"]).model.norm == Layer.Config()
    assert load(Run, [file], ["model.norm.type=tanh", "model.norm.alpha=3"]).model.norm == (
        Tanh.Config(3.0)
    )
    assert load(Run, [file], ["model.norm.type=rms"]).model.norm == Rms.Config(1e-3, False)
    assert load(Run, [file], ["model.norm.eps=1"]).model.norm == Rms.Config(1.0, False)


def test_keys_over_a_bare_name_keep_that_component() -> None:
    merged = merge({"norm": "layer"}, {"norm": {"bias": False}})
    assert merged == {"norm": {"type": "layer", "bias": False}}


def test_merge_is_deep_and_leaves_its_inputs_alone() -> None:
    left, right = {"a": {"b": 1, "c": [1, 2]}, "d": 1}, {"a": {"c": [3]}, "e": None}
    assert merge(left, right) == {"a": {"b": 1, "c": [3]}, "d": 1, "e": None}
    assert left == {"a": {"b": 1, "c": [1, 2]}, "d": 1}
    assert right == {"a": {"c": [3]}, "e": None}


def test_later_layers_win_and_are_named_as_the_source(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("name: a\nsteps: x\noptimizer: {lr: y}\n")
    second.write_text("steps: z\n")
    with pytest.raises(ConfigError) as caught:
        load(Run, [first, second], ["optimizer.clip=w"])
    assert {(p.path, p.source) for p in caught.value.problems} == {
        ("steps", str(second)),
        ("optimizer.lr", str(first)),
        ("optimizer.clip", "command line"),
    }
    tree, sources = combine(load_yaml_files([first, second]).items())
    assert tree["steps"] == "z"
    assert sources["optimizer.lr"] == str(first)


# --- all problems together --------------------------------------------------------------------


def test_every_problem_is_reported_at_once() -> None:
    found = problems("stepz=1", "model.heads=3", "optimizer.lr=x", "model.final_norm={type: tanh, "
                     "alpha: 0}")  # fmt: skip
    assert len(found) == 4
    text = "\n".join(found)
    for part in (
        "stepz (command line): unknown key; allowed are name,",
        "optimizer.lr (command line): given 'x'",
        "model.heads (command line): given 3; must divide width 64",
        "model.final_norm.alpha (command line): given 0.0; must be above 0",
    ):
        assert part in text


def test_problems_of_defaults_and_list_items_are_found_once() -> None:
    assert the_problem("model.extra=[{type: tanh, alpha: -1}]").startswith(
        "model.extra[0].alpha (command line): given -1.0"
    )
    with pytest.raises(ConfigError, match=r"^model\.norm\.alpha: given -1\.0"):
        validate(Run("a", model=Model(norm=Tanh.Config(-1.0))))
    validate(Run("a"))


def test_one_problem_is_one_line_and_several_are_counted() -> None:
    with pytest.raises(ConfigError) as caught:
        run("steps=x")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^2 problems in the configuration\n  .*\n  .*$"):
        run("steps=x", "save=x")


# --- files and overrides ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: 1\nb: 2\na: 3\n", r"line 3, column 1: .*key 'a' is given twice \(lines 1 and 3\)"),
        ("a: {b: 1, b: 2}\n", "key 'b' is given twice"),
        ("1: x\n", "a key must be text"),
        ("a: [1\n", "line 2, column 1: cannot be read as YAML"),
        ("- a\n", "must hold 'key: value' pairs, not a list"),
        ("a: !!python/object:os.system x\n", "cannot be read as YAML"),
        ("a: 1\n---\nb: 1\n", "cannot be read as YAML"),
    ],
)
def test_a_broken_file_says_where(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_yaml_files([file])
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_unreadable_files_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "smoke.yaml").write_text("{}")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(ConfigError) as caught:
        load(Run, [tmp_path / "smoek.yaml", tmp_path, tmp_path / "latin.yaml"], ["steps"])
    text = str(caught.value)
    assert "no such file; did you mean 'smoke.yaml'?" in text
    assert "is a folder, not a file" in text
    assert "latin.yaml: cannot be read" in text
    assert "given 'steps'; an override is written key=value" in text


def test_an_empty_file_is_an_empty_config(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load(Run, [tmp_path / "empty.yaml"], ["name=a"]) == Run("a")


@pytest.mark.parametrize("text", ["=1", ".a=1", "a..b=1", "a b", "a. b=1", "--steps"])
def test_a_malformed_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="an override is written key=value"):
        parse_overrides([text])


def test_an_override_that_is_not_yaml_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^a\.b \(command line\): cannot be read .*'\[1'"):
        parse_overrides(["a.b=[1"])


def test_overrides_merge_left_to_right() -> None:
    assert parse_overrides(["a.b=1", "a.c=[x, 1e-3]", "a.b=2"]) == {"a": {"b": 2, "c": ["x", 1e-3]}}


# --- writing ----------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12)
ODD = st.sampled_from(["1e-3", "on", "010", "1:30", "null", "~", "", "1_0", "=", "- a", ".inf"])
NUMBER = st.floats(allow_nan=False)
OPTIMIZERS = st.builds(
    Optimizer,
    lr=st.floats(min_value=0),
    betas=st.tuples(NUMBER, NUMBER),
    clip=st.none() | NUMBER,
)
COMPONENTS = st.one_of(
    st.builds(Rms.Config, eps=NUMBER, affine=st.booleans()),
    st.builds(Layer.Config, eps=NUMBER, bias=st.booleans()),
    st.builds(Tanh.Config, alpha=st.floats(min_value=1e-9)),
)
RUNS = st.builds(
    Run,
    name=TEXT | ODD,
    model=st.builds(
        Model,
        width=st.integers(1, 99).map(lambda n: 4 * n),
        window=st.none() | st.integers(),
        norm=COMPONENTS,
        final_norm=st.none() | COMPONENTS,
        extra=st.lists(COMPONENTS, max_size=2).map(tuple),
    ),
    optimizer=OPTIMIZERS,
    steps=st.integers(),
    stages=st.lists(st.integers(), max_size=3),
    sources=st.dictionaries(TEXT | ODD, NUMBER, max_size=3),
    micro=st.integers() | st.just("auto"),
    ladder=st.lists(OPTIMIZERS, max_size=2).map(tuple),
)


@given(RUNS)
def test_encode_and_yaml_round_trips_are_exact(config: Run) -> None:
    assert decode(Run, encode(config)) == config
    text = dump_yaml(config)
    tree = parse_yaml(text, "dump")
    assert tree == encode(config)
    again = decode(Run, tree)
    assert again == config
    assert dump_yaml(again) == text


@given(RUNS)
def test_a_dump_reads_the_same_in_plain_yaml(config: Run) -> None:
    assert yaml.safe_load(dump_yaml(config)) == encode(config)


def test_encode_names_the_component_type() -> None:
    tree = encode(run("model.norm.affine=false"))
    assert tree["model"]["norm"] == {"type": "rms", "eps": 1e-6, "affine": False}
    assert tree["model"]["final_norm"] is None
    assert dump_tree({"a": "1e-3"}) == "a: '1e-3'\n"


def test_diff_lists_what_differs_and_nothing_else() -> None:
    assert diff(run(), run()) == []
    assert diff(run(), run("steps=5", "optimizer.betas=[0.9, 0.99]")) == [
        ("optimizer.betas", [0.9, 0.95], [0.9, 0.99]),
        ("steps", 100, 5),
    ]
    assert ("model.norm.type", "rms", "tanh") in diff(run(), run("model.norm=tanh"))
    assert ("model.norm.alpha", None, 0.5) in diff(run(), run("model.norm=tanh"))
    assert diff({"a": 1}, {"a": True}) == [("a", 1, True)]


# --- describing -------------------------------------------------------------------------------


def test_describe_shows_every_key_with_default_type_and_help() -> None:
    text = describe(Run, width=120)
    lines = text.splitlines()

    def line(key: str) -> str:
        return next(line for line in lines if line.split()[:1] == [key])

    assert line("name").split()[1:] == ["required", "text"]
    assert line("model.width").split(None, 2)[1:] == [
        "64",
        "width of the residual stream (an integer)",
    ]
    assert "rms" in line("model.norm")
    assert "before each sublayer" in line("model.norm")
    assert line("model.norm.bias").split(None, 2)[1:] == ["true", "[layer] true or false"]
    assert line("optimizer.lr").split()[1] == "0.002"
    assert any(row.split()[:3] == ["model.norm.eps", "1e-06", "[rms]"] for row in lines)
    assert all(len(row) <= 120 for row in lines)


def test_changes_are_what_differs_from_the_defaults() -> None:
    assert describe_changes(Model()) == ""
    config = Model(width=32, activation="gelu", norm=Layer.Config(1e-6), window=7)
    # A key that another component lacks is a change; one that it has with the same value is not.
    assert describe_changes(config) == (
        "  width=32\n  activation=gelu\n  window=7\n  norm.type=layer  norm.bias=true"
    )
    assert describe_changes(config, width=20).splitlines()[-2:] == [
        "  norm.type=layer",
        "  norm.bias=true",
    ]


def test_the_article_fits_the_noun() -> None:
    objectives = Registry("objective")
    objectives.register("rms")(Rms)

    @dataclass(frozen=True)
    class Task:
        objective: Any = field(default=Rms.Config(), metadata={"registry": objectives})

    with pytest.raises(ConfigError, match="given 'x'; expected an objective: one of rms"):
        load(Task, [], ["objective=x"])
