"""The kinds of value that plans and mig-parted files are made of, each with what is said where it is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from migd.mig.profiles import ProfileName
from migd.plans.problems import shown, wrong

COUNT_MAX: Final = 64
"""More instances than this on one GPU is a slip of the hand: no GPU holds even 16."""
INDEX_MAX: Final = 1023
TIMEOUT_MAX_S: Final = 7 * 24 * 3600


class Value(BaseModel):
    """A frozen value: unknown keys, strings for numbers and bools for ints are all refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_by_name=True, validate_by_alias=True)


def _profile(text: str) -> str:
    name = ProfileName.parse(text)
    if name is None:
        plain = text.strip().lower().removeprefix("mig ").removeprefix("mig-").removeprefix("nvidia.com/mig-")
        plain = re.sub(r"\.me\b", "+me", plain)
        hint = (
            f"did you mean {plain}?" if ProfileName.parse(plain) else "a profile name looks like 3g.40gb or 1g.10gb+me"
        )
        raise wrong(f"{shown(text)} is not a profile name", hint)
    if name.compute_part is not None:
        whole = text.split(".", 1)[1]
        raise wrong(
            f"compute instances smaller than their GPU instance are not in v1alpha1: {text}",
            f"{whole} is the whole one",
        )
    return text


_DURATION: Final = re.compile(r"(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", re.ASCII)


def seconds_of(text: str) -> int | None:
    """A duration such as 30m, 90s or 1h30m in seconds, or None where the text is none."""
    found = _DURATION.fullmatch(text)
    if not text or found is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds


def duration_of(seconds: int) -> str:
    """Seconds as a duration: 5400 is 1h30m."""
    parts = ((seconds // 3600, "h"), (seconds // 60 % 60, "m"), (seconds % 60, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


def _seconds(value: object) -> object:
    if isinstance(value, str):
        seconds = seconds_of(value)
        if seconds is None:
            raise wrong(f"{shown(value)} is not a duration", "write it as 30m, 90s or 1h30m")
        if not 1 <= seconds <= TIMEOUT_MAX_S:
            raise wrong(f"must be between 1s and {duration_of(TIMEOUT_MAX_S)}, not {shown(value)}")
        return seconds
    raise wrong(f"must be a duration, not {shown(value)}", "write it as 30m, 90s or 1h30m")


def unavailable_nodes(value: object) -> object:
    """A validator: a number of nodes, or a percentage."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1_000_000:
        return value
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,3}%", value) and int(value[:-1]) <= 100:
        return value
    raise wrong(f"must be a number of nodes from 0 on, or a percentage from 0% to 100%, not {shown(value)}")


def _uuid(text: str) -> str:
    if not re.fullmatch(r"(?ai)gpu-[0-9a-z-]{1,64}", text):
        mig = text.upper().startswith("MIG-")
        raise wrong(
            f"{shown(text)} is not a GPU's UUID",
            "that is a MIG device; name the GPU it lies on" if mig else "it looks like GPU-5c89852c-…; see migd gpus",
        )
    return text


def check_pci(value: object) -> object:
    """A validator: a PCI device id as text, "0x20B210DE", is taken as it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        raise wrong("must be text, not a number", f'write "0x{value:08X}" in quotes' if 0 <= value < 1 << 32 else "")
    if isinstance(value, str) and not re.fullmatch(r"(?i)(0x)?[0-9a-f]{4}10de", value):
        raise wrong(
            f"{shown(value)} is not an NVIDIA PCI device id", 'device, then vendor 10DE, in hexadecimal: "0x20B210DE"'
        )
    return value


def pci_key(device_id: str) -> str:
    """A PCI device id without what does not matter in it: 0x and case."""
    return device_id.lower().removeprefix("0x")


def only_true(value: object) -> object:
    """A validator: true or nothing; 1 equals true in Python and is no true."""
    if value is not None and value is not True:
        raise wrong(f"must be true, not {shown(value)}", "leave it out to select by something else")
    return value


def _glob(text: str) -> str:
    if not text.strip():
        raise wrong("must not be empty", 'a pattern for the model name, such as "*A100*80GB*"')
    return text


def some(what: str) -> AfterValidator:
    """Refuses an empty list; not by a length bound, which would also speak where all items are bad."""

    def check(values: tuple[Any, ...]) -> tuple[Any, ...]:
        if not values:
            raise wrong("must not be empty", what)
        return values

    return AfterValidator(check)


def most(number: int, what: str) -> AfterValidator:
    """Refuses more of something than an object of the API may have; the bounds are the definitions'."""

    def check(values: Any) -> Any:
        if len(values) > number:
            raise wrong(f"has {len(values)} {what}, more than {number}")
        return values

    return AfterValidator(check)


def once(what: str, key: Callable[[Any], object] = lambda value: value) -> AfterValidator:
    """Refuses a list that names one thing twice, and says where both are."""

    def check(values: tuple[Any, ...]) -> tuple[Any, ...]:
        seen: dict[object, int] = {}
        for at, value in enumerate(values):
            if key(value) in seen:
                raise wrong(f"{what} {value} is named twice: at [{seen[key(value)]}] and [{at}]", "name it once")
            seen[key(value)] = at
        return values

    return AfterValidator(check)


_LABEL_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_DNS: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")


def _label_key(text: str) -> str:
    prefix, slash, name = text.rpartition("/")
    if not _LABEL_NAME.fullmatch(name) or (slash and not (len(prefix) <= 253 and _DNS.fullmatch(prefix))):
        raise wrong(f"{shown(text)} is not a label's name", "such as pool or example.com/pool")
    return text


def _label_value(text: str) -> str:
    if text and not _LABEL_NAME.fullmatch(text):
        raise wrong(f"{shown(text)} is not a label's value", "up to 63 letters, digits, '-', '_' or '.'")
    return text


def _plan_name(text: str) -> str:
    if len(text) > 253 or not _DNS.fullmatch(text):
        raise wrong(f"{shown(text)} is not a valid name", "lower-case letters, digits, '-' and '.', at most 253")
    return text


def sorted_labels(values: dict[str, str]) -> dict[str, str]:
    """A validator: labels as Kubernetes takes them, in order of name."""
    for key, value in values.items():
        _label_key(key)
        _label_value(value)
    return dict(sorted(values.items()))


Natural = Annotated[int, Field(ge=0)]
Tuple = Field(strict=False)
"""Marks a list: a YAML list becomes a tuple; what is in it stays strict."""
Count = Annotated[int, Field(ge=1, le=COUNT_MAX)]
ProfileText = Annotated[str, most(32, "characters"), AfterValidator(_profile)]
Duration = Annotated[int, BeforeValidator(_seconds), PlainSerializer(duration_of)]
Index = Annotated[int, Field(ge=0, le=INDEX_MAX)]
Uuid = Annotated[str, AfterValidator(_uuid)]
Glob = Annotated[str, most(256, "characters"), AfterValidator(_glob)]
PciDeviceId = Annotated[str, BeforeValidator(check_pci)]
Named = some("name at least one, or leave it out")
PlanName = Annotated[str, AfterValidator(_plan_name)]
LabelKey = Annotated[str, AfterValidator(_label_key)]
LabelValue = Annotated[str, AfterValidator(_label_value)]
