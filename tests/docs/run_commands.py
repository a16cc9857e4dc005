"""Run the shell and Python blocks of a Markdown file that are marked with ``<!-- run -->``, in an empty folder.

Usage: python tests/docs/run_commands.py README.md [MORE.md ...]. The first command that fails ends with its code.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BLOCK = re.compile(r"^<!-- run -->\n```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNNERS = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}


def blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, text) of the marked blocks of a document."""
    return BLOCK.findall(text)


def main(paths: list[str]) -> int:
    """Run each document in a folder of its own; return the code of the first block that fails, or 0."""
    for path in paths:
        found = blocks(Path(path).read_text(encoding="utf-8"))
        if not found:
            print(f"{path}: no block is marked <!-- run -->", file=sys.stderr)
            return 1
        with tempfile.TemporaryDirectory() as folder:
            # Documents refer to example files by their place in the repository.
            (Path(folder) / "examples").symlink_to(Path(__file__).resolve().parents[2] / "examples")
            for language, block in found:
                print(f"\n[{language}]\n{block.rstrip()}", flush=True)
                start = time.monotonic()
                code = subprocess.run([*RUNNERS[language], block], cwd=folder, check=False).returncode
                print(f"[{time.monotonic() - start:.1f} s]", flush=True)
                if code:
                    print(f"{path}: the block above ended with exit code {code}", file=sys.stderr)
                    return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
