"""The error of the rehost."""

from __future__ import annotations

from ..errors import BuildError


class RehostError(BuildError):
    """PTX that cannot be turned into Hopper code; the message names the line and the instruction."""
