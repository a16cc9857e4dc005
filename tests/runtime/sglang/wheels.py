"""The released wheels of SGLang, read without installing them: fetched once, checked by hash, parsed by `ast`."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import pytest

FACTS = json.loads((Path(__file__).parent / "wheel_facts.json").read_text(encoding="utf-8"))
VERSIONS = tuple(FACTS["wheels"])
CACHE = platformdirs.user_cache_path("kvcq") / "sglang"
PYTHON = ("--platform", "manylinux_2_34_x86_64", "--python-version", "3.12", "--implementation", "cp", "--abi", "cp312")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.cache
def fetch(version: str) -> Path | str:
    """Return the wheel of one release, fetched into the cache folder where it is missing, or why it is not there."""
    name = f"sglang-{version}-cp312-cp312-manylinux_2_34_x86_64.whl"
    path, wanted = CACHE / name, FACTS["wheels"][version]
    if path.is_file() and digest(path) == wanted:
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--retries=1", "--no-deps", "--only-binary=:all:"]
        command += [*PYTHON, "-d", folder, f"sglang=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"the wheel of SGLang {version} cannot be fetched: {done.stderr.strip()[-200:]}"
        fetched = Path(folder) / name
        assert digest(fetched) == wanted, f"{name} is another file than the one that was read"
        fetched.replace(path)
    return path


def wheel(version: str) -> Path:
    """Return the wheel of one release; without a network the test is skipped, and fails where tests must all run."""
    found = fetch(version)
    if isinstance(found, Path):
        return found
    if os.environ.get("CI") == "true":
        pytest.fail(found)
    pytest.skip(found)


@dataclass(frozen=True)
class Sources:
    """The modules of one release."""

    version: str

    def text(self, module: str) -> str:
        return _archive(self.version).read(_path(module)).decode()

    def has(self, module: str) -> bool:
        return _path(module) in _archive(self.version).NameToInfo

    def tree(self, module: str) -> ast.Module:
        return _tree(self.version, module)

    def find(self, target: str) -> ast.AST:
        """Return the definition that a dotted path leads to, as SGLang's registry resolves it."""
        parts = target.split(".")
        cut = next((n for n in range(len(parts) - 1, 0, -1) if self.has(".".join(parts[:n]))), None)
        assert cut is not None, f"SGLang {self.version} has no module of {target}"
        node: ast.AST = self.tree(".".join(parts[:cut]))
        for name in parts[cut:]:
            node = member(node, name) or pytest.fail(f"SGLang {self.version} has no {target}")
        return node

    def function(self, target: str) -> Function:
        node = self.find(target)
        assert isinstance(node, Function), f"{target} of SGLang {self.version} is no function"
        return node

    def parameters(self, target: str) -> list[str]:
        arguments = self.function(target).args
        return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]

    def calls(self, target: str, name: str) -> list[ast.Call]:
        """Return the calls of a function or method of this name inside a function."""
        nodes = [node for node in ast.walk(self.find(target)) if isinstance(node, ast.Call)]
        return [node for node in nodes if ast.unparse(node.func).rpartition(".")[2] == name]

    def fields(self, target: str) -> dict[str, ast.AnnAssign]:
        """Return the annotated fields of a class."""
        body = self.find(target).body  # type: ignore[attr-defined]
        return {node.target.id: node for node in body if isinstance(node, ast.AnnAssign)}


def _path(module: str) -> str:
    return module.replace(".", "/") + ".py"


@functools.cache
def _archive(version: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel(version))


@functools.cache
def _tree(version: str, module: str) -> ast.Module:
    return ast.parse(Sources(version).text(module))


def member(node: ast.AST, name: str) -> ast.AST | None:
    """Return what defines a name directly inside a module or a class; the last definition counts."""
    found = None
    for item in getattr(node, "body", ()):
        if isinstance(item, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and item.name == name:
            found = item
    return found
