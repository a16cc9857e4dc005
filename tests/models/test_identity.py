import hashlib

from kvcq.models.geometry import plan_geometry
from kvcq.models.identity import build_identity, build_provenance, vocabulary_digest
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer


class Vocabulary:
    def __init__(self, entries):
        self.entries = entries

    def get_vocab(self):
        return self.entries


def test_the_vocabulary_hash_follows_its_definition_in_any_order():
    entries = {"b": 1, "é": 0, "a": 2}
    data = b"".join(
        index.to_bytes(8, "little") + len(token.encode()).to_bytes(8, "little") + token.encode()
        for index, token in ((0, "é"), (1, "b"), (2, "a"))
    )
    assert vocabulary_digest(Vocabulary(entries)) == hashlib.sha256(data).hexdigest()
    assert vocabulary_digest(Vocabulary(dict(reversed(entries.items())))) == hashlib.sha256(data).hexdigest()


def test_an_added_token_or_a_swapped_id_changes_the_vocabulary():
    plain, extended = tiny_tokenizer(), tiny_tokenizer()
    extended.add_tokens(["<extra>"])
    assert vocabulary_digest(plain) == vocabulary_digest(tiny_tokenizer())
    assert vocabulary_digest(plain) != vocabulary_digest(extended)
    assert vocabulary_digest(Vocabulary({"a": 0, "b": 1})) != vocabulary_digest(Vocabulary({"a": 1, "b": 0}))


def identity(model_type="llama", longest=None, **overrides):
    model = tiny_model(model_type, **overrides)
    return build_identity(model, None, plan_geometry(model, longest=longest))


def test_identity_names_the_flags_of_the_configuration():
    found = identity()
    assert found.biases == {"attention_bias": False, "mlp_bias": False}
    assert set(found.norms) == {"rms_norm_eps"}


def test_other_weights_have_the_same_identity_and_other_shapes_or_frequencies_do_not():
    base = identity()
    assert identity(seed=9) == base
    assert identity(longest=400) == base
    others = [
        identity(num_hidden_layers=3),
        identity(num_key_value_heads=4),
        identity(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        identity("qwen3"),
    ]
    assert len({base.digest(), *(other.digest() for other in others)}) == 5


def test_the_shift_check_does_not_enter_the_identity():
    model = tiny_model()
    geometry = plan_geometry(model)
    checked = geometry.model_copy(
        update={"layers": tuple(layer.model_copy(update={"unrotates": True}) for layer in geometry.layers)}
    )
    assert build_identity(model, None, checked) == build_identity(model, None, geometry)


def test_provenance_hashes_the_headers_of_the_weight_files(tmp_path):
    folder = save_tiny(tmp_path / "tiny", tokenizer=False)
    (entry,) = build_provenance("tiny", folder=folder).weights
    data = (folder / "model.safetensors").read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    assert (entry.name, entry.size) == ("model.safetensors", len(data))
    assert entry.header_sha256 == hashlib.sha256(header).hexdigest()
