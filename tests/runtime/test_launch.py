"""Loading and launching through a fake driver: order of calls, parameter block, streams, devices, attributes."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as bindings

import b12x
from b12x._runtime import counters, cuda_target, resolve
from b12x._runtime.launch import used_on

from .fakes import BOTH, FakeDriver, ToySpec, make_artifact, make_pack, role


@pytest.fixture
def load(install: Callable[..., None], tmp_path: Path) -> Callable[..., Any]:
    """Resolve a toy kernel on a device."""

    def put(spec: ToySpec, ordinal: int = 0) -> Any:
        folder = tmp_path / f"pack{spec.key.__hash__()}"
        if not folder.exists():
            install(make_pack(folder, spec))
        return resolve.resolve(role(spec), cuda_target.cuda_target(ordinal), "toy.copy").loaded

    return put


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """torch's current stream on each device: 0x500 + ordinal. Gives the ordinals asked for."""
    asked: list[int] = []

    def current(ordinal: int) -> int:
        asked.append(ordinal)
        return 0x500 + ordinal

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current, raising=False)
    return asked


MAPS = {"x": ((128, 200), (256,))}


def arguments(**changes: Any) -> dict[str, Any]:
    values = {
        "x": torch.zeros(200, 128, dtype=torch.bfloat16),
        "y": torch.zeros(64, dtype=torch.uint8),
        "scale": torch.ones(1),
        "m": 200,
        "stride": 1 << 40,
        "alpha": 0.5,
    }
    return {**values, **changes}


def test_everything_is_loaded_at_plan_time_and_launching_loads_nothing(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], stream: list[int]
) -> None:
    fake = fake_driver()
    kernel = load(ToySpec())
    order = [c[0] for c in fake.calls if c[0] not in ("cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute")]
    assert order == [
        "cuDriverGetVersion",
        "cuInit",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent",
        "cuLibraryLoadData",
        "cuLibraryGetKernel",
        "cuKernelGetFunction",
        "cuCtxPopCurrent",
    ]
    launch = kernel.prepare(arguments(), MAPS)
    launch.grid = (4, 1, 1)
    fake.cuCtxPushCurrent(bindings.CUcontext(7000))
    before = len(fake.calls)
    launch.launch()
    launch.launch()
    assert [c[0] for c in fake.calls[before:]] == ["cuLaunchKernel"] * 2, "nothing else in the hot path"
    assert not fake.named("cuLibraryUnload", "cuModuleUnload", "cuDevicePrimaryCtxRelease")


def test_the_cubin_of_the_pack_is_loaded_by_its_entry(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any]
) -> None:
    fake = fake_driver(capabilities=((12, 1),))
    spec = ToySpec()
    load(spec)
    artifact, blobs = make_artifact(spec)
    ((_, image, context),) = fake.named("cuLibraryLoadData")
    assert image == blobs[f"{artifact.cubins['sm_121a'].blob}.cubin"]
    assert context == 7000
    assert fake.named("cuLibraryGetKernel")[0][2] == b"toy_entry"


def test_parameter_block_holds_each_argument_in_abi_order(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], stream: list[int]
) -> None:
    fake = fake_driver()
    args = arguments(alpha=-0.25, m=-3)
    launch = load(ToySpec()).prepare(args, MAPS)
    launch.grid = (5, 6, 7)
    launch.launch()
    (seen,) = fake.launches
    m, x, y, stride, scale, alpha = seen["params"]
    assert struct.unpack("<i", m) == (-3,)
    assert struct.unpack("<16Q", x) == tuple(args["x"].data_ptr() + i for i in range(16))
    assert struct.unpack("<Q", y) == (args["y"].data_ptr(),)
    assert struct.unpack("<q", stride) == (1 << 40,)
    assert struct.unpack("<Q", scale) == (args["scale"].data_ptr(),)
    assert struct.unpack("<f", alpha) == (-0.25,)
    assert seen["addresses"][1] % 64 == 0, "tensor maps are 64-byte aligned"
    assert all(a % n == 0 for a, n in zip(seen["addresses"], (4, 64, 8, 8, 8, 4), strict=True))
    assert (seen["grid"], seen["block"], seen["smem"]) == ((5, 6, 7), (128, 1, 1), 1024)


