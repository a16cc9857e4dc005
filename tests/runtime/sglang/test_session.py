"""Batches in chunks, with prefix hits, beside others and with padding, answer as the replay of their boundaries."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcq.kernels import causal
from kvcq.kernels.arrays import Tables
from kvcq.kernels.causal import attend_causal
from kvcq.models.geometry import plan_geometry
from kvcq.runtime.hf.semantics import Served
from kvcq.runtime.sglang import attend
from kvcq.runtime.sglang.attend import Attention, Rule, size_for
from kvcq.runtime.sglang.layers import shard
from kvcq.runtime.sglang.ranks import head_range
from kvcq.runtime.sglang.session import Board, extend_step
from kvcq.spec.boundary import Boundary
from kvcq.spec.plan import Windows
from tests.runtime.hf.setup import INT2, PAIRS, WINDOWS, codecs_of, host_of, relative, run
from tests.runtime.sglang.stage import PAGE, Stage, served
from tests.tiny import tiny_model

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run in Triton's interpreter here")


def tables_of(model, k=INT2, v=INT2):
    layers = {layer.layer: layer for layer in plan_geometry(model).layers}
    codecs = codecs_of(model, k, v)
    return {
        number: Tables.of(codec, layers[number].kv_heads, layers[number].d_k, layers[number].d_v, torch.float32, CPU)
        for number, codec in codecs.items()
    }


def attention_of(stage, model, max_batch=4, library=frozenset()):
    heads = {"q_heads": model.config.num_attention_heads, "max_batch": max_batch}
    return Attention(stage.tables, stage.caches, stage.req_to_token, stage.exact_from, **heads, library=library)


def draw(count, seed):
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed))


def replay(model, tokens, prompt, boundaries, pair):
    """Logits of a request by itself, cut where its boundaries are, then one token at a time."""
    edges = [0, *(b.position for b in boundaries), prompt, *range(prompt + 1, len(tokens) + 1)]
    sizes = [b - a for a, b in pairwise(edges)]
    with host_of(model, *PAIRS[pair], kernels=False) as host:
        return run(model, host.new_cache(Served(prompt, boundaries)), tokens, sizes)[0]


@pytest.mark.parametrize(
    ("family", "pair", "layers"),
    [("llama", "int2", 2), ("qwen2", "vq", 1), ("gpt_oss", "grouped values", 1)],
)
def test_chunks_prefix_hits_and_decode_equal_the_replay_of_their_boundaries(family, pair, layers):
    # Learned sinks, biases; with two layers the rows of a prefix depend on where its first owner was cut.
    extra = {"layer_types": ["full_attention"] * layers} if family == "gpt_oss" else {}
    model = tiny_model(family, num_hidden_layers=layers, num_key_value_heads=1, **extra)
    first = draw(93, 1)
    second = torch.cat([first[:PAGE], draw(27, 2)])
    third = draw(12, 3)
    stage = Stage(tables_of(model, *PAIRS[pair]), WINDOWS)
    found = {0: [], 1: [], 2: []}
    with served(model, attention_of(stage, model)) as answer:
        a = stage.admit(first)
        found[0].append(answer(stage.extend([(a, 40)])))
        found[0].append(answer(stage.extend([(a, 50)])))
        b, c = stage.admit(second, a, PAGE), stage.admit(third)
        both = answer(stage.extend([(b, 13), (c, 9)], padding=3))
        assert both[22:].isfinite().all()
        found[1].append(both[:13])
        found[2].append(both[13:22])
        # One token of a prompt is a chunk, no decode step.
        both = answer(stage.extend([(c, 1), (b, 10)]))
        found[2].append(both[:1])
        found[1].append(both[1:])
        for rows in ((2, 0, 1), (1, 0)):
            every = answer(stage.decode([(a, b, c)[row] for row in rows], padding=1))
            for index, row in enumerate(rows):
                found[row].append(every[index : index + 1])
    wanted = (
        replay(model, first[:92], 90, (Boundary(40, "carried"),), pair),
        replay(
            model, second[:89], 87, (Boundary(40, "carried"), Boundary(64, "cached"), Boundary(77, "carried")), pair
        )[64:],
        replay(model, third[:11], 10, (Boundary(9, "carried"),), pair),
    )
    for row, logits in enumerate(wanted):
        assert relative(torch.cat(found[row]), logits) < 2e-3


@pytest.mark.parametrize(("family", "pair"), [("llama", "int2"), ("qwen2", "vq"), ("gpt_oss", "int2")])
def test_prompts_that_begin_are_attended_by_a_library_and_stored_as_ever(monkeypatch, family, pair):
    extra = {"layer_types": ["full_attention"] * 2} if family == "gpt_oss" else {}
    model = tiny_model(family, num_hidden_layers=2, num_key_value_heads=1, **extra)
    calls = []

    def spy(q, k, v, spans, scaling, out):
        calls.append(spans)
        attend_causal(q, k, v, spans, scaling, out)

    monkeypatch.setattr(attend, "attend_causal", spy)
    monkeypatch.setattr(attend, "LEAST", 16)
    monkeypatch.setattr(causal, "STEP", 32)

    def answers(library):
        stage = Stage(tables_of(model, *PAIRS[pair]), WINDOWS)
        attention = attention_of(stage, model, library=library)
        assert [name.endswith("long prompts by cuDNN") for name in attention.kernels.values()] == [False, bool(library)]
        with served(model, attention) as answer:
            a, b, c, d = (stage.admit(draw(93, seed)) for seed in (1, 2, 3, 4))
            found = [answer(stage.extend([(a, 70), (b, 32)], padding=3))[:102]]
            # The first has a history, the second is short, the third begins.
            found += [answer(stage.extend([(a, 20), (c, 8), (d, 40)], padding=2))[:68], answer(stage.extend([(b, 9)]))]
            found += [answer(stage.decode([a, b, c, d])), answer(stage.decode([a, b, c, d]))]
        pages = [cache.pages for cache in stage.caches.values()]
        return found, pages

    (ours, plain), (theirs, pages) = answers(frozenset()), answers(frozenset({1}))
    # Learned sinks weigh in: no library.
    assert calls == ([] if family == "gpt_oss" else [((0, 70), (70, 102)), ((28, 68),)])
    for one, two in zip(ours, theirs, strict=True):
        assert relative(two, one) < 1e-5
    assert all(torch.equal(one, two) for one, two in zip(plain, pages, strict=True))


def test_neighbours_padding_and_cuts_for_larger_batches_change_nothing():
    model, pair = tiny_model("llama", num_hidden_layers=1, num_key_value_heads=1), PAIRS["int2"]
    prompts = [draw(count, count) for count in (20, 33, 9)]
    answers = []
    for together in (True, False):
        stage = Stage(tables_of(model, *pair), WINDOWS)
        with served(model, attention_of(stage, model)) as answer:
            requests = [stage.admit(tokens) for tokens in prompts]
            parts = [(request, len(request.tokens) - 1) for request in requests]
            if together:
                logits = [answer(stage.extend(parts, padding=5))[: sum(count for _, count in parts)]]
                logits.append(answer(stage.decode(requests, padding=1))[:3])
                answers.append(torch.cat(logits))
            else:
                logits = [answer(stage.extend([part])) for part in parts]
                logits += [answer(stage.decode([request])) for request in requests]
                answers.append(torch.cat(logits))
    assert relative(*answers) < 1e-5


def test_a_decode_step_is_written_in_place_and_padding_is_nobody():
    stage = Stage({}, WINDOWS)
    board = Board(4, stage.req_to_token, stage.exact_from)
    requests = [stage.admit(draw(100, 1)), stage.admit(draw(100, 2))]
    for request, count in zip(requests, (70, 9), strict=True):
        stage.extend([(request, count)])
    stage.exact_from[requests[1].row] = 5
    step = board.fill(stage.decode(requests, padding=2))
    addresses = [t.data_ptr() for t in (step.slots, step.positions, *vars(step.batch).values())]
    assert step.batch.lengths.tolist() == [71, 10, 0, 0]
    assert step.positions.tolist() == [70, 9, 0, 0]
    assert step.slots.tolist() == [PAGE * requests[0].pages[1] + 6, PAGE * requests[1].pages[0] + 9, -1, -1]
    assert step.batch.slots.tolist() == [1, 2, 0, 0]
    assert step.batch.exact_from.tolist() == [0, 5, 0, 0]
    assert step.batch.page_table[0, :2].tolist() == requests[0].pages
    assert step.requests.tolist() == [0, 1, 2, 3]
    again = board.fill(stage.decode(requests[1:]))
    assert again.batch.lengths.tolist() == [11]
    assert [again.slots.data_ptr(), again.positions.data_ptr()] == addresses[:2]
    assert [t.data_ptr() for t in vars(again.batch).values()] == addresses[2:]
    with pytest.raises(ValueError, match="room is for 4"):
        board.fill(stage.decode(requests, padding=3))


def test_the_tokens_of_an_extend_know_their_requests_and_what_they_read_exactly():
    windows = Windows(sink=4, recent=16)
    stage = Stage({}, windows)
    a, b, c = (stage.admit(draw(200, seed)) for seed in range(3))
    stage.extend([(a, 100), (b, 10)])
    stage.exact_from[a.row] = 96
    batch = stage.extend([(a, 3), (c, 0), (b, 70), (c, 2)], padding=2)
    step = extend_step(batch, stage.req_to_token, stage.exact_from, windows)
    assert step.starts.tolist() == [0, 3, 3, 73, 75]
    assert step.requests.tolist() == [0] * 3 + [2] * 70 + [3] * 2 + [3] * 2
    assert step.positions.tolist() == [100, 101, 102, *range(10, 80), 0, 1, 0, 0]
    assert step.oldest.tolist()[:75] == [96] * 3 + [0] * 72
    assert step.slots[:75].tolist() == batch.out_cache_loc[:75].tolist() and step.slots[75:].tolist() == [-1, -1]
    assert step.batch.lengths.tolist() == [103, 2, 80, 2]
    assert step.batch.page_table[2, :2].tolist() == b.pages
    short = step.narrow(75)
    assert short.tokens == 75 and short.oldest.shape == (75,) and step.narrow(77) is step
    with pytest.raises(ValueError, match="80 tokens"):
        step.narrow(80)


PARTS = st.tuples(st.integers(0, 150), st.integers(0, 90), st.integers(0, 150))


@given(parts=st.lists(PARTS, min_size=1, max_size=5), padding=st.integers(0, 9), sink=st.integers(0, 70))
def test_steps_are_what_a_loop_over_requests_says(parts, padding, sink):
    windows = Windows(sink=sink, recent=16)
    stage = Stage({}, windows, rows=5, pages=30)
    requests = [stage.admit(draw(250, seed)) for seed in range(len(parts))]
    stage.extend([(request, first) for request, (first, _, _) in zip(requests, parts, strict=True)])
    for request, (first, _, since) in zip(requests, parts, strict=True):
        stage.exact_from[request.row] = min(since, first)
    step = extend_step(
        stage.extend([(request, count) for request, (_, count, _) in zip(requests, parts, strict=True)], padding),
        stage.req_to_token,
        stage.exact_from,
        windows,
    )
    wanted = []
    for index, (request, (first, count, since)) in enumerate(zip(requests, parts, strict=True)):
        oldest = max(first - windows.recent, min(since, first))
        for position in range(first, first + count):
            slot = PAGE * request.pages[position // PAGE] + position % PAGE
            wanted.append((slot, position, index, oldest))
    columns = (step.slots, step.positions, step.requests, step.oldest)
    assert [tuple(int(column[t]) for column in columns) for t in range(len(wanted))] == wanted
    assert step.slots[len(wanted) :].tolist() == [-1] * padding
    assert step.starts.diff().tolist() == [count for _, count, _ in parts]
    board = Board(6, stage.req_to_token, stage.exact_from)
    decoded = board.fill(stage.decode(requests, padding=1))
    for index, request in enumerate(requests):
        last = request.stored - 1
        assert int(decoded.positions[index]) == last == int(decoded.batch.lengths[index]) - 1
        assert int(decoded.slots[index]) == PAGE * request.pages[last // PAGE] + last % PAGE
        assert decoded.batch.page_table[index, : len(request.pages)].tolist() == request.pages
    assert (int(decoded.slots[-1]), int(decoded.batch.lengths[-1])) == (-1, 0)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_answer_with_their_heads_as_one_rank_with_all(tp):
    whole = tables_of(tiny_model("llama", num_hidden_layers=1))
    q, k, v = (torch.randn(21, heads, 32, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 3))
    v, rule, share = v[:, :2], Rule(0.2), 4 // tp

    def answers(tables, q, k, v):
        stage = Stage({0: tables}, WINDOWS)
        attention = Attention(
            stage.tables, stage.caches, stage.req_to_token, stage.exact_from, q_heads=q.shape[1], max_batch=1
        )
        request = stage.admit(draw(30, 1))
        found = []
        for start, stop in ((0, 12), (12, 20)):
            attention.begin_extend(stage.extend([(request, stop - start)]), stop - start)
            found.append(attention.extend(0, q[start:stop], k[start:stop], v[start:stop], rule))
        attention.begin_decode(stage.decode([request]))
        return torch.cat([*found, attention.decode(0, q[20:], k[20:], v[20:], rule)])

    wanted, found = answers(whole[0], q, k, v), []
    for rank in range(tp):
        heads = head_range(2, tp, rank)
        own = slice(heads.start, heads.stop)
        found.append(answers(shard(whole[0], heads), q[:, rank * share : (rank + 1) * share], k[:, own], v[:, own]))
    assert relative(torch.cat(found, 1), wanted) < 1e-5


def test_what_is_stored_already_is_not_stored_again():
    model = tiny_model("llama", num_hidden_layers=1)
    stage = Stage(tables_of(model), WINDOWS)
    attention = attention_of(stage, model)
    request = stage.admit(draw(30, 1))
    batch = stage.extend([(request, 20)])
    q, k, v = (torch.randn(20, heads, 32) for heads in (4, 2, 2))
    rule = Rule(0.2)
    attention.begin_extend(batch, 20)
    untouched = [t.clone() for t in (stage.caches[0].pages, stage.caches[0].ring_k, stage.caches[0].sink_v)]
    unsaved = attention.extend(0, q, k, v, rule, save=False)
    for before, after in zip(
        untouched, (stage.caches[0].pages, stage.caches[0].ring_k, stage.caches[0].sink_v), strict=True
    ):
        assert torch.equal(before.nan_to_num(7), after.nan_to_num(7))
    # All rows of the first chunk are its own: codes are not read.
    assert torch.equal(unsaved, attention.extend(0, q, k, v, rule))
    batch = stage.decode([request])
    attention.begin_decode(batch)
    outputs = [attention.decode(0, q[:1], k[:1], v[:1], rule)]
    pages = stage.caches[0].pages.clone()
    outputs.append(attention.decode(0, q[:1], k[1:2], v[1:2], rule, save=False))
    assert torch.equal(pages, stage.caches[0].pages) and torch.equal(*outputs)


def test_sliding_windows_have_work_lists_of_their_own():
    model = tiny_model("llama", num_hidden_layers=1)
    stage = Stage(tables_of(model), WINDOWS)
    attention = attention_of(stage, model)
    request = stage.admit(draw(40, 1))
    attention.begin_extend(stage.extend([(request, 30)]), 30)
    q, k, v = (torch.randn(30, heads, 32) for heads in (4, 2, 2))
    attention.extend(0, q, k, v, Rule(0.2))
    attention.begin_decode(stage.decode([request]))
    whole, cut = (attention.decode(0, q[:1], k[:1], v[:1], Rule(0.2, window=window)) for window in (None, 2))
    exact = torch.stack([v[29], v[0]])
    weights = torch.einsum("hgd,shd->hgs", q[0].view(2, 2, 32), torch.stack([k[29], k[0]])) * 0.2
    wanted = torch.einsum("hgs,shd->hgd", weights.softmax(-1), exact).flatten(0, 1)
    assert relative(cut[0], wanted) < 1e-4 and relative(whole, cut) > 1e-2


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_caps_and_learned_sinks_weigh_as_in_plain_attention(softcap):
    # Centred keys: what their products lack must come back before the cap, and in the sinks' share.
    model = tiny_model("llama", num_hidden_layers=1)
    stage = Stage(tables_of(model), WINDOWS)
    attention = attention_of(stage, model)
    q, k, v = (torch.randn(10, heads, 32, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 3))
    v, sinks = v[:, :2], torch.tensor([0.5, -1.0, 2.0, 0.0])
    rule = Rule(0.3, softcap=softcap, sinks=sinks)
    request = stage.admit(draw(10, 1))
    attention.begin_extend(stage.extend([(request, 9)]), 9)
    found = [attention.extend(0, q[:9], k[:9], v[:9], rule)]
    # The tenth token still reads all keys exactly: three sinks and eight recent ones.
    attention.begin_decode(stage.decode([request]))
    found.append(attention.decode(0, q[9:], k[9:], v[9:], rule))
    logits = 0.3 * torch.einsum("thd,shd->hts", q, k.repeat_interleave(2, 1))
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf)
    weights = torch.cat([logits, sinks[:, None, None].expand(-1, 10, 1)], -1).softmax(-1)[..., :-1]
    wanted = torch.einsum("hts,shd->thd", weights, v.repeat_interleave(2, 1))
    assert relative(torch.cat(found), wanted) < 1e-4


def test_forwards_that_were_not_prepared_are_refused():
    model = tiny_model("llama", num_hidden_layers=1)
    stage = Stage(tables_of(model), WINDOWS)
    attention = attention_of(stage, model)
    q, k, v = (torch.randn(3, heads, 32) for heads in (4, 2, 2))
    with pytest.raises(ValueError, match="prepared was nothing"):
        attention.decode(0, q, k, v, Rule(1.0))
    request = stage.admit(draw(9, 1))
    attention.begin_extend(stage.extend([(request, 2)]))
    with pytest.raises(ValueError, match="an extend of 2"):
        attention.decode(0, q, k, v, Rule(1.0))
    with pytest.raises(ValueError, match="3 tokens"):
        attention.extend(0, q, k, v, Rule(1.0))
    attention.begin_decode(stage.decode([request]))
    with pytest.raises(ValueError, match="a decode step of 1"):
        attention.extend(0, q, k, v, Rule(1.0))
    attention.begin_nothing()
    with pytest.raises(ValueError, match="nothing"):
        attention.extend(0, q, k, v, Rule(1.0))


def test_work_lists_are_cut_for_powers_of_two():
    assert [size_for(batch, 48) for batch in (1, 2, 3, 5, 32, 33, 48)] == [1, 2, 4, 8, 32, 48, 48]


def test_work_lists_of_every_size_share_one_workspace():
    model = tiny_model("llama", num_hidden_layers=2)
    stage = Stage(tables_of(model), WINDOWS)
    attention = attention_of(stage, model)
    attention.reserve(9)
    sizes = [place.size for place in attention._decoders]
    assert sizes == sorted(set(sizes), reverse=True) and sizes[0] == 9 and sizes[-1] == 1
    found = [decoder.partials for decoder in attention._decoders.values()]
    assert {partials.o.data_ptr() for partials in found} == {found[0].o.data_ptr()}
    assert [partials.mass.shape[0] for partials in found] == sizes


def test_every_layer_tells_its_kernel():
    model = tiny_model("llama", num_hidden_layers=2)
    stage = Stage(tables_of(model), WINDOWS)
    told = attention_of(stage, model).kernels
    assert told == {0: "triton", 1: "triton"}
