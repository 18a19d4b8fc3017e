"""What a computation costs, counted in place of timed: no noise of the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.count += int(count(*args, **(kwargs or {}), out_val=result))
        return result


def operations(run: Callable[[], object]) -> int:
    """Multiplications and additions of the convolutions and matrix products in a run."""
    with _Counter() as counter:
        run()
    return counter.count
