"""Buffers that are handed on: for equal sizes, and never what somebody still looks into."""

import weakref

import torch

from protrain_runtime.buffers import Buffers
from protrain_runtime.lanes import Backend


def buffers() -> Buffers:
    return Buffers(Backend(torch.device("cpu")))


def test_what_leaves_serves_a_fetch_of_its_size() -> None:
    pool = buffers()
    small, large = pool.new(64), pool.new(128)
    places = small.data_ptr(), large.data_ptr()
    pool.give_up([small, large])
    del small, large
    assert pool.new(128).data_ptr() == places[1]
    assert pool.new(64).data_ptr() == places[0]


def test_what_a_view_looks_into_is_left_to_the_view() -> None:
    pool = buffers()
    buffer = pool.new(64)
    view = buffer[8:16].fill_(7)
    pool.give_up([buffer])
    del buffer
    other = pool.new(64).fill_(1)
    assert not other.eq(7).any()
    assert view.eq(7).all()


def test_what_no_fetch_of_the_boundary_takes_is_freed() -> None:
    pool = buffers()
    given = [pool.new(64), pool.new(64), pool.new(128)]
    alive = [weakref.ref(buffer) for buffer in given]
    pool.give_up(given)
    del given
    pool.keep_for([64, 256])
    assert [buffer() is not None for buffer in alive] == [True, False, False]
