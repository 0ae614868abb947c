"""What a mask says, against its bits one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from specstep.runtime.asked.node_mask import NodeMask


@given(bits=st.lists(st.sampled_from([0, 1, 6, 1 << 31, 0xFFFFFFFF]), min_size=1, max_size=6))
def test_a_mask_says_what_its_bits_say(bits):
    bits = np.array(bits, np.uint32)
    tokens = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    mask = NodeMask(bits)
    assert [token for token in range(32 * len(bits)) if mask.allows(token)] == tokens
    assert mask.only == (tokens[0] if len(tokens) == 1 else None)
    assert mask.is_text == (sum(word > 0 for word in bits) > len(bits) / 2)
    assert mask.key == NodeMask(bits.copy()).key != NodeMask(~bits).key
