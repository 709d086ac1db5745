"""Shared by the toy kernels, so that tests can change a file that the device module only imports."""

from __future__ import annotations


def scaled(value, alpha):
    return value * alpha
