"""Memory of caches that goes back to the system."""

import math
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import specstep
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import save_model
from specstep.runtime.engine_file import TensorSpec
from specstep.runtime.inductor.dense_cache import DenseCache
from specstep.runtime.inductor.paged_cache import PagedCache, make_caches

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pages keep what they hold")
PRESENT = np.uint64(1) << np.uint64(63)


def resident_bytes(tensor: torch.Tensor) -> int:
    """What a tensor takes in memory."""
    first, last = tensor.data_ptr() // mmap.PAGESIZE, -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * (last - first)), np.uint64)
    return int(np.count_nonzero(entries & PRESENT)) * mmap.PAGESIZE


@settings(deadline=None, max_examples=40)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 300), st.integers(1, 80)),
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.data(),
)
def test_the_first_slots_of_a_row_become_zeros_and_nothing_else(shape, dtype, data):
    pages = PagedCache(TensorSpec("keys.0", shape, dtype), 0)
    assert pages.tensor.shape == shape and not pages.tensor.any()
    pages.tensor.fill_(3)
    row, slots = data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[2]))
    expected = pages.tensor.clone()
    expected[row, :, :slots] = 0
    pages.clear(row, slots)
    assert torch.equal(pages.tensor, expected)
    pages.tensor[row].fill_(5)  # what went back is there again
    assert (pages.tensor[row] == 5).all()


def test_a_cleared_row_takes_nothing():
    pages = PagedCache(TensorSpec("keys.0", (4, 2, 1024, 64), "float32"), 0)
    assert resident_bytes(pages.tensor) == 0
    pages.tensor[1] = pages.tensor[2] = 1.0
    row = 2 * 1024 * 64 * 4
    assert resident_bytes(pages.tensor) == 2 * row
    pages.clear(1, 1024)
    assert resident_bytes(pages.tensor) == row
    pages.clear(2, 512)
    assert resident_bytes(pages.tensor) == row // 2


def test_an_engine_takes_what_its_rows_hold(tmp_path):
    """Reserved for 4 rows of 1,024 tokens, and each held that many once; then each holds some 50."""
    shape = {"head_dim": 64, "max_position_embeddings": 2048, "num_hidden_layers": 2}
    folder = save_model(tmp_path / "model", tokenizer=True, **shape)
    sizes = {"dtype": "float32", "drafter": "ngram", "max_batch": 4, "max_seq_len": 1024, "prefill_chunk": 256}
    with specstep.eager(str(folder), **sizes) as engine:
        caches = engine.session.caches.values()
        reserved = sum(tensor.nbytes for tensor in caches)
        long, short = [[*range(8, 58)] * 18 for _ in range(4)], [[40 + row] * 40 for row in range(4)]
        expected = [result.token_ids for result in engine.generate(short, 10, ignore_eos=True)]
        engine.generate(long, 20, ignore_eos=True)
        freed = sum(map(resident_bytes, caches))
        row = engine.session.admit(long[0], 1000, [])
        held = sum(map(resident_bytes, caches))
        engine.session.release(row)
        again = [result.token_ids for result in engine.generate(short, 10, ignore_eos=True)]
        after = sum(map(resident_bytes, caches))
    assert again == expected
    pages_of_edges = 2 * mmap.PAGESIZE * sum(math.prod(tensor.shape[:2]) for tensor in caches)
    assert freed <= pages_of_edges and after <= pages_of_edges
    assert 0.8 * reserved / 4 < held < reserved / 4 + pages_of_edges < 0.4 * reserved


