import pytest
import torch

from kvcq.models.folding import FOLD_LIMIT, FOLDS, _orthogonal, fold_errors, fold_output
from kvcq.models.library import forward
from tests.tiny import tiny_model, tiny_tokens


def judge(model_type, layers=(0, 2), **overrides):
    return fold_errors(tiny_model(model_type, **overrides), tiny_tokens(24), layers)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "gpt_oss", "glm4", "gpt2", "opt", "mimo_v2_flash"])
def test_a_linear_path_to_the_output_folds(model_type):
    for error, reason in judge(model_type).values():
        assert error < 1e-5
        assert reason == FOLDS


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "afmoe", "bitnet"])
def test_gates_and_norms_before_the_output_do_not_fold(model_type):
    for error, reason in judge(model_type).values():
        assert error > FOLD_LIMIT
        assert reason != FOLDS


def test_a_half_precision_model_is_judged_in_float32():
    model = tiny_model().to(torch.bfloat16)
    error, reason = fold_errors(model, tiny_tokens(24), [1])[1]
    assert error < 1e-5
    assert reason == FOLDS


def test_every_layer_is_judged_alone():
    model = tiny_model()
    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0].relu(),))
    found = fold_errors(model, tiny_tokens(24), [0, 1, 2, 3])
    assert [reason == FOLDS for _, reason in found.values()] == [True, False, True, True]


class Other(torch.nn.Linear):
    """Stands for a quantized linear layer."""


def test_a_projection_that_is_no_plain_linear_layer_is_not_folded():
    model = tiny_model()
    attention = model.model.layers[0].self_attn
    replaced = Other(128, 64, bias=False)
    replaced.weight = attention.o_proj.weight
    attention.o_proj = replaced
    error, reason = fold_errors(model, tiny_tokens(24), [0])[0]
    assert error is None
    assert "Other" in reason


def test_the_model_is_left_as_found():
    model = tiny_model("qwen3_next")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits = forward(model, tiny_tokens(24)[None])
    fold_errors(model, tiny_tokens(24), [0, 2])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(forward(model, tiny_tokens(24)[None]), logits)
    assert model.model.layers[0].self_attn._forward_pre_hooks == {}


def test_folding_undoes_the_rotation_of_each_kv_head():
    torch.manual_seed(0)
    heads, group, dims = 2, 3, 8
    rotation = _orthogonal(heads, dims, seed=1)
    weight = torch.randn(5, heads * group * dims, dtype=torch.float64)
    output = torch.randn(7, heads * group, dims, dtype=torch.float64)
    turned = output.unflatten(1, (heads, group)) @ rotation
    folded = fold_output(weight, rotation, heads * group)
    torch.testing.assert_close(turned.flatten(1) @ folded.T, output.flatten(1) @ weight.T)


def test_random_rotations_are_orthogonal_and_differ_by_head():
    rotation = _orthogonal(3, 16, seed=4)
    eye = torch.eye(16, dtype=torch.float64).expand(3, 16, 16)
    torch.testing.assert_close(rotation @ rotation.mT, eye)
    assert not torch.allclose(rotation[0], rotation[1])
    assert torch.equal(rotation, _orthogonal(3, 16, seed=4))
