"""The backend by SGLang's contract: what its layers ask for is computed or refused, graphs hold no stale batch."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
import torch

from kvcq.errors import MismatchError, UnsupportedError
from kvcq.kernels import causal
from kvcq.runtime.sglang import attend
from kvcq.runtime.sglang.attend import Attention
from kvcq.runtime.sglang.backend import lengths_of, make_backend_class, rule_of
from tests.runtime.hf.setup import WINDOWS, relative
from tests.runtime.sglang import small
from tests.runtime.sglang.loop import radix
from tests.runtime.sglang.stage import PAGE, Stage
from tests.runtime.sglang.test_session import tables_of
from tests.tiny import tiny_model

HEADS, KV_HEADS, D = 4, 2, 32


def layer(number=0, **changes):
    """A layer of the model."""
    return radix(number, HEADS, KV_HEADS, D, D, **changes)


@pytest.fixture(scope="module")
def tables():
    return tables_of(tiny_model("llama", num_hidden_layers=1))


@pytest.fixture
def parts(monkeypatch, tables):
    """A stage, its backend and what its pool was asked for."""
    small.install(monkeypatch, "0.5.15.post1")
    stage, asked = Stage(tables, WINDOWS), []
    sizes = {"q_heads": HEADS, "max_batch": 3, "library": frozenset({0})}
    attention = Attention(stage.tables, stage.caches, stage.req_to_token, stage.exact_from, **sizes)
    runner = SimpleNamespace(
        token_to_kv_pool=SimpleNamespace(
            settle=lambda: asked.append("settle"), page_size=PAGE, store=SimpleNamespace(pending=False)
        ),
        req_to_token_pool=SimpleNamespace(req_to_token=stage.req_to_token),
        model_config=SimpleNamespace(context_len=256),
    )
    backend = make_backend_class()(runner, attention)
    return SimpleNamespace(stage=stage, backend=backend, asked=asked)


def mode_of(batch):
    batch.forward_mode = small.Mode(batch.mode)
    batch.rids = None
    return batch


def rows(count, seed=0):
    """Queries, keys and values as a fused projection gives them: strided views of one tensor."""
    fused = torch.randn(count, (HEADS + 2 * KV_HEADS) * D, generator=torch.Generator().manual_seed(seed))
    return fused.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)


@pytest.mark.parametrize(
    ("changes", "extras", "words"),
    [
        ({}, {"q_rope": 1}, "q_rope, which kvcq does not know"),
        ({}, {"topk_indices": torch.zeros(1)}, "topk_indices"),
        ({"is_cross_attention": True}, {}, "cross attention"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, {}, "encoder_only attention"),
        ({"attn_type": "decoder_bidirectional"}, {}, "decoder_bidirectional attention"),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, {}, "sigmoid"),
        ({"xai_temperature_len": 1024}, {}, "depend on the position"),
    ],
)
def test_what_a_layer_wants_and_is_not_computed_is_refused(changes, extras, words):
    with pytest.raises(UnsupportedError, match="layer 7") as error:
        rule_of(layer(7, **changes), extras)
    assert words in str(error.value)


def test_what_a_layer_says_of_its_logits_is_kept():
    sinks = torch.zeros(HEADS)
    rule = rule_of(layer(logit_cap=30, sliding_window_size=127), {"sinks": sinks, "q_rope": None})
    assert (rule.scaling, rule.softcap, rule.window) == (0.2, 30.0, 128) and rule.sinks is sinks
    plain = rule_of(layer(sliding_window_size=None, attn_type="decoder"), {"sinks": None})
    assert (plain.softcap, plain.window, plain.sinks) == (None, None, None)


def test_lengths_are_read_where_the_host_knows_them():
    batch = SimpleNamespace(extend_prefix_lens_cpu=torch.tensor([0, 64]), extend_seq_lens_cpu=[3, torch.tensor(4)])
    assert lengths_of(batch) == ([0, 64], [3, 4])
    batch.extend_prefix_lens_cpu = None
    assert lengths_of(batch) is None


def test_a_library_gets_the_prompts_that_begin_in_a_forward_and_only_those(parts, monkeypatch):
    spans = []
    monkeypatch.setattr(attend, "LEAST", 16)
    monkeypatch.setattr(causal, "STEP", 16)
    monkeypatch.setattr(attend, "attend_causal", lambda *own: spans.append(own[3]) or causal.attend_causal(*own))
    stage, backend = parts.stage, parts.backend
    first, second = (stage.admit(torch.arange(50)) for _ in range(2))

    def forward(batch):
        backend.init_forward_metadata(mode_of(batch))
        return backend.forward(*rows(len(batch.out_cache_loc)), layer(), batch)

    forward(stage.extend([(first, 20), (second, 5)]))
    assert spans == [((0, 20),)]
    # The host does not know the lengths of the next: those of the one before are not read.
    batch = stage.extend([(first, 20), (second, 30)])
    batch.extend_prefix_lens_cpu = None
    assert forward(batch).abs().sum(1).all() and spans == [((0, 20),)]


def test_a_prefill_whose_copies_were_not_made_does_not_attend(parts):
    batch = mode_of(parts.stage.extend([(parts.stage.admit(torch.arange(50)), 20)]))
    parts.backend.init_forward_metadata(batch)
    parts.backend.token_to_kv_pool.store.pending = True
    with pytest.raises(MismatchError, match="before the exact rows of its batch"):
        parts.backend.forward(*rows(20), layer(), batch)


def test_forwards_go_where_their_mode_says_and_answers_are_flat(parts):
    stage, backend = parts.stage, parts.backend
    request = stage.admit(torch.arange(50))
    batch = mode_of(stage.extend([(request, 20)], padding=3))
    backend.init_forward_metadata(batch)
    assert parts.asked == ["settle"]
    answer = backend.forward(*rows(23), layer(), batch)
    assert answer.shape == (23, HEADS * D) and not answer[20:].any() and answer[:20].abs().sum(1).all()
    # Pieces of graphs narrow a padded batch to its own tokens before attention runs.
    narrowed = backend.forward(*(part[:20] for part in rows(23)), layer(), batch)
    assert relative(narrowed, answer[:20]) < 1e-6
    batch = mode_of(stage.decode([request]))
    backend.init_forward_metadata(batch)
    assert backend.forward(*rows(1), layer(), batch).shape == (1, HEADS * D) and parts.asked == ["settle"]
    idle = SimpleNamespace(forward_mode=small.Mode.IDLE)
    backend.init_forward_metadata(idle)
    assert backend.forward(*rows(0), layer(), idle).shape == (0, HEADS * D)


def test_forwards_of_other_kinds_are_refused(parts):
    for mode in (small.Mode.MIXED, small.Mode.TARGET_VERIFY):
        batch = SimpleNamespace(forward_mode=mode)
        for call in (
            lambda batch: parts.backend.init_forward_metadata(batch),
            lambda batch: parts.backend.init_forward_metadata_out_graph(batch, in_capture=True),
            lambda batch: parts.backend.forward(*rows(1), layer(), batch),
        ):
            with pytest.raises(UnsupportedError, match=mode.name):
                call(batch)
    with pytest.raises(UnsupportedError, match="EXTEND"):
        parts.backend.init_forward_metadata_out_graph(SimpleNamespace(forward_mode=small.Mode.EXTEND))
    with pytest.raises(UnsupportedError, match="another layer"):
        parts.backend.forward(rows(1)[0], None, None, layer(), SimpleNamespace(forward_mode=small.Mode.DECODE))


def test_a_graph_reads_the_buffers_that_are_filled_before_its_replay(parts):
    """Recorded operations are played back by running them again on the same tensors, without the batch of a replay."""
    stage, backend = parts.stage, parts.backend
    backend.init_cuda_graph_state(4, 4)
    assert backend.attention.max_batch == 4 and backend.get_cuda_graph_seq_len_fill_value() == 1
    with pytest.raises(UnsupportedError, match="8 tokens of 4 requests"):
        backend.init_cuda_graph_state(4, 8)
    requests = [stage.admit(torch.arange(50)) for _ in range(2)]
    batch = mode_of(stage.extend([(request, 20) for request in requests]))
    backend.init_forward_metadata(batch)
    backend.forward(*rows(40), layer(), batch)
    static = mode_of(
        SimpleNamespace(
            mode="decode",
            req_pool_indices=torch.zeros(4, dtype=torch.long),
            seq_lens=torch.ones(4, dtype=torch.long),
            out_cache_loc=torch.zeros(4, dtype=torch.long),
            extend_seq_lens=None,
        )
    )
    q, k, v = (part.clone() for part in rows(4, seed=5))
    backend.init_forward_metadata_out_graph(static, in_capture=True)

    def recorded():
        backend.init_forward_metadata_in_graph(static)
        return backend.forward(q, k, v, layer(), static)

    pages = stage.caches[0].pages.clone()
    assert not recorded().any() and torch.equal(pages, stage.caches[0].pages)
    real = mode_of(stage.decode(requests))
    for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
        getattr(static, name)[:2] = getattr(real, name)
    # At a replay the slots of the view are those of the batch, not padded: nothing may be read from it.
    backend.init_forward_metadata_out_graph(SimpleNamespace(forward_mode=small.Mode.DECODE, batch_size=4))
    replayed = recorded()
    assert not replayed[2:].any()
    backend.init_forward_metadata(real)
    eager = backend.forward(q[:2], k[:2], v[:2], layer(), real)
    assert relative(replayed[:2], eager) < 1e-5


def test_every_release_has_what_is_read(sources):
    fields = sources.fields("sglang.srt.model_executor.forward_batch_info.ForwardBatch")
    read = {
        "forward_mode", "req_pool_indices", "seq_lens", "out_cache_loc", "rids", "extend_num_tokens", "extend_seq_lens",
        "extend_seq_lens_cpu", "extend_prefix_lens_cpu",
    }  # fmt: skip
    assert read <= set(fields)
    layers = ast.unparse(sources.find("sglang.srt.layers.radix_attention.RadixAttention.__init__"))
    for name in set(vars(layer())) - {"layer_id"}:
        assert f"self.{name} = " in layers, name
    kinds = ast.unparse(sources.find("sglang.srt.layers.radix_attention.AttentionType"))
    assert "DECODER = 'decoder'" in kinds
    modes = ast.unparse(sources.find("sglang.srt.model_executor.forward_batch_info.ForwardMode"))
    assert all(f"{name} = auto()" in modes for name in ("EXTEND", "DECODE", "IDLE"))
    assert "def is_decode(self)" in modes and "def is_idle(self)" in modes
    assert "self.kv_committed_len = 0" in ast.unparse(sources.find("sglang.srt.managers.schedule_batch.Req.__init__"))


def test_every_release_pads_graphs_with_slot_0_and_prepares_them_inside(sources):
    """Otherwise padding would write into tokens of others, or replays would read the batch of the capture."""
    runners = (
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner",
        "sglang.srt.model_executor.cuda_graph_runner",
    )
    runner = next(name for name in runners if sources.has(name))
    made = [node for node in ast.walk(sources.tree(runner)) if isinstance(node, ast.FunctionDef)]
    prepared = [node for node in made if node.name == "run_once"]
    assert any("init_forward_metadata_in_graph(forward_batch)" in ast.unparse(node) for node in prepared)
    slots = [
        node
        for node in ast.walk(sources.tree("sglang.srt.model_executor.cuda_graph_buffer_registry"))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "GraphSlot"
        and node.args
        and ast.unparse(node.args[0]) in ("'out_cache_loc'", "'req_pool_indices'")
    ]
    assert len(slots) >= 2
    for slot in slots:
        policy = {keyword.arg: ast.unparse(keyword.value) for keyword in slot.keywords}["padding_policy"]
        assert policy == "PaddingPolicy.ZERO"
