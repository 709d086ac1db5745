"""Section: every expansion alone, on the GPU against the emulator running the original instruction."""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import expected
import numpy as np
import torch
from report import Report

from b12x._runtime import driver, target
from b12x.build_tools.rehost.case_data import Words
from b12x.build_tools.rehost.cases import BLOCK, Case, all_cases, differences

_WORKERS = 12
_POISON = 0xDEADBEEF


def run(prepared: Path, seed: int, report: Report) -> None:
    """Compare all cases; expected results are made meanwhile, in other processes."""
    index: dict[str, dict[str, str]] = json.loads((prepared / "cases" / "index.json").read_text())
    spawn = multiprocessing.get_context("spawn")
    current = target.current_target("cuda").current()
    with current, ProcessPoolExecutor(_WORKERS, mp_context=spawn) as pool:
        waiting = [
            (number, case, pool.submit(expected.results, number, seed)) for number, case in enumerate(all_cases())
        ]
        for number, case, future in waiting:
            with report.guard(case.name):
                _compare(case, expected.inputs(case, number, seed), index, prepared / "cases", future, report)
    report.set("exact", sum(entry.get("equal_bits", 0.0) == 1.0 for entry in report.data["entries"]))


def _compare(
    case: Case, words: Words, index: dict[str, dict[str, str]], folder: Path, future: Future[Any], report: Report
) -> None:
    held = index[case.name]
    if held["ptx"] != hashlib.sha256(case.ptx.encode()).hexdigest():
        raise RuntimeError("the case has changed since it was prepared; run prepare.py again")
    found = _launch((folder / held["cubin"]).read_bytes(), words, case.results)
    wanted, bounds = future.result()
    wrong = differences(case, found, wanted, bounds)
    example = {}
    if len(wrong):
        thread, result = wrong[0]
        example = {
            "thread": int(thread),
            "result": int(result),
            "found": hex(found[thread, result]),
            "expected": hex(wanted[thread, result]),
            "inputs": [hex(word) for word in words[thread]],
        }
    report.add(
        case.name,
        not len(wrong),
        compare=case.compare,
        threads=len(words),
        differences=len(wrong),
        equal_bits=float((found == wanted).mean()),
        **example,
    )


def _launch(cubin: bytes, words: Words, results: int) -> Words:
    cu = driver.ready()
    (library,) = driver.check("cuLibraryLoadData", cu.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    (kernel,) = driver.check("cuLibraryGetKernel", cu.cuLibraryGetKernel(library, b"case"))
    (function,) = driver.check("cuKernelGetFunction", cu.cuKernelGetFunction(kernel))
    source = torch.from_numpy(np.ascontiguousarray(words).view(np.int32)).cuda()
    output = torch.from_numpy(np.full((len(words), results), _POISON, np.uint32).view(np.int32)).cuda()
    arguments = ((source.data_ptr(), output.data_ptr()), (ctypes.c_uint64, ctypes.c_uint64))
    stream = torch.cuda.current_stream().cuda_stream
    launched = cu.cuLaunchKernel(function, len(words) // BLOCK, 1, 1, BLOCK, 1, 1, 0, stream, arguments, 0)
    driver.check("cuLaunchKernel", launched)
    found: Words = output.cpu().numpy().view(np.uint32)
    driver.check("cuLibraryUnload", cu.cuLibraryUnload(library))
    return found
