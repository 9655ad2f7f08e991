import pytest

from benchmarks.equality import FIELDS, cases, differences

EVERY = cases()
SAMPLE = EVERY[3::11]  # the whole product is `python benchmarks/equality.py`
for name, values in FIELDS.items():
    assert {getattr(case, name) for case in SAMPLE} == set(values), name


@pytest.mark.parametrize("case", SAMPLE, ids=lambda c: f"{c.architecture}-{c.positions}-{c.norm_position}")
def test_cached_equals_uncached(case):
    found = dict(differences(case))
    assert len(found) == 5
    assert max(found.values()) < 1e-4, found
