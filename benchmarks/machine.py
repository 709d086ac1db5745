"""Which machine a result is from."""

from __future__ import annotations

import datetime
import os
import platform
from typing import Any


def describe() -> dict[str, Any]:
    """CPU, cores that this process may use, GPU and driver if there are any, Python, date."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": _gpu(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def _cpu() -> str:
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    return platform.processor() or platform.machine()


def _gpu() -> str | None:
    from b12x._runtime import cuda_target, driver
    from b12x._runtime.errors import DriverError

    try:
        version = driver.version()
        return f"{cuda_target.device_name(0)}, driver for CUDA {version // 1000}.{version % 1000 // 10}"
    except DriverError:
        return None
