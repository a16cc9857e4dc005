import yaml

from kvcq.reports import bundle_card
from kvcq.reports.card import markdown
from kvcq.spec.plan import LayerPlan
from tests.reports.sample import sample_manifest

HOSTILE = "x | y](//e) <img src=q> `code` **b** https://evil.example www.evil.example\n# head\u202e"


def front_matter(card):
    _, head, body = card.split("---\n", 2)
    return yaml.safe_load(head), body


def test_front_matter_is_what_the_hub_reads():
    head, body = front_matter(bundle_card(sample_manifest()))
    assert head["library_name"] == "kvcq" and head["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert {"kvcq", "kv-cache", "2-bit", "nova"} <= set(head["tags"])
    order = ["# 2-bit KV cache for", "## Bits per element", "## Fidelity", "## Kept in BF16", "## Use", "## Provenance"]
    places = [body.index(title) for title in order]
    assert places == sorted(places)


def test_bits_fidelity_gates_and_digests_are_told():
    card = bundle_card(sample_manifest())
    for text in ("| 8k | 2.00 | 0.50 | 0.75 | 3.25 |", "| 8k | 0.0114 |", "| kl ≤ 0.05 at 8k | 0.0114 | pass |",
                 "28 of 30 quantized (1-14, 16-29)", "3.9 MiB", "kvcq inspect", *(c * 64 for c in "123")):  # fmt: skip
        assert text in card


def test_the_card_does_not_depend_on_what_is_sealed_after_it():
    manifest = sample_manifest()
    draft = manifest.model_copy(update={"digest": "0" * 64, "files": ()})
    assert bundle_card(draft) == bundle_card(manifest)


def test_hostile_text_is_escaped():
    manifest = sample_manifest()
    recipe = manifest.recipe.model_copy(update={"method": HOSTILE, "params": {HOSTILE: HOSTILE}})
    plan = (LayerPlan(layer=0, reason=HOSTILE), *manifest.plan[1:])
    provenance = manifest.provenance.model_copy(update={"source": HOSTILE, "revision": HOSTILE})
    calibration = manifest.calibration.model_copy(update={"sources": (HOSTILE,)})
    changed = {"recipe": recipe, "plan": plan, "provenance": provenance, "calibration": calibration, "kvcq": HOSTILE}
    card = bundle_card(manifest.model_copy(update=changed))
    head, body = front_matter(card)
    assert "base_model" not in head and all(isinstance(tag, str) for tag in head["tags"])
    assert "<img" not in card and "https://" not in card and "www.evil" not in card and "\u202e" not in card
    assert "\n# head" not in card and "\\](//e)" in card
    row = next(line for line in body.splitlines() if line.startswith("| 0 |"))
    assert row.replace("\\|", "").count("|") == 3


def test_a_bundle_with_nothing_quantized_has_a_card():
    manifest = sample_manifest()
    plan = tuple(LayerPlan(layer=entry.layer, reason="kept") for entry in manifest.plan)
    card = bundle_card(manifest.model_copy(update={"plan": plan, "bits": (), "folds": ()}))
    assert "0 of 30 quantized" in card and "**values:**" not in card


def test_markdown_escapes_every_mark():
    assert markdown("a_b*c|d") == "a\\_b\\*c\\|d" and markdown("<&>") == "&lt;&amp;&gt;"
