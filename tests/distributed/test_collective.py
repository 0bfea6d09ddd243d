"""The protocol: what ranks may exchange, how arrays are divided, and the engine of one rank."""

import numpy as np
import pytest

import onnxgrad.distributed
from onnxgrad.distributed import Alone, Collective, blocks
from onnxgrad.distributed.collective import check
from onnxgrad.errors import BadInput


@pytest.mark.parametrize(("length", "size"), [(10, 4), (3, 8), (0, 3), (7, 1), (4096, 64)])
def test_blocks_cover_everything_evenly(length, size):
    bounds = blocks(length, size)
    sizes = np.diff(bounds)
    assert len(sizes) == size
    assert sizes.sum() == length
    assert sizes.max() - sizes.min() <= 1


def test_one_rank_alone_changes_nothing():
    alone: Collective = Alone()
    array = np.arange(6, dtype=np.float32)
    alone.all_reduce(array)
    alone.reduce_scatter(array, [0, 6])
    alone.all_gather(array, [0, 6])
    received = np.zeros((1, 6), np.float32)
    alone.all_to_all(array, [0, 6], received)
    np.testing.assert_array_equal(received, [array])
    with pytest.raises(BadInput, match="rank 0 is given float32"):
        alone.all_to_all(array, [0, 6], np.zeros((1, 5), np.float32))
    alone.broadcast(array)
    alone.barrier()
    alone.close()
    assert (alone.rank, alone.size) == (0, 1)
    np.testing.assert_array_equal(array, np.arange(6))


@pytest.mark.parametrize(
    ("array", "bounds", "said"),
    [
        (np.zeros((4, 4), np.float32)[:, 1], None, "contiguous"),
        (np.zeros(2, ">f4"), None, "byte order"),
        (np.zeros(2, np.complex64), None, "complex64"),
        (np.zeros(2, object), None, "Python objects"),
        (np.zeros((2, 2), np.float32), [0, 1, 4], "one axis"),
        (np.zeros(4, np.float32), [0, 4], "3 ascending bounds"),
        (np.zeros(4, np.float32), [0, 3, 5], "from 0 to 4"),
        (np.zeros(4, np.float32), [0, 5, 4], "ascending"),
    ],
)
def test_what_cannot_be_exchanged_is_refused(array, bounds, said):
    with pytest.raises(BadInput, match=said):
        check(array, bounds, size=2, summed=True)


def test_read_only_memory_is_refused():
    array = np.zeros(2, np.float32)
    array.flags.writeable = False
    with pytest.raises(BadInput, match="writable"):
        Alone().broadcast(array)


def test_the_former_name_of_broadcast_document_warns():
    with pytest.warns(DeprecationWarning, match="told is deprecated; it is called broadcast_document now"):
        assert onnxgrad.distributed.told(Alone(), {"a": 1}) == {"a": 1}
    with pytest.raises(AttributeError, match="has no attribute 'tell'"):
        onnxgrad.distributed.tell  # noqa: B018
