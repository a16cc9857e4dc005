"""Fits that are sealed perfectly and mean something else than their plan."""

import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from kvcq.artifacts.bundle import draft_manifest, write_bundle
from kvcq.artifacts.fit_file import read_fit, write_fit
from kvcq.artifacts.report_file import read_report
from kvcq.artifacts.tensor_file import read_tensors
from kvcq.artifacts.tensors import tensor_chunks
from kvcq.artifacts.verify import verify
from kvcq.errors import CorruptArtifactError
from kvcq.spec.codec import CodecSpec
from kvcq.spec.plan import LayerPlan
from tests.artifacts import example
from tests.attacks.hostile import copy, edit_header, relist, replace_tensors

METRIC, ROTATION = "layers.0.k.transform", "layers.0.v.transform"
SCALE, WORDS, OFFSET = "layers.0.k.codebook_scale", "layers.0.k.codebook", "layers.0.k.offset"


def poke(name, value):
    def change(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[3] = value

    return change


def put(name, function):
    return lambda tensors: tensors.update({name: function(tensors[name])})


def scale_metric(factor):
    """Turn a metric transform into one of another size, still inverted by its query side."""
    query = "layers.0.k.query"
    return lambda t: t.update({METRIC: t[METRIC] * np.float32(factor), query: t[query] / np.float32(factor)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (poke(OFFSET, np.nan), "layers.0.k.offset has values that are not finite"),
        (poke(ROTATION, np.inf), "not finite"),
        (poke("layers.0.k.codebook_fp16", np.nan), "not finite"),
        (poke("layers.1.v.codebook", -np.inf), "not finite"),
        (poke(ROTATION, 0.5), "layers.0.v.transform is not orthogonal"),
        (put(ROTATION, lambda t: t * np.float32(1.001)), "not orthogonal"),
        (put(ROTATION, np.zeros_like), "not orthogonal"),
        (put(METRIC, lambda t: t * np.float32(1.001)), "not inverted by its query side"),
        (put("layers.0.k.query", lambda t: t.swapaxes(-1, -2).copy()), "not inverted"),
        (put(OFFSET, lambda t: t * 0 + np.float32(1e30)), "offset has values beyond 65504"),
        (scale_metric(1e9), "transform has values beyond 65504"),
        (poke(SCALE, 1e-42), "differs from its float16 centroids"),
        (put("layers.1.v.codebook", lambda t: np.full_like(t, 0.5)), "words are all equal"),
        (poke(SCALE, 0.0), "scale that is not positive"),
        (poke(SCALE, -1.0), "scale that is not positive"),
        (put(SCALE, np.ones_like), "differs from its float16 centroids"),
        (put(WORDS, lambda t: np.broadcast_to(t[..., :1, :], t.shape).copy()), "words are all equal"),
        (put(WORDS, lambda t: -t), "differs from its float16 centroids"),
        (put(ROTATION, lambda t: t.astype(np.float64)), r"is F64 \[2, 16, 16\]"),
        (put(ROTATION, lambda t: t[:1]), r"is F32 \[1, 16, 16\]"),
        (lambda t: t.pop(OFFSET), "layers.0.k.offset is missing"),
        (lambda t: t.update({"layers.0.k.scale": t[OFFSET]}), "layers.0.k.scale is not called for"),
        (lambda t: t.update({"layers.0.k.offsets": t.pop(OFFSET)}), "not called for"),
        (lambda t: t.update({"layers.2.k.offset": t[OFFSET]}), "not called for"),
    ],
)
def test_tensors_that_do_not_mean_the_plan_are_refused(chain, tmp_path, change, message):
    folder = copy(chain, "fit", tmp_path)
    tensors = example.tensors()
    change(tensors)
    replace_tensors(folder, tensors)
    with pytest.raises(CorruptArtifactError, match=message):
        verify(folder)


def test_a_codebook_of_zeros_and_raw_centroids_beside_float8_words_are_allowed(chain, tmp_path):
    folder = copy(chain, "fit", tmp_path)
    tensors = example.tensors()
    for name, value in ((WORDS, 0), (SCALE, 1), ("layers.0.k.codebook_fp16", 0)):
        tensors[name][:, 0] = value
    tensors["layers.1.v.codebook_fp16"] = tensors["layers.1.v.codebook"]
    replace_tensors(folder, tensors)
    verify(folder)


def layer(header, index, **changes):
    header["geometry"]["layers"][index].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["plan"].pop(), "one entry for each layer"),
        (lambda h: h["plan"].reverse(), "one entry for each layer"),
        (lambda h: layer(h, 1, layer=0), "repeated or out of order"),
        (lambda h: layer(h, 0, kind="sliding"), r"layer 0 \(sliding\) cannot be quantized"),
        (lambda h: layer(h, 0, kv_heads=0), "4 query heads for 0 KV heads"),
        (lambda h: layer(h, 0, kv_heads=3), "4 query heads for 3 KV heads"),
        (lambda h: layer(h, 0, d_k=10**9), r"the plan calls for"),
        (lambda h: layer(h, 0, d_k=18), "does not split"),
        (lambda h: layer(h, 0, d_k=8), "turns 16 of 8 channels"),
        (lambda h: layer(h, 0, rope=7), "names RoPE 7 of 1"),
        (lambda h: layer(h, 0, d_v=0), "does not split"),
        (lambda h: h["plan"][1]["k"].update(groups=3), "does not split into 3 groups"),
        (lambda h: h["plan"][0]["v"].update(transform="metric"), "no metric transform"),
        (lambda h: h["tensors"].reverse(), "not sorted"),
        (lambda h: h["tensors"].append(h["tensors"][-1]), "not sorted, or repeats"),
        (lambda h: h["tensors"][0].update(role="v.codebook"), "with role v.codebook"),
        (lambda h: h["tensors"][0].update(name="../x"), "tensors.0.name"),
        (lambda h: h["files"][0].update(size=10), "bytes of tensors"),
        (lambda h: h.update(tensors_digest="0" * 64), "tensors digest does not match"),
    ],
)
def test_plans_that_cannot_be_are_refused(chain, tmp_path, change, message):
    folder = copy(chain, "fit", tmp_path)
    edit_header(folder, "fit", change)
    with pytest.raises(CorruptArtifactError, match=message):
        verify(folder)