def test_a_prefix_is_shared_until_one_writes():
    cache = PagedCache(TensorSpec("keys.0", (3, 2, 512, 64), "bfloat16"), 100)
    cache.make_store(1024, lookahead=0)
    cache.tensor[0] = torch.randn(2, 512, 64)
    kept = cache.tensor[0].clone()
    cache.keep(0, 0, 512, 400)
    cache.recall(1, 0, 512, 400)
    assert resident_bytes(cache.tensor[1]) <= 4 * mmap.PAGESIZE  # edges alone, until it is read
    assert torch.equal(cache.tensor[1, :, :400], kept[:, :400]) and not cache.tensor[1, :, 400:].any()
    cache.tensor[1, :, 390:] = 7.0  # its next tokens
    cache.recall(2, 0, 512, 400)
    assert torch.equal(cache.tensor[2, :, :400], kept[:, :400])
    cache.keep(1, 380, 512, 100)  # other text takes the place: who shares it has its own from now on
    assert torch.equal(cache.tensor[2, :, :400], kept[:, :400])
    assert torch.equal(cache.tensor[1, :, :390], kept[:, :390]) and (cache.tensor[1, :, 390:] == 7).all()
    cache.clear(2, 400)
    assert not cache.tensor[2].any() and resident_bytes(cache.tensor[2]) <= 512 * 64 * 4
    assert torch.equal(cache.store[:, 612:912], kept[:, 100:400])


@pytest.mark.parametrize("lookahead", [1, 3])
def test_slots_that_lie_before_their_tokens_are_shared_too(lookahead):
    cache = PagedCache(TensorSpec("keys.0", (2, 2, 512, 64), "bfloat16"), 100)
    cache.make_store(512, lookahead)
    cache.store.fill_(3)
    cache.recall(1, 64 - lookahead, 32, 320)
    assert resident_bytes(cache.tensor[1]) <= 4 * mmap.PAGESIZE
    assert (cache.tensor[1, :, 64 - lookahead : 384 - lookahead] == 3).all()
    assert int(cache.tensor[1].sum()) == 3 * 2 * 320 * 64


@settings(deadline=None, max_examples=40)
@given(
    st.tuples(
        st.integers(1, 3), st.integers(1, 2), st.sampled_from([64, 96, 128, 192, 250]), st.sampled_from([16, 64])
    ),
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.integers(0, 3),
    st.sampled_from([0, 5, 1000]),
    st.randoms(use_true_random=False),
)
def test_it_does_what_a_dense_one_does(shape, dtype, lookahead, most, rng):
    rows, heads, slots, width = shape
    spec = TensorSpec("keys.0", (rows, heads, 8 * slots, width), dtype)
    caches = [PagedCache(spec, most), DenseCache(spec, torch.device("cpu"))]
    blocks = range(0, 8 * slots - 32, 32)
    for cache in caches:
        cache.make_store(8 * slots, lookahead)
    for number in range(25):
        row, block, place = rng.randrange(rows), rng.choice(blocks), rng.choice(blocks)
        start = max(block - lookahead, 0)
        count = rng.randrange(1, min(8 * slots - start, 8 * slots - place - lookahead))
        task = rng.choice(["keep", "recall", "recall", "write", "clear"])
        for cache in caches:
            if task == "write":
                cache.tensor[row, :, start : start + count] = number
            elif task == "clear":
                cache.clear(row, 8 * slots)
            else:
                getattr(cache, task)(row, start, place + start - block + lookahead, count)
        assert torch.equal(caches[0].tensor, caches[1].tensor), task
        assert torch.equal(caches[0].store, caches[1].store), task


def test_a_store_goes_with_its_cache():
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, cache = files(), PagedCache(TensorSpec("keys.0", (2, 2, 512, 64), "bfloat16"), 100)
    cache.make_store(512, 0)
    assert files() > before
    cache.recall(1, 0, 0, 512)
    tensor = cache.tensor
    del cache
    assert files() == before and not tensor.any()


def test_where_the_system_refuses_a_line_says_so(monkeypatch, caplog):
    specs, cpu = [TensorSpec("keys.0", (1, 1, 8, 8), "float32")], torch.device("cpu")
    assert type(make_caches(specs, cpu)["keys.0"]) is PagedCache
    assert type(make_caches(specs, torch.device("meta"))["keys.0"]) is DenseCache

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert type(make_caches(specs, cpu)["keys.0"]) is DenseCache
    monkeypatch.setattr(sys, "platform", "darwin")
    assert type(make_caches(specs, cpu)["keys.0"]) is DenseCache
    said = "caches keep the memory that they once took: "
    assert caplog.messages == [f"{said}no memory", f"{said}expected Linux, got darwin"]
