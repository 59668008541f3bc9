"""The control plane of a test run, with our definitions in it."""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from controlplane.building import NotBuiltError, found_programs
from controlplane.clusters import Cluster
from controlplane.nodes_programs import python_path
from controlplane.nursery import Nursery
from controlplane.processes import until
from controlplane.real_clusters import RealCluster
from controlplane.real_preparing import hinders
from controlplane.running import ControlPlane
from integration.crowds import Crowd, crowd_of, needs_of
from integration.stage import Stage

CRDS = Path(__file__).parents[2] / "crds"
KINDS = ("gpupartitionplans", "gpupartitions")
LONG = ("races", "outage", "kills", "writes", "plans")
"""The stories, test_e2e_*, in the order in which two workers take turns: who waits runs beside who computes."""


def pytest_configure(config: pytest.Config) -> None:
    """Files are dealt out in our order, and not by how many tests they have."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes begins first, before the control plane that all other files share."""
    files = [f"test_e2e_{name}" for name in LONG]
    items.sort(key=lambda item: files.index(item.path.stem) if item.path.stem in files else len(files))


@pytest.fixture(scope="session")
def bare_programs() -> Path:
    """The folder of the programs."""
    programs = _programs()
    if isinstance(programs, str):
        pytest.fail(programs, pytrace=False)
    return programs


@pytest.fixture(scope="session")
def bare_plane(
    bare_programs: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """A control plane as it comes; its folder, with all logs, is kept and named where a test failed."""
    yield from _control_plane(bare_programs, request, tmp_path_factory)


@pytest.fixture(scope="module")
def own_plane(
    bare_programs: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """A control plane of the test module's own, as it comes; its folder as that of `bare_plane`."""
    yield from _control_plane(bare_programs, request, tmp_path_factory)


def _control_plane(
    programs: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    failed = request.session.testsfailed
    folder = tmp_path_factory.mktemp("control-plane")
    with ControlPlane(folder, programs) as running:
        yield running
    _kept_or_not(request, failed, folder)


def _programs() -> Path | str:
    try:
        return found_programs()
    except NotBuiltError as missing:
        return str(missing)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where agents, operators and device plugins are forked from."""
    with Nursery(python_path()) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A whole cluster of the test module's own; what its CLUSTER says goes to `Cluster`."""
    programs = _programs()
    if isinstance(programs, str):
        pytest.fail(programs, pytrace=False)
    failed = request.session.testsfailed
    folder = tmp_path_factory.mktemp("cluster")
    options = {"forking": nursery, **getattr(request.module, "CLUSTER", {})}
    with Cluster(folder, programs=programs, **options) as running:
        yield running
    _kept_or_not(request, failed, folder)


def _kept_or_not(request: pytest.FixtureRequest, failed: int, folder: Path) -> None:
    """Name the folder of a cluster, or of a control plane, where a test failed since, and else clear it away."""
    if request.session.testsfailed > failed:
        sys.stderr.write(f"\nlogs of the cluster: {folder}\n")
    else:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def crowd(
    request: pytest.FixtureRequest, nursery: Nursery, bare_programs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Crowd]:
    """The selected stories of a module, under way; see `integration.crowds`."""
    failed = request.session.testsfailed
    folder = tmp_path_factory.mktemp("crowd")
    with crowd_of(needs_of(request), folder, bare_programs, forking=nursery) as under_way:
        yield under_way
    _kept_or_not(request, failed, folder)


@pytest.fixture(scope="session")
def plane(bare_plane: ControlPlane) -> ControlPlane:
    """A control plane that serves our kinds."""
    done = bare_plane.kubectl("apply", "--server-side", "-f", str(CRDS))  # as deploy/ is applied later
    assert done.returncode == 0, done.stderr
    for kind in KINDS:
        # a definition just made answers 404 or 429 for a moment
        assert until(lambda at=kind: bare_plane.admin.get(f"/apis/migd.dev/v1alpha1/{at}").ok, 30), f"{kind} not served"
    return bare_plane


@pytest.fixture
def name() -> str:
    """A name that no other test uses: the control plane is shared."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def stage(plane: ControlPlane) -> Stage:
    """A control plane with deploy/ on it, and who asks it for what; see `integration.stage`."""
    return Stage.set_up(plane)


@pytest.fixture(scope="module")
def real_cluster(
    request: pytest.FixtureRequest, bare_programs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealCluster]:
    """A cluster with one real node, of the test module's own; what its REAL_CLUSTER says goes to `RealCluster`.

    Skipped, with a reason that names what is missing, where this machine cannot have one.
    """
    _able_to_have_a_real_node()
    failed = request.session.testsfailed
    folder = tmp_path_factory.mktemp("real")
    options = getattr(request.module, "REAL_CLUSTER", {})
    with RealCluster(folder, programs=bare_programs, **options) as running:
        yield running
    _kept_or_not(request, failed, folder)


@pytest.fixture(scope="session")
def able_to_have_a_real_node() -> None:
    """Skip where this machine cannot have one; fail where it was not prepared."""
    _able_to_have_a_real_node()


def _able_to_have_a_real_node() -> None:
    try:
        reason = hinders()
    except NotBuiltError as missing:
        pytest.fail(str(missing), pytrace=False)
    if reason:
        pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was skipped and why, also where nobody asked for it."""
    reasons = {str(report.longrepr[2]) for report in terminalreporter.getreports("skipped") if report.longrepr}
    for reason in sorted(reasons):
        terminalreporter.write_line(reason, yellow=True)
