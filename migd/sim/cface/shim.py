"""The C source of the simulated libnvidia-ml.so.1: a function for every one of nvml.h, over the hand-written shim.c."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Final

from migd.sim.cface.header import Argument, Function, Header

ARGUMENTS_MAX: Final = 8
"""As in shim.c."""

FILLED: Final = "filled"
"""An array that is only written: how large it is only the caller knows."""


def source(
    header: Header, simulated: Iterable[str], arrays: Mapping[tuple[str, str], str], texts: Mapping[int, str]
) -> str:
    """The whole source. simulated: the functions whose arguments are sent; of others only the name is.

    arrays: (function, argument) -> the argument that says how many elements are sent, or FILLED.
    texts: what nvmlErrorString says, by code. Raises ValueError where simulated names what the header lacks.
    """
    wanted = set(simulated)
    strange = wanted - {f.name for f in header.functions}
    if strange:
        raise ValueError(f"nvml.h has no {', '.join(sorted(strange))}")
    words = ", ".join(header.versions)
    parts = [
        '#include "nvml.h"',
        f"static const unsigned versions[] = {{{words}}};",
        (resources.files("migd.sim.cface") / "shim.c").read_text("utf-8"),
        '#define EXPORTED __attribute__((visibility("default")))',
        *(_function(f, header, f.name in wanted, arrays, texts) for f in header.functions),
    ]
    return "\n".join(parts) + "\n"


def _function(
    function: Function,
    header: Header,
    simulated: bool,
    arrays: Mapping[tuple[str, str], str],
    texts: Mapping[int, str],
) -> str:
    taken = ", ".join(f"{a.type} {a.name}" for a in function.arguments) or "void"
    head = f"EXPORTED {function.result} {function.name}({taken})"
    if function.name == "nvmlErrorString":
        return f"{head}\n{_error_texts(function.arguments[0].name, texts)}"
    if not simulated or not function.arguments:
        return f'{head}\n{{\n    return (nvmlReturn_t)ask("{function.name}", NULL, 0, -1);\n}}'
    assert len(function.arguments) <= ARGUMENTS_MAX, function.name
    sent = ", ".join(_sent(function, a, header, arrays) for a in function.arguments)
    waits = [i for i, a in enumerate(function.arguments) if a.name == "timeoutms"] or [-1]
    count = len(function.arguments)
    return (
        f"{head}\n{{\n    struct migd_argument a[] = {{{sent}}};\n"
        f'    return (nvmlReturn_t)ask("{function.name}", a, {count}, {waits[0]});\n}}'
    )


def _sent(function: Function, argument: Argument, header: Header, arrays: Mapping[tuple[str, str], str]) -> str:
    count = arrays.get((function.name, argument.name))
    if argument.pointee is None:
        return f"VALUE({argument.name})"
    if argument.type == "const char *":
        return f"TEXT({argument.name})"
    if count == FILLED or argument.pointee == "char":
        return f"FILLED({argument.name})"
    if count is not None:
        return f"ARRAY({argument.name}, {count})"
    if argument.pointee in header.versioned:
        return f"VERSIONED({argument.name})"
    return f"POINTED({argument.name})"


def _error_texts(code: str, texts: Mapping[int, str]) -> str:
    cases = "".join(f'    case {number}: return "{text}";\n' for number, text in sorted(texts.items()))
    return f'{{\n    switch ((int){code}) {{\n{cases}    default: return "Unknown Error";\n    }}\n}}'
