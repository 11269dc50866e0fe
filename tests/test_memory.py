"""Tests of memory by pages: alignment, limits, forks."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from ooc_embed import cgroups, memory


@pytest.mark.parametrize("nbytes", [1, 4096, 10_000, (2 << 20) - 1, 2 << 20, (5 << 20) + 7])
def test_buffers_are_zeroed_writable_and_begin_on_a_page_or_a_huge_one(nbytes):
    buffer = memory.page_aligned(nbytes)
    assert buffer.shape == (nbytes,)
    assert buffer.dtype == np.uint8
    assert buffer.ctypes.data % (2 << 20 if nbytes >= 2 << 20 else 4096) == 0
    assert not buffer.any()
    buffer[:] = 255
    assert buffer.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_huge_tensors_have_the_shape_and_type_that_were_asked_for(dtype):
    tensor = memory.huge_zeros((700_001, 3), dtype)
    assert (tensor.shape, tensor.dtype) == ((700_001, 3), dtype)
    assert tensor.is_contiguous()
    assert not tensor.any()
    tensor[-1] = 7
    assert tensor.sum() == 21


def test_memory_is_given_back_with_its_last_view():
    span = memory.Span(64 << 20, writable=True)
    view = np.asarray(span)[5:]
    address = f"{span.address:x}-"
    del span
    gc.collect()

    def mapped() -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return any(line.startswith(address) for line in lines)

    assert mapped()
    del view
    gc.collect()
    assert not mapped()


def test_more_memory_than_the_machine_has_is_refused_at_once():
    with pytest.raises(OSError, match="mmap of .* bytes"):
        memory.page_aligned(64 * cgroups.usable_memory() + (1 << 45))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_child_drops_inherited_buffers_without_unmapping_its_own_memory():
    buffer = memory.page_aligned(8 << 20)
    buffer[:] = 1
    child = os.fork()
    if child == 0:
        other = bytearray(b"x") * (64 << 20)
        del buffer
        gc.collect()
        os._exit(0 if other.count(b"x") == 64 << 20 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert buffer.all()
