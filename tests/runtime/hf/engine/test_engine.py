from __future__ import annotations

import gc
import inspect
import threading
import time
import weakref

import pytest
import torch

from kvcq.models.library import forward
from kvcq.runtime.hf.engine.engine import Refused
from kvcq.runtime.hf.engine.request import Done, Failed, State
from kvcq.runtime.hf.engine.sampling import Sampling
from tests.runtime.hf.engine.setup import Client, answer, ask, decode, running, tiny_host


@pytest.fixture(scope="module")
def setup():
    model, host = tiny_host()
    with host:
        yield model, host


def generated(model, host, question):
    """What the library's own generate gives on the same kind of cache."""
    prompt = torch.tensor([question.prompt])
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    out = model.generate(
        prompt,
        **{name: host.new_cache()},
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=question.max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(question.prompt) :].tolist()


@pytest.mark.parametrize("length", [1, 5, 16, 90])
def test_greedy_answers_are_those_of_generate(setup, length):
    question = ask(seed=length, length=length, max_tokens=20)
    with running(*setup, chunk=512) as engine:
        client = answer(engine, question)
    assert client.ids == generated(*setup, question)
    assert client.end == Done("length", 20) and client.text == decode(client.ids)


def test_chunks_do_not_change_the_answer(setup):
    question = ask(length=70)
    found = []
    for chunk in (7, 16, 512):
        with running(*setup, chunk=chunk) as engine:
            found.append(answer(engine, question).ids)
    assert found[0] == found[1] == found[2]


def questions():
    drawn = Sampling(temperature=1.0, seed=5)
    return [
        ask(0, length=60),
        ask(1, length=3, max_tokens=20),
        ask(2, length=33, sampling=drawn),
        ask(3, length=90, max_tokens=4),
        ask(4, length=20, sampling=Sampling(temperature=0.7, top_p=0.8, top_k=20, seed=9, scores=3)),
        ask(5, length=47, prompt_scores=True, sampling=Sampling(scores=1)),
    ]


def test_an_answer_does_not_depend_on_its_neighbours(setup):
    alone = []
    for question in questions():
        with running(*setup) as engine:
            alone.append(answer(engine, question))
    with running(*setup, running=4) as engine:
        clients = [Client() for _ in alone]
        engine.submit(list(zip(questions(), clients, strict=True)))
        for client in clients:
            client.wait()
    for together, single in zip(clients, alone, strict=True):
        assert (together.text, together.tokens, together.scored) == (single.text, single.tokens, single.scored)
        assert together.end == single.end


def test_requests_take_turns(setup):
    order = []
    with running(*setup, chunk=16) as engine:
        clients = [Client(lambda _, name=name: order.append(name)) for name in "ab"]
        engine.submit([(ask(seed, length=16, max_tokens=10), client) for seed, client in enumerate(clients)])
        for client in clients:
            client.wait()
    assert order.index("b") < 3 and order.index("a", 10) < len(order)


def test_prompt_scores_are_the_log_probabilities_of_the_prompt(setup):
    question = ask(length=40, max_tokens=0, prompt_scores=True, sampling=Sampling(scores=2))
    with running(*setup, chunk=512) as engine:
        client = answer(engine, question)
    with running(*setup, chunk=7) as engine:
        pieces = answer(engine, question).scored
    assert client.end == Done("length", 0) and client.text == ""
    assert [token.id for token in client.scored] == list(question.prompt)
    assert client.scored[0].logprob is None
    model, host = setup
    logits = forward(model, torch.tensor([question.prompt]), cache=host.new_cache())[0]
    wanted = logits.log_softmax(-1)[range(39), list(question.prompt[1:])]
    assert torch.allclose(torch.tensor([token.logprob for token in client.scored[1:]]), wanted, atol=1e-5)
    # Rows are rounded to bfloat16, on either side of a border when products are summed in another order.
    assert torch.allclose(torch.tensor([token.logprob for token in pieces[1:]]), wanted, atol=2e-2)
    assert all(len(token.top) == 2 for token in client.scored[1:])


