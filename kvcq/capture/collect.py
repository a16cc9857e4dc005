"""A model's attention calls, streamed into the accumulators of its full-attention layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcq.errors import InputError, UnsupportedError
from kvcq.models.attention import AttentionCall, attention_hook, plain_attention
from kvcq.models.library import forward, new_cache
from kvcq.models.rope import in_regime
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from kvcq.stats.accumulator import LayerSums, Workspace
from kvcq.stats.part import StatsPart, layer_sums, pack_stats
from kvcq.stats.probe import ProbePlan
from kvcq.stats.rotary import Turn, turn_table
from kvcq.stats.rows import RowStore
from kvcq.stats.sampling import RowSelection

if TYPE_CHECKING:
    from kvcq.data.sequences import TokenSequence
    from kvcq.models.load import LoadedModel


class Capture:
    """Collects the statistics of one model, one sequence at a time.

    Memory holds the accumulators, the row budget and one chunk; it does not grow with the number of sequences.

    Args:
        loaded: The model.
        geometry: As `self_check` observed it.
        selection: Rows to keep; every sequence that will run was offered with its counted tokens.
        plan: Which tokens are the probe and which are counted.

    Attributes:
        whole: False between the first and the last layer that takes a finished sequence in; an exception in between
            leaves it so, and the result is then of no use.
    """

    def __init__(self, loaded: LoadedModel, geometry: ModelGeometry, selection: RowSelection, plan: ProbePlan) -> None:
        self._model = loaded.model
        self._geometry = geometry
        self._layers = {layer.layer: layer for layer in geometry.quantizable()}
        workspace = Workspace()
        self._sums = {
            number: LayerSums(layer, geometry.rope_of(layer), workspace) for number, layer in self._layers.items()
        }
        self._rows = RowStore(selection, plan)
        self._plan = plan
        self._sequence = ""
        self._first = self._position = 0
        self._turns: dict[int, Turn] = {}
        self._sources = {layer.layer: layer.source for layer in geometry.layers if layer.source is not None}
        self._by_length = tuple(rope for rope in geometry.ropes if rope.by_length)
        self._seen: dict[int, int] = {}
        self._expected = 0
        self.whole = True

    def run(self, sequence: TokenSequence, chunk: int) -> None:
        """Forward a sequence in chunks and add it to the statistics.

        Each segment starts from an empty cache at position 0. Tokens that are neither counted nor probe are not run
        where nothing after them is wanted.

        Args:
            sequence: Part of the probe plan; run at most once.
            chunk: Tokens per forward.

        Raises:
            InputError: a bad chunk, a sequence that is unknown or ran before, a forward in another RoPE regime than
                the geometry's, or non-finite activations (layer and head named). The capture has no result after an
                error.
            UnsupportedError: a layer did not see every token.
        """
        if chunk < 1:
            raise InputError(f"a chunk of {chunk} tokens", where="--chunk", fix="use at least 1")
        if sequence.digest not in self._plan.counted or sequence.digest in self._rows.done:
            raise InputError("a sequence outside the plan, or run twice", where=sequence.digest[:12])
        counted = self._plan.counted[sequence.digest]
        probe = self._plan.spans.get(sequence.digest, (0, 0))
        self._sequence = sequence.digest
        self._seen, self._expected = dict.fromkeys(self._layers, 0), 0
        for sums in self._sums.values():
            sums.begin()
        with attention_hook(self._model, self._attend):
            for start, stop in sequence.segments:
                wanted = min(stop, max(counted, probe[1] if probe[1] > start else 0))
                wanted = stop if wanted > start and self._by_length else wanted  # a shorter run has other frequencies
                skipped = counted <= start and probe[0] >= stop
                if wanted > start and not skipped:
                    self._run_segment(sequence, start, wanted, chunk)
        self._refuse_silent_layers()
        self.whole = False
        for sums in self._sums.values():
            sums.finish()
        self._rows.done.add(sequence.digest)
        self.whole = True

    def restore(self, part: StatsPart) -> None:
        """Continue from the statistics of an earlier capture that planned the same; nothing ran yet.

        Raises:
            InputError: arrays are missing, misshapen, or of another selection.
        """
        for sums in self._sums.values():
            sums.merge(layer_sums(self._geometry, sums.geometry, part.moments))
        self._rows.restore(part.sequences, part.probe, list(self._layers.values()), part.samples)

    @property
    def done(self) -> frozenset[str]:
        """Digests of the sequences that ran to their end."""
        return frozenset(self._rows.done)

    @property
    def result(self) -> StatsPart:
        """Statistics of the sequences that ran so far; parts over other sequences merge with it."""
        return pack_stats(list(self._sums.values()), self._rows)

    def _run_segment(self, sequence: TokenSequence, start: int, stop: int, chunk: int) -> None:
        # A single forward needs no cache: none of it is read again.
        cache = new_cache(self._model) if stop - start > chunk else None
        for first in range(start, stop, chunk):
            last = min(first + chunk, stop)
            tokens = torch.from_numpy(sequence.tokens[first:last].astype("int64")).unsqueeze(0)
            self._first, self._position = first, first - start
            self._turns.clear()
            forward(self._model, tokens, cache=cache, last_only=True)
            self._expected += last - first
            if self._by_length and not in_regime(self._model, self._by_length):
                raise InputError(
                    f"a forward of {last - first} tokens to position {last - start - 1} has other rotary frequencies "
                    f"than {self._by_length[0].regime} at the planned length",
                    where="--chunk",
                    fix="run whole sequences of one length: --chunk of at least --seq-len, --packing on",
                )

    def _attend(self, call: AttentionCall) -> Tensor:
        output = plain_attention(call)
        new = call.query.shape[2]
        positions = torch.arange(self._position, self._position + new, device=call.key.device)
        counted = min(max(self._plan.counted[self._sequence] - self._first, 0), new)
        q, o = call.query[0], output[0]
        layer = self._layers.get(call.layer)
        if layer is not None:
            self._seen[call.layer] += new
            k, v = call.key[0, :, -new:], call.value[0, :, -new:]
            self._rows.put(layer, self._sequence, self._first, positions, {"k": k, "v": v, "q": q})
            if counted:
                turn = self._turn(layer, positions, counted)
                part = slice(0, counted)
                self._sums[call.layer].add(q[:, part], k[:, part], v[:, part], o[:, part], positions[part], turn)
        elif counted and (producer := self._layers.get(self._sources.get(call.layer, -1))):
            turn = self._turn(producer, positions, counted)
            self._sums[producer.layer].add_queries(q[:, :counted], o[:, :counted], positions[:counted], turn)
        return output

    def _turn(self, layer: LayerGeometry, positions: Tensor, counted: int) -> Turn | None:
        rope = self._geometry.rope_of(layer)
        if rope is None or layer.rope is None or not layer.unrotates:
            return None
        if layer.rope not in self._turns:
            self._turns[layer.rope] = turn_table(rope, positions[:counted])
        return self._turns[layer.rope]

    def _refuse_silent_layers(self) -> None:
        silent = [str(number) for number, seen in self._seen.items() if seen != self._expected]
        if silent:
            raise UnsupportedError(
                f"not every token passed through the attention function in layer {', '.join(silent)}",
                where=f"model_type {self._geometry.model_type}",
            )
