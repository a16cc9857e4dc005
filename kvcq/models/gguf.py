"""GGUF weights become an ordinary HuggingFace folder once; every later load reads that."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcq.errors import InputError, ResourceError
from kvcq.models.library import quiet_library, refuse_incomplete

MAGIC = b"GGUF"


def gguf_folder(path: Path, cache: Path, progress: Callable[[str], None] | None = None) -> Path:
    """Return the converted folder of a GGUF file in the cache, keyed by its path, size and modification time.

    Raises:
        InputError: not a readable GGUF file of a known architecture.
        ResourceError: the disk is full.
    """
    resolved = path.resolve()
    state = resolved.stat()
    key = hashlib.sha256(f"{resolved}\n{state.st_size}\n{state.st_mtime_ns}".encode()).hexdigest()[:12]
    return convert_gguf(resolved, cache / "models" / f"{resolved.stem}-{key}", progress)


def convert_gguf(gguf_path: Path, dest_folder: Path, progress: Callable[[str], None] | None = None) -> Path:
    """Dequantize a GGUF file to bfloat16 safetensors with its tokenizer and configuration.

    An existing `dest_folder` is complete and reused: work happens in a sibling folder that is renamed at the end.

    Raises:
        InputError: not a readable GGUF file of a known architecture.
        ResourceError: the disk is full.
    """
    if dest_folder.is_dir():
        return dest_folder
    with gguf_path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise InputError("not a GGUF file", where=gguf_path.name, fix="check that the download is complete")
    if progress:
        progress(f"converting {gguf_path.name} to a bfloat16 folder (once)")
    dest_folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{dest_folder.name}-", dir=dest_folder.parent))
    try:
        _write_folder(gguf_path, staging)
        _move_into_place(staging, dest_folder)
    except OSError as error:
        raise ResourceError(f"cannot convert: {error.strerror or error}", where=gguf_path.name) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return dest_folder


def _write_folder(gguf_path: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": str(gguf_path.parent), "gguf_file": gguf_path.name}
    try:
        # The library draws a bar here that no switch turns off.
        with quiet_library(), contextlib.redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(**source)
            model, report = AutoModelForCausalLM.from_pretrained(
                **source, dtype=torch.bfloat16, output_loading_info=True
            )
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"the GGUF file cannot be read: {reason}", where=gguf_path.name) from error
    refuse_incomplete(report, gguf_path.name)
    # The library refuses save_pretrained() on a model read from GGUF, so the folder is written by hand.
    state = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _move_into_place(staging: Path, dest: Path) -> None:
    for path in staging.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    staging.chmod(0o755)
    try:
        staging.rename(dest)
    except OSError:
        if not dest.is_dir():  # otherwise another process finished the same conversion first
            raise
