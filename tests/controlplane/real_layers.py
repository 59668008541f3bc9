"""Images made of another one and a few files, by hand: archives that containerd imports without a registry.

An archive has only what is new: the layers below are in containerd already.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from controlplane.api import Json

_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
_NAMED: Final = "io.containerd.image.name"
_EPOCH: Final = "1970-01-01T00:00:00Z"


@dataclass(frozen=True, slots=True)
class Base:
    """An image that containerd has: its manifest, and its configuration."""

    manifest: Json
    config: Json

    @classmethod
    def of(cls, archive: Path) -> Base:
        """The one image of an OCI archive."""
        with tarfile.open(archive) as file:

            def read(name: str) -> bytes:
                member = file.extractfile(name)
                assert member is not None, f"{archive} has no {name}"
                return member.read()

            (told,) = json.loads(read("index.json"))["manifests"]
            manifest = json.loads(read(_blob(told["digest"])))
            return cls(manifest, json.loads(read(_blob(manifest["config"]["digest"]))))

    def lowest(self) -> Base:
        """What is below it all, as a base for something else."""
        layers, hashes = self.manifest["layers"][:1], self.config["rootfs"]["diff_ids"][:1]
        config = {**self.config, "config": {}, "rootfs": {"type": "layers", "diff_ids": hashes}}
        return Base({**self.manifest, "layers": layers}, config)


def layer(files: Mapping[str, bytes], programs: Mapping[str, bytes] = MappingProxyType({})) -> bytes:
    """A layer with these files, readable by everybody, and programs. Path, without the first slash -> contents."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        whole = {**files, **programs}
        for name in sorted(_folders(whole)):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(folder)
        for name, contents in sorted(whole.items()):
            file = tarfile.TarInfo(name)
            file.size, file.mode = len(contents), 0o755 if name in programs else 0o644
            archive.addfile(file, io.BytesIO(contents))
    return made.getvalue()


def image(base: Base, name: str, config: Json, top: bytes | None = None) -> bytes:
    """An OCI archive of an image made of another one. config: what differs, such as Entrypoint; top: a layer on it."""
    layers, hashes = list(base.manifest["layers"]), list(base.config["rootfs"]["diff_ids"])
    blobs: dict[str, bytes] = {}
    if top is not None:
        layers.append(_put(blobs, top, _LAYER))
        hashes.append(layers[-1]["digest"])
    whole: Json = {
        **{key: base.config[key] for key in ("architecture", "os")},
        "created": _EPOCH,
        "config": {**base.config.get("config", {}), **config},
        "rootfs": {"type": "layers", "diff_ids": hashes},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _put(blobs, _json(whole), _CONFIG),
        "layers": layers,
    }
    told = {**_put(blobs, _json(manifest), _MANIFEST), "annotations": {_NAMED: name}}
    index = {"schemaVersion": 2, "manifests": [told]}
    files = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": _json(index)}
    return layer(files | {_blob(digest): blob for digest, blob in blobs.items()})


def _put(blobs: dict[str, bytes], blob: bytes, kind: str) -> Json:
    digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
    blobs[digest] = blob
    return {"mediaType": kind, "digest": digest, "size": len(blob)}


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _folders(files: Mapping[str, bytes]) -> set[str]:
    return {str(folder) for name in files for folder in Path(name).parents if str(folder) != "."}
