import pytest

from tests.runtime.sglang.wheels import VERSIONS, Sources


@pytest.fixture(params=[pytest.param(version, marks=pytest.mark.network) for version in VERSIONS])
def sources(request):
    """Every release of SGLang that the plugin supports, one after the other."""
    return Sources(request.param)
