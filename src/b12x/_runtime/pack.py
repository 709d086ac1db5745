"""The pack format: a folder of compiled kernels with one index.

::

    index.json
    blobs/<sha256>.cubin
    blobs/<sha256>.ptx.gz      sha256 of the uncompressed text, whose target line says .target sm_120a

The index is JSON with one entry a line, so that opening it finds the lines of 10,000 entries and parses none; one is
parsed when it is asked for. Its first member, ``_sha256``, is the sha256 of all that follows it: one hash finds any
damage, and vouches for the lines. The hashes guard against accident, not against someone who can rewrite the installed
files.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import KeysView, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from b12x import __version__
from b12x._runtime.errors import PackError

if TYPE_CHECKING:
    from typing_extensions import Self

SCHEMA = 1
INDEX = "index.json"
BLOBS = "blobs"

_SEAL = b'{"_sha256":"'
_ENTRIES = b',"entries":{\n'
_END = b"\n}}\n"
_REINSTALL = "reinstall the wheel or build the pack again with `b12x build`"


@dataclass(frozen=True)
class Cubin:
    """One architecture's machine code: its blob and what it uses (``spill_bytes`` is local memory per thread)."""

    blob: str
    bytes: int
    registers: int
    static_smem: int
    spill_bytes: int


@dataclass(frozen=True)
class Artifact:
    """What a pack holds under one key.

    ``abi`` is the JSON form of a ``KernelABI``; ``ptx`` is None in a pack without PTX.
    """

    abi: dict[str, Any]
    fingerprint: str
    source: str
    ptx: str | None
    entry: str
    cubins: Mapping[str, Cubin]
    checks: tuple[Any, ...] = ()

    def to_text(self) -> str:
        """The entry's canonical JSON text."""
        return _canonical(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Artifact:
        """Parse an entry (KeyError, TypeError or ValueError when it is not one)."""
        data = json.loads(text)
        data["cubins"] = {arch: Cubin(**cubin) for arch, cubin in data["cubins"].items()}
        data["checks"] = tuple(data["checks"])
        return cls(**data)


@dataclass(frozen=True)
class Pack:
    """An opened pack. ``Pack.open`` reads the index only; blobs are read, and their hashes checked, when asked for.

    ``entries`` says where in ``index`` the text of each kernel's entry begins; it ends with the line.
    """

    path: Path
    name: str
    b12x_version: str
    dsl: str
    ptxas: str
    archs: tuple[str, ...]
    manifests: Mapping[str, str]
    index: bytes = field(repr=False)
    entries: Mapping[str, int] = field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Pack:
        """Open the pack in a folder.

        Raises
        ------
        PackError
            No index, a damaged index, or one of another schema or another b12x version.
        """
        folder = Path(path)
        index = folder / INDEX
        try:
            data = index.read_bytes()
        except OSError as error:
            raise PackError(f"no pack at {folder}: cannot read {INDEX} ({error.strerror}); {_REINSTALL}") from None
        return cls.parse(folder, data)

    @classmethod
    def parse(cls, folder: Path, data: bytes) -> Self:
        """The pack of a folder whose index has these bytes (PackError as :meth:`open`)."""
        index = folder / INDEX
        members, entries = _unseal(index, data)
        version = members.get("b12x_version")
        if version != __version__:
            raise PackError(
                f"pack {folder} was built by b12x {version}, but this is b12x {__version__}; packs go with exactly one "
                f"version: build it again with `b12x build`, or remove it"
            )
        try:
            return cls(
                path=folder,
                name=members["name"],
                b12x_version=version,
                dsl=members["dsl"],
                ptxas=members["ptxas"],
                archs=tuple(members["archs"]),
                manifests=members["manifests"],
                index=data,
                entries=entries,
            )
        except (KeyError, TypeError) as error:
            raise PackError(f"pack index {index} is malformed ({error!r}); {_REINSTALL}") from None

    def keys(self) -> KeysView[str]:
        """Keys of all kernels."""
        return self.entries.keys()

    def get(self, key: str) -> Artifact | None:
        """The kernel under a key, None when the pack lacks it (PackError when the entry is malformed)."""
        start = self.entries.get(key)
        if start is None:
            return None
        text = self.index[start : self.index.index(b"\n", start)].removesuffix(b",")
        try:
            return Artifact.from_text(text)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PackError(f"entry {key} of pack {self.path} is malformed ({error!r}); {_REINSTALL}") from None

    def cubin(self, artifact: Artifact, arch: str) -> bytes:
        """Machine code for an architecture that the artifact has (PackError when it is missing or damaged)."""
        blob = artifact.cubins[arch].blob
        return self._checked(f"{blob}.cubin", blob, lambda data: data)

    def ptx(self, artifact: Artifact) -> str:
        """The kernel's PTX (PackError when it is missing or damaged, or when the pack was built without)."""
        if artifact.ptx is None:
            raise PackError(f"pack {self.path} carries no PTX; build it again with PTX to use the emulator")
        return self._checked(f"{artifact.ptx}.ptx.gz", artifact.ptx, gzip.decompress).decode("ascii")

    def _read(self, file: Path) -> bytes:
        return file.read_bytes()

    def _checked(self, name: str, expected: str, decode: Any) -> bytes:
        file = self.path / BLOBS / name
        try:
            data: bytes = decode(self._read(file))
        except FileNotFoundError:
            raise PackError(f"{file} is missing; {_REINSTALL}") from None
        except Exception as error:  # gzip raises several unrelated types on damaged input
            raise PackError(f"{file} cannot be read ({error}); {_REINSTALL}") from None
        found = hashlib.sha256(data).hexdigest()
        if found != expected:
            raise PackError(f"{file} is damaged: its sha256 is {found}, expected is {expected}; {_REINSTALL}")
        return data


@dataclass(frozen=True)
class UnsavedPack(Pack):
    """A pack that is in no folder: its blobs are in memory."""

    blobs: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @classmethod
    def from_bytes(cls, folder: Path, index: bytes, blobs: Mapping[str, bytes]) -> UnsavedPack:
        """The pack of an index and its blobs by file name; ``folder`` is for messages."""
        return replace(cls.parse(folder, index), blobs=blobs)

    def _read(self, file: Path) -> bytes:
        return self.blobs[file.name]


def cubin_blob(cubin: bytes) -> tuple[str, str, bytes]:
    """sha256, file name and file contents of a cubin's blob."""
    digest = hashlib.sha256(cubin).hexdigest()
    return digest, f"{digest}.cubin", cubin


def ptx_blob(ptx: str) -> tuple[str, str, bytes]:
    """sha256, file name and file contents of a PTX text's blob."""
    data = ptx.encode("ascii")
    digest = hashlib.sha256(data).hexdigest()
    return digest, f"{digest}.ptx.gz", gzip.compress(data, 9, mtime=0)


def index_bytes(
    *,
    name: str,
    dsl: str,
    ptxas: str,
    archs: tuple[str, ...],
    manifests: Mapping[str, str],
    entries: Mapping[str, Artifact],
) -> bytes:
    """Contents of ``index.json``, the same bytes for the same contents."""
    members = {
        "schema": SCHEMA,
        "name": name,
        "b12x_version": __version__,
        "dsl": dsl,
        "ptxas": ptxas,
        "archs": sorted(archs),
        "manifests": dict(manifests),
    }
    return seal(members, {key: artifact.to_text() for key, artifact in entries.items()})


def seal(members: Mapping[str, Any], entries: Mapping[str, str]) -> bytes:
    """An index: members, then entries (JSON texts by key), with the hash of all in front."""
    head = _canonical(members)[1:-1]
    lines = ",\n".join(f"{_canonical(key)}:{text}" for key, text in sorted(entries.items()))
    rest = b'",' + head.encode("ascii") + _ENTRIES + lines.encode("ascii") + _END
    return _SEAL + hashlib.sha256(rest).hexdigest().encode() + rest


def write_pack(folder: Path, index: bytes, blobs: Mapping[str, bytes]) -> None:
    """Write a pack so that the folder appears whole or not at all: a temporary sibling, fsync, rename.

    Raises OSError when the folder exists and is not empty, or cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        (temporary / BLOBS).mkdir()
        for name, data in blobs.items():
            _write_synced(temporary / BLOBS / name, data)
        _write_synced(temporary / INDEX, index)
        for directory in (temporary / BLOBS, temporary):
            _sync_directory(directory)
        temporary.chmod(0o755)
        temporary.rename(folder)
        _sync_directory(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _unseal(index: Path, data: bytes) -> tuple[dict[str, Any], dict[str, int]]:
    """Members of an index whose seal and schema are right, and where in it the text of each entry begins."""
    start = len(_SEAL)
    expected, found = data[start : start + 64], hashlib.sha256(memoryview(data)[start + 64 :]).hexdigest()
    if not data.startswith(_SEAL) or expected != found.encode():
        _check_schema(index, data)
        raise PackError(
            f"pack index {index} is truncated or damaged ({len(data)} bytes): its sha256 is {found}, expected is "
            f"{expected.decode('ascii', 'replace')}; {_REINSTALL}"
        )
    cut = data.find(_ENTRIES)
    head = data[:cut] + b"}"
    _check_schema(index, data if cut < 0 else head)
    try:
        if cut < 0 or not data.endswith(_END):
            raise ValueError("it is not laid out as one entry a line")
        members = json.loads(head)
        entries = {}
        line, end = cut + len(_ENTRIES), len(data) - len(_END)
        while 0 < line < end:
            colon = data.index(b'":', line, end)
            entries[data[line + 1 : colon].decode("ascii")] = colon + 2
            line = data.find(b"\n", colon, end) + 1
    except ValueError as error:
        raise PackError(f"pack index {index} is malformed ({error}); {_REINSTALL}") from None
    return members, entries


def _check_schema(index: Path, text: bytes) -> None:
    """Refuse an index that says it has another schema, whether or not this version can make sense of its seal."""
    try:
        schema = json.loads(text)["schema"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return
    if schema != SCHEMA:
        raise PackError(
            f"pack index {index} has schema {schema}, but b12x {__version__} reads schema {SCHEMA}; build the pack "
            "again with this version's `b12x build`, or install the b12x version that it was made for"
        )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _write_synced(file: Path, data: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
