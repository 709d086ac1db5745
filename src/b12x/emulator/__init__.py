"""A PTX emulator: runs a kernel's PTX on the CPU, and finds what hardware lets pass.

>>> program = b12x.emulator.parse(ptx_text)
>>> b12x.emulator.launch(program, grid=(1,), block=(128,), params=[...], regions=[...])

Only numpy is needed. Accesses are checked against the passed tensors, data that nothing wrote is tracked to where it
would matter, and asynchronous copies take effect as late as PTX allows.
"""

from .errors import (
    BarrierError,
    Deadlock,
    EmulatorError,
    LaunchError,
    Misaligned,
    MissingProxyFence,
    OutOfBounds,
    ParseError,
    PendingCopies,
    SharedRace,
    StepLimit,
    TaintError,
    UnsupportedInstruction,
)
from .options import Options, Stats
from .run import Launch, Program, launch, launch_together, parse

__all__ = [
    "BarrierError",
    "Deadlock",
    "EmulatorError",
    "Launch",
    "LaunchError",
    "Misaligned",
    "MissingProxyFence",
    "Options",
    "OutOfBounds",
    "ParseError",
    "PendingCopies",
    "Program",
    "SharedRace",
    "Stats",
    "StepLimit",
    "TaintError",
    "UnsupportedInstruction",
    "launch",
    "launch_together",
    "parse",
]
