"""Check records: which PTX has passed which numerical cases, on which target.

    python -m b12x.build_tools.checks record --target emulator
    python -m b12x.build_tools.checks report

``checks.json`` maps the sha256 of a kernel's PTX, its target line normalised, to the kernel's key and its checks: for
each target the names of the cases that passed, the largest error as a part of its bound (``worst``) and the largest
norm of an error over that of its result (``relative``). The pack step copies the checks into the pack and refuses a
kernel that has none.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import b12x
from b12x._runtime.errors import DeviceNotSupportedError, DriverError, PackError
from b12x._runtime.pack import Pack, ptx_blob

from .compile_one import CompiledArtifact
from .errors import BuildError

if TYPE_CHECKING:
    from b12x.verify.runner import KernelResult

FILE = Path(__file__).with_name("checks.json")
#: Set to 1, it lets a build pack kernels without a record. For development.
ALLOW_UNCHECKED = "B12X_BUILD_ALLOW_UNCHECKED"
RECORD = "python -m b12x.build_tools.checks record --target emulator"

_MANIFESTS = Path(__file__).resolve().parent.parent / "manifests"
_REHOST = "rehost:sm_90a"
_TARGETS = ("emulator", _REHOST, "cuda")

#: PTX sha256 -> {"key": ..., "checks": [{"target": ..., "worst": ..., "relative": ..., "cases": [...]}]}
Records = dict[str, dict[str, Any]]


def load(file: Path = FILE) -> Records:
    """The records of a file; none where there is no file."""
    if not file.exists():
        return {}
    records: Records = json.loads(file.read_text())
    return records


def save(records: Records, file: Path = FILE) -> None:
    """Write records; the same records give the same bytes."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
    os.replace(partial, file)


def unchecked_allowed() -> bool:
    """Whether the environment allows kernels without a record."""
    return os.environ.get(ALLOW_UNCHECKED, "").strip() not in ("", "0")


def refuse_unchecked(name: str, artifacts: Iterable[CompiledArtifact], records: Mapping[str, Any]) -> None:
    """Raise BuildError where a kernel of the pack ``name`` has passed no check in its present form."""
    missing = {artifact.key: digest for artifact in artifacts if (digest := ptx_blob(artifact.ptx)[0]) not in records}
    if missing:
        lines = [f"pack {name!r} was not written: {len(missing)} kernels have no check record for their PTX"]
        lines += [f"  {key} (PTX sha256 {digest})" for key, digest in sorted(missing.items())]
        lines.append(f"`{RECORD}` makes the records; for development, {ALLOW_UNCHECKED}=1 builds without")
        raise BuildError("\n".join(lines))


def merge(records: Mapping[str, Any], pack: Pack, target: str, results: Iterable[KernelResult]) -> Records:
    """The records with this run's in place of earlier ones of its target.

    Records of PTX that the pack does not hold are dropped: nothing is built from it any more.
    """
    held = {}
    for key in sorted(pack.keys()):
        artifact = pack.get(key)
        assert artifact is not None
        assert artifact.ptx is not None
        held[key] = artifact.ptx
    checks = {digest: list(records.get(digest, {}).get("checks", ())) for digest in held.values()}
    for kernel in results:
        found = checks[held[kernel.key]]
        found[:] = [check for check in found if check["target"] != target]
        if kernel.status == "passed":
            cases = [result.case.name for result in kernel.results]
            # Two digits: the last ones depend on the order in which a machine's libraries add.
            worst, relative = (float(f"{figure:.1e}") for figure in (kernel.worst, kernel.relative))
            found.append({"target": target, "worst": worst, "relative": relative, "cases": cases})
        found.sort(key=lambda check: str(check["target"]))
    return {digest: {"key": key, "checks": checks[digest]} for key, digest in held.items() if checks[digest]}


