r"""Soak of ``kvcq serve --engine sglang``: mixed requests from many workers, then the books of an idle server.

    kvcq serve NAME.kvcq --engine sglang --model DIR --port 30000 --trace trace.jsonl \
        -- --enable-metrics --max-total-tokens 40000
    python benchmarks/soak_sglang.py --url http://127.0.0.1:30000 --model DIR --seconds 300 --out soak.json
    python benchmarks/serve_replay.py compare --bundle NAME.kvcq --model DIR --trace trace.jsonl --shard 0/8 soak.json

More workers than fit keep requests in the queue, and long answers in a small pool have some retracted. Draws are
seeded, time is not: which request meets which is another every time. About a tenth of the finished ones are written
to `--out` for `compare`, while the soak goes on: `--keep` of those that are read whole or as a stream.

It ends with 1 when the server fails or answers wrongly, or when anything is still held once nothing runs: requests,
tokens of the pool, rows of the ring, sink entries that copies name, or attention that did not take the kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import sys
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path

import httpx2
from serve_replay import answer_of, question, read_ids

PROMPTS = {"fresh": 4, "shared": 3, "turn": 3, "again": 3, "tiny": 2}
# How a request ends: read whole or as a stream, sampled twice, aborted, or its connection dropped.
ENDS = {"whole": 8, "stream": 2, "twice": 1, "abort": 3, "drop": 2}
LONG = 1 / 12  # of the answers have 1024 to 2048 tokens
GAUGES = ("max_total_num_tokens", "kv_available_tokens", "kv_evictable_tokens", "kv_used_tokens")
LOADS = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")


def spread(rng, least, most):
    """Return a length, its logarithm even."""
    return min(most, round(least * (most / least) ** rng.random()))


def until_none(seconds, faults):
    """Return what `faults` still finds after some seconds, nothing as soon as it finds nothing."""
    end = time.monotonic() + seconds
    while (found := faults()) and time.monotonic() < end:
        time.sleep(0.25)
    return found


class Wrong(Exception):
    """An answer is not what it should be."""


def lines_of(answer):
    """Yield the lines of a stream; nothing but a newline ends one: text may hold what Unicode calls line ends too."""
    rest = b""
    for data in answer.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def loads(http):
    """Return requests and tokens of each scheduler: what neither the free list nor the tree holds is used."""
    return http.get("/v1/loads").raise_for_status().json()["loads"]


def books(http):
    """Return kvcq's record of each scheduler."""
    return [state["kvcq"] for state in http.get("/server_info").raise_for_status().json()["internal_states"]]


def metrics(http):
    """Return the values of SGLang's metrics; none without ``--enable-metrics``."""
    found = {}
    for name, value in re.findall(r"^sglang:(\w+)(?:\{.*\})? (\S+)$", http.get("/metrics").text, re.M):
        found.setdefault(name, []).append(float(value))
    return found


