"""`FakeMode`: tensors without values, that may be copied."""

from torch._subclasses.fake_tensor import FakeTensorMode


class FakeMode(FakeTensorMode):
    """A `FakeTensorMode` of which copied tensors are, too.

    PyTorch copies the mode with each tensor. The copy has the same weak references to storages of
    constants, uncounted, and frees them a second time: by then the memory may be anybody's.
    """

    def __deepcopy__(self, _: object) -> "FakeMode":
        return self
