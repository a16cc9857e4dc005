"""The one place where exceptions of transformers, the hub and torch become kvcq errors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from huggingface_hub import errors as hub

from kvcq.errors import InputError, KvcqError, ResourceError, UnavailableError, UnsupportedError

UNREACHABLE = (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError, ConnectionError, TimeoutError)


@contextmanager
def loading(label: str) -> Iterator[None]:
    """Translate every exception of loading the model called `label` into one line; kvcq's own pass unchanged.

    Raises:
        InputError: unreadable or inconsistent files, an unknown hub id or revision.
        UnsupportedError: an architecture that the library does not know, or code that would have to be trusted.
        ResourceError: memory or disk ran out.
        UnavailableError: gated, offline, or a missing package.
    """
    try:
        yield
    except KvcqError:
        raise
    except Exception as error:
        raise translate(error, label) from error


def translate(error: BaseException, label: str) -> KvcqError:
    """Return the kvcq error for an exception, judged by its whole chain of causes."""
    chain = list(_chain(error))

    def any_of(*types: type[BaseException]) -> bool:
        return any(isinstance(link, types) for link in chain)

    reason = _first_line(error)
    if any_of(torch.OutOfMemoryError, MemoryError):
        return ResourceError("out of memory", where=label, fix="use a smaller dtype or --device-map auto")
    if any(isinstance(link, OSError) and link.errno == errno.ENOSPC for link in chain):
        return ResourceError("no space left on the disk", where=label)
    if any_of(hub.GatedRepoError):
        return UnavailableError(
            "the model is gated", where=label, fix="accept its licence on the hub and run `hf auth login`"
        )
    if any_of(hub.RevisionNotFoundError):
        return InputError("no such revision on the hub", where=label)
    if any_of(hub.RepositoryNotFoundError, hub.HFValidationError):
        return InputError(
            "neither a local folder nor a model on the hub", where=label, fix="private models need `hf auth login`"
        )
    if any_of(*UNREACHABLE) or any(type(link).__module__.startswith("httpx") for link in chain):
        return UnavailableError(
            "the hub is not reachable and the model is not cached", where=label, fix="go online or give a model folder"
        )
    if any_of(hub.HfHubHTTPError):
        return UnavailableError(f"the hub refused: {reason}", where=label)
    if any_of(ImportError):
        missing = next(link for link in chain if isinstance(link, ImportError))
        return UnavailableError(f"a package is missing: {_first_line(missing)}", where=label)
    if "trust_remote_code" in str(error):
        return UnsupportedError(
            "the model brings its own code, which kvcq does not run unasked", where=label, fix="--trust-remote-code"
        )
    if "does not recognize this architecture" in str(error) or "Unrecognized configuration class" in str(error):
        return UnsupportedError(f"not a causal language model that transformers knows: {reason[:160]}", where=label)
    return InputError(f"the model cannot be loaded: {reason}", where=label)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
