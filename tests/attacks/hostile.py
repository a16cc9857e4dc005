"""Tools of an attacker who can edit every file and recompute every digest."""

import hashlib
import json
import shutil

import numpy as np

from kvcq.artifacts.tensors import tensor_chunks, tensor_index, tensors_digest
from kvcq.spec import canonical

SEALED = {"bundle": "kvcq.json", "stats": "stats.json", "fit": "fit.json", "report": "report.json"}


def copy(chain, kind, folder):
    target = folder / kind
    source = chain[kind]
    return shutil.copy(source, target) if source.is_file() else shutil.copytree(source, target)


def edit_header(folder, kind, change, name=None):
    """Apply `change` to the parsed header and seal it again."""
    path = folder / (name or SEALED[kind])
    header = json.loads(path.read_bytes())
    header.pop("digest")
    change(header)
    header["digest"] = canonical.digest(header)
    path.write_bytes(canonical.dumps(header))


def relist(folder, kind):
    """Write the true size and SHA-256 of every listed file into the header, and seal it."""

    def change(header):
        for entry in header["files"]:
            data = (folder / entry["name"]).read_bytes()
            entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())

    edit_header(folder, kind, change)


def replace_tensors(folder, tensors):
    """Put other served tensors into a fit, with index and digests that agree with them."""
    (folder / "tensors.safetensors").write_bytes(b"".join(tensor_chunks(tensors)))
    index = tensor_index(tensors)

    def change(header):
        header.update(tensors=[e.plain() for e in index], tensors_digest=tensors_digest(index, tensors))

    edit_header(folder, "fit", change)
    relist(folder, "fit")


def flipped(data, position, rng):
    changed = bytearray(data)
    changed[position] ^= int(rng.integers(1, 256))
    return bytes(changed)


def positions(size, rng, count=200):
    return range(size) if size <= count else sorted(int(p) for p in rng.choice(size, count, replace=False))


def generator():
    return np.random.default_rng(11)
