"""What a launch tells an observer: for measurements, such as bank conflicts and bytes in flight, and for traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .async_ import BulkCopy, ThreadCopies
    from .decode import Op
    from .machine import Cta, Group
    from .parse import Instr


class Observer(Protocol):
    """Called in the order in which things happen under the launch's schedule. An observer changes nothing."""

    def block(self, cta: Cta, warps: Sequence[int], ops: Sequence[Op]) -> None:
        """Warps are about to run the instructions of a basic block, or its rest."""

    def shared(self, cta: Cta, ins: Instr, warps: NDArray[Any], offsets: NDArray[Any], size: int, write: bool) -> None:
        """Lanes load or store shared memory of a CTA, ``size`` bytes each: the warp of each and its byte offset.

        For ldmatrix and stmatrix these are the rows of 16 bytes, eight to a matrix, in the order of the lanes that
        address them.
        """

    def copy(self, cta: Cta, copy: ThreadCopies | BulkCopy) -> None:
        """A CTA asks for an asynchronous copy."""

    def landed(self, cta: Cta, copy: ThreadCopies | BulkCopy) -> None:
        """A copy takes effect; one of threads may do so in parts."""


def lanes(g: Group, where: NDArray[Any] | None, count: int = 32) -> NDArray[Any]:
    """The warp of each active lane of a group, or of those at some positions; of whole warps the first ``count``."""
    warps = np.repeat(np.array(g.warps), 32).reshape(g.n, 32)
    found: NDArray[Any] = g.pick(warps) if count == 32 else warps[:, :count].ravel()
    return found if where is None else found[where]
