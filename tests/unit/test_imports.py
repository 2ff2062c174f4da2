"""Who may import whom: read from the source, imports inside functions included."""

from __future__ import annotations

import ast
import configparser
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "models": set[str](),
    "data_tools": set[str](),
    "parallel": {"models"},
    "pretrain": {"models", "parallel", "data_tools"},
    "launch": {"models", "parallel", "data_tools", "pretrain"},
}
OUTSIDE = {"benchmarks", "tests"}  # no package may import these
MODELS_THIRD_PARTY = {"torch", "transformers"}  # transformers: the Hugging Face classes alone
HUGGING_FACE = {
    "configuration_midspan.py", "modeling_midspan.py", "modeling_midspan_diffusion.py",
}  # fmt: skip


def imported_modules(source: str, package: tuple[str, ...]) -> list[tuple[int, str]]:
    """(line, dotted module) of every import in ``source``, a module of ``package``.

    ``from a import b`` gives ``a.b``, for b may be a module; relative names are resolved, and a
    literal ``importlib.import_module("a")`` or ``__import__("a")`` counts as an import.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            kept = len(package) - node.level + 1
            stem = list(package[:kept]) if node.level else []
            stem += [node.module] if node.module else []
            found += [(node.lineno, ".".join([*stem, alias.name])) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func).split(".")[-1]
            argument = node.args[0]
            is_text = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            if name in ("import_module", "__import__") and is_text:
                assert isinstance(argument, ast.Constant)
                found.append((node.lineno, str(argument.value)))
    return found


def attributes(source: str) -> set[str]:
    """Every dotted name used in ``source``, as written: ``torch.distributed.get_rank``."""
    nodes = ast.walk(ast.parse(source))
    return {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}


def violations(path: Path, source: str) -> list[str]:
    """What ``source``, standing at ``path`` relative to the checkout, imports but must not."""
    top = path.parts[0]
    forbidden = (set(MAY_IMPORT) | OUTSIDE) - MAY_IMPORT[top] - {top}
    found = []
    for line, module in imported_modules(source, path.parent.parts):
        first = module.split(".")[0]
        if first in forbidden:
            found.append(f"{path}:{line}: {top} imports {module}")
        if top == "models" and module.startswith("torch.distributed"):
            found.append(f"{path}:{line}: models imports {module}")
    if top == "models" and any(name.startswith("torch.distributed") for name in attributes(source)):
        found.append(f"{path}: models uses torch.distributed")
    return found


def outside_the_model_folder(path: Path, source: str) -> list[str]:
    """Imports of models/ that would break in an exported folder holding only these files."""
    allowed = {"torch"} | (MODELS_THIRD_PARTY if path.name in HUGGING_FACE else set())
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            flat = node.level == 1 and node.module is not None and "." not in node.module
            names = [] if flat else [ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            first = name.split(".")[0]
            if first not in allowed and first not in sys.stdlib_module_names:
                found.append(f"{path}:{node.lineno}: {name}")
    return found


def sources(top: str) -> list[Path]:
    return [path.relative_to(ROOT) for path in sorted((ROOT / top).rglob("*.py"))]


@pytest.mark.parametrize("top", MAY_IMPORT)
def test_imports_point_one_way(top: str) -> None:
    files = sources(top)
    assert files
    assert [v for path in files for v in violations(path, (ROOT / path).read_text())] == []


def test_model_files_use_only_torch_and_each_other() -> None:
    found = []
    for path in sources("models"):
        found += outside_the_model_folder(path, (ROOT / path).read_text())
    assert found == []


def test_the_model_folder_is_flat() -> None:
    assert [path for path in sources("models") if len(path.parts) != 2] == []


@pytest.mark.parametrize("top", MAY_IMPORT)
def test_every_package_folder_is_listed_for_installation(top: str) -> None:
    """setup.cfg lists packages by hand; a forgotten one works here and is missing elsewhere."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    present = {".".join(path.parent.parts) for path in sources(top)}
    assert present == {name for name in listed if name.split(".")[0] == top}
    assert all((ROOT / path.parent / "__init__.py").is_file() for path in sources(top))


@pytest.mark.parametrize(
    "path, source",
    [
        ("models/a.py", "from parallel.mesh import build"),
        ("models/a.py", "def f():\n    import pretrain.config"),
        ("models/a.py", "import torch.distributed as dist"),
        ("models/a.py", "from torch import distributed"),
        ("models/a.py", "import torch\ndef f():\n    return torch.distributed.get_rank()"),
        ("models/a.py", "import importlib\nimportlib.import_module('parallel.mesh')"),
        ("models/a.py", "def f():\n    return __import__('data_tools')"),
        ("models/a.py", "from ..parallel import mesh"),
        ("data_tools/a.py", "import models"),
        ("parallel/pipeline/a.py", "from pretrain import trainer"),
        ("parallel/pipeline/a.py", "from ...data_tools.blend import Blend"),
        ("pretrain/objectives/a.py", "from launch import doctor"),
        ("launch/a.py", "from tests.conftest import ROOT"),
        ("parallel/a.py", "from benchmarks import run"),
    ],
)
def test_a_forbidden_import_is_detected(path: str, source: str) -> None:
    assert len(violations(Path(path), source)) >= 1


@pytest.mark.parametrize(
    "path, source",
    [
        ("models/a.py", "from .norms import RMSNorm\nimport importlib\nimport torch.nn"),
        ("models/a.py", "import importlib\nimportlib.import_module('flash_attn')"),
        ("parallel/pipeline/a.py", "from ..mesh import build\nfrom models.norms import RMSNorm"),
        ("pretrain/a.py", "import models, parallel, data_tools"),
        ("launch/a.py", "from pretrain.decode import load"),
    ],
)
def test_an_allowed_import_passes(path: str, source: str) -> None:
    assert violations(Path(path), source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import numpy",
        "def f():\n    from models.norms import RMSNorm",
        "from . import norms",
        "from .a.b import c",
        "from transformers import PreTrainedModel",
    ],
)
def test_an_import_that_an_exported_folder_lacks_is_detected(source: str) -> None:
    assert len(outside_the_model_folder(Path("models/a.py"), source)) == 1
