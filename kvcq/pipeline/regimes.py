"""One RoPE regime an artifact: where the length of a sequence selects the frequencies, all must have one length."""

from __future__ import annotations

from kvcq.data.sequences import Corpus
from kvcq.errors import InputError
from kvcq.spec.geometry import ModelGeometry


def one_regime(geometry: ModelGeometry, corpus: Corpus, seq_len: int, chunk: int) -> list[str]:
    """Drop the sequences that would run with other frequencies than those of `seq_len`, and return what to tell.

    Up to the original context of the model frequencies are those it was trained with, whatever the length. Beyond,
    they follow the length (dynamic NTK) or switch with it (longrope), and a chunk is a forward of its own length.

    Raises:
        InputError: `chunk` cuts sequences, or no sequence has `seq_len` tokens.
    """
    found = geometry.length_regimes()
    if not found:
        return []
    told = [
        f"RoPE {regime}: keys depend on the sequence length, the statistics hold in the regime of {seq_len} tokens "
        "only: collect at a length that you will serve"
        for regime in found
    ]
    if not any(regime.endswith(":long") for regime in found):
        return told
    if chunk < seq_len:
        raise InputError(
            f"chunks of {chunk} tokens would mix RoPE regimes ({', '.join(found)})",
            where="--chunk",
            fix=f"run sequences whole: --chunk {seq_len}",
        )
    whole = [sequence for sequence in corpus.sequences if sequence.segments == ((0, seq_len),)]
    if not whole:
        raise InputError(
            f"no text fills {seq_len} tokens, and shorter ones run in another RoPE regime than {', '.join(found)}",
            where="--seq-len",
            fix="give more text with --packing on, or a shorter --seq-len",
        )
    dropped = len(corpus.sequences) - len(whole)
    if dropped:
        told.append(f"{dropped} sequences shorter than {seq_len} tokens left out: they run in another RoPE regime")
        corpus.sequences = whole
        got = sum(len(sequence.tokens) for sequence in whole)
        corpus.source = corpus.source.model_copy(update={"got_tokens": got})
    return told
