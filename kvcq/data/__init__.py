"""Calibration text to token sequences."""

from kvcq.data.documents import Document, describe_sources, iter_documents
from kvcq.data.sequences import Corpus, TokenSequence, build_corpus
from kvcq.data.template import encode

__all__ = ["Corpus", "Document", "TokenSequence", "build_corpus", "describe_sources", "encode", "iter_documents"]
