"""One call to NVML: by name, with its error translated, and noted while it is under way."""

from __future__ import annotations

from typing import Any

import pynvml

from migd.nvml.errors import GoneError, GpuError, NotSupportedError, error_for

Library = Any
"""The pynvml module, or an object with its functions, argument and return shapes, and exceptions."""

Handle = Any
"""An opaque pointer of NVML. Two handles of one device are different objects; never compare or keep them."""


class Calls:
    """Calls functions of one NVML library by name.

    in_flight: the call under way, or the last one; another thread may read it to say what hangs.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self.in_flight = ""

    def __call__(self, name: str, gpu_uuid: str, *args: Any) -> Any:
        """What the function of this name returns for args; raises GpuError, about gpu_uuid ("" for the driver)."""
        self.in_flight = name
        try:
            return getattr(self._library, name)(*args)
        except pynvml.NVMLError as error:
            raise error_for(name, gpu_uuid, error.value) from error
        except pynvml.NVMLLibraryMismatchError as error:
            # What pynvml raises for the process queries where the driver lacks their newest version.
            raise error_for(name, gpu_uuid, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND) from error

    def where_supported(self, name: str, gpu_uuid: str, *args: Any) -> Any | None:
        """As a call, but None for NOT_SUPPORTED, which most values of an enum are answered with."""
        self.in_flight = name
        try:
            return getattr(self._library, name)(*args)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                return None
            raise error_for(name, gpu_uuid, error.value) from error


def is_gone(error: GpuError) -> bool:
    """Whether an error about an instance says only that it is gone: no such id, a dead handle, or MIG off by now."""
    return isinstance(error, GoneError) or (
        isinstance(error, NotSupportedError) and error.code == pynvml.NVML_ERROR_NOT_SUPPORTED
    )


def text(value: str | bytes) -> str:
    """A text of NVML as str; pynvml decodes most of them, but not on every path."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
