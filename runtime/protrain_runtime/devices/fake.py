"""`FakeMode`: tensors without values that may be copied."""

from torch._subclasses.fake_tensor import FakeTensorMode


class FakeMode(FakeTensorMode):
    """A `FakeTensorMode` whose tensors may be copied.

    PyTorch copies the mode with each tensor. The copy shares uncounted weak references to storages
    of constants, and frees them a second time, when the memory may be in other use.
    """

    def __deepcopy__(self, _: object) -> "FakeMode":
        return self
