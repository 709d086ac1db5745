"""Seeded faults: kernels broken by rule, to learn whether the emulator and the numerical cases would notice.

:mod:`.kernel` finds the instructions of a PTX text and what they read and write, the ``rules_*`` modules change one at
a time, :mod:`.draw` draws changes by seed, :mod:`.families` lists which kernels are judged on which cases,
:mod:`.judge` runs one broken kernel and :mod:`.run` many. ``python -m b12x.build_tools.mutants KERNEL --seed N
--count M`` prints what became of each.
"""
