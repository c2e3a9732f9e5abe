"""What an array argument may be, and telling torch's tensors without importing torch."""

import sys
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Array(Protocol):
    """A NumPy array, a torch tensor, or anything else that exports its memory by DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


def torch_of(array: Any) -> Any:
    """The module torch where `array` is a tensor of its, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else None
