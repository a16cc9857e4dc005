import pytest
import torch

from kvcq.transforms.hadamard import hadamard, power_of_two_divisor


@pytest.mark.parametrize(("d", "block"), [(1, 1), (8, 8), (64, 64), (80, 16), (96, 32), (128, 128), (192, 64)])
def test_orthogonal_symmetric_and_flat_inside_blocks(d: int, block: int) -> None:
    h = hadamard(d)
    assert power_of_two_divisor(d) == block
    torch.testing.assert_close(h @ h.T, torch.eye(d, dtype=torch.float64), atol=1e-12, rtol=0)
    assert torch.equal(h, h.T)
    assert torch.equal(h != 0, torch.block_diag(*[torch.ones(block, block)] * (d // block)) != 0)
    torch.testing.assert_close(h[h != 0].abs().unique(), torch.tensor([block**-0.5], dtype=torch.float64))


def test_natural_order_and_dtype() -> None:
    assert (hadamard(4) * 2).tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    assert hadamard(16, torch.float32).dtype == torch.float32


def test_empty_head_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        hadamard(0)
