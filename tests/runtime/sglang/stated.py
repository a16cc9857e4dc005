"""A plain model and arguments for it that are served, and the flags that a release of SGLang takes."""

import ast
from types import SimpleNamespace

from kvcq.runtime.sglang.facts import model_facts
from kvcq.runtime.sglang.flags import RULES
from kvcq.spec.geometry import LayerGeometry, ModelGeometry, RopeSpec

ARGS = "sglang.srt.server_args.ServerArgs"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 256,
    "head_dim": 32,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def served(**changes):
    """Arguments that are served, with changes."""
    fields = {rule.field: rule.legal[0] for rule in RULES}
    return SimpleNamespace(**{**fields, "max_running_requests": 64, "tp_size": 1, **changes})


def frequencies(theta=10000.0, dims=32):
    return tuple(theta ** (-2 * index / dims) for index in range(dims // 2))


def geometry(layers=2, rope=None, **changes):
    fields = {"kind": "full", "q_heads": 8, "kv_heads": 4, "d_k": 32, "d_v": 32, "rope": 0, **changes}
    rope = rope or RopeSpec(rotary_dims=32, inv_freq=frequencies())
    made = tuple(LayerGeometry(layer=layer, **fields) for layer in range(layers))
    return ModelGeometry(model_type="llama", hidden_size=256, vocab_size=128, ropes=(rope,), layers=made)


MODEL = model_facts(CONFIG)


def flags_of(found):
    return [refusal.flag.split()[0] for refusal in found]


def spellings(sources):
    """Every flag of a release: those of its parser, and those that its annotated fields become."""
    found = set()
    for name, node in sources.fields(ARGS).items():
        text = ast.unparse(node.annotation)
        if text.startswith("A[") and "no_cli=True" not in text:
            found.add("--" + name.replace("_", "-"))
        for call in ast.walk(node.annotation):
            for word in getattr(call, "keywords", ()):
                if word.arg == "aliases":
                    found |= set(ast.literal_eval(word.value))
    for call in ast.walk(sources.find(f"{ARGS}.add_cli_args")):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("add_argument"):
            found |= {argument.value for argument in call.args if isinstance(argument, ast.Constant)}
    return {flag for flag in found if isinstance(flag, str) and flag.startswith("--")}
