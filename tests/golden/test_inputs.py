from tests.golden.reference import close, golden, keys, queries, values


def test_formulas_give_the_published_rows_and_sums() -> None:
    want = golden()["inputs"]
    q, k, v = queries(), keys(), values()
    close(q[0, 0], want["q_row0_h0"])
    close(q[1, 3], want["q_row3_h1"])
    for name, x in (("k", k), ("v", v)):
        close(x[0, 0], want[f"{name}_row0"])
        close(x[0, 3], want[f"{name}_row3"])
    for name, x in (("q", q), ("k", k), ("v", v)):
        close(x.sum(), want[f"sum_{name}"])
        close(x.square().sum(), want[f"sumsq_{name}"])
