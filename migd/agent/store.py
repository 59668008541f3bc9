"""The record on disk: one JSON file, written whole, fsynced and renamed, so that a crash leaves the old or the new."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, cast, get_args

from migd.agent.records import (
    VERSION,
    AwaitingReboot,
    Cause,
    GpuRecord,
    NodeWork,
    Outcome,
    PodRef,
    Record,
    Stage,
    StepTime,
    Transaction,
)
from migd.mig.geometry import Geometry, GpuInstance, Layout, by_start
from migd.mig.profiles import Placement

FILE: Final = "record.json"
_ENCODER: Final = json.JSONEncoder(sort_keys=True)


class RecordError(Exception):
    """The record cannot be read or written; the text says where and what to do."""


class NewerError(ValueError):
    """A record of a version that this migd does not know yet."""


class FileStore:
    """Keeps the record of one machine in a folder. One writer at a time: see `locking`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def load(self) -> Record | None:
        """The record, or None where there is none yet. RecordError where it cannot be read or understood."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise RecordError(f"cannot read the record {self.path}: permission denied. Run as root") from error
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(f"cannot read the record {self.path}: {error}") from error
        try:
            return decode(text)
        except NewerError as error:
            raise RecordError(
                f"the record {self.path} is of {error}. Nothing was touched. Use the newer migd"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise RecordError(
                f"the record {self.path} is damaged ({error}). Nothing was touched. See what is there by `migd gpus` "
                "with --state-dir and an empty folder, then move the file away; without it all instances are foreign"
            ) from error

    def save(self, record: Record) -> None:
        """Put the record on disk before returning: written beside, fsynced, renamed, folder fsynced."""
        beside = self.path.with_suffix(".new")
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(encode(record))
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            with suppress(OSError):
                beside.unlink()
            raise RecordError(f"cannot write the record {self.path}: {error}") from error


def encode(record: Record) -> str:
    """A record as JSON text; equal records give equal text."""
    body = {
        "version": VERSION,
        "bootId": record.boot_id,
        "orderId": record.order_id,
        "gpus": {uuid: _gpu_out(gpu) for uuid, gpu in sorted(record.gpus.items())},
        "node": _node_out(record.node),
    }
    return _ENCODER.encode(body) + "\n"


def decode(text: str) -> Record:
    """The record that `encode` wrote; ValueError, KeyError or TypeError for anything else."""
    body = json.loads(text)
    found = body.get("version") if isinstance(body, dict) else None
    if isinstance(found, int) and found > VERSION:
        raise NewerError(f"version {found}, which a newer migd wrote; this one reads version {VERSION}")
    if found not in range(1, VERSION + 1):
        raise ValueError(f"its version is {found!r}; this migd reads versions 1 to {VERSION}")
    gpus = {uuid: _gpu_in(gpu) for uuid, gpu in body["gpus"].items()}
    return Record(body["bootId"], body["orderId"], gpus, _node_in(None if found == 1 else body["node"]))


def _gpu_out(gpu: GpuRecord) -> dict[str, Any]:
    return {
        "owned": _geometry_out(gpu.owned),
        "previous": _layout_out(gpu.previous),
        "transaction": _transaction_out(gpu.transaction),
        "awaiting": _flat(gpu.awaiting) if gpu.awaiting else None,
        "outcome": _flat(gpu.outcome) | {"cause": _flat(gpu.outcome.cause)} if gpu.outcome else None,
        "older": _layout_out(gpu.older),
    }


def _gpu_in(body: dict[str, Any]) -> GpuRecord:
    outcome = body["outcome"]
    return GpuRecord(
        _geometry_in(body["owned"]),
        _layout_in(body["previous"]),
        _transaction_in(body["transaction"]),
        AwaitingReboot(**body["awaiting"]) if body["awaiting"] else None,
        Outcome(**outcome | {"cause": Cause(**outcome["cause"])}) if outcome else None,
        _layout_in(body["older"]),
    )


def _flat(value: Cause | Outcome | AwaitingReboot | StepTime | PodRef) -> dict[str, Any]:
    """The fields of a value by name, as they are: unlike `asdict`, which copies them deeply at every save."""
    return {name: getattr(value, name) for name in value.__slots__}


def _transaction_out(transaction: Transaction | None) -> dict[str, Any] | None:
    if transaction is None:
        return None
    plain = {name: getattr(transaction, name) for name in _PLAIN}
    return plain | {
        "before": _layout_out(transaction.before),
        "target": _layout_out(transaction.target),
        "cause": _flat(transaction.cause) if transaction.cause else None,
        "error": _flat(transaction.error) if transaction.error else None,
    }


_PLAIN: Final = (
    *("order_id", "hold", "back", "step", "tries"),
    *("resets", "touched", "turns", "not_before_s", "parked"),
)


def _transaction_in(body: dict[str, Any] | None) -> Transaction | None:
    if body is None:
        return None
    before = _layout_in(body["before"])
    if before is None:
        raise ValueError("a transaction without the layout before it")
    return Transaction(
        before=before,
        target=_layout_in(body["target"]),
        cause=Cause(**body["cause"]) if body["cause"] else None,
        error=Cause(**body["error"]) if body["error"] else None,
        **{name: body[name] for name in _PLAIN},
    )


_CAUSES: Final = ("why", "refresh", "unadvertised", "denied", "spent_why")


def _node_out(work: NodeWork | None) -> dict[str, Any] | None:
    if work is None:
        return None
    plain = {field.name: getattr(work, field.name) for field in fields(work)}
    return plain | {
        **{name: _flat(cause) if cause else None for name, cause in _causes(work).items()},
        "steps": [_flat(step) for step in work.steps],
        "before": dict(work.before),
        "after": dict(work.after),
        "accepted": {uuid: _layout_out(layout) for uuid, layout in work.accepted.items()},
        "victims": {uuid: [_flat(pod) for pod in pods] for uuid, pods in work.victims.items()},
        "asked": [_flat(pod) for pod in work.asked],
        "spent": list(work.spent),
    }


def _causes(work: NodeWork) -> dict[str, Cause | None]:
    return {name: getattr(work, name) for name in _CAUSES}


def _node_in(body: dict[str, Any] | None) -> NodeWork | None:
    if body is None:
        return None
    causes = {name: Cause(**body[name]) if body.get(name) else None for name in _CAUSES}
    steps = tuple(StepTime(**step) for step in body["steps"])
    accepted = {uuid: layout for uuid, text in body["accepted"].items() if (layout := _layout_in(text)) is not None}
    if body["stage"] not in get_args(Stage):
        raise ValueError(f"a stage {body['stage']!r}, which there is none of")
    return NodeWork(**body | causes | _drain_in(body) | {"steps": steps, "accepted": accepted})


def _drain_in(body: dict[str, Any]) -> dict[str, Any]:
    """What is about a drain; version 2 had none of it."""
    return {
        "victims": {uuid: tuple(PodRef(**pod) for pod in pods) for uuid, pods in body.get("victims", {}).items()},
        "asked": tuple(PodRef(**pod) for pod in body.get("asked", ())),
        "spent": tuple(body.get("spent", ())),
    }


def _layout_out(layout: Layout | None) -> dict[str, Any] | None:
    return {"mig": layout.mig, "instances": _geometry_out(layout.instances)} if layout else None


def _layout_in(body: dict[str, Any] | None) -> Layout | None:
    return Layout(cast("bool", body["mig"]), _geometry_in(body["instances"])) if body else None


def _geometry_out(geometry: Geometry) -> list[list[Any]]:
    return [[i.profile, i.placement.start, i.placement.size] for i in by_start(geometry)]


def _geometry_in(body: list[list[Any]]) -> Geometry:
    return frozenset(GpuInstance(profile, Placement(int(start), int(size))) for profile, start, size in body)