def test_tensor_maps_are_aligned_wherever_the_block_lies(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], stream: list[int]
) -> None:
    fake = fake_driver()
    kernel, args = load(ToySpec()), arguments()
    launches = [kernel.prepare(args, MAPS) for _ in range(40)]
    for launch in launches:
        launch.grid = (1, 1, 1)
        launch.launch()
    assert {seen["addresses"][1] % 64 for seen in fake.launches} == {0}
    assert len({tuple(seen["params"]) for seen in fake.launches}) == 1


def test_null_pointer_and_integer_address(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], stream: list[int]
) -> None:
    fake = fake_driver()
    launch = load(ToySpec()).prepare(arguments(scale=None, y=0x7F0000000010), MAPS)
    launch.grid = (1, 1, 1)
    launch.launch()
    assert fake.launches[0]["params"][4] == bytes(8)
    assert struct.unpack("<Q", fake.launches[0]["params"][2]) == (0x7F0000000010,)


def test_set_rewrites_one_scalar_of_the_same_block(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], stream: list[int]
) -> None:
    fake = fake_driver()
    launch = load(ToySpec()).prepare(arguments(), MAPS)
    launch.grid = (1, 1, 1)
    launch.launch()
    for name, value in (("m", 17), ("stride", -5), ("alpha", 2.0)):
        launch.set(name, value)
    launch.launch()
    first, second = fake.launches
    assert first["addresses"] == second["addresses"]
    changed = [i for i, (a, b) in enumerate(zip(first["params"], second["params"], strict=True)) if a != b]
    assert changed == [0, 3, 5]
    assert struct.unpack("<i", second["params"][0]) == (17,)
    assert struct.unpack("<q", second["params"][3]) == (-5,)
    assert struct.unpack("<f", second["params"][5]) == (2.0,)


def test_two_launches_of_one_kernel_have_their_own_blocks(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], stream: list[int]
) -> None:
    fake = fake_driver()
    kernel = load(ToySpec())
    launches = [kernel.prepare(arguments(m=m), MAPS) for m in (1, 2)]
    for launch in (*launches, *launches):
        launch.grid = (1, 1, 1)
        launch.launch()
    assert [struct.unpack("<i", seen["params"][0])[0] for seen in fake.launches] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"y": torch.zeros(64, dtype=torch.uint8)[1:]}, ValueError, ("y", "1 bytes past a multiple of 16", "copy")),
        ({"y": 3.5}, TypeError, ("y is a float", "tensor, an address or None")),
        ({"m": 1 << 31}, ValueError, ("m is 2147483648", "int32")),
        ({"m": 1.0}, TypeError, ("m is a float", "int32")),
        ({"m": torch.zeros(2)}, TypeError, ("m is a Tensor", "int32")),
        ({"alpha": "1"}, TypeError, ("alpha is a str", "float32")),
        ({"x": 16}, TypeError, ("x is a int", "needed is a tensor")),
        ({"z": 1}, TypeError, ("missing arguments []", "unknown arguments ['z']", "['m', 'x', 'y'")),
    ],
)
def test_wrong_arguments_are_named(
    fake_driver: Callable[..., FakeDriver],
    load: Callable[..., Any],
    change: dict[str, Any],
    error: type[Exception],
    words: tuple[str, ...],
) -> None:
    fake_driver()
    kernel = load(ToySpec())
    with pytest.raises(error) as caught:
        kernel.prepare(arguments(**change), MAPS)
    for word in ("toy.copy", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("other", [{}, {"z": 1}])
def test_missing_argument_is_named(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], other: dict[str, int]
) -> None:
    fake_driver()
    kernel = load(ToySpec())
    args = arguments(**other)
    del args["stride"]
    with pytest.raises(TypeError, match=r"missing arguments \['stride'\]"):
        kernel.prepare(args, MAPS)


@pytest.mark.parametrize("maps", [{}, {"y": MAPS["x"]}, {**MAPS, "y": MAPS["x"]}])
def test_maps_are_those_of_the_kernel(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], maps: dict[str, Any]
) -> None:
    fake_driver()
    kernel = load(ToySpec())
    with pytest.raises(TypeError, match=r"toy\.copy.*maps has the shapes of .*; needed are those of \['x'\]"):
        kernel.prepare(arguments(), maps)


