"""The ablation tables of OSCAR and NOVA-KV, and the crosses of both methods, in one report.

Usage: python benchmarks/ablations.py --stats STATS --model MODEL --data HELD_OUT --out OUT
           [--contexts 2048] [--passages 1] [--device auto] [--dtype auto] [--signs 4] [--iterations 25] [--only ROW]

Collect first, for example: kvcq collect smollm2-135m --data builtin:pydoc-topics --num-tokens 8k --seq-len 2k
--out stats. Every row is fitted into OUT/fits, OSCAR's rows once for each draw of eigenvector signs, and all of them
are measured by one validate into OUT/report, whose device and dtype are the arguments. Prints one Markdown table,
draws averaged, and says where an order differs from the papers'; OUT/table.md has the same text.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvcq import FitRequest, ValidateRequest, fit, validate
from kvcq.spec.report import ArtifactReport, Report


@dataclass(frozen=True)
class Row:
    """One row of the table; `draws`: fitted once for each draw of signs, and averaged."""

    name: str
    method: str
    settings: tuple[str, ...] = ()
    draws: bool = False
    codebooks: bool = False


ROWS = (
    Row("naive-int2", "naive-int2"),
    Row("quarot-int2", "quarot-int2"),
    Row("klt-int2", "klt-int2", draws=True),
    Row("oscar", "oscar", draws=True),
    Row("oscar no-u", "oscar", ("ablate=no-u",), draws=True),
    Row("oscar no-h", "oscar", ("ablate=no-h",), draws=True),
    Row("oscar g4", "oscar", ("groups=4",), draws=True),
    Row("oscar no-p g4", "oscar", ("groups=4", "ablate=no-p"), draws=True),
    Row("oscar ktk", "oscar", ("key_target=key",), draws=True),
    Row("oscar ktk/vtv", "oscar", ("key_target=key", "value_target=value"), draws=True),
    Row("oscar output", "oscar", ("value_target=attention_output",), draws=True),
    Row("oscar layer", "oscar", ("granularity=layer",), draws=True),
    Row("oscar-centered", "oscar-centered", draws=True),
    Row("oscar-centered g4", "oscar-centered", ("groups=4",), draws=True),
    Row("oscar-centered ktk", "oscar-centered", ("key_target=key",), draws=True),
    Row("oscar-lloyd", "oscar-lloyd", draws=True),
    Row("oscar-lloyd main", "oscar-lloyd", ("variant=main",), draws=True),
    Row("oscar-vq", "oscar-vq", draws=True, codebooks=True),
    Row("oscar-vq centred", "oscar-vq", ("centred=true",), draws=True, codebooks=True),
    Row("nova-sq", "nova-sq"),
    # The clip spans the whole head: with a scale for each run of axes it would only cut the strongest run.
    Row("nova-sq g4", "nova-sq", ("groups=4", "clip_k=1.0")),
    Row("nova-sq h", "nova-sq", ("hadamard=true",)),
    Row("nova", "nova", codebooks=True),
    Row("nova snake", "nova", ("partition=snake",), codebooks=True),
    Row("nova random", "nova", ("partition=random",), codebooks=True),
    Row("nova sorted", "nova", ("partition=sorted",), codebooks=True),
)

# What the papers state as better, then worse. OSCAR's numbers are task scores of its table (full 70.01, no P 68.00,
# no H 51.74, no U 32.82, K'K/V'V 31.12), NOVA-KV's are retrieval scores; P is compared where it can matter.
ORDERS = (
    ("OSCAR", "oscar g4", "oscar no-p g4"),
    ("OSCAR", "oscar", "oscar no-h"),
    ("OSCAR", "oscar no-h", "oscar no-u"),
    ("OSCAR", "oscar no-u", "oscar ktk/vtv"),
    ("OSCAR", "oscar", "quarot-int2"),
    ("NOVA-KV", "nova", "nova random"),
    ("NOVA-KV", "nova random", "nova sorted"),
    ("NOVA-KV", "nova", "oscar"),
)
# Windows weigh little at this length: what the codes and their scales cost. Every report states it.
LONG = 131072
METRICS = (("kl", "KL"), ("output_error", "output error"))


def fit_rows(rows: list[Row], stats: Path, out: Path, draws: int, iterations: int) -> dict[str, list[str]]:
    """Fit every row once for each draw; return the names of its fits by row."""
    found: dict[str, list[str]] = {}
    for row in rows:
        start = time.perf_counter()
        for draw in range(draws if row.draws else 1):
            name = row.name.replace(" ", "-").replace("/", "-") + (f"-signs{draw}" if row.draws else "")
            settings = row.settings + ((f"signs={draw}",) if row.draws else ())
            settings += (f"iterations={iterations}",) if row.codebooks else ()
            fit(FitRequest(stats=stats, out=out / name, method=row.method, settings=settings, force=True))
            found.setdefault(row.name, []).append(name)
        print(f"fitted {row.name} in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return found


def values(entries: list[ArtifactReport], metric: str, context: int) -> list[float]:
    """Return a metric of some artifacts at one context."""
    return [getattr(part.metrics, metric) for entry in entries for part in entry.contexts if part.context == context]


def table(groups: dict[str, list[ArtifactReport]], contexts: tuple[int, ...]) -> str:
    """Return the Markdown table: means over draws, and the range of the KL at the longest context."""
    last = contexts[-1]
    head = ["row", "draws", *(f"KL {context}" for context in contexts), "range of KL", "top-1", "output error"]
    head += [f"BPE {last}", f"BPE {LONG}"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, entries in groups.items():
        kls = values(entries, "kl", last)
        cells = [name, str(len(entries))]
        cells += [f"{statistics.mean(values(entries, 'kl', context)):.4f}" for context in contexts]
        cells.append(f"{min(kls):.4f} .. {max(kls):.4f}" if len(kls) > 1 else "")
        cells.append(f"{statistics.mean(values(entries, 'top1', last)):.4f}")
        cells.append(f"{statistics.mean(values(entries, 'output_error', last)):.4f}")
        cells += [f"{entries[0].bits[str(length)]:.3f}" for length in (last, LONG)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def orders(groups: dict[str, list[ArtifactReport]], context: int) -> str:
    """Say for every order of the papers whether it holds here, by attention KL (keys) and output error (both)."""
    lines = []
    for paper, better, worse in ORDERS:
        if better not in groups or worse not in groups:
            continue
        for metric, label in METRICS:
            a, b = (values(groups[name], metric, context) for name in (better, worse))
            low, high = statistics.mean(a), statistics.mean(b)
            verdict = "as" if low < high else "differs from"
            apart = max(a) < min(b) or max(b) < min(a)
            note = (", one draw each" if len(a) == len(b) == 1 else "") if apart else ", but the draws overlap"
            lines.append(f"- {label}: {better} {low:.4f}, {worse} {high:.4f}: {verdict} the {paper} paper{note}")
    return "\n".join(lines)


def grouped(report: Report, fits: dict[str, list[str]]) -> dict[str, list[ArtifactReport]]:
    """Return the measured artifacts by row, the BF16 reference first."""
    found = {entry.name: entry for entry in report.artifacts}
    reference = report.artifacts[0]
    return {reference.name: [reference]} | {row: [found[name] for name in names] for row, names in fits.items()}


def main() -> None:
    """Fit, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stats", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contexts", default="2048", help="comma-separated context lengths")
    parser.add_argument("--passages", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--signs", type=int, default=4, help="draws of eigenvector signs for OSCAR's rows")
    parser.add_argument("--iterations", type=int, default=25, help="k-means steps of the codebook rows")
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], metavar="ROW")
    args = parser.parse_args()
    contexts = tuple(sorted(int(part) for part in args.contexts.split(",")))
    rows = [row for row in ROWS if args.only is None or row.name in args.only]
    fits = fit_rows(rows, args.stats, args.out / "fits", args.signs, args.iterations)
    start = time.perf_counter()
    result = validate(
        ValidateRequest(
            model=args.model,
            device=args.device,
            dtype=args.dtype,
            artifacts=tuple(args.out / "fits" / name for names in fits.values() for name in names),
            data=tuple(args.data),
            out=args.out / "report",
            contexts=contexts,
            passages=args.passages,
            canary=(),
            force=True,
        )
    )
    print(f"measured in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    groups = grouped(result.report, fits)
    text = f"{table(groups, contexts)}\n\n{orders(groups, contexts[-1])}\n"
    (args.out / "table.md").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
