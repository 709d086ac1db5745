"""Checks of kernels against their references: numerical cases, the run of ``b12x verify``, and the MMA probe.

An op's cases are ``b12x.<group>.<op>.cases.CASES``. Tests, ``b12x verify``, the run on a rehosted GPU and the check
records of the build all run those.
"""