def test_set_refuses_what_is_no_live_scalar(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], stream: list[int]
) -> None:
    fake = fake_driver()
    launch = load(ToySpec()).prepare(arguments(), MAPS)
    with pytest.raises(TypeError, match="'y' is no scalar of this kernel; those are stride, m, alpha"):
        launch.set("y", 5)
    with pytest.raises(ValueError, match="m is -2147483649; needed is a value that int32 holds"):
        launch.set("m", -(1 << 31) - 1)
    launch.grid = (1, 1, 1)
    launch.launch()
    assert struct.unpack("<i", fake.launches[0]["params"][0]) == (200,), "a refused value leaves the old one"


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (1, 1, 65536), (-1, 1, 1), (3, 1, 1)])
def test_bad_grids_are_refused(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], grid: tuple[int, int, int]
) -> None:
    fake_driver()
    launch = load(ToySpec(cluster=2)).prepare(arguments(), MAPS)
    with pytest.raises(ValueError, match=r"grid is .* multiples of the cluster shape \(2, 1, 1\)"):
        launch.grid = grid


def test_launch_without_a_grid_says_so(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], stream: list[int]
) -> None:
    fake_driver()
    launch = load(ToySpec()).prepare(arguments(), MAPS)
    with pytest.raises(RuntimeError, match=r"set \.grid before the launch"):
        launch.launch()


def test_stream_is_torchs_current_one_of_the_device_unless_given(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], stream: list[int]
) -> None:
    fake = fake_driver(capabilities=((12, 0), (12, 0)))
    launch = load(ToySpec(), ordinal=1).prepare(arguments(), MAPS)
    launch.grid = (1, 1, 1)
    launch.launch()
    assert stream == [1]
    launch.launch(0x99)
    launch.launch(SimpleNamespace(cuda_stream=0x77))
    launch.launch(bindings.CUstream(0x66))
    launch.launch(0)
    assert stream == [1], "a given stream is not asked for again"
    assert [seen["stream"] for seen in fake.launches] == [0x501, 0x99, 0x77, 0x66, 0]


def test_each_device_gets_its_own_function_in_its_own_context(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], stream: list[int]
) -> None:
    fake = fake_driver(capabilities=((12, 0), (12, 1)))
    kernels = [load(ToySpec(), ordinal) for ordinal in (0, 1)]
    assert [context for *_, context in fake.named("cuKernelGetFunction")] == [7000, 7001]
    images = [image for _, image, _ in fake.named("cuLibraryLoadData")]
    assert b"sm_120a" in images[0]
    assert b"sm_121a" in images[1]
    for kernel in kernels:
        launch = kernel.prepare(arguments(), MAPS)
        launch.grid = (1, 1, 1)
        launch.launch()
    assert [seen["context"] for seen in fake.launches] == [7000, 7001]
    assert fake.launches[0]["function"] != fake.launches[1]["function"]
    assert fake.cuCtxGetCurrent()[1].__int__() == 0, "the caller's context is current again"


def test_current_context_is_left_alone_when_it_is_the_right_one(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], stream: list[int]
) -> None:
    fake = fake_driver()
    launch = load(ToySpec()).prepare(arguments(), MAPS)
    launch.grid = (1, 1, 1)
    fake.cuCtxPushCurrent(bindings.CUcontext(7000))
    before = len(fake.calls)
    launch.launch()
    assert [c[0] for c in fake.calls[before:]] == ["cuLaunchKernel"]


@pytest.mark.parametrize("current", [0, 7001, 7777])
@pytest.mark.parametrize("spec", [ToySpec(), ToySpec(cluster=2)])
def test_a_launch_finds_its_context_whatever_is_current(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], stream: list[int], spec: ToySpec, current: int
) -> None:
    fake = fake_driver(capabilities=((12, 0), (12, 0)))
    launch = load(spec).prepare(arguments(), MAPS)
    launch.grid = (2, 1, 1)
    if current:
        fake.cuCtxPushCurrent(bindings.CUcontext(current))
    launch.launch()
    launch.launch()
    assert [seen["context"] for seen in fake.launches] == [7000, 7000]
    assert int(fake.cuCtxGetCurrent()[1]) == current, "the caller's context is current again"
    assert counters.launches == {spec.key: 2}, "a refused attempt is not counted"


