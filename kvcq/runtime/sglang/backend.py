"""SGLang's side of attention: its layers and batches, handed to `Attention`.

What a decode step needs is computed by kernels that a CUDA graph records with the step, from the buffers that SGLang
fills before a replay; so nothing is prepared outside of graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from kvcq.errors import MismatchError, UnsupportedError
from kvcq.runtime.sglang.attend import Attention, Rule
from kvcq.runtime.sglang.trace import Trace
from kvcq.runtime.sglang.versions import INSTEAD

NAME = "kvcq"
# What SGLang fills the lengths of padding rows with; rows whose slot is 0 count as empty, whatever their length.
FILL = 1


def rule_of(layer: Any, extras: Mapping[str, Any]) -> Rule:
    """Read how a layer weighs keys.

    Args:
        layer: SGLang's ``RadixAttention``.
        extras: Further keywords of its call; learned sinks are known.

    Raises:
        UnsupportedError: something that is not computed here; names the layer.
    """
    where = f"layer {layer.layer_id}"
    if unknown := sorted(name for name, value in extras.items() if name != "sinks" and value is not None):
        raise UnsupportedError(f"attention gets {unknown[0]}, which kvcq does not know", where=where)
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if layer.is_cross_attention or kind != "decoder":
        raise UnsupportedError(f"{'cross' if layer.is_cross_attention else kind} attention", where=where)
    capped = layer.logit_cap > 0
    if capped and layer.logit_capping_method != "tanh":
        raise UnsupportedError(f"logits are capped by {layer.logit_capping_method}, not by tanh", where=where)
    if getattr(layer, "xai_temperature_len", -1) > 0:
        raise UnsupportedError("logits depend on the position", where=where)
    slides = layer.sliding_window_size is not None and layer.sliding_window_size > 0
    return Rule(
        layer.scaling,
        softcap=float(layer.logit_cap) if capped else None,
        # SGLang counts the tokens before the query, kvcq the query too.
        window=layer.sliding_window_size + 1 if slides else None,
        sinks=extras.get("sinks"),
    )


def lengths_of(batch: Any) -> tuple[list[int], list[int]] | None:
    """Return the tokens before and the new ones of each request of a prefill; None where the host does not know."""
    firsts, counts = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
    if firsts is None or counts is None:
        return None
    # Lists, or tensors in what SGLang makes up.
    return [int(first) for first in firsts], [int(count) for count in counts]


def make_backend_class() -> type[Any]:
    """Return the class of the backend; imports SGLang."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    class KvcqBackend(AttentionBackend):  # type: ignore[misc, unused-ignore]
        """Attention over 2-bit pages and exact rows.

        Args:
            runner: SGLang's model runner; its pool is kvcq's.
            attention: All layers of this rank.
            trace: Where boundaries of requests are noted, or None.
        """

        # Lengths of requests are read on the device only; SGLang has those of a prefill on the host anyway.
        needs_cpu_seq_lens = False

        def __init__(self, runner: Any, attention: Attention, trace: Trace | None = None) -> None:
            super().__init__()
            self.attention, self.trace = attention, trace
            self.token_to_kv_pool = runner.token_to_kv_pool
            self.req_to_token_pool = runner.req_to_token_pool
            self.max_context_len = runner.model_config.context_len
            self.forward_metadata = None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            """Prepare a forward that runs eagerly, or a prefill whose attention does.

            Raises:
                UnsupportedError: a forward that is neither prefill nor decode.
            """
            mode = forward_batch.forward_mode
            if mode.is_idle():
                self.attention.begin_nothing()
            elif mode.is_decode():
                self.attention.begin_decode(forward_batch)
            elif mode.name == "EXTEND":
                self.token_to_kv_pool.settle()
                self.attention.begin_extend(forward_batch, forward_batch.extend_num_tokens, lengths_of(forward_batch))
                if self.trace is not None and self.trace.active:
                    self._note(self.trace, forward_batch)
            else:
                _refuse(mode)

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            """Check that the graph is one of decode steps: all they need is prepared inside.

            Raises:
                UnsupportedError: a graph of another forward.
            """
            mode = forward_batch.forward_mode
            if not (mode.is_decode() or mode.is_idle()):
                _refuse(mode)

        def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
            """Prepare a decode step from SGLang's static buffers, recorded and replayed with it."""
            self.attention.begin_decode(forward_batch)

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            """Make room for the largest batch that is captured.

            Raises:
                UnsupportedError: several tokens a request.
            """
            if max_num_tokens != max_bs:
                raise UnsupportedError(f"{max_num_tokens} tokens of {max_bs} requests in a decode step", where="graphs")
            if max_bs > self.attention.max_batch:
                self.attention.reserve(max_bs)

        def get_cuda_graph_seq_len_fill_value(self) -> int:
            """Return the length that padding rows are given."""
            return FILL

        def forward_decode(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            **kwargs: Any,
        ) -> Tensor:
            """Attend with one token of every request; return ``[B, Hq d_v]``."""
            return self._run(self.attention.decode, q, k, v, layer, save_kv_cache, kwargs)

        def forward_extend(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            **kwargs: Any,
        ) -> Tensor:
            """Attend with the new tokens of every request; return ``[T, Hq d_v]``.

            Raises:
                MismatchError: copies that the batch needs were not made: rows of others would be read.
            """
            if forward_batch.forward_mode.name != "EXTEND":
                _refuse(forward_batch.forward_mode)
            if self.token_to_kv_pool.store.pending:
                raise MismatchError(
                    "a prefill attends before the exact rows of its batch were brought to the device",
                    where="init_forward_metadata",
                    fix=f"start the server without what prepares prefills in another way, {INSTEAD}",
                )
            return self._run(self.attention.extend, q, k, v, layer, save_kv_cache, kwargs)

        def _run(
            self, attend: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, save: bool, extras: Mapping[str, Any]
        ) -> Tensor:
            if k is None or v is None:
                raise UnsupportedError("it reads the rows of another layer", where=f"layer {layer.layer_id}")
            rule = rule_of(layer, extras)
            queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            keys = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            values = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            out: Tensor = attend(layer.layer_id, queries, keys, values, rule, save=save)
            return out.view(out.shape[0], -1).to(q.dtype)

        def _note(self, trace: Trace, batch: Any) -> None:
            """Waits for the device: a trace is asked for where speed does not count."""
            if batch.rids is None:
                # Batches that SGLang makes up to warm up or to capture are of no request.
                return
            table = self.req_to_token_pool.req_to_token[
                batch.req_pool_indices.long(), :: self.token_to_kv_pool.page_size
            ]
            pages = (table // self.token_to_kv_pool.page_size).tolist()
            trace.extend(batch.rids, list(batch.extend_prefix_lens_cpu), list(batch.extend_seq_lens_cpu), pages)

    return KvcqBackend


def _refuse(mode: Any) -> NoReturn:
    raise UnsupportedError(
        f"a forward of kind {mode.name}: kvcq has prefill, and decode of one token a request",
        where="--attention-backend",
        fix="leave out what asks for it: speculation, mixed chunks, prefill graphs of kind full",
    )
