import pytest

from tests.artifacts.example import make_chain


@pytest.fixture(scope="session")
def chain(tmp_path_factory):
    """Paths of one artifact of each kind; tests copy before they change anything."""
    return make_chain(tmp_path_factory.mktemp("chain"))
