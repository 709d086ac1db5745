"""What the emulator can find wrong with a kernel, or with itself."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """Base of every error that the emulator raises about a kernel."""


class ParseError(EmulatorError):
    """The PTX text is malformed, or names something it does not declare."""


class UnsupportedInstruction(EmulatorError):
    """An opcode, modifier or operand form that the emulator does not know; names it and its PTX line."""


class LaunchError(EmulatorError):
    """The launch does not fit the entry: parameters, block shape or shared memory."""


class OutOfBounds(EmulatorError):
    """An access outside the passed tensors or the CTA's shared memory, or a write to a read-only tensor."""


class Misaligned(EmulatorError):
    """An access whose address is not a multiple of its width."""


class TaintError(EmulatorError):
    """Data that nothing wrote reached a stored result, an address or a branch."""


class Deadlock(EmulatorError):
    """No warp can go on; the message says where each one stands."""


class PendingCopies(EmulatorError):
    """A CTA finished while asynchronous copies still used its shared memory."""


class BarrierError(EmulatorError):
    """A barrier or mbarrier was used against its rules (too many arrivals, not initialised, wrong count)."""


class SharedRace(EmulatorError):
    """Two warps, lanes or copies touch the same shared memory, one of them writing, and nothing orders them."""


class MissingProxyFence(EmulatorError):
    """An asynchronous copy uses what ordinary stores wrote, without a fence between the two proxies."""


class StepLimit(EmulatorError):
    """The launch took more steps than ``Options(max_steps=...)`` allows."""
