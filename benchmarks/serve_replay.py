"""A running SGLang with kvcq beside `runtime/hf`: the same prompts, cut at the same boundaries.

    kvcq serve NAME.kvcq --engine sglang --model DIR --port 8000 --trace trace.jsonl -- --chunked-prefill-size 2048
    python benchmarks/serve_replay.py ask --url http://127.0.0.1:8000 --model DIR --name cold1 --out cold1.json
    python benchmarks/serve_replay.py ask ... --name warm1 --keep --out warm1.json          (again, prefixes kept)
    python benchmarks/serve_replay.py ask ... --name cold16 --batch 16 --out cold16.json
    python benchmarks/serve_replay.py compare --bundle NAME.kvcq --model DIR --trace trace.jsonl cold1.json ...
    python benchmarks/serve_replay.py compare ... --shard 0/2 --out 0.json cold1.json ...      (in many processes)
    python benchmarks/serve_replay.py pool 0.json 1.json

`ask` sends prompts of 20 to `--longest` tokens, every fifth behind the beginning of the one before, and keeps greedy
tokens and log-probs. `compare` replays each list of boundaries twice in transformers, the server's own tokens fed: in
float32 by torch alone, which is the reference, and in bfloat16 by the kernels. It prints how far the server and the
bfloat16 replay are from the reference; a server that is right is no further than the replay. `pool` prints what
several processes found as one. Without `--bundle` the server is one with a BF16 cache. Each prefill of a retracted
request is replayed with the tokens that it led to, those before them in its prompt; what the trace cannot tell is
counted as not replayed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import httpx2

LAST = 200  # tokens of a prompt with log-probs: fewer than a prefix hit leaves to compute


def call(url, body=None):
    """Return what a server answers."""
    answer = httpx2.request("GET" if body is None else "POST", url, json=body, timeout=600, trust_env=False)
    answer.raise_for_status()
    return answer


def read_ids(folder, data, wanted):
    """Return the token ids of the first documents of `data`, little more than `wanted` if there are as many."""
    from transformers import AutoTokenizer

    from kvcq.data.documents import iter_documents

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = []
    for document in iter_documents([data]):
        ids += tokenizer(document.text or "").input_ids
        if len(ids) > wanted:
            break
    return ids


def make_prompts(folder, data, count, longest, seed):
    """Return lists of token ids, lengths spread evenly over their logarithms."""
    ids = read_ids(folder, data, 3 * count * longest // 4)
    rng, prompts, at = random.Random(seed), [], 0
    for index in range(count):
        length = round(20 * (longest / 20) ** (index / (count - 1)))
        prompt = ids[at : at + length]
        at = (at + length) % max(len(ids) - longest, 1)
        if index % 5 == 4:
            shared = len(prompts[-1]) * 3 // 4
            prompt = prompts[-1][:shared] + prompt[shared:]
        prompts.append(prompt)
    rng.shuffle(prompts)
    return prompts


def question(rid, prompt, new):
    """Return a request for greedy tokens and the log-probs that `answer_of` keeps."""
    sampling = {"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": prompt, "rid": rid, "sampling_params": sampling}
    return body | {"return_logprob": True, "logprob_start_len": max(len(prompt) - LAST, 0), "top_logprobs_num": 2}


def answer_of(body, meta):
    """Return what `compare` needs of the answer to a `question`."""
    given, chosen = meta["input_token_logprobs"], meta["output_token_logprobs"]
    return {
        "rid": body["rid"],
        "prompt": body["input_ids"],
        "start": body["logprob_start_len"],
        "cached": meta["cached_tokens"],
        "input": [entry[0] for entry in given[1:]],
        "tokens": [entry[1] for entry in chosen],
        "output": [entry[0] for entry in chosen],
        "gaps": [top[0][0] - top[1][0] for top in meta["output_top_logprobs"]],
    }


def ask(options):
    """Send the prompts and write what comes back."""
    prompts = make_prompts(options.model, options.data, options.prompts, options.longest, options.seed)
    if not options.keep:
        call(f"{options.url}/flush_cache", {})

    def one(index):
        body = question(f"{options.name}-{index}", prompts[index], options.new)
        return answer_of(body, call(f"{options.url}/generate", body).json()["meta_info"])

    with ThreadPoolExecutor(options.batch) as pool:
        answers = list(pool.map(one, range(len(prompts))))
    options.out.write_text(json.dumps({"name": options.name, "answers": answers}))
    print(options.name, len(answers), "answers,", sum(a["cached"] for a in answers), "tokens from the cache")


class Replay:
    """The model in transformers, with the bundle's cache or without.

    Args:
        options: Of the command line.
        exact: In float32 by torch alone: the reference. Otherwise in bfloat16 by kernels, as the server does.
    """

    def __init__(self, options, exact):
        from kvcq.models.load import load_model
        from kvcq.runtime.hf.load import open_host

        self.loaded = load_model(options.model, dtype="float32" if exact else "bfloat16")
        kernels = False if exact else None
        self.host = None if options.bundle is None else open_host(options.bundle, self.loaded, kernels=kernels)

    def logits(self, prompt, start, boundaries, tokens):
        """Return log-probs behind the tokens of the prompt from `start` on, and behind all but the last of `tokens`."""
        import torch
        from transformers import DynamicCache

        from kvcq.models.library import forward
        from kvcq.runtime.hf.semantics import Served

        model, served = self.loaded.model, Served(len(prompt), boundaries)
        cache = DynamicCache() if self.host is None else self.host.new_cache(served)
        ids, found = torch.tensor(prompt), []
        edges = [0, *(b.position for b in boundaries), len(prompt)]
        with torch.inference_mode():
            for first, stop in pairwise(edges):
                keep = max(min(stop - first, stop - start), 1)
                part = forward(model, ids[None, first:stop], cache=cache, keep=keep)[0]
                found += [part] if stop > start else []
            found += [forward(model, torch.tensor([[token]]), cache=cache, keep=1)[0] for token in tokens[:-1]]
            return torch.cat(found).float().log_softmax(-1)


class Tally:
    """Differences from the reference, and tokens that it would not have chosen."""

    def __init__(self, differences=(), gaps=(), tokens=0):
        self.differences, self.gaps, self.tokens = list(differences), list(gaps), tokens

    @classmethod
    def of(cls, reference, values, targets, chosen):
        """Compare log-probs `values` of `targets`, and the last tokens `chosen` greedily."""
        own = reference.gather(1, targets[:, None])[:, 0]
        last = reference[-len(chosen) :]
        gaps = last.amax(-1) - last.gather(1, chosen[:, None])[:, 0]
        return cls((own - values.to(own.device)).abs().tolist(), [g for g in gaps.tolist() if g > 0], len(chosen))

    def join(self, other):
        """Count what another counted."""
        self.differences += other.differences
        self.gaps += other.gaps
        self.tokens += other.tokens

    def __str__(self):
        ordered, gaps = sorted(self.differences) or [0.0], sorted(self.gaps)
        return (
            f"mean {sum(ordered) / len(ordered):.4f} p99 {ordered[int(0.99 * len(ordered))]:.3f} max {ordered[-1]:.3f} "
            f"nats; {len(gaps)} of {self.tokens} tokens chosen otherwise, by {sum(gaps) / max(len(gaps), 1):.3f} nats "
            f"in the mean, {max(gaps, default=0.0):.3f} at most"
        )


class Found:
    """What the replays of one run found.

    Attributes:
        numbers: Which answers.
        sides: A tally of the server and of the replay in bfloat16.
        cuts: KL from the first run of prompts that were cut otherwise there.
        counts: Of answers, those `retracted` and prefilled again, and of their prefills those `not replayed`.
    """

    def __init__(self):
        self.numbers = []
        self.sides = {"server": Tally(), "transformers, bfloat16": Tally()}
        self.cuts = {"other tokens from the cache": [], "chunks cut elsewhere": []}
        self.counts = Counter(retracted=0, **{"not replayed": 0})

    def plain(self):
        """Return it for JSON."""
        sides = {who: vars(tally) for who, tally in self.sides.items()}
        return {"numbers": self.numbers, "sides": sides, "cuts": self.cuts, "counts": self.counts}

    def join(self, plain):
        """Add what another process found.

        Raises:
            ValueError: answers that are counted already.
        """
        if twice := sorted(set(self.numbers) & set(plain["numbers"])):
            raise ValueError(f"answers {twice} are counted already")
        self.numbers += plain["numbers"]
        for who, tally in plain["sides"].items():
            self.sides[who].join(Tally(**tally))
        for kind, values in plain["cuts"].items():
            self.cuts[kind] += values
        self.counts.update(plain["counts"])

    def print(self, name):
        """Print a line for each side and each kind of cuts."""
        told = ", ".join([f"{len(self.numbers)} answers", *(f"{count} {what}" for what, count in self.counts.items())])
        for who, tally in self.sides.items():
            print(f"{name} | {who} | {tally} | {told}", flush=True)
        for kind, values in self.cuts.items():
            if values:
                mean = sum(values) / len(values)
                print(
                    f"{name} | KL from the first run, {kind}: mean {mean:.4f}, max {max(values):.4f}, "
                    f"{len(values)} prompts",
                    flush=True,
                )


def usable(record):
    """Tell whether a list of boundaries says it all: what others computed of it lies behind its last prefix hit."""
    if record is None or record.decoded:
        return False
    cached = max((b.position for b in record.boundaries if b.kind == "cached"), default=0)
    return all(start >= cached for start, _ in record.adopted)


def read_records(path):
    """Return the lines of a trace by request, in their order; none of what is not traced."""
    from kvcq.runtime.sglang.trace import read_trace

    records = {}
    for record in () if path is None else read_trace(path):
        records.setdefault(record.rid, []).append(record)
    return records


def passes(answer, records):
    """Return (record, first, stop): which of the answer's tokens each prefill led to.

    A retracted request is prefilled again with the tokens that it had: the next one comes of its last row, and every
    token comes of the last prefill before it.
    """
    starts = [record.prompt - len(answer["prompt"]) for record in records]
    begin = max((index for index, start in enumerate(starts) if start == 0), default=len(starts))
    stops = [*starts[begin + 1 :], len(answer["tokens"])][: len(starts) - begin]
    found = [part for part in zip(records[begin:], starts[begin:], stops, strict=True) if part[1] < part[2]]
    return found or [(None, 0, len(answer["tokens"]))]


def compare(options):
    """Replay and print."""
    import torch

    records = read_records(options.trace)
    runs = {run["name"]: run["answers"] for run in (json.loads(path.read_text()) for path in options.answers)}
    index, of = options.shard
    exact, served = Replay(options, True), Replay(options, False)
    first, known, result = {}, {}, {}
    for name, answers in runs.items():
        side = result[name] = Found()
        for number, answer in list(enumerate(answers))[index::of]:
            if options.only and number not in options.only:
                continue
            found = passes(answer, records.get(answer["rid"], []))
            side.numbers.append(number)
            side.counts["retracted"] += len(found) > 1
            for record, begin, stop in found:
                if options.trace is not None and not usable(record):
                    side.counts["not replayed"] += 1
                    continue
                boundaries, tokens = () if record is None else record.boundaries, answer["tokens"][begin:stop]
                prompt, output = answer["prompt"] + answer["tokens"][:begin], answer["output"][begin:stop]
                # Log-probs of the prompt are those of the first prefill.
                start, given = (len(prompt) - 1, []) if begin else (answer["start"], answer["input"])
                key = (number, boundaries, begin, tuple(tokens))
                reference, other = known.get(key) or [
                    replay.logits(prompt, start, boundaries, tokens) for replay in (exact, served)
                ]
                targets = torch.tensor(prompt[start + 1 :] + tokens, device=reference.device)
                values, own = torch.tensor(given + output), other.gather(1, targets[:, None])[:, 0]
                both = (values, targets[-len(tokens) :]), (own, other[-len(tokens) :].argmax(-1))
                for (who, tally), (own_values, chosen) in zip(side.sides.items(), both, strict=True):
                    alone = Tally.of(reference, own_values, targets, chosen)
                    tally.join(alone)
                    if options.only:
                        print(f"{answer['rid']}, {len(prompt)} tokens, {boundaries} | {who} | {alone}", flush=True)
                if len(runs) == 1 or len(found) > 1:
                    continue
                # Kept for the other runs.
                known[key] = reference, other
                cold = first.setdefault(number, (boundaries, reference))
                if cold[0] != boundaries:
                    a, b = (x[: -len(tokens)] for x in (cold[1], reference))
                    one, two = ([c.position for c in cuts if c.kind == "cached"] for cuts in (cold[0], boundaries))
                    kind = list(side.cuts)[one == two]
                    side.cuts[kind].append(float((a.exp() * (a - b)).sum(-1).mean()))
        side.print(name)
        if options.out is not None:
            options.out.write_text(json.dumps({name: side.plain() for name, side in result.items()}))
    _between(runs, records)


def pool(options):
    """Print what several processes found as one."""
    result = {}
    for path in options.found:
        for name, plain in json.loads(path.read_text()).items():
            try:
                result.setdefault(name, Found()).join(plain)
            except ValueError as error:
                sys.exit(f"{path}: {name}: {error}")
    for name, side in result.items():
        side.print(name)


def _between(runs, records):
    """Compare the answers of the runs with each other where boundaries are equal."""
    names = list(runs)
    for name in names[1:]:
        equal = differ = other = 0
        worst = 0.0
        for a, b in zip(runs[names[0]], runs[name], strict=True):
            one, two = ([(r.prompt, r.boundaries) for r in records.get(x["rid"], [])] for x in (a, b))
            if one and two and one != two:
                other += 1
                continue
            step = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if x != y), None)
            equal, differ = equal + (step is None), differ + (step is not None)
            worst = max(worst, 0.0 if step is None else max(a["gaps"][step], b["gaps"][step]))
        print(
            f"{names[0]} and {name}: {equal} equal, {differ} part at a gap of {worst:.3f} nats at most, "
            f"{other} have other boundaries"
        )


def main():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("ask")
    one.set_defaults(run=ask)
    one.add_argument("--url", required=True)
    one.add_argument("--name", required=True)
    one.add_argument("--data", default="builtin:pydoc-topics")
    one.add_argument("--prompts", type=int, default=50)
    one.add_argument("--longest", type=int, default=8000)
    one.add_argument("--new", type=int, default=16)
    one.add_argument("--batch", type=int, default=1)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--keep", action="store_true", help="keep the server's radix cache")
    one.add_argument("--out", type=Path, required=True)
    two = commands.add_parser("compare")
    two.set_defaults(run=compare)
    two.add_argument("--bundle", help="without it: transformers with a BF16 cache")
    two.add_argument("--trace", type=Path)
    two.add_argument("--shard", type=lambda text: tuple(map(int, text.split("/"))), default=(0, 1))
    two.add_argument(
        "--only", type=lambda text: {int(n) for n in text.split(",")}, help="prompts, each with its own line"
    )
    two.add_argument("--out", type=Path, help="for pool")
    two.add_argument("answers", type=Path, nargs="+")
    three = commands.add_parser("pool")
    three.set_defaults(run=pool)
    three.add_argument("found", type=Path, nargs="+")
    for command in (one, two):
        command.add_argument("--model", required=True)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
