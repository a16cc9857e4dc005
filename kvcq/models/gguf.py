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
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from kvcq.errors import InputError, KvcqError, ResourceError
from kvcq.models.gguf_check import GgufHeader, read_header
from kvcq.models.library import quiet_library, refuse_incomplete

# Numbers that a model may have beyond twice those of its file (tied embeddings): tables of positions, masks.
SLACK = 1 << 25


def gguf_folder(path: Path, cache: Path, progress: Callable[[str], None] | None = None) -> Path:
    """Return the converted folder of a GGUF file in the cache, keyed by its path, size and modification time.

    Raises:
        InputError: not a readable GGUF file of a known architecture.
        ResourceError: the disk is or would be full, or the header is beyond a cap of `read_header`.
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
        ResourceError: the disk is or would be full, or the header is beyond a cap of `read_header`.
    """
    if dest_folder.is_dir():
        return dest_folder
    header = read_header(gguf_path)
    _require_disk(header.decoded_bytes, dest_folder, gguf_path.name)
    if progress:
        progress(f"converting {gguf_path.name} to a bfloat16 folder (once)")
    staging = None
    try:
        dest_folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{dest_folder.name}-", dir=dest_folder.parent))
        _write_folder(gguf_path, staging, header)
        _move_into_place(staging, dest_folder)
    except OSError as error:
        raise ResourceError(f"cannot convert: {error.strerror or error}", where=gguf_path.name) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    return dest_folder


def _require_disk(needed: int, dest: Path, label: str) -> None:
    place = next(folder for folder in dest.absolute().parents if folder.is_dir())
    if (free := shutil.disk_usage(place).free) < needed:
        what = f"the converted model takes {needed} bytes, {free} are free in {place}"
        raise ResourceError(what, where=label, fix="free some disk space")


def _write_folder(gguf_path: Path, folder: Path, header: GgufHeader) -> None:
    try:
        # The library draws a bar here that no switch turns off.
        with quiet_library(), contextlib.redirect_stderr(io.StringIO()):
            _convert(gguf_path, folder, header)
    except MemoryError as error:
        raise ResourceError("out of memory", where=gguf_path.name) from error
    except SafetensorError as error:
        raise ResourceError(f"cannot write the converted model: {error}", where=gguf_path.name) from error
    except Exception as error:
        # The library's own complaints are OSErrors too, without a number.
        if isinstance(error, KvcqError) or getattr(error, "errno", None) is not None:
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = f"it has no {reason}" if isinstance(error, KeyError) else reason
        raise InputError(f"the GGUF file cannot be read: {reason}", where=gguf_path.name) from error


def _convert(gguf_path: Path, folder: Path, header: GgufHeader) -> None:
    source = {"pretrained_model_name_or_path": str(gguf_path.parent), "gguf_file": gguf_path.name}
    config = AutoConfig.from_pretrained(**source)
    _refuse_inflated(config, header, gguf_path.name)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model, report = AutoModelForCausalLM.from_pretrained(
        **source, config=config, dtype=torch.bfloat16, output_loading_info=True
    )
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
    # Engines other than the library find the model's class by this name.
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _refuse_inflated(config: PretrainedConfig, header: GgufHeader, label: str) -> None:
    """Refuse metadata of a model far larger than the tensors: the library would allocate what is missing."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    declared = sum(tensor.numel() for group in (model.parameters(), model.buffers()) for tensor in group)
    if declared > 2 * header.numbers + SLACK:
        what = f"its metadata describe a model of {declared} numbers, its tensors hold {header.numbers}"
        raise InputError(what, where=label)


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
