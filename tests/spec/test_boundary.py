import pytest

from kvcq.spec.boundary import Boundary, check_boundaries, served_boundaries


def test_boundaries_are_of_two_kinds_and_increase_inside_the_prompt():
    with pytest.raises(ValueError, match="carried or cached, not 'evicted'"):
        Boundary(3, "evicted")
    for starts in ([0], [9], [4, 4], [5, 2]):
        with pytest.raises(ValueError, match="do not increase"):
            check_boundaries(9, [Boundary(at, "carried") for at in starts])
    check_boundaries(9, [Boundary(1, "cached"), Boundary(8, "carried")])


def test_a_prefix_hit_starts_a_forward_and_the_chunks_anew():
    found = [(b.position, b.kind) for b in served_boundaries(20, 8, 3)]
    assert found == [(3, "cached"), (11, "carried"), (19, "carried")]
    assert [b.position for b in served_boundaries(20, 8, 10)] == [8, 10, 18]
    for chunk, hit in ((0, None), (8, 0), (8, 20)):
        with pytest.raises(ValueError, match="cannot cut 20 tokens"):
            served_boundaries(20, chunk, hit)
