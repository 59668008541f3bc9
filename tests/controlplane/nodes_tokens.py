"""What a node gives to its containers, and the token of a pod, as the kubelet asks for it with its own credentials."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from controlplane.api import Api, Json
from controlplane.nodes_pods import uid_of
from controlplane.processes import Forking

TOKEN_S: Final = 3607
"""How long a token holds; what the ServiceAccount admission plugin asks for."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What a node gives to its containers. root: its `/`; server, authority: of the API server.

    variables: every container has them. logs: a folder for their output. backoff_s: before the first restart, doubled
    each time; a kubelet's is 10. instead: program -> the command that runs in its place, for tests that kill it.
    forking: where Python programs are forked from; None starts each anew.
    """

    node: str
    root: Path
    server: str
    authority: Path
    logs: Path
    variables: Mapping[str, str]
    backoff_s: float = 10.0
    leashed: bool = True
    instead: Mapping[str, Sequence[str]] = field(default_factory=dict)
    forking: Forking | None = None


class Token:
    """The ServiceAccount token of a pod, bound to it, in a kubeconfig that reads it from a file; renewed in time."""

    def __init__(self, ground: Ground, pod: Json, api: Api) -> None:
        self._pod = pod
        self._api = api
        self._again_at_s = 0.0
        self.ready = False
        self.folder = ground.root / "pods" / uid_of(pod)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.kubeconfig = self.folder / "kubeconfig"
        self.file = self.folder / "token"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "c", "cluster": {"server": ground.server, "certificate-authority": str(ground.authority)}}
            ],
            "users": [{"name": "pod", "user": {"tokenFile": str(self.file)}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "pod"}}],
            "current-context": "c",
        }
        self.kubeconfig.write_text(json.dumps(config))

    def step(self, now_s: float) -> None:
        """Ask for a token where none is there or four fifths of its time are over."""
        if now_s < self._again_at_s:
            return
        metadata, account = self._pod["metadata"], self._pod["spec"].get("serviceAccountName", "default")
        bound = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": TOKEN_S, "boundObjectRef": bound},
        }
        path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
        self._again_at_s = now_s + 1.0
        try:
            answer = self._api.create(path, body)
        except OSError:
            return
        if not answer.ok:  # the authorizer learns of a bound pod a moment later
            return
        new = self.file.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(answer.body["status"]["token"])
        os.replace(new, self.file)
        self.ready = True
        self._again_at_s = now_s + 0.8 * TOKEN_S