class Soak:
    """Workers and what they count; prompts are cut from `ids`, with its answer a request has `limit` tokens at most."""

    def __init__(self, options, ids, limit):
        self.options, self.ids, self.limit = options, ids, limit
        rng = random.Random(options.seed)
        self.longest = min(options.longest, limit // 2)
        self.beginnings = [self._cut(rng, spread(rng, 100, min(4000, self.longest // 2))) for _ in range(6)]
        self.asked, self.talks = deque(maxlen=64), deque(maxlen=64)
        self.counts, self.faults, self.answers = Counter(crashes=0, refused=0), Counter(), []
        self.lock, self.over = threading.Lock(), threading.Event()
        # Not even an empty list: what a former soak left is not this one's.
        self.saved = -1

    def _cut(self, rng, length):
        at = rng.randrange(max(len(self.ids) - length, 1))
        return self.ids[at : at + length]

    def _count(self, **counts):
        with self.lock:
            self.counts.update(counts)

    def _fault(self, text):
        with self.lock:
            self.faults[text[:300]] += 1

    def prompt(self, rng):
        """Return tokens and their kind; before there is anything to go on from, those of another kind."""
        kind = rng.choices(list(PROMPTS), PROMPTS.values())[0]
        rest = spread(rng, 1, self.longest)
        if kind == "tiny":
            return self._cut(rng, rng.randint(1, 63)), kind
        if kind == "again" and self.asked:
            return rng.choice(list(self.asked)), kind
        if kind == "turn" and self.talks:
            before = rng.choice(list(self.talks))
            if len(before) + 200 <= self.longest:
                return before + self._cut(rng, spread(rng, 1, 200)), kind
        if kind == "shared":
            return (rng.choice(self.beginnings) + self._cut(rng, rest))[: self.longest], kind
        return self._cut(rng, rest), "fresh"

    def work(self, worker):
        """Send one request after another."""
        rng = random.Random(f"{self.options.seed}/{worker}")
        with httpx2.Client(base_url=self.options.url, timeout=600, trust_env=False) as http:
            for number in itertools.count():
                if self.over.is_set():
                    return
                # All ids are of one length: an abort meets all requests whose ids begin with the one it names.
                self.one(http, rng, f"{self.options.name}-{worker:04d}-{number:06d}")

    def one(self, http, rng, rid):
        """Send a request and count how it ended."""
        prompt, kind = self.prompt(rng)
        new = rng.randint(1024, 2048) if rng.random() < LONG else spread(rng, 1, 512)
        body = question(rid, prompt, min(new, self.limit - len(prompt)))
        end = rng.choices(list(ENDS), ENDS.values())[0]
        keep = end in ("whole", "stream") and rng.random() < self.options.keep
        if not keep:
            del body["return_logprob"], body["logprob_start_len"], body["top_logprobs_num"]
        if end == "twice":
            body["sampling_params"]["n"] = 2
        timer = threading.Timer(rng.expovariate(0.5), self.abort, (rid,))
        chunks = rng.randint(0, 60) if end == "drop" else None
        self.asked.append(prompt)
        self._count(asked=1, **{f"prompt: {kind}": 1, f"end: {end}": 1})
        if end == "abort":
            timer.start()
        try:
            if end in ("stream", "drop"):
                answers = self.stream(http, body, chunks)
            else:
                found = self.checked(http.post("/generate", json=body)).json()
                answers = found if isinstance(found, list) else [found]
            for answer in answers:
                self.judge(body, end, answer)
            if answers:
                self.talks.append(prompt + answers[0]["output_ids"])
            if keep:
                self.keep(body, answers[0]["meta_info"])
        except Wrong as error:
            self._fault(str(error))
        except httpx2.HTTPError as error:
            self._count(crashes=1)
            self._fault(repr(error))
            if isinstance(error, httpx2.ConnectError):
                self.over.set()
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            self._fault(f"an answer cannot be read: {error!r}")
        finally:
            timer.cancel()

    def stream(self, http, body, chunks):
        """Return the last answer of a stream, or none after leaving it behind `chunks` of them."""
        last = None
        with http.stream("POST", "/generate", json=body | {"stream": True}) as answer:
            self.checked(answer)
            for number, line in enumerate(line for line in lines_of(answer) if line.startswith(b"data: {")):
                last = json.loads(line[6:])
                if "error" in last:
                    raise Wrong(f"in a stream: {last['error']}")
                if number == chunks and not last["meta_info"]["finish_reason"]:
                    self._count(dropped=1)
                    return []
        return [last]

    def checked(self, answer):
        """Return a response, unless it is a refusal or a failure."""
        if answer.status_code != 200:
            self._count(**{"crashes" if answer.status_code >= 500 else "refused": 1})
            answer.read()
            raise Wrong(f"HTTP {answer.status_code}: {answer.text}")
        return answer

    def abort(self, rid):
        """Abort a request; one that is over already is no fault."""
        with suppress(httpx2.HTTPError):
            httpx2.post(f"{self.options.url}/abort_request", json={"rid": rid}, timeout=60, trust_env=False)

    def judge(self, body, end, answer):
        """Count a finished or aborted request, if that is how it should have ended."""
        meta, made = answer["meta_info"], len(answer["output_ids"])
        reason = meta["finish_reason"]
        self._count(tokens=made, retracted=int(meta.get("num_retractions", 0) > 0))
        if reason["type"] == "abort" and end == "abort":
            self._count(aborted=1)
        elif reason["type"] != "length" or made != body["sampling_params"]["max_new_tokens"]:
            raise Wrong(f"ended otherwise than asked: {reason}")
        else:
            self._count(finished=1, prompts=meta["prompt_tokens"], cached=meta["cached_tokens"])

    def keep(self, body, meta):
        """Keep a finished request for the replay."""
        answer = answer_of(body, meta)
        values = [*answer["input"], *answer["output"], *answer["gaps"]]
        asked = len(answer["prompt"]) - answer["start"] - 1
        if len(answer["input"]) != asked or not all(math.isfinite(value) for value in values):
            raise Wrong("log-probs are missing or no numbers")
        with self.lock:
            self.answers.append(answer)

    def run(self, http):
        """Have the workers work; return the most requests that ran and waited, and the fullest pool."""
        most = Counter()
        self.save()
        threads = [threading.Thread(target=self.work, args=(n,), daemon=True) for n in range(self.options.workers)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + self.options.seconds
        while any(thread.is_alive() for thread in threads):
            if time.monotonic() >= end:
                self.over.set()
            self.save()
            # A worker will notice a failure.
            with suppress(httpx2.HTTPError):
                for load in loads(http):
                    most |= Counter({name: load[name] for name in LOADS})
            time.sleep(0.5)
        self.save()
        return most

    def save(self):
        """Write what is kept so far: replays need not wait for the end."""
        with self.lock:
            answers = list(self.answers)
        if self.options.out is None or len(answers) == self.saved:
            return
        part = self.options.out.with_suffix(".part")
        try:
            part.write_text(json.dumps({"name": self.options.name, "answers": answers}))
            part.replace(self.options.out)
            self.saved = len(answers)
        except OSError as error:
            self._fault(f"answers are not written: {error}")


def audit(http, first):
    """Return what an idle server still holds, one line for each fault; its cache is flushed on the way."""

    def held(parts, names):
        return [f"{name} is {part[name]}" for part in parts for name in names if part[name]]

    def unflushed():
        gauges = metrics(http)
        whole, *left = (gauges.get(name) for name in GAUGES)
        return [f"{left} of {whole} tokens after the flush"] if left != [whole, [0.0], [0.0]] else []

    wrong = until_none(60, lambda: held(loads(http), LOADS))
    # Copies of sinks wait for the prefill after next, and a prompt of one token has no sinks to keep. A flush would
    # clear the books and hide what is lost: they are read before it.
    tiny = {"input_ids": [first], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}
    for _ in range(2):
        http.post("/generate", json=tiny).raise_for_status()
    wrong += until_none(10, lambda: held(books(http), ("rings", "pinned", "fallbacks")))
    flushed = http.post("/flush_cache")
    if flushed.status_code != 200:
        return [*wrong, f"the cache is not flushed: {flushed.text.strip()}"]
    # An idle server writes its gauges every 30 seconds.
    wrong += until_none(45, unflushed)
    return wrong + [f"{line} after the flush" for line in held(books(http), ("rings", "pinned", "cached"))]


def main():
    """Read the command line, soak, and hold the books."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    numbers = {"seconds": 300.0, "workers": 24, "longest": 8000, "seed": 0, "keep": 0.15}
    for name, value in ({"data": "builtin:pydoc-topics", "name": "soak"} | numbers).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    http = httpx2.Client(base_url=options.url, timeout=60, trust_env=False)
    before = metrics(http)
    if "max_total_num_tokens" not in before:
        sys.exit("/metrics tells nothing: start the server with --enable-metrics")
    info = http.get("/server_info").raise_for_status().json()
    limit = min(info["max_req_input_len"], info["max_total_num_tokens"] - 192)
    soak = Soak(options, read_ids(options.model, options.data, 40 * options.longest), limit)
    most = soak.run(http)
    after, wrong = before, [f"{count} x {text}" for text, count in soak.faults.items()]
    try:
        after = metrics(http)
        wrong += audit(http, soak.ids[0])
    except (httpx2.HTTPError, KeyError) as error:
        wrong.append(f"the books cannot be read: {error!r}")
    totals = ("num_retracted_requests_total", "num_aborted_requests_total", "evicted_tokens_total")
    total = {name: sum(after.get(name, [])) - sum(before.get(name, [])) for name in totals}
    summary = {"seed": options.seed, "seconds": options.seconds, "capacity": info["max_total_num_tokens"]}
    summary |= {"counts": soak.counts, "most": most, "server": total, "kept": len(soak.answers), "wrong": wrong}
    print(json.dumps(summary))
    for name, value in {**soak.counts, **most, **total}.items():
        print(f"{name:32} {value:12,.0f}")
    for line in wrong:
        print("wrong:", line)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
