"""Prepares the H200 run on a machine without a GPU: builds the pack, rehosts it, assembles the cases of the expansions
and racecheck's controls. Needs ptxas and nvdisasm: packages nvidia-cuda-nvcc and nvidia-cuda-nvdisasm.

    python benchmarks/h200/prepare.py                  # writes build/h200
    PYTHONPATH=src python3 benchmarks/h200/run.py --seed 1 --out h200.json      # on the GPU machine, with build/h200

The folder is a few megabytes and depends on no seed: inputs and expected results are made from the seed of the run, the
latter by the emulator, which needs only numpy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from controls import all_controls
from paths import ROOT
from sanitizer import opcodes

from b12x._runtime.pack import Pack
from b12x.build_tools.build import BuildOptions, build_pack
from b12x.build_tools.manifest import load_manifest
from b12x.build_tools.rehost import assemble, rehost_pack, rewrite
from b12x.build_tools.rehost.cases import Case, all_cases
from b12x.build_tools.rehost.rewrite import TARGET
from b12x.build_tools.workers import default_jobs
from b12x.cli.sass import disassemble

#: The run is a check itself: it takes kernels that have no check record yet.
_OPTIONS = replace(BuildOptions.from_environment(), allow_unchecked=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", type=Path, default=ROOT / "manifests" / "base.toml")
    parser.add_argument("--pack", type=Path, help="rehost this pack instead of building the manifest")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "h200")
    parser.add_argument("-j", "--jobs", type=int, default=default_jobs())
    arguments = parser.parse_args()
    output: Path = arguments.output
    shutil.rmtree(output, ignore_errors=True)
    (output / "cases").mkdir(parents=True)
    source = arguments.pack or build_pack(load_manifest(arguments.manifest), output / "original", _OPTIONS).path
    pack = rehost_pack(source, output / "pack", jobs=arguments.jobs)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        cubins = list(pool.map(_assembled, all_cases()))
    index = {}
    for case, cubin in zip(all_cases(), cubins, strict=True):
        name = f"{hashlib.sha256(cubin).hexdigest()}.cubin"
        (output / "cases" / name).write_bytes(cubin)
        index[case.name] = {"ptx": hashlib.sha256(case.ptx.encode()).hexdigest(), "cubin": name}
    (output / "cases" / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    codes = {key: opcodes(disassemble(_cubin(pack, key))) for key in sorted(pack.keys())}
    (output / "controls").mkdir()
    for control in all_controls():
        cubin = assemble(rewrite(control.ptx).ptx, about=control.name)
        (output / "controls" / f"{control.name}.cubin").write_bytes(cubin)
        codes[control.name] = opcodes(disassemble(cubin))
    (output / "opcodes.json").write_text(json.dumps(codes) + "\n")
    about = {"pack": pack.name, "dsl": pack.dsl, "ptxas": pack.ptxas, "kernels": _kernels(pack), "cases": len(index)}
    (output / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    shutil.rmtree(output / "original", ignore_errors=True)
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    print(f"{output}: {len(pack.keys())} kernels, {len(index)} cases, {size / 1e6:.1f} MB")


def _assembled(case: Case) -> bytes:
    return assemble(rewrite(case.ptx).ptx, about=case.name)


def _cubin(pack: Pack, key: str) -> bytes:
    artifact = pack.get(key)
    assert artifact is not None
    return pack.cubin(artifact, TARGET)


def _kernels(pack: Pack) -> dict[str, str]:
    """sha256 of each kernel's PTX, which ties the run's results to the shipped artifact."""
    found = {}
    for key in sorted(pack.keys()):
        artifact = pack.get(key)
        assert artifact is not None
        assert artifact.ptx is not None
        found[key] = artifact.ptx
    return found


if __name__ == "__main__":
    main()
