"""A control plane that runs: etcd, API server, controllers and scheduler on loopback, in a folder of their own."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from controlplane.api import Api, Json
from controlplane.audit import POLICY, AuditLog
from controlplane.building import found_programs
from controlplane.certificates import SERVICE_ADDRESS, Authority, Pair, signing_key
from controlplane.processes import Child, Ports, StartError

ISSUER: Final = "https://kubernetes.default.svc.cluster.local"
_SERVICE_RANGE: Final = f"{SERVICE_ADDRESS.rpartition('.')[0]}.0/24"
_GO: Final = {"GOGC": "800", "GOMEMLIMIT": "1500MiB"}
"""Collect garbage seldom: a fifth of the API server's time goes into it otherwise, and a tenth at 200."""
_NEEDLESS: Final = (
    "certificatesigningrequest-approving-controller",
    "certificatesigningrequest-cleaner-controller",
    "certificatesigningrequest-signing-controller",
    "endpointslice-mirroring-controller",
    "ephemeral-volume-controller",
    "horizontal-pod-autoscaler-controller",
    "persistentvolume-attach-detach-controller",
    "persistentvolume-binder-controller",
    "persistentvolume-expander-controller",
    "persistentvolume-protection-controller",
    "persistentvolumeclaim-protection-controller",
    "service-cidr-controller",
    "volumeattributesclass-protection-controller",
)
"""Of kinds that no simulated cluster has: volumes, certificates of kubelets. All others run."""
_START_S: Final = 90.0  # about 6 s where nothing else runs
_KUBECTL_S: Final = 60.0