@pytest.mark.parametrize("code", ["CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_INVALID_CONTEXT"])
def test_a_context_error_in_the_right_context_is_not_tried_again(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], stream: list[int], code: str
) -> None:
    fake = fake_driver(fail={"cuLaunchKernel": getattr(bindings.CUresult, code)})
    launch = load(ToySpec()).prepare(arguments(), MAPS)
    launch.grid = (1, 1, 1)
    fake.cuCtxPushCurrent(bindings.CUcontext(7000))
    with pytest.raises(b12x.DriverError, match=code):
        launch.launch()
    assert len(fake.named("cuLaunchKernel")) == 1


@pytest.mark.parametrize(("smem", "set_to"), [(0, None), (48 * 1024, None), (48 * 1024 + 1, 49153), (101376, 101376)])
def test_large_shared_memory_is_asked_for_before_the_function(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], smem: int, set_to: int | None
) -> None:
    fake = fake_driver(capabilities=((12, 0), (12, 0)))
    load(ToySpec(smem=smem), 1)
    calls = fake.named("cuKernelSetAttribute")
    if set_to is None:
        assert calls == []
        return
    ((_, name, value, kernel, device),) = calls
    assert (name, value, device) == ("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", set_to, 1)
    names = [c[0] for c in fake.calls]
    assert names.index("cuKernelSetAttribute") < names.index("cuKernelGetFunction")
    assert kernel == fake.named("cuKernelGetFunction")[0][1]


@pytest.mark.parametrize(
    ("spec", "attributes"),
    [
        (ToySpec(cluster=2), {"cluster": (2, 1, 1)}),
        (ToySpec(pdl=True), {"pdl": 1}),
        (ToySpec(cluster=4, pdl=True), {"cluster": (4, 1, 1), "pdl": 1}),
    ],
)
def test_cluster_and_programmatic_launch_go_through_launch_ex(
    fake_driver: Callable[..., FakeDriver],
    load: Callable[..., Any],
    stream: list[int],
    spec: ToySpec,
    attributes: dict[str, Any],
) -> None:
    fake = fake_driver()
    launch = load(spec).prepare(arguments(), MAPS)
    launch.grid = (8, 2, 1)
    launch.launch()
    launch.set("m", 1)
    launch.grid = (4, 1, 1)
    launch.launch(0x42)
    first, second = fake.launches
    assert first["attributes"] == second["attributes"] == attributes
    assert (first["grid"], first["stream"], first["smem"], first["block"]) == ((8, 2, 1), 0x500, 1024, (128, 1, 1))
    assert (second["grid"], second["stream"]) == ((4, 1, 1), 0x42)
    assert struct.unpack("<i", second["params"][0]) == (1,)
    assert not fake.named("cuLaunchKernel")


def test_tensor_maps_are_encoded_once_per_tensor(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any]
) -> None:
    fake = fake_driver()
    kernel = load(ToySpec())
    args = arguments()
    for _ in range(3):
        kernel.prepare(args, MAPS)
    ((_, *call),) = fake.named("cuTensorMapEncodeTiled")
    assert call == [
        "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
        2,
        args["x"].data_ptr(),
        [128, 200],
        [256],
        [64, 32],
        [1, 1],
        "CU_TENSOR_MAP_INTERLEAVE_NONE",
        "CU_TENSOR_MAP_SWIZZLE_128B",
        "CU_TENSOR_MAP_L2_PROMOTION_NONE",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    ]
    kernel.prepare(args, {"x": ((128, 199), (256,))})
    assert len(fake.named("cuTensorMapEncodeTiled")) == 2, "other extents are another map"