def test_a_tensor_file_with_other_names_than_its_index_is_refused(chain, tmp_path):
    folder = copy(chain, "fit", tmp_path)
    data = (folder / "tensors.safetensors").read_bytes()
    (folder / "tensors.safetensors").write_bytes(data.replace(b"layers.0.v.transform", b"layers.0.v.transfora"))
    relist(folder, "fit")
    with pytest.raises(CorruptArtifactError, match=r"header is not canonical|differs from the tensor index"):
        verify(folder)
    (folder / "tensors.safetensors").write_bytes(data.replace(b"layers.1.v.codebook", b"layers.1.v.codeboox"))
    relist(folder, "fit")
    with pytest.raises(CorruptArtifactError, match="differs from the tensor index"):
        verify(folder)


def swap_stats(folder, changed, dropped=()):
    """Put other arrays into statistics, sealed."""
    moments = read_tensors(folder / "moments.safetensors", framework="pt")
    for name in ("moments.safetensors", "samples.safetensors"):
        tensors = read_tensors(folder / name, framework="pt")
        mine = {key: value for key, value in changed.items() if (key in moments) == name.startswith("moments")}
        kept = {key: value for key, value in (tensors | mine).items() if key not in dropped}
        (folder / name).write_bytes(b"".join(tensor_chunks(kept)))
    relist(folder, "stats")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers.7.rows.k": np.ones((2, 8, 16))}, "layers.7.rows.k belongs to no layer"),
        ({"layers.2.rows.k": np.ones((2, 8, 16))}, "layers.2.rows.k belongs to no layer"),
        ({"layers.00.rows.k": np.ones((2, 8, 16))}, "belongs to no layer"),
        ({"probe.0.layers.x.k": np.ones((2, 3, 16))}, "belongs to no layer"),
        ({"probe.1.positions": np.arange(3)}, "belongs to no layer"),
        ({"surprise": np.ones(3)}, "belongs to no layer"),
        ({"layers.0.k_min": np.full((2, 16), np.nan)}, "k_min has values that are not finite"),
        ({"layers.0.rows.k": torch.full((2, 8, 16), torch.nan, dtype=torch.bfloat16)}, "not finite"),
        ({"layers.0.k_moment.hi": np.ones((2, 17, 17), np.int64)}, r"shape \[2, 17, 17\]"),
        ({"layers.0.rows.k": np.ones((2, 9, 16))}, "unlike the model's heads"),
        ({"layers.0.rows.q": np.ones((2, 8, 16))}, "unlike the model's heads"),
        ({"probe.0.layers.1.k": np.ones((2, 4, 16))}, "unlike the model's heads"),
        ({"probe.0.positions": np.ones((3, 1), np.int32)}, "unlike the model's heads"),
        ({"rows.positions": np.arange(8.0)}, "not whole numbers"),
        ({"rows.positions": np.arange(8) - 1}, "points beyond"),
        ({"rows.sequence": np.arange(8)}, "points beyond 1 entries"),
        ({"rows.sequence": np.zeros(7, np.int32)}, "different numbers of entries"),
        ({"probe.0.q_index": np.array([3])}, "points beyond 3 entries"),
    ],
)
def test_statistics_that_do_not_fit_their_header_are_refused(chain, tmp_path, changed, message):
    folder = copy(chain, "stats", tmp_path)
    swap_stats(folder, changed)
    with pytest.raises(CorruptArtifactError, match=message):
        verify(folder)