class ControlPlane:
    """One control plane. Use it as a context, or call `start` and `stop`.

    folder: made if need be; gets certificates, logs, audit.log, kubeconfig and etcd's data. programs: the folder of
    the programs. leashed: its processes die with this one; False for one that outlives it.
    """

    def __init__(self, folder: Path, programs: Path | None = None, leashed: bool = True) -> None:
        self.folder = folder
        self.programs = programs or found_programs()
        self._leashed = leashed
        self._ports = Ports()
        self.logs = folder / "logs"
        self._secrets = folder / "pki"
        for made in (folder, self.logs, self._secrets):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.authority = Authority(self._secrets)
        self.port = self._ports.take()
        self._admin_pair = self.authority.client("admin", "migd-tests-admin", ["system:masters"])
        self.admin = self.as_client(self._admin_pair)
        self.kubeconfig = self.kubeconfig_of("kubeconfig", self._admin_pair)
        self.audit = AuditLog(folder / "audit.log", self.admin)
        etcd_port = self._ports.take()
        self.etcd = self._etcd(etcd_port)
        self.api_server = self._api_server(etcd_port)
        self.controllers = self._controllers()
        self.scheduler = self._scheduler()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def server(self) -> str:
        """The API server's URL."""
        return f"https://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start everything and wait until it is ready; StartError, with all stopped again, where it is not."""
        try:
            self.etcd.start()
            self.api_server.start()
            self.wait_ready()
            self.controllers.start()
            self.scheduler.start()
            self.controllers.wait_until(self._controllers_work, _START_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End everything, the other way round; nothing is left running."""
        for child in (self.scheduler, self.controllers, self.api_server, self.etcd):
            child.stop()
        self._ports.close()

    def wait_ready(self, within_s: float = _START_S) -> None:
        """Wait until the API server serves and its built-in roles are there."""
        self.api_server.wait_until(lambda: self._answers("/readyz"), within_s)

    def as_client(self, pair: Pair) -> Api:
        """The API server as the user of a client certificate sees it."""
        return Api(self.port, self.authority.certificate, client=pair)

    def as_token(self, token: str) -> Api:
        """The API server as the holder of a token sees it."""
        return Api(self.port, self.authority.certificate, token=token)

    def bound_token(self, namespace: str, service_account: str, pod: str, seconds: int = 3600) -> str:
        """A ServiceAccount token as a pod gets it: bound to the pod, and so to the pod's node."""
        seen = self.admin.get(f"/api/v1/namespaces/{namespace}/pods/{pod}").object()
        body: Json = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "audiences": [ISSUER],
                "expirationSeconds": seconds,
                "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": seen["metadata"]["uid"]},
            },
        }
        made = self.admin.create(f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token", body)
        return str(made.object()["status"]["token"])

    def kubeconfig_of(self, file: str, client: Pair | None = None, token: str = "") -> Path:
        """A kubeconfig in the folder, for a client certificate or a token; everything is inside the file."""
        user: dict[str, str] = {"token": token} if client is None else _embedded(client)
        cluster = {"server": self.server, "certificate-authority-data": _base64(self.authority.certificate)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "migd", "cluster": cluster}],
            "users": [{"name": file, "user": user}],
            "contexts": [{"name": "migd", "context": {"cluster": "migd", "user": file}}],
            "current-context": "migd",
        }
        path = self.folder / file
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=1))
        return path

    def kubectl(self, *words: str, stdin: str = "", kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl, as the admin unless another kubeconfig is given; the caller looks at the exit status."""
        return subprocess.run(
            [self.programs / "kubectl", "--cache-dir", self.folder / "kubectl-cache", *words],
            env=_bare(os.environ) | {"KUBECONFIG": str(kubeconfig or self.kubeconfig), "HOME": str(self.folder)},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_KUBECTL_S,
            check=False,
        )

    def _etcd(self, port: int) -> Child:
        client, peer = (f"http://127.0.0.1:{p}" for p in (port, self._ports.take()))
        return self._child(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",  # the data is thrown away
            "--watch-progress-notify-interval=5s",
        )

    def _api_server(self, etcd_port: int) -> Child:
        serving = self.authority.server("kube-apiserver")
        tokens = signing_key(self._secrets)
        policy = self._secrets / "audit-policy.json"
        policy.write_text(json.dumps(POLICY))
        return self._child(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={self.authority.certificate}",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-key-file={tokens.certificate}",
            f"--service-account-signing-key-file={tokens.key}",
            f"--api-audiences={ISSUER}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--service-cluster-ip-range={_SERVICE_RANGE}",
            "--endpoint-reconciler-type=none",  # loopback is no address for an endpoint
            "--allow-privileged=true",
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self.folder / 'audit.log'}",
            "--audit-log-mode=blocking",
            "--audit-log-maxsize=0",  # one file, never rotated
        )

    def _controllers(self) -> Child:
        config = self._kubeconfig_for("kube-controller-manager")
        return self._child(
            "kube-controller-manager",
            *_as_itself(config),
            f"--secure-port={self._ports.take()}",
            f"--service-account-private-key-file={self._secrets / 'service-accounts.key'}",
            f"--root-ca-file={self.authority.certificate}",
            "--use-service-account-credentials=true",  # each controller with its own rights, as on real clusters
            f"--controllers=*,{','.join(f'-{name}' for name in _NEEDLESS)}",
        )

    def _scheduler(self) -> Child:
        config = self._kubeconfig_for("kube-scheduler")
        return self._child("kube-scheduler", *_as_itself(config), f"--secure-port={self._ports.take()}")

    def _kubeconfig_for(self, name: str) -> Path:
        return self.kubeconfig_of(f"{name}.kubeconfig", self.authority.client(name, f"system:{name}"))

    def _child(self, name: str, *flags: str) -> Child:
        command = [self.programs / name, *flags]
        return Child(name, command, self.logs / f"{name}.log", self._leashed, {**os.environ, **_GO})

    def _answers(self, path: str) -> bool:
        try:
            return self.admin.get(path).ok
        except OSError:
            return False

    def _controllers_work(self) -> bool:
        """The first thing that shows: the namespace `default` has got its ServiceAccount."""
        if not self.scheduler.running:
            raise StartError(f"kube-scheduler ended while starting:\n{self.scheduler.tail()}")
        return self._answers("/api/v1/namespaces/default/serviceaccounts/default")


def _as_itself(kubeconfig: Path) -> Sequence[str]:
    """The flags of a component that talks to the API server, and asks it who its own callers are."""
    return (
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
    )


def _embedded(pair: Pair) -> dict[str, str]:
    return {"client-certificate-data": _base64(pair.certificate), "client-key-data": _base64(pair.key)}


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _bare(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would change kubectl's ways."""
    return {name: value for name, value in environment.items() if not name.startswith(("KUBE", "KUBECTL_"))}
