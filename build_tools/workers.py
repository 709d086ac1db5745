"""Worker processes: fresh interpreters that compile one kernel at a time and can die without ending the build."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import b12x

#: Kernels that one worker compiles before a fresh one takes its place; bounds what the DSL's own caches keep in memory.
KERNELS_PER_WORKER = 64
#: Bytes of a dead worker's output that the error message shows.
_OUTPUT_SHOWN = 2000
#: Seconds between calls of ``on_wait``.
_TICK = 0.5

# A fresh interpreter does not know this one's search paths: a source tree, an isolated build, or what a test adds.
_BOOT = """\
import importlib, json, sys
paths = json.loads(sys.stdin.readline())
sys.path[:] = paths.pop("")
for name, path in paths.items():
    importlib.import_module(name).__path__[:] = path
from b12x.build_tools.worker import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Task:
    """Compile the spec of a key for some archs."""

    key: str
    archs: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What a worker made of a task: ``builds`` in JSON form, or the reason why there are none."""

    task: Task
    builds: tuple[dict[str, Any], ...]
    error: str | None
    compiles: int
    seconds: float


def default_jobs() -> int:
    """One job per CPU that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_tasks(tasks: Sequence[Task], jobs: int, on_wait: Callable[[list[str]], None]) -> Iterator[Answer]:
    """Yield each task's answer as it comes. ``on_wait`` is called now and then with the keys that are being compiled.

    Closing the iterator, or an exception in its consumer, ends the workers at once.
    """
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    answers: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()
    lanes = [_Lane(waiting, answers) for _ in range(min(jobs, len(tasks)))]
    try:
        for lane in lanes:
            lane.start()
        left = len(tasks)
        while left:
            try:
                answer = answers.get(timeout=_TICK)
            except queue.Empty:
                on_wait(sorted(lane.running for lane in lanes if lane.running))
                continue
            if isinstance(answer, BaseException):
                raise answer
            left -= 1
            yield answer
    finally:
        for lane in lanes:
            lane.stop()


class _Lane(threading.Thread):
    """Feeds waiting tasks to one worker process at a time."""

    def __init__(self, waiting: queue.SimpleQueue[Task], answers: queue.SimpleQueue[Answer | BaseException]) -> None:
        super().__init__(daemon=True)
        self.running = ""
        self._waiting = waiting
        self._answers = answers
        self._worker: _Worker | None = None
        self._stopped = threading.Event()

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    task = self._waiting.get_nowait()
                except queue.Empty:
                    break
                self.running = task.key
                self._answers.put(self._compile(task))
                self.running = ""
        except BaseException as error:
            self._answers.put(error)
        finally:
            self._retire()

    def stop(self) -> None:
        self._stopped.set()
        worker = self._worker
        if worker is not None:
            worker.process.kill()
        self.join()

    def _compile(self, task: Task) -> Answer:
        if self._worker is None:
            self._worker = _Worker()
        answer = self._worker.ask(task)
        # Nothing says what a failed trace leaves behind in the DSL, so the worker gets no second task.
        if answer.error is not None or self._worker.asked >= KERNELS_PER_WORKER:
            self._retire()
        return answer

    def _retire(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


class _Worker:
    def __init__(self) -> None:
        self.asked = 0
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
            # DSL settings of the user's environment would change what is compiled.
            env={name: value for name, value in os.environ.items() if not name.startswith("CUTE_")},
        )
        paths = {
            "": sys.path,
            "b12x": list(b12x.__path__),
            "b12x.kernels": list(importlib.import_module("b12x.kernels").__path__),
        }
        self._send(paths)

    def ask(self, task: Task) -> Answer:
        self.asked += 1
        self._send({"key": task.key, "archs": task.archs})
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return Answer(task, (), f"{task.key}: {self._cause_of_death()}", 0, 0.0)
        answer = json.loads(line)
        builds = tuple(answer.get("builds", ()))
        return Answer(task, builds, answer.get("error"), answer["compiles"], answer["seconds"])

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self._output.close()

    def _send(self, message: object) -> None:
        assert self.process.stdin is not None
        # If the worker is dead, reading its answer finds that out and says why.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def _cause_of_death(self) -> str:
        code = self.process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - _OUTPUT_SHOWN))
        output = self._output.read().decode(errors="replace").strip()
        return f"its compiler process {how}; its last output: {output or 'none'}"