def test_statistics_without_the_moments_of_a_layer_are_refused(chain, tmp_path):
    folder = copy(chain, "stats", tmp_path)
    swap_stats(folder, {}, dropped=("layers.1.k_moment.hi",))
    with pytest.raises(CorruptArtifactError, match="layer 1 has no moments"):
        verify(folder)


def test_claimed_shapes_take_no_memory(chain, tmp_path):
    """A geometry of a million channels is refused by the tensors beside it, before anything is allocated."""
    folder = copy(chain, "stats", tmp_path)
    edit_header(folder, "stats", lambda header: layer(header, 0, d_k=10**6, kv_heads=10**6, q_heads=10**6))
    with pytest.raises(CorruptArtifactError, match="unlike the model's heads"):
        verify(folder)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A bundle of 50 MB: 16 layers of 8 heads of 128 with metric and orthogonal transforms."""
    folder = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(3)
    layers, heads, dim = 33, 8, 128
    shape = example.geometry(layers, heads, dim)
    spec = CodecSpec(transform="orthogonal")
    metric = CodecSpec(transform="metric")
    plan = tuple(
        LayerPlan(layer=i, k=metric, v=spec) if i < layers - 1 else LayerPlan(layer=i, reason="sliding")
        for i in range(layers)
    )
    rotation = example.rotations(rng, heads, dim)
    tensors = {
        f"layers.{i}.{role}": rotation for i in range(layers - 1) for role in ("k.transform", "k.query", "v.transform")
    }
    header = write_fit(folder / "fit", example.fit_header(plan, shape), tensors)
    example.make_report(folder / "report", header)
    fit, measured = read_fit(folder / "fit"), read_report(folder / "report")
    for name, archive in (("folder", False), ("file", True)):
        write_bundle(folder / name, draft_manifest(fit, measured), fit, measured, "", archive=archive)
    return folder


def test_a_50_mb_bundle_verifies_in_a_second(large):
    for path in (large / "folder", large / "file"):
        times = []  # CPU time: other processes must not fail this test
        for _ in range(3):
            start = time.process_time()
            outcome = verify(path)
            times.append(time.process_time() - start)
        assert outcome.size > 50e6
        assert min(times) < 1.0


def test_verify_imports_no_torch(chain):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kvcq.artifacts.verify import verify\n"
        "from kvcq.artifacts.diff import diff\n"
        "for path in sys.argv[1:]: verify(Path(path))\n"
        "diff(Path(sys.argv[1]), Path(sys.argv[1]))\n"
        "print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    paths = [str(path) for path in chain.values()]
    run = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
