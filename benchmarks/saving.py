"""What a save of the record costs, next to the disk alone: the same bytes, fsynced, renamed, and the folder fsynced."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from boards import board

from benchmarks.measuring import Times, timed
from migd.agent.records import GpuRecord, Record, Transaction
from migd.agent.store import FileStore, encode
from migd.mig.geometry import Layout
from migd.mig.table import table_of


@dataclass(frozen=True, slots=True)
class Saving:
    """Saves of one record, ours and the disk's, taken in turns. bytes: of the file."""

    bytes: int
    ours: Times
    disk: Times
    ratio: float


def saving(n: int, gpus: int = 8) -> Saving:
    """So many saves of a record of so many GPUs, each under way, in the folder for temporary files."""
    record = some_record(gpus)
    ours, disk = [], []
    with tempfile.TemporaryDirectory() as folder:
        store, beside = FileStore(Path(folder)), Path(folder) / "disk.json"
        data = encode(record).encode()
        for _ in range(n):
            disk.append(timed(lambda: _write(beside, data))[0])
            ours.append(timed(lambda: store.save(record))[0])
        assert store.load() == record, "what was saved is another record"
        assert store.path.read_bytes() == beside.read_bytes(), "both sides must write the same"
    return Saving(len(data), Times.of(ours), Times.of(disk), Times.of(ours).p50_s / Times.of(disk).p50_s)


def some_record(gpus: int) -> Record:
    """Every GPU cut into seven and on the way to a mix."""
    table = table_of(board("a100-80gb"))
    seven, mixed = table.with_counts((("1g.10gb", 7),))[0], table.with_counts((("1g.10gb", 2), ("3g.40gb", 1)))[0]
    before, after = Layout(True, table.geometry(seven.bits)), Layout(True, table.geometry(mixed.bits))
    one = GpuRecord(before.instances, Layout(False), Transaction("0123456789abcdef", before, after))
    return Record(
        "a-boot-id", "0123456789abcdef", {f"GPU-{i:08x}-0000-0000-0000-000000000000": one for i in range(gpus)}
    )


def _write(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(file, data)
    os.fsync(file)
    os.close(file)
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(folder)
    os.close(folder)
