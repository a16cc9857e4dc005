"""Greedy answers of the packed cache against the simulated one and an exact pass in float64, alone and in a batch.

Usage: python benchmarks/near_ties.py --model MODEL --fits FIT [FIT ...] [--data builtin:pydoc-topics]
           [--lengths 260,400,320] [--steps 32] [--dtype auto]

The reference keeps no cache: the model in float64 reads prompt and answer in one pass, every query under the window
rule. Packed and simulated answers must be equal to the last bit. An answer may leave the reference only at a near-tie:
where the two likeliest tokens of the reference lie within twice the largest difference of the logits at that step.
Prints one Markdown table. The windows are those of the fits: fit with small ones for short prompts.
"""

from __future__ import annotations

import argparse
import copy
import inspect
from pathlib import Path

import torch
from torch import Tensor

from kvcq.data.documents import iter_documents
from kvcq.data.sequences import build_corpus
from kvcq.evaluation.simulate import exact_by_query
from kvcq.models.attention import attention_hook
from kvcq.models.library import forward
from kvcq.models.load import LoadedModel, load_model
from kvcq.pipeline.measure import simulated_hook
from kvcq.pipeline.subjects import Subject, open_subjects
from kvcq.runtime.compat import check_frame, check_model
from kvcq.runtime.hf.cache import Host


def answers(host: Host, prompts: list[Tensor], steps: int) -> tuple[Tensor, Tensor]:
    """Return greedy tokens [B, steps] and the logits that chose them [B, steps, vocab] of a left-padded batch."""
    model, longest = host.model, max(map(len, prompts))
    tokens, mask = (torch.zeros(len(prompts), longest, dtype=torch.long) for _ in range(2))
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    found = model.generate(
        tokens.to(model.device),
        attention_mask=mask.to(model.device),
        do_sample=False,
        min_new_tokens=steps,
        max_new_tokens=steps,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **{name: host.new_cache()},
    )
    return found.sequences[:, longest:].cpu(), torch.stack(found.logits, 1).cpu()


def ties(found: Tensor, reference: Tensor) -> tuple[int, float]:
    """Return how many of the tokens that `found` [n, vocab] chose differ, and the mean logit difference.

    Raises:
        SystemExit: one differs where the reference was decided.
    """
    difference = (found.double() - reference.double()).abs()
    best = reference.double().topk(2, -1).values
    other = found.argmax(-1) != reference.argmax(-1)
    if bool(((best[:, 0] - best[:, 1])[other] > 2 * difference.amax(-1)[other]).any()):
        raise SystemExit("an answer leaves the reference where it was decided")
    return int(other.sum()), float(difference.mean())


def compare(loaded: LoadedModel, exact: torch.nn.Module, subject: Subject, prompts: list[Tensor], steps: int) -> str:
    """Return the row of one fit."""
    codecs = subject.codecs(loaded.device)
    arguments = (loaded.model, codecs, subject.geometry, subject.windows)
    count, means, off = 0, [], []
    with Host(*arguments) as packed, Host(*arguments, mode="simulate") as simulated:
        together, batch = answers(packed, prompts, steps)
        for row, prompt in enumerate(prompts):
            tokens, logits = answers(packed, [prompt], steps)
            again, same = answers(simulated, [prompt], steps)
            if not (torch.equal(tokens, again) and torch.equal(logits, same)):
                raise SystemExit("packed and simulated answers differ")
            whole = torch.cat([prompt, tokens[0, :-1]])
            with attention_hook(exact, simulated_hook(codecs, exact_by_query(len(whole), subject.windows))):
                reference = forward(exact, whole[None])[0, len(prompt) - 1 :].cpu()
            found, mean = ties(logits[0], reference)
            count, means = count + found, [*means, mean]
            # Beyond a parting the two read different texts.
            parted = (tokens[0] != together[row]).nonzero()
            equal = int(parted[0]) + 1 if len(parted) else steps
            off.append((ties(batch[row, :equal], logits[0, :equal])[0], equal))
    windows = f"{subject.windows.sink}/{subject.windows.recent}"
    cells = [subject.name, windows, f"{count} of {steps * len(prompts)}", f"{min(means):.3f} .. {max(means):.3f}"]
    cells.append(f"{sum(tie for tie, _ in off)} in {sum(equal for _, equal in off)}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--fits", nargs="+", type=Path, required=True)
    parser.add_argument("--data", default="builtin:pydoc-topics")
    parser.add_argument("--lengths", default="260,400,320")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    lengths = [int(part) for part in args.lengths.split(",")]
    subjects = open_subjects(args.fits)
    loaded = load_model(args.model, dtype=args.dtype)
    for subject in subjects:
        check_model(subject, loaded, strict=False)
        check_frame(subject, loaded.geometry)
    corpus = build_corpus(
        iter_documents([args.data]), loaded.tokenizer, labels=(args.data,), seq_len=max(lengths),
        num_tokens=max(lengths) * len(lengths),
    )  # fmt: skip
    texts = [torch.from_numpy(sequence.tokens.astype("int64")) for sequence in corpus.sequences]
    prompts = [text[:length] for text, length in zip(texts, lengths, strict=False)]
    exact = copy.deepcopy(loaded.model).double()
    print("| fit | windows | ties against float64 | mean logit difference | ties of the batch against alone |")
    print("|---|---|---|---|---|")
    for subject in subjects:
        print(compare(loaded, exact, subject, prompts, args.steps), flush=True)


if __name__ == "__main__":
    main()
