"""Makes the source tree importable without an install, in this process and in those that it starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

_PATHS = [str(ROOT / "src"), str(HERE), str(HERE.parent)]

sys.path[:0] = [path for path in _PATHS if path not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join([*_PATHS, os.environ.get("PYTHONPATH", "")])

import b12x  # noqa: E402

# The build tools are a folder of the source tree; an install puts them into the package.
if str(ROOT) not in b12x.__path__:
    b12x.__path__.append(str(ROOT))