def coverage(pack: Pack, records: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each kernel of a pack: its key, its PTX and what it passed, by target."""
    rows = []
    for key in sorted(pack.keys()):
        artifact = pack.get(key)
        assert artifact is not None
        checks = records.get(artifact.ptx or "", {}).get("checks", [])
        rows.append({"key": key, "ptx": artifact.ptx, "checks": {check["target"]: check for check in checks}})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when every kernel has passed, or for a report."""
    parser = argparse.ArgumentParser(prog="python -m b12x.build_tools.checks", description="Check records of kernels.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("record", help="run the cases of every kernel and keep what passed")
    command.set_defaults(run=_record)
    command.add_argument("--target", choices=_TARGETS, required=True)
    command.add_argument("-o", "--output", type=Path, default=FILE, metavar="FILE", help="records to update")
    _pack_argument(command)
    command = commands.add_parser("report", help="on which targets each kernel has run, and with what error")
    command.set_defaults(run=_report)
    command.add_argument("--json", action="store_true", help="print JSON")
    _pack_argument(command)
    chosen = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="b12x-checks-") as folder:
            status: int = chosen.run(chosen, Path(folder))
    except (BuildError, PackError, DriverError, DeviceNotSupportedError) as error:
        print(f"checks: {error}", file=sys.stderr)
        return 1
    return status


def _pack_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--pack", type=Path, metavar="FOLDER", help="default: what manifests/*.toml reach, built here")


def _record(chosen: argparse.Namespace, folder: Path) -> int:
    from b12x.verify import runner

    pack = _pack(chosen, folder)
    if chosen.target == _REHOST and chosen.pack is None:
        from .rehost import rehost_pack

        pack = rehost_pack(pack.path, folder / "rehosted")
    _, sizes = runner.TARGETS[chosen.target]
    with _installed(pack), runner.entered(chosen.target) as where:
        kernels = [k for k in runner.run_cases(where, runner.all_cases(sizes)) if k.key in pack.entries]
    records = merge(load(chosen.output), pack, chosen.target, kernels)
    save(records, chosen.output)
    for kernel in kernels:
        print(f"{kernel.status:7}  {len(kernel.results):3} cases  {kernel.worst:.2f} of bound  {kernel.key}")
        for result in kernel.results:
            if not result.passed:
                print(f"         {result.case.name}: {result}")
    print(f"{chosen.output}: {len(records)} records")
    return 0 if all(kernel.status == "passed" for kernel in kernels) else 1


@contextmanager
def _installed(pack: Pack) -> Iterator[None]:
    """The pack is the first one that plans look into."""
    before = os.environ.get("B12X_PACK_PATH")
    os.environ["B12X_PACK_PATH"] = str(pack.path)
    b12x.clear_all_caches()
    try:
        yield
    finally:
        if before is None:
            del os.environ["B12X_PACK_PATH"]
        else:
            os.environ["B12X_PACK_PATH"] = before
        b12x.clear_all_caches()


def _report(chosen: argparse.Namespace, folder: Path) -> int:
    rows = coverage(_pack(chosen, folder), load())
    if chosen.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        print(f"{row['key']}\n  PTX {row['ptx']}")
        for target in _TARGETS:
            check = row["checks"].get(target)
            found = "not run"
            if check:
                found = f"{len(check['cases'])} cases, {check['worst']:g} of bound, norm of error {check['relative']:g}"
            print(f"  {target:14} {found}")
    for target in _TARGETS:
        absent = [row["key"] for row in rows if target not in row["checks"]]
        print(f"{target}: {len(rows) - len(absent)} of {len(rows)} kernels have run")
    return 0


def _pack(chosen: argparse.Namespace, folder: Path) -> Pack:
    """The pack of ``--pack``, or one of all that the manifests of the source tree reach."""
    if chosen.pack is not None:
        return Pack.open(chosen.pack)
    from .build import BuildOptions, BuildReport, compile_specs
    from .manifest import load_manifest
    from .pack import pack_contents, publish

    manifests = [load_manifest(path) for path in sorted(_MANIFESTS.glob("*.toml"))]
    if not manifests:
        raise BuildError(f"{_MANIFESTS} holds no manifests; run this in a source tree, or name a pack with --pack")
    specs = {spec.key: spec for manifest in manifests for spec in manifest.specs()}
    report = BuildReport("checks", folder, ())
    artifacts = compile_specs([specs[key] for key in sorted(specs)], BuildOptions.from_environment(), report)
    index, blobs = pack_contents("checks", artifacts, {})
    publish(folder / "built", index, blobs)
    return Pack.open(folder / "built")


if __name__ == "__main__":
    sys.exit(main())
