from kvcq.spec.compare import differences, flatten, listed


def test_differences_name_the_path_and_both_values():
    left = {"a": {"b": 1, "c": [1, 2]}, "d": None, "same": "x"}
    right = {"a": {"b": 2, "c": [1]}, "d": "y" * 99, "same": "x"}
    found = differences(left, right)
    assert found == ("a.b 1, not 2", "a.c.1 2, not none", f"d none, not {'y' * 21}...")
    assert differences(left, left) == ()


def test_long_lists_are_cut_and_counted():
    found = differences({str(n): 1 for n in range(10)}, {"9": 1})
    assert listed(found).count("not none") == 4 and listed(found).endswith("; and 5 more")
    assert listed(found[:4]).count(";") == 3


def test_empty_containers_are_leaves():
    assert flatten({"a": {}, "b": [], "c": {"d": [0]}}) == {"a": {}, "b": [], "c.d.0": 0}
