"""deploy/ as kubectl sees it: every overlay is taken by the API server whole, and an own one can be made of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from controlplane.processes import until
from controlplane.running import ControlPlane
from integration.deployed import DEPLOY, rendered, rights_in

OVERLAYS = ["base", "overlays/gpu-operator", "overlays/helm-plugin", "overlays/simulated"]
SORTED = "Sorting order is set both in 'kustomization.yaml'"  # kubectl always asks for one, and then takes ours
_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def spaces(plane: ControlPlane) -> ControlPlane:
    """The namespaces are there: a dry run makes none, and what goes into them would be refused."""
    for name in ("migd-system", "nvidia-device-plugin"):
        plane.admin.create("/api/v1/namespaces", {"metadata": {"name": name}})
    return plane


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_api_server_takes_it_whole(spaces: ControlPlane, overlay: str):
    done = spaces.kubectl("apply", "--server-side", "--dry-run=server", "-k", str(DEPLOY / overlay))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if SORTED not in line] == []
    assert len(done.stdout.splitlines()) == len(rendered(spaces, overlay))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_definitions_rights_and_policies_come_before_the_programs(spaces: ControlPlane, overlay: str):
    documents = rendered(spaces, overlay)
    kinds = [document["kind"] for document in documents]
    assert min(kinds.index("Deployment"), kinds.index("DaemonSet")) > max(
        i for i, kind in enumerate(kinds) if kind.startswith("Validating") or kind == "CustomResourceDefinition"
    )
    made = ["default", "nvidia-device-plugin"] if overlay != "overlays/simulated" else ["default"]
    for document in documents:
        assert document["metadata"].get("namespace", "default") in made
        made += [document["metadata"]["name"]] if document["kind"] == "Namespace" else []


def test_the_policies_are_free_of_type_errors(plane: ControlPlane):
    """The API server type-checks expressions against the definitions, and says so in the policy's status only."""
    done = plane.kubectl("apply", "--server-side", "-k", str(DEPLOY / "base"))
    assert done.returncode == 0, done.stderr
    at = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"

    def statuses() -> dict[str, dict[str, object]]:
        items = plane.admin.get(at).object()["items"]
        found = {p["metadata"]["name"]: p for p in items if p["metadata"]["name"].startswith("migd-")}
        checked = {n: p for n, p in found.items() if "typeChecking" in p.get("status", {})}
        assert len(found) == 11
        return {n: p["status"]["typeChecking"] for n, p in checked.items()}

    assert until(lambda: len(statuses()) == 11, _WITHIN_S)
    assert {name: told for name, told in statuses().items() if told} == {}


def test_another_namespace_of_the_plugin_and_another_image_take_an_overlay_of_ones_own(
    plane: ControlPlane, tmp_path: Path
):
    """As docs/install.md has it."""
    page = (DEPLOY.parent / "docs" / "install.md").read_text()
    example = next(part for part in page.split("```yaml\n")[1:] if "kind: Kustomization" in part).split("```")[0]
    overlay = example.replace("../migd/deploy", os.path.relpath(DEPLOY, tmp_path.resolve()))
    (tmp_path / "kustomization.yaml").write_text(overlay)
    done = plane.kubectl("kustomize", str(tmp_path))
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    wanted = yaml.safe_load(example)
    image = wanted["images"][0]
    images = {
        container["image"]
        for document in documents
        if document["kind"] in ("Deployment", "DaemonSet")
        for container in document["spec"]["template"]["spec"]["containers"]
    }
    assert images == {f"{image['newName']}:{image['newTag']}"}
    assert {r.namespace for r in rights_in(documents) if (r.resource, r.verb) == ("pods", "delete")} == {"gpu-plugins"}
