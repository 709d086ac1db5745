"""Add-on wheels: a distribution ``b12x-pack-<name>`` whose one package is a pack, found by its entry point."""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from b12x import __version__
from b12x._runtime.pack import BLOBS, INDEX
from b12x._runtime.packs import ENTRY_POINTS

# The earliest time that a zip file can hold; the same on every build.
_TIME = (1980, 1, 1, 0, 0, 0)


def write_wheel(directory: Path, name: str, index: bytes, blobs: Mapping[str, bytes]) -> Path:
    """Write the add-on wheel of a pack; the same pack gives the same bytes. The file appears whole or not at all."""
    package = f"b12x_pack_{name.replace('-', '_')}"
    info = f"{package}-{__version__}.dist-info"
    files = {f"{package}/{BLOBS}/{blob}": data for blob, data in blobs.items()}
    files |= {
        f"{package}/{INDEX}": index,
        f"{package}/__init__.py": f'"""The kernel pack {name!r} for b12x {__version__}."""\n'.encode(),
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {__version__}\n"
            f"Summary: Kernel pack {name!r} for b12x\nRequires-Python: >=3.10\nRequires-Dist: b12x=={__version__}\n"
        ).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: b12x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[{ENTRY_POINTS}]\n{name} = {package}\n".encode(),
    }
    record = [f"{path},sha256={_record_hash(data)},{len(data)}" for path, data in sorted(files.items())]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / f"{package}-{__version__}-py3-none-any.whl"
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".new-", delete=False) as temporary:
        try:
            _write_zip(temporary.name, files)
            os.chmod(temporary.name, 0o644)
            os.replace(temporary.name, wheel)
        except BaseException:
            os.unlink(temporary.name)
            raise
    return wheel


def _write_zip(path: str, files: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        # Metadata last, as the wheel format recommends.
        for name, data in sorted(files.items(), key=lambda item: (".dist-info/" in item[0], item[0])):
            member = zipfile.ZipInfo(name, _TIME)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = 0o100644 << 16
            archive.writestr(member, data)


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
