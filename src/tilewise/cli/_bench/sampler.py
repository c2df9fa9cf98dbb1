"""Clock and power of one GPU while it works: NVIDIA's management library, or ``nvidia-smi`` where that cannot be loaded."""

from __future__ import annotations

import ctypes
import shutil
import statistics
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Sampler", "driver_version"]

_PERIOD = 0.02
_SM_CLOCK = 1
_POWER_INSTANT = 186  # field: milliwatts now; the plain query is an average over a second
Reading = tuple[float | None, float | None]


class _FieldValue(ctypes.Structure):
    _fields_ = [
        ("field_id", ctypes.c_uint),
        ("scope_id", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("value_type", ctypes.c_uint),
        ("status", ctypes.c_uint),
        ("value", ctypes.c_ulonglong),
    ]


def _nvml() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def driver_version() -> str | None:
    """The NVIDIA driver's version, if there is one."""
    library = _nvml()
    text = ctypes.create_string_buffer(96)
    if library is None or library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96)) != 0:
        return None
    return text.value.decode()


def _nvml_reader(uuid: str) -> Callable[[], Reading] | None:
    library = _nvml()
    handle = ctypes.c_void_p()
    if library is None or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
        return None

    def read() -> Reading:
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        mhz = float(clock.value) if library.nvmlDeviceGetClockInfo(handle, _SM_CLOCK, ctypes.byref(clock)) == 0 else None
        field = _FieldValue(field_id=_POWER_INSTANT)
        if library.nvmlDeviceGetFieldValues(handle, 1, ctypes.byref(field)) == 0 and field.status == 0 and field.value:
            return mhz, (field.value & 0xFFFFFFFF) / 1e3
        known = library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power)) == 0
        return mhz, power.value / 1e3 if known else None

    return read


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


class Sampler:
    """Samples in a background thread from ``start`` to ``stop``; a GPU that cannot be asked gives no samples."""

    def __init__(self, uuid: str | None):
        self._uuid = None if uuid is None else uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        self._samples: deque[tuple[float, float | None, float | None]] = deque(maxlen=30_000)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._smi: subprocess.Popen[str] | None = None

    def start(self) -> None:
        if self._uuid is None:
            return
        read = _nvml_reader(self._uuid)
        target = (lambda: self._poll(read)) if read is not None else self._follow
        self._thread = threading.Thread(target=target, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._smi is not None:
            self._smi.terminate()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def _poll(self, read: Callable[[], Reading]) -> None:
        while not self._stop.wait(_PERIOD):
            self._samples.append((time.monotonic(), *read()))

    def _follow(self) -> None:
        command = shutil.which("nvidia-smi")
        if command is None or self._uuid is None:
            return
        query = [command, "-i", self._uuid, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "50"]
        try:
            self._smi = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return
        for line in self._smi.stdout or ():
            self.add(time.monotonic(), line)
            if self._stop.is_set():
                return

    def add(self, now: float, line: str) -> None:
        """Take in one line of nvidia-smi: ``clock, power``; what is not a number ("[N/A]") is unknown."""
        values = [_number(word) for word in line.split(",")]
        if len(values) == 2:
            self._samples.append((now, values[0], values[1]))

    def between(self, began: float, ended: float) -> Reading:
        """Median clock (MHz) and power (W) of the samples between two times of ``time.monotonic``."""
        inside = [s for s in list(self._samples) if began <= s[0] <= ended]
        mhz = [s[1] for s in inside if s[1] is not None]
        watts = [s[2] for s in inside if s[2] is not None]
        return (statistics.median(mhz) if mhz else None, statistics.median(watts) if watts else None)