def test_stop_tokens_and_stop_texts_end_an_answer(setup):
    with running(*setup) as engine:
        whole = answer(engine, ask(max_tokens=20))
        stopped = answer(engine, ask(max_tokens=20, stop_ids=frozenset(whole.ids[5:6])))
        at = whole.ids.index(whole.ids[5])
        assert stopped.ids == whole.ids[:at] and stopped.end == Done("stop", at + 1)
        stop = whole.text[4:7]
        cut = answer(engine, ask(max_tokens=20, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.end.reason == "stop"


def test_a_client_that_leaves_frees_its_memory(setup):
    caches = []
    model, host = setup

    def new_cache():
        cache = host.new_cache()
        caches.append(weakref.ref(cache))
        return cache

    with running(model, host) as engine:
        engine._new_cache = new_cache
        client = Client()
        (request,) = engine.submit([(ask(length=30, max_tokens=3000), client)])
        assert client.begun.wait(30) and engine.cache_bytes() > 0 and engine.reserved_tokens >= 3030
        engine.cancel(request)
        engine.cancel(request)
        deadline = time.monotonic() + 20
        while engine.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.reserved_tokens == 0 and request.state is State.ENDED and client.end is None
        assert answer(engine, ask()).end.reason == "length"
    gc.collect()
    assert [ref() for ref in caches] == [None, None]
    assert engine.counts.failed["cancelled"] == 1


def test_a_request_that_waits_can_leave_too(setup):
    with running(*setup, running=1) as engine:
        first, second = Client(), Client()
        (busy,) = engine.submit([(ask(max_tokens=3000), first)])
        (queued,) = engine.submit([(ask(), second)])
        assert first.begun.wait(30)
        engine.cancel(queued)
        while engine.waiting:
            time.sleep(0.01)
        assert busy.state is State.DECODE and queued.state is State.ENDED


def test_a_full_queue_refuses_all_of_a_submission(setup):
    with running(*setup, running=1, queue=2) as engine:
        client = Client()
        engine.submit([(ask(max_tokens=3000), client)])
        assert client.begun.wait(30)
        with pytest.raises(Refused) as refused:
            engine.submit([(ask(), Client())] * 3)
        assert not refused.value.closing and engine.waiting == 0
        engine.submit([(ask(), Client())] * 2)
        with pytest.raises(Refused, match="2 are waiting"):
            engine.submit([(ask(), Client())])


def test_requests_wait_for_pages(setup):
    with running(*setup, pages=2, running=4) as engine:
        clients = [Client() for _ in range(3)]
        engine.submit([(ask(seed, length=60, max_tokens=40), client) for seed, client in enumerate(clients)])
        assert clients[0].begun.wait(30)
        assert (engine.running, engine.waiting) == (1, 2)
        for client in clients:
            assert client.wait().end.reason == "length"
        with pytest.raises(ValueError, match="more than 2 pages"):
            engine.submit([(ask(length=60, max_tokens=200), Client())])


def test_time_runs_out_in_the_queue_and_on_the_way(setup):
    with running(*setup, running=1, timeout=0.4) as engine:
        clients = [Client(), Client()]
        engine.submit([(ask(max_tokens=3000), client) for client in clients])
        for client in clients:
            assert client.wait().end == Failed("timeout", "no complete answer within 0.4 seconds")
        assert clients[0].tokens and not clients[1].tokens
        assert answer(engine, ask(max_tokens=2)).end.reason == "length"


def test_closing_lets_short_answers_finish_and_ends_long_ones(setup):
    with running(*setup) as engine:
        short, long = Client(), Client()
        engine.submit([(ask(max_tokens=30), short), (ask(max_tokens=3000), long)])
        assert long.begun.wait(30)
        engine.close(1.5)
        with pytest.raises(Refused) as refused:
            engine.submit([(ask(), Client())])
        assert refused.value.closing
        assert short.wait().end.reason == "length"
        assert long.wait().end == Failed("shutdown", "the server is shutting down")


def test_a_request_that_fails_takes_nobody_along(setup):
    def broken(ids):
        if len(ids) and ids[-1] in bad:
            raise RuntimeError("no such character")
        return decode(ids)

    bad = set()
    with running(*setup, decode=broken) as engine:
        fine = answer(engine, ask(1))
        bad.update(answer(engine, ask(0)).ids[3:4])
        clients = [Client(), Client()]
        engine.submit([(ask(0), clients[0]), (ask(2, max_tokens=1), clients[1])])
        failed = clients[0].wait().end
        assert isinstance(failed, Failed) and failed.trouble == "internal" and "no such character" in failed.message
        clients[1].wait()
        bad.clear()
        assert answer(engine, ask(1)).text == fine.text


def test_logits_that_are_not_finite_fail_the_request(setup, monkeypatch):
    model, host = setup
    weight = model.lm_head.weight
    before = weight[5].clone()
    with running(model, host) as engine:
        weight[5] = float("nan")
        end = answer(engine, ask()).end
        weight[5] = before
        assert isinstance(end, Failed) and "not finite" in end.message
        assert answer(engine, ask()).end.reason == "length"


def test_a_client_without_an_event_loop_is_dropped(setup):
    def gone(_):
        raise RuntimeError("Event loop is closed")

    with running(*setup) as engine:
        engine.submit([(ask(max_tokens=3000), gone)])
        assert answer(engine, ask(1)).end.reason == "length"
        while engine.running:
            time.sleep(0.01)
        assert engine.counts.failed["cancelled"] == 1


def test_many_clients_at_once(setup):
    """Threads submit, cancel and wait in any order; every answer that comes is the one that comes alone."""
    with running(*setup, running=3, queue=100) as engine:
        wanted = [answer(engine, ask(seed, length=5 + seed, max_tokens=5)).ids for seed in range(6)]
        problems = []

        def client_thread(number):
            draw = torch.Generator().manual_seed(number)
            for _ in range(4):
                seed = int(torch.randint(0, 6, (1,), generator=draw))
                client = Client()
                (request,) = engine.submit([(ask(seed, length=5 + seed, max_tokens=5), client)])
                if torch.rand(1, generator=draw) < 0.25:
                    engine.cancel(request)
                elif client.wait().ids != wanted[seed]:
                    problems.append(seed)

        threads = [threading.Thread(target=client_thread, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not problems and sum(engine.counts.done.values()) + engine.counts.failed["cancelled"] == 6 + 32
        while engine.running or engine.waiting:
            time.sleep(0.01)


def test_every_kind_of_layer_can_be_served():
    model, host = tiny_host("gemma2")
    with host, running(model, host) as engine:
        question = ask(length=50, max_tokens=10)
        assert answer(engine, question).ids == answer(engine, question).ids
