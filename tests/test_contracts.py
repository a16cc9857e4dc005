"""Promises about the source itself: what it never does, how big its files are, and what importing it costs."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import kvcq
from tests.chain import python

ROOT = Path(kvcq.__file__).resolve().parent
FILES = sorted(ROOT.rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load", "os.system"}
FORBIDDEN_NAMES = {"os.environ", "os.getenv", "os.putenv", "os.environb"}
LONGEST = 400
# A kernel, its launcher and its launch table belong together.
LONGEST_KERNEL = 600


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` of a name or attribute chain, else the empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"import {item.name}" for item in node.names if item.name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{item.name}" for item in node.names}
            if (node.module or "").split(".")[0] in FORBIDDEN_MODULES or names & (FORBIDDEN_CALLS | FORBIDDEN_NAMES):
                yield f"from {node.module} import {sorted(names)}"
        elif isinstance(node, ast.Attribute) and dotted(node) in FORBIDDEN_NAMES:
            yield dotted(node)
        elif isinstance(node, ast.Call):
            if dotted(node.func) in FORBIDDEN_CALLS:
                yield f"{dotted(node.func)}()"
            for keyword in node.keywords:
                loose = keyword.arg == "allow_pickle" and not is_constant(keyword.value, False)
                if loose or (keyword.arg == "shell" and not is_constant(keyword.value, False)):
                    yield f"{keyword.arg}="
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            yield "bare except"
        elif isinstance(node, ast.Assert):
            yield "assert"


def is_constant(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(p)",
        "from torch import load",
        "yaml.load(x)",
        "eval('1')",
        "os.environ['A']",
        "from os import environ",
        "subprocess.run(x, shell=True)",
        "np.load(p, allow_pickle=True)",
        "try:\n  pass\nexcept:\n  pass",
    ],
)
def test_the_rules_find_what_they_forbid(source: str) -> None:
    assert list(offences(ast.parse(source)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_keeps_the_rules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not list(offences(ast.parse(text)))
    assert text.count("\n") <= (LONGEST_KERNEL if path.parent.name == "kernels" else LONGEST)
    marks = [word for word in ("TODO", "FIXME", "XXX", "NotImplementedError") if word in text]
    assert not marks


def test_importing_the_package_loads_no_numbers() -> None:
    code = "import sys, kvcq; print([m for m in ('torch', 'numpy', 'transformers', 'triton') if m in sys.modules])"
    done = python("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, b"[]"), done.stderr


def test_the_version_is_the_installed_one() -> None:
    assert kvcq.__version__ == metadata.version("kvcq")


def test_every_public_name_resolves_and_others_do_not() -> None:
    code = "import json, kvcq; print(json.dumps({name: str(getattr(kvcq, name)) for name in kvcq.__all__}))"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == set(kvcq.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvcq.nothing  # noqa: B018
