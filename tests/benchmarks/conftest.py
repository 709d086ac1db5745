"""The benchmarks are scripts: their folders are where they import each other from."""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks"
sys.path += [str(folder) for folder in (FOLDER, FOLDER / "h200") if str(folder) not in sys.path]
