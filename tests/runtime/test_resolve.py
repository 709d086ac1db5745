"""Resolution: its order, what frozen means, which candidate is taken, and what a miss says."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import b12x
from b12x._runtime import cuda_target, jit, resolve
from b12x._runtime.emulator_target import EmulatorTarget

from .fakes import FakeDriver, RecordingTarget, ToySpec, make_artifact, make_pack, role

HINT = '[[op]]\nop = "toy.copy"\nmax_m = 8'


@pytest.fixture
def no_jit(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compiling and its disk cache are off limits; gives what was asked of them."""
    asked: list[str] = []

    def obtain(spec: ToySpec, arch: str, missed: str) -> Any:
        asked.append(f"{spec.key} {arch}")
        raise b12x.KernelNotFoundError(missed)

    monkeypatch.setattr(jit, "obtain", obtain)
    return asked


@pytest.fixture
def fake_jit(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compiling always works; gives the keys that were compiled."""
    asked: list[str] = []

    def obtain(spec: ToySpec, arch: str, missed: str) -> Any:
        asked.append(spec.key)
        return make_artifact(spec, (arch,))[0], None, "jit"

    monkeypatch.setattr(jit, "obtain", obtain)
    return asked


def test_pack_then_memory(install: Callable[..., None], tmp_path: Path, no_jit: list[str]) -> None:
    install(make_pack(tmp_path / "p", ToySpec(), name="demo"))
    target = RecordingTarget()
    first = resolve.resolve(role(ToySpec()), target, "toy.copy")
    second = resolve.resolve(role(ToySpec()), target, "toy.copy")
    assert (first.origin, second.origin) == ("pack:demo", "memory")
    assert second.why.endswith("from memory, first from pack:demo")
    assert first.loaded is second.loaded
    assert first.spec == ToySpec()
    assert f"{ToySpec().key} from pack:demo" in first.why
    assert target.loads == [ToySpec().key]


def test_frozen_allows_packs_and_memory(install: Callable[..., None], tmp_path: Path, fake_jit: list[str]) -> None:
    install(make_pack(tmp_path / "p", ToySpec()))
    target = RecordingTarget()
    compiled = resolve.resolve(role(ToySpec(tile=1)), target, "toy.copy")
    b12x.freeze_kernel_resolution("serving")
    assert resolve.resolve(role(ToySpec()), target, "toy.copy").origin == "pack:toys"
    again = resolve.resolve(role(ToySpec(tile=1)), target, "toy.copy")
    assert (again.origin, again.loaded) == ("memory", compiled.loaded)


def test_frozen_miss_raises_before_the_jit_is_asked(
    install: Callable[..., None], tmp_path: Path, no_jit: list[str]
) -> None:
    install(make_pack(tmp_path / "p", ToySpec()))
    b12x.freeze_kernel_resolution("serving")
    with pytest.raises(b12x.KernelResolutionFrozenError):
        resolve.resolve(role(ToySpec(tile=1)), RecordingTarget(), "toy.copy")
    assert no_jit == []
    b12x.unfreeze_kernel_resolution()
    with pytest.raises(b12x.KernelNotFoundError):
        resolve.resolve(role(ToySpec(tile=1)), RecordingTarget(), "toy.copy")
    assert no_jit == [f"{ToySpec(tile=1).key} sm_120a"]


def test_frozen_message_says_op_key_nearest_reason_and_manifest_lines(
    install: Callable[..., None], tmp_path: Path, no_jit: list[str]
) -> None:
    present = [ToySpec(tile=64, dtype="float16"), ToySpec(tile=128), ToySpec(tile=96), ToySpec(tile=1024, pdl=True)]
    folder = make_pack(tmp_path / "p", *present, name="demo")
    install(folder)
    b12x.freeze_kernel_resolution("the demo is serving")
    wanted = ToySpec(tile=80)
    with pytest.raises(b12x.KernelResolutionFrozenError) as caught:
        resolve.resolve(role(wanted), RecordingTarget(), "toy.copy", HINT)
    text = str(caught.value)
    for word in (
        "toy.copy: no kernel for role 'main'",
        f"wanted: {wanted.key} (key sha256 ",
        "the demo is serving",
        "cute.compile",
        f"'demo' (sm_120a, sm_121a; 4 kernels) at {folder}",
        "b12x build my.toml",
        "B12X_PACK_PATH",
        *HINT.splitlines(),
    ):
        assert word in text
    nearest = [line.split()[1] for line in text.splitlines() if line.startswith("  nearest:")]
    assert nearest == [ToySpec(tile=96).key, ToySpec(tile=128).key, ToySpec(tile=64, dtype="float16").key]
    assert "(differs: tile=96)" in text
    assert "(differs: dtype=float16, tile=64)" in text


def test_frozen_without_reason_and_without_packs(install: Callable[..., None], no_jit: list[str]) -> None:
    install()
    b12x.freeze_kernel_resolution()
    with pytest.raises(b12x.KernelResolutionFrozenError) as caught:
        resolve.resolve(role(ToySpec()), RecordingTarget(), "toy.copy")
    for word in ("reason: none given", "packs none found", "no pack holds any toy.copy kernel"):
        assert word in str(caught.value)


def test_first_present_candidate_is_taken_and_explained(
    install: Callable[..., None], tmp_path: Path, no_jit: list[str]
) -> None:
    best, second, fallback = ToySpec(tile=256), ToySpec(tile=128), ToySpec(tile=64)
    install(make_pack(tmp_path / "1", fallback, name="base"), make_pack(tmp_path / "2", fallback, second, name="more"))
    target = RecordingTarget()
    resolve.resolve(role(fallback), target, "toy.copy")
    for _ in range(2):
        found = resolve.resolve(role(best, second, fallback), target, "toy.copy")
        assert found.spec == second, "what is in memory does not beat a better candidate in a pack"
        assert "candidate 2 of 3" in found.why
        assert f"no pack has {best.key}" in found.why
    assert target.loads == [fallback.key, second.key]


def test_only_the_preferred_candidate_is_compiled(install: Callable[..., None], fake_jit: list[str]) -> None:
    install()
    best, fallback = ToySpec(tile=256), ToySpec(tile=64)
    assert resolve.resolve(role(best, fallback), RecordingTarget(), "toy.copy").spec == best
    assert fake_jit == [best.key]


def test_pack_for_another_arch_is_named(install: Callable[..., None], tmp_path: Path, no_jit: list[str]) -> None:
    install(make_pack(tmp_path / "p", ToySpec(), archs=("sm_120a",), name="half"))
    b12x.freeze_kernel_resolution()
    with pytest.raises(b12x.KernelResolutionFrozenError) as caught:
        resolve.resolve(role(ToySpec()), RecordingTarget(arch="sm_121a"), "toy.copy")
    assert f"pack 'half' has it for sm_120a only: {ToySpec().key}" in str(caught.value)
    assert "(sm_121a)" in str(caught.value)


def test_device_whose_arch_the_pack_lacks_is_refused_before_loading(
    install: Callable[..., None], tmp_path: Path, no_jit: list[str], fake_driver: Callable[..., FakeDriver]
) -> None:
    fake = fake_driver(capabilities=((12, 1),))
    install(make_pack(tmp_path / "p", ToySpec(), archs=("sm_120a",), name="half"))
    with pytest.raises(b12x.KernelNotFoundError) as caught:
        resolve.resolve(role(ToySpec()), cuda_target.cuda_target(0), "toy.copy")
    assert "pack 'half' has it for sm_120a only, and cuda:0 needs sm_121a" in str(caught.value)
    assert not fake.named("cuLibraryLoadData")


def test_pack_order_decides_among_equal_kernels_but_a_usable_one_wins(
    install: Callable[..., None], tmp_path: Path
) -> None:
    narrow = make_pack(tmp_path / "1", ToySpec(), archs=("sm_121a",), name="narrow")
    wide = make_pack(tmp_path / "2", ToySpec(), name="wide")
    install(narrow, wide)
    assert resolve.resolve(role(ToySpec()), RecordingTarget(arch="sm_121a"), "toy.copy").origin == "pack:narrow"
    assert resolve.resolve(role(ToySpec()), RecordingTarget(arch="sm_120a"), "toy.copy").origin == "pack:wide"


def test_another_abi_is_refused_with_both_fingerprints(install: Callable[..., None], tmp_path: Path) -> None:
    folder = make_pack(
        tmp_path / "p", ToySpec(), name="old", edit=lambda a: dataclasses.replace(a, fingerprint="f" * 64)
    )
    install(folder)
    target = RecordingTarget()
    with pytest.raises(b12x.PackError) as caught:
        resolve.resolve(role(ToySpec()), target, "toy.copy")
    for word in (
        f"pack 'old' at {folder} (b12x {b12x.__version__}, DSL 4.8.1)",
        ToySpec().key,
        "f" * 64,
        ToySpec().abi().fingerprint,
        f"this code (b12x {b12x.__version__})",
        "build the pack again",
    ):
        assert word in str(caught.value)
    assert target.loads == []


@dataclass(frozen=True, kw_only=True)
class WiderSpec(ToySpec):
    """The same key as a ToySpec with another launch contract: what a changed kernel looks like to an old pack."""

    def abi(self) -> Any:
        abi = super().abi()
        return dataclasses.replace(abi, launch=dataclasses.replace(abi.launch, cluster=(2, 1, 1)))


def test_changed_launch_contract_is_another_abi(install: Callable[..., None], tmp_path: Path) -> None:
    install(make_pack(tmp_path / "p", ToySpec()))
    assert WiderSpec().key == ToySpec().key
    with pytest.raises(b12x.PackError, match="ABI"):
        resolve.resolve(role(WiderSpec()), RecordingTarget(), "toy.copy")


@pytest.mark.parametrize("frozen", [False, True])
def test_capture_loads_nothing(install: Callable[..., None], tmp_path: Path, frozen: bool) -> None:
    install(make_pack(tmp_path / "p", ToySpec()))
    if frozen:
        b12x.freeze_kernel_resolution("test")
    target = RecordingTarget(in_capture=True)
    with pytest.raises(b12x.KernelNotFoundError) as caught:
        resolve.resolve(role(ToySpec()), target, "toy.copy")
    for word in ("toy.copy: ", ToySpec().key, "pack 'toys'", "not loaded on recorder", "before the capture"):
        assert word in str(caught.value)
    assert target.loads == []
    target.in_capture = False
    assert resolve.resolve(role(ToySpec()), target, "toy.copy").origin == "pack:toys"
    target.in_capture = True
    assert resolve.resolve(role(ToySpec()), target, "toy.copy").origin == "memory"


def test_capture_allows_what_is_there_but_compiles_nothing(
    install: Callable[..., None], tmp_path: Path, fake_jit: list[str]
) -> None:
    install(make_pack(tmp_path / "p", ToySpec()))
    target = RecordingTarget()
    resolve.resolve(role(ToySpec()), target, "toy.copy")
    target.in_capture = True
    resolve.resolve(role(ToySpec()), target, "toy.copy")
    with pytest.raises(b12x.KernelNotFoundError) as caught:
        resolve.resolve(role(ToySpec(tile=1)), target, "toy.copy", HINT)
    for word in ("compile miss during CUDA-graph capture", "before the capture", ToySpec(tile=1).key, "max_m = 8"):
        assert word in str(caught.value)
    assert fake_jit == []
    target.in_capture = False
    resolve.resolve(role(ToySpec(tile=1)), target, "toy.copy", HINT)
    target.in_capture = True
    assert resolve.resolve(role(ToySpec(tile=1)), target, "toy.copy", HINT).origin == "memory"


def test_cuda_target_asks_torch_whether_it_captures(
    fake_driver: Callable[..., FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    fake_driver()
    target = cuda_target.cuda_target(0)
    assert target.capturing() is False, "torch without CUDA captures nothing"
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for answer in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=answer: answer)
        assert target.capturing() is answer


def test_threads_that_resolve_one_key_load_it_once(install: Callable[..., None], tmp_path: Path) -> None:
    install(make_pack(tmp_path / "p", *(ToySpec(tile=n) for n in range(1, 9))))

    class SlowTarget(RecordingTarget):
        def load(self, *args: Any) -> Any:
            time.sleep(0.01)
            return super().load(*args)

    target = SlowTarget()
    start = threading.Barrier(8)
    found: list[Any] = []

    def work() -> None:
        start.wait()
        found.extend(resolve.resolve(role(ToySpec(tile=n)), target, "toy.copy").loaded for n in range(1, 9))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 64
    assert sorted(target.loads) == sorted(ToySpec(tile=n).key for n in range(1, 9))
    assert len({id(kernel) for kernel in found}) == 8


def test_threads_load_a_cubin_once_per_device(
    install: Callable[..., None], tmp_path: Path, fake_driver: Callable[..., FakeDriver]
) -> None:
    fake = fake_driver(capabilities=((12, 0), (12, 0)))
    install(make_pack(tmp_path / "p", ToySpec()))
    start = threading.Barrier(8)

    def work(ordinal: int) -> None:
        start.wait()
        resolve.resolve(role(ToySpec()), cuda_target.cuda_target(ordinal), "toy.copy")

    threads = [threading.Thread(target=work, args=(n % 2,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(context for *_, context in fake.named("cuLibraryLoadData")) == [7000, 7001]
    assert len(fake.named("cuInit")) == 1
    assert len(fake.named("cuDevicePrimaryCtxRetain")) == 2


def test_flipped_byte_in_a_cubin_stops_the_plan(
    install: Callable[..., None], tmp_path: Path, fake_driver: Callable[..., FakeDriver]
) -> None:
    fake = fake_driver()
    folder = make_pack(tmp_path / "p", ToySpec())
    for file in (folder / "blobs").glob("*.cubin"):
        data = bytearray(file.read_bytes())
        data[0] ^= 0x80
        file.write_bytes(data)
    install(folder)
    with pytest.raises(b12x.PackError, match=r"is damaged: its sha256 is .* expected is"):
        resolve.resolve(role(ToySpec()), cuda_target.cuda_target(0), "toy.copy")
    assert not fake.named("cuLibraryLoadData")


def test_pack_without_ptx_does_not_serve_the_emulator(
    install: Callable[..., None], tmp_path: Path, no_jit: list[str]
) -> None:
    install(make_pack(tmp_path / "p", ToySpec(), ptx=False, name="lean"))
    with pytest.raises(b12x.KernelNotFoundError, match="pack 'lean' has it without PTX, which the emulator runs"):
        resolve.resolve(role(ToySpec()), EmulatorTarget(), "toy.copy")


@dataclass(frozen=True, kw_only=True)
class ToyCaps:
    device: str = "cuda:0"
    max_m: int = 8
    dtype: str = "bfloat16"
    fast: bool = True
    splits: tuple[int, ...] = (1, 2)
    limit: float | None = None


def test_manifest_hint_is_toml_that_gives_the_caps_back() -> None:
    tomllib = pytest.importorskip("tomllib")
    text = resolve.manifest_hint("toy.copy", ToyCaps())
    (table,) = tomllib.loads(text)["op"]
    assert table.pop("op") == "toy.copy"
    assert ToyCaps(**{**table, "splits": tuple(table["splits"])}) == ToyCaps()


def test_resolve_all_puts_the_caps_into_the_message(install: Callable[..., None], no_jit: list[str]) -> None:
    install()
    with pytest.raises(b12x.KernelNotFoundError, match="max_m = 8"):
        resolve.resolve_all("toy.copy", [role(ToySpec())], RecordingTarget(), ToyCaps())


def test_clear_forgets_kernels_and_packs(install: Callable[..., None], tmp_path: Path) -> None:
    folder = make_pack(tmp_path / "p", ToySpec())
    install(folder)
    target = RecordingTarget()
    resolve.resolve(role(ToySpec()), target, "toy.copy")
    b12x.clear_all_caches()
    assert resolve.resolve(role(ToySpec()), target, "toy.copy").origin == "pack:toys"
    assert target.loads == [ToySpec().key] * 2
