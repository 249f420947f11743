"""Every target of fuzz.py on samples that were damaged at random; `make fuzz` looks for more, guided by coverage."""

from __future__ import annotations

import fuzz
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

DAMAGE = st.lists(
    st.tuples(
        st.integers(0, 1 << 16),
        st.integers(0, 3),
        st.binary(max_size=3) | st.sampled_from([b"\r\n", b"\n", b"\0", b"\xff", b'"', b"{", b"}", b"[", b",", b":", b"-1", b"9" * 30, b"\\u", b" "]),
    ),
    max_size=6,
)


@pytest.mark.parametrize("name", fuzz.TARGETS)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_a_damaged_sample_is_read_or_refused_and_nothing_else(name, data):
    sample = data.draw(st.sampled_from(fuzz.SAMPLES[name]))
    for place, cut, put in data.draw(DAMAGE):
        place %= len(sample) + 1
        sample = sample[:place] + put + sample[place + cut :]
    fuzz.TARGETS[name](sample)
