"""What tables and codes are built from does not depend on the device."""

import pytest
import torch

from kvcq.codecs.codebook import snap_int8
from kvcq.codecs.uniform import encode_uniform


@pytest.mark.gpu
def test_codebooks_survive_a_second_snapping_on_a_gpu():
    centroids = torch.randn(500, 256, 4, generator=torch.Generator().manual_seed(0))
    words, scale = snap_int8(centroids)
    for device in ("cpu", "cuda"):
        again, same = snap_int8((words.float() * scale[:, None, None]).to(device))
        assert torch.equal(again.cpu(), words)
        assert torch.equal(same.cpu(), scale)
        assert torch.equal(snap_int8(centroids.to(device))[1].cpu(), scale)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 4])
def test_uniform_codes_are_those_of_the_processor_on_a_gpu(bits):
    rows = torch.randn(20000, 64, generator=torch.Generator().manual_seed(0))
    for own, other in zip(encode_uniform(rows, 4, bits), encode_uniform(rows.cuda(), 4, bits), strict=True):
        assert torch.equal(own, other.cpu())
