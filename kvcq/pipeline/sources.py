"""From a request to a loaded model and a corpus: what collect and validate share."""

from __future__ import annotations

from pathlib import Path

from kvcq.data.documents import describe_sources, iter_documents
from kvcq.data.sequences import Corpus, build_corpus
from kvcq.errors import InputError
from kvcq.models.geometry import require_quantizable
from kvcq.models.load import LoadedModel, load_model
from kvcq.pipeline.progress import Reporter
from kvcq.pipeline.requests import CollectRequest, ModelRequest, ValidateRequest

TEXT_BYTES = 1 << 20


def open_model(request: ModelRequest, reporter: Reporter, *, longest: int) -> LoadedModel:
    """Load the model of a request; `longest` decides which branch of a length-dependent RoPE is in force.

    Raises:
        UnsupportedError: no layer attends to the whole context, so that nothing could be quantized.
    """
    loaded = load_requested(request, reporter, longest=longest)
    require_quantizable(loaded.geometry)
    return loaded


def load_requested(request: ModelRequest, reporter: Reporter, *, longest: int | None = None) -> LoadedModel:
    """Load the model of a request, whatever its layers are; see `open_model`."""
    reporter.stage("opening the model")
    return load_model(
        request.model,
        revision=request.revision,
        device=request.device,
        dtype=request.dtype,
        device_map=request.device_map,
        trust_remote_code=request.trust_remote_code,
        longest=longest,
        notify=reporter.note,
    )


def open_corpus(
    request: CollectRequest | ValidateRequest,
    loaded: LoadedModel,
    reporter: Reporter,
    *,
    seq_len: int,
    num_tokens: int,
) -> Corpus:
    """Tokenize the text of a request and pass its warnings on.

    Raises:
        InputError: unreadable text or template, or sequences longer than the model's context.
    """
    longest = loaded.geometry.max_positions
    flag = "--seq-len" if isinstance(request, CollectRequest) else "--contexts"
    if longest is not None and seq_len > longest:
        raise InputError(f"the model's context is {longest} tokens, not {seq_len}", where=flag, fix="use a shorter one")
    reporter.stage("tokenizing text")
    corpus = build_corpus(
        iter_documents(request.data, text_column=request.text_column),
        loaded.tokenizer,
        labels=describe_sources(request.data),
        seq_len=seq_len,
        num_tokens=num_tokens,
        packing=request.packing if isinstance(request, CollectRequest) else "on",
        template=request.template,
        chat_template=read_text(request.chat_template, "--chat-template"),
    )
    for warning in corpus.warnings:
        reporter.warn(warning)
    return corpus


def read_text(path: Path | None, flag: str) -> str | None:
    """Read a small text file given by a flag, or None.

    Raises:
        InputError: unreadable, larger than 1 MiB, or not UTF-8.
    """
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            raw = file.read(TEXT_BYTES + 1)
        if len(raw) > TEXT_BYTES:
            raise InputError(f"{path} is larger than {TEXT_BYTES} bytes", where=flag)
        return raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}", where=flag, fix="name a readable UTF-8 file") from None