@pytest.mark.parametrize(
    ("change", "shape", "words"),
    [
        ({}, ((128, 200), (264,)), ("strides of (264,) bytes", "multiples of 16", "pad the rows")),
        ({}, ((128, 0), (256,)), ("dims (128, 0)", "1 to 2^32")),
        ({}, ((128,), (256,)), ("1 dims, 1 strides and a box of 2",)),
        ({"x": torch.zeros(64, dtype=torch.bfloat16)[1:]}, MAPS["x"], ("address 0x", "multiple of 16")),
    ],
)
def test_what_tma_cannot_address_is_refused_before_the_driver_sees_it(
    fake_driver: Callable[..., FakeDriver],
    load: Callable[..., Any],
    change: dict[str, Any],
    shape: tuple[tuple[int, ...], tuple[int, ...]],
    words: tuple[str, ...],
) -> None:
    fake = fake_driver()
    kernel = load(ToySpec())
    with pytest.raises(ValueError, match="TMA cannot address x") as caught:
        kernel.prepare(arguments(**change), {"x": shape})
    for word in words:
        assert word in str(caught.value)
    assert not fake.named("cuTensorMapEncodeTiled")


def test_failed_launch_says_what_was_launched(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], stream: list[int]
) -> None:
    fake_driver(fail={"cuLaunchKernel": bindings.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES})
    spec = ToySpec()
    launch = load(spec).prepare(arguments(), MAPS)
    launch.grid = (3, 1, 1)
    with pytest.raises(b12x.DriverError) as caught:
        launch.launch()
    for word in (spec.key, "cuda:0", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701)", "(3, 1, 1)", "(128, 1, 1)", "1024"):
        assert word in str(caught.value)
    assert counters.launches[spec.key] == 0


def test_launches_are_counted_by_key_also_from_threads(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any], stream: list[int]
) -> None:
    fake_driver()
    spec, other = ToySpec(), ToySpec(tile=32)
    launch = load(spec).prepare(arguments(), MAPS)
    launch.grid = (1, 1, 1)

    def work() -> None:
        for _ in range(250):
            launch.launch()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    once = load(other).prepare(arguments(), MAPS)
    once.grid = (1, 1, 1)
    once.launch()
    assert counters.launches == {spec.key: 1000, other.key: 1}


def test_clearing_caches_does_not_load_a_second_copy(
    fake_driver: Callable[..., FakeDriver], load: Callable[..., Any]
) -> None:
    fake = fake_driver()
    first = load(ToySpec())
    b12x.clear_all_caches()
    second = load(ToySpec())
    assert second is not first
    assert second.function == first.function
    assert len(fake.named("cuLibraryLoadData")) == 1


def test_sm_count_comes_from_the_device_each_time(fake_driver: Callable[..., FakeDriver]) -> None:
    fake = fake_driver(sm_count=48)
    device = cuda_target.cuda_target(0)
    assert device.sm_count == 48
    fake.sm_count = 24
    assert device.sm_count == 24


def test_a_launch_keeps_its_tensors_alive(fake_driver: Callable[..., FakeDriver], load: Callable[..., Any]) -> None:
    import weakref

    fake_driver()
    args = arguments()
    gone = weakref.ref(args["y"])
    launch = load(ToySpec()).prepare(args, MAPS)
    del args
    assert gone() is not None
    del launch
    assert gone() is None


def test_archs_are_data(
    fake_driver: Callable[..., FakeDriver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_driver(capabilities=((9, 0),))
    with pytest.raises(b12x.DeviceNotSupportedError):
        cuda_target.cuda_target(0)
    monkeypatch.setitem(cuda_target.ARCHS, (9, 0), "sm_90a")
    assert cuda_target.cuda_target(0).arch == "sm_90a"
    assert tuple(cuda_target.ARCHS.values()) == (*BOTH, "sm_90a")


def test_used_on_marks_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a stream in any form that ``launch`` takes; nothing on the current stream, nor in host memory."""

    class Stream:
        cuda_stream = 7

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    marked: list[Any] = []
    tensor = SimpleNamespace(is_cuda=True, device="cuda:1", record_stream=marked.append)
    host = SimpleNamespace(is_cuda=False)
    used_on(None, tensor, host)
    assert marked == []
    stream = Stream()
    used_on(stream, tensor, host, tensor)
    assert marked == [stream, stream]
    marked.clear()
    for handle in (5, bindings.CUstream(5), SimpleNamespace(cuda_stream=5)):
        used_on(handle, tensor, host)
    assert marked == [(5, "cuda:1")] * 3
