"""What a real node is made of, as values: what a machine lacks, configurations, images, keys and the overlay."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml
from controlplane import real_cgroups
from controlplane.api import Json
from controlplane.deploying import DEPLOY
from controlplane.nodes_styles import HELM, Style
from controlplane.nodes_styles import OPERATOR as OPERATOR_STYLE
from controlplane.real_config import OWN, PAUSE, TUNABLES, Place, containerd_config, kubelet_config, mounts
from controlplane.real_images import RECIPE, REQUIREMENTS, SOURCES, Keys, newest, pip_config, pip_settings
from controlplane.real_layers import Base, image, layer
from controlplane.real_node import TOOLS
from controlplane.real_nvidia import Ways, configuration, device_plugin, exporter, feature_discovery
from controlplane.real_overlays import AGENT, OPERATOR, Program, deployment, overlay
from controlplane.real_packages import PACKAGES, Seen, hindrance, installable, missing
from controlplane.real_roots import copied

from migd.agent.node.clients import is_plugin
from migd.kube.pods import PODS
from migd.kube.stored import Interner

ROOT = Path(__file__).parents[2]
EVERY = frozenset(program for package in PACKAGES for program in package.programs)
ABLE = Seen(system="linux", root=True, programs=EVERY, apt=True, namespaces="", cgroups="")


# ---- what a machine lacks


def test_nothing_hinders_a_machine_that_has_everything():
    assert hindrance(ABLE) == ""
    assert missing(ABLE) == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"system": "darwin"}, "needs Linux; this is darwin"),
        ({"root": False}, "needs root, for containerd and kubelet: run the tests as root"),
        ({"namespaces": "unshare failed: Operation not permitted"}, "may make none: unshare failed: Operation not"),
        ({"cgroups": "Read-only file system: /sys/fs/cgroup/cpu"}, "none can be made: Read-only file system"),
        (
            {"programs": EVERY - {"gcc", "buildah"}},
            "needs gcc, buildah, which are missing: `make real-node` installs gcc libc6-dev buildah",
        ),
        (
            {"programs": EVERY - {"nsenter"}, "apt": False},
            "needs nsenter, which are missing: there is no apt-get here: install what your system calls util-linux",
        ),
    ],
)
def test_what_hinders_a_real_node_is_said_by_name_and_with_what_to_do(change: Json, says: str):
    assert says in hindrance(dataclasses.replace(ABLE, **change))


@pytest.mark.parametrize(
    ("change", "can"),
    [
        ({}, True),
        ({"apt": False}, False),
        ({"root": False}, False),
        ({"namespaces": "refused"}, False),
    ],
)
def test_packages_are_installed_only_where_nothing_else_hinders(change: Json, can: bool):
    assert installable(dataclasses.replace(ABLE, programs=frozenset(), **change)) == can


# ---- configurations


def test_everything_that_is_the_nodes_own_is_in_its_folder():
    place = Place(Path("/folder"))
    has = dict.fromkeys(TUNABLES, True) | {"kernel/keys/root_maxkeys": False}
    found = mounts(place, has)
    assert all(source.startswith("/folder/") for source, _ in found)
    assert dict(found)[str(place.kubelet)] == "/var/lib/kubelet"
    assert len(found) == len(OWN) + len(TUNABLES) - 1, "what this kernel lacks cannot be mounted on"


def test_a_snapshotter_is_one_that_works():
    place = Place(Path("/folder"))
    assert 'snapshotter = "overlayfs"' in containerd_config(place, overlays=True)
    assert 'snapshotter = "native"' in containerd_config(place, overlays=False)


def test_what_a_device_is_is_looked_up_in_the_nodes_own_folder_only():
    config = tomllib.loads(containerd_config(Place(Path("/folder")), overlays=True))
    runtime = config["plugins"]["io.containerd.cri.v1.runtime"]
    assert runtime["cdi_spec_dirs"] == ["/var/run/cdi"]
    assert "/var/run/cdi" in OWN.values()
    assert config["plugins"]["io.containerd.cri.v1.images"]["pinned_images"] == {"sandbox": PAUSE}


def test_the_kubelet_leaves_the_machine_alone_and_answers_nobody_without_a_certificate():
    config = kubelet_config(Path("/ca.crt"), 25_000)
    assert config["makeIPTablesUtilChains"] is False
    assert config["authentication"]["anonymous"] == {"enabled": False}
    assert (config["address"], config["port"], config["healthzPort"]) == ("127.0.0.1", 25_000, 0)


@pytest.fixture(params=["v1", "v2"])
def cgroups(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tree as the kernel shows it, which makes no files in new folders here."""
    if request.param == "v2":
        for name in ("cgroup.controllers", "cgroup.procs", "cgroup.subtree_control"):
            (tmp_path / name).write_text("cpu io memory pids\n" if name == "cgroup.controllers" else "")
        return tmp_path
    for controller in ("cpu", "memory"):
        (tmp_path / controller).mkdir()
        (tmp_path / controller / "cgroup.procs").touch()
    return tmp_path


def test_a_cgroup_is_made_in_every_hierarchy_and_removed_with_those_in_it(cgroups: Path):
    roots = real_cgroups.hierarchies(cgroups)
    assert len(roots) == (1 if cgroups in roots else 2)
    real_cgroups.make("node", cgroups)
    for root in roots:
        (root / "node/pod/container").mkdir(parents=True)
        for file in (root / "node").glob("cgroup.*"):
            assert file.read_text() == "+cpu +memory +pids"
            file.unlink()
    assert real_cgroups.remove("node", cgroups)
    assert not any((root / "node").exists() for root in roots)


def test_a_machine_without_cgroups_says_so(tmp_path: Path):
    assert real_cgroups.hindrance("node", tmp_path) == f"{tmp_path} has no cgroups: {tmp_path}"


# ---- images


def copy_of_the_clone(folder: Path) -> Path:
    for name in (*RECIPE, *SOURCES):
        target = folder / name
        if (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
        else:
            target.mkdir()
            (target / "one.py").write_text("x = 1\n")
    return folder


@pytest.mark.parametrize(
    ("edited", "same"),
    [
        ("migd/one.py", {"base", "libraries"}),
        ("README.md", {"base", "libraries"}),
        ("requirements-image.txt", {"base"}),
        ("Dockerfile", {"base"}),
        (".dockerignore", {"base", "libraries"}),
        ("migd/__pycache__/one.pyc", {"base", "libraries", "image"}),
        ("tests/test_one.py", {"base", "libraries", "image"}),
    ],
)
def test_an_edit_makes_only_the_steps_anew_that_it_is_part_of(tmp_path: Path, edited: str, same: set[str]):
    clone = copy_of_the_clone(tmp_path)
    before = dataclasses.asdict(Keys.of(clone))
    path = clone / edited
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "# edited\n")
    after = dataclasses.asdict(Keys.of(clone))
    assert {step for step in before if before[step] == after[step]} == same


def test_the_image_is_made_of_what_its_key_is_made_of():
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert allowed == set(SOURCES)
    copied_in = [line.split()[1:-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line[:5] == "COPY "]
    assert [words for words in copied_in if "--from" not in words[0]] == [[*REQUIREMENTS], ["."]]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split(" ")[0].split("==") for line in lines if "==" in line)


def test_the_images_requirements_are_the_developers_without_their_tools():
    ours, tools, everything = pins("requirements-image.txt"), pins("requirements-build.txt"), pins("requirements.txt")
    assert ours.items() | tools.items() <= everything.items()
    assert {"kopf", "grpcio", "nvidia-ml-py"} <= ours.keys()
    assert not {"pytest", "mypy", "grpcio-tools", "hatchling"} & ours.keys()


def test_pips_configuration_is_taken_over_as_far_as_it_says_where_packages_come_from():
    listed = "\n".join(
        (
            ":env:.cert='/env/ca.pem'",
            "global.cert='/global/ca.pem'",
            "global.index-url='https://mirror.example/simple'",
            "global.no-cache-dir='true'",
            "user.extra-index-url='\\nhttps://a.example\\nhttps://b.example'",
            "install.find-links='/wheels'",
            "",
        )
    )
    settings = pip_settings(listed)
    assert settings["cert"] == "/env/ca.pem", "a variable is stronger than a file"
    assert pip_config(settings).splitlines() == [
        "[global]",
        "cert = /env/ca.pem",
        "extra-index-url = https://a.example https://b.example",
        "find-links = /wheels",
        "index-url = https://mirror.example/simple",
    ]


def test_only_the_newest_few_are_kept(tmp_path: Path):
    for at in range(5):
        path = tmp_path / f"root-{at}"
        path.mkdir()
        os.utime(path, (at, at))
    assert [path.name for path in newest(tmp_path, "root-*")] == ["root-4", "root-3", "root-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root-2", "root-3", "root-4"]


def test_an_image_made_of_another_has_its_layers_and_only_what_is_new_in_its_archive(tmp_path: Path):
    below = {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": "sha256:aa", "size": 7}
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"User": "65532", "Env": ["A=1"]},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:bb"]},
    }
    base = Base({"layers": [below]}, config)
    top = layer({"opt/tools/one.py": b"x = 1\n"})
    made = tmp_path / "image.tar"
    made.write_bytes(image(base, "localhost/tools:1", {"User": "0"}, top))
    assert image(base, "localhost/tools:1", {"User": "0"}, top) == made.read_bytes()
    found = Base.of(made)
    assert found.manifest["layers"][0] == below
    assert found.config["config"] == {"User": "0", "Env": ["A=1"]}
    assert found.config["rootfs"]["diff_ids"] == ["sha256:bb", found.manifest["layers"][1]["digest"]]
    with tarfile.open(made) as archive:
        blobs = [name for name in archive.getnames() if name.startswith("blobs/sha256/")]
    assert len(blobs) == 3, "manifest, configuration, the layer on top"
    with tarfile.open(fileobj=io.BytesIO(top)) as contents:
        assert contents.getnames() == ["opt", "opt/tools", "opt/tools/one.py"]


def test_an_image_of_programs_is_made_of_the_lowest_layer_alone_and_they_may_be_run(tmp_path: Path):
    layers = [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": f"sha256:{n}", "size": 7} for n in "ab"]
    rootfs = {"type": "layers", "diff_ids": ["sha256:c", "sha256:d"]}
    config = {"architecture": "amd64", "os": "linux", "config": {"User": "65532"}, "rootfs": rootfs}
    top = layer({"etc/one": b""}, {"usr/bin/one": b"#!/bin/true\n"})
    made = tmp_path / "image.tar"
    made.write_bytes(image(Base({"layers": layers}, config).lowest(), "localhost/programs:1", {"Env": ["A=1"]}, top))
    found = Base.of(made)
    assert [one["digest"] for one in found.manifest["layers"]][:-1] == ["sha256:a"]
    assert found.config["rootfs"]["diff_ids"][:-1] == ["sha256:c"]
    assert found.config["config"] == {"Env": ["A=1"]}
    with tarfile.open(fileobj=io.BytesIO(top)) as contents:
        assert {one.name: one.mode for one in contents if one.isfile()} == {"etc/one": 0o644, "usr/bin/one": 0o755}


def test_a_copy_of_a_root_shares_files_but_no_database(tmp_path: Path):
    (tmp_path / "root/store/blobs").mkdir(parents=True)
    (tmp_path / "root/store/blobs/one").write_text("layer")
    (tmp_path / "root/store/meta.db").write_text("names")
    copied(tmp_path / "root", tmp_path / "copy")
    assert (tmp_path / "copy/store/blobs/one").samefile(tmp_path / "root/store/blobs/one")
    (tmp_path / "copy/store/meta.db").write_text("other")
    assert (tmp_path / "root/store/meta.db").read_text() == "names"


# ---- what is applied


def test_the_overlay_of_tests_changes_what_a_machine_without_a_cluster_network_needs_and_nothing_else(tmp_path: Path):
    document = overlay(tmp_path, "localhost/migd:abc", ("127.0.0.1", 6443), {OPERATOR: 21_000, AGENT: 21_001})
    assert document["images"] == [{"name": "migd", "newName": "localhost/migd", "newTag": "abc"}]
    (resource,) = document["resources"]
    assert (tmp_path / resource).resolve() == DEPLOY / "overlays/helm-plugin"
    operator, agent, driven = (json.loads(patch["patch"]) for patch in document["patches"])
    for operations, port in ((operator, 21_000), (agent, 21_001)):
        values = [operation["value"] for operation in operations if operation["op"] != "test"]
        assert f"--listen=127.0.0.1:{port}" in values
        assert {"name": "KUBERNETES_SERVICE_PORT", "value": "6443"} in values
    (volume,) = driven["spec"]["template"]["spec"]["volumes"]
    assert volume == {"name": "driver", "hostPath": {"path": "/run/nvidia/driver", "type": "Directory"}}


def test_another_program_can_run_as_the_agent(tmp_path: Path):
    document = overlay(tmp_path, "localhost/migd:abc", ("127.0.0.1", 1), {}, instead="dying.py")
    values = [operation["value"] for operation in json.loads(document["patches"][-1]["patch"])]
    assert values == [TOOLS, ["python3", "/opt/migd-tests/dying.py"]]


@pytest.mark.parametrize("program", [OPERATOR, AGENT], ids=lambda program: program.name)
def test_the_overlay_knows_where_among_the_arguments_the_one_about_listening_is(program: Program):
    text = (DEPLOY / "base" / f"{program.container}.yaml").read_text()
    (document,) = yaml.safe_load_all(text)
    (container,) = document["spec"]["template"]["spec"]["containers"]
    assert (document["kind"], document["metadata"]["name"]) == (program.kind, program.name)
    assert (container["name"], container["args"][program.listens]) == (program.container, "--listen=0.0.0.0:8080")


# ---- NVIDIA's programs


def pods_of(documents: list[Json]) -> dict[str, Json]:
    """The pods that DaemonSets make, as the API server shows them, by the DaemonSet's name."""
    found = {}
    for one in documents:
        if one["kind"] == "DaemonSet":
            template, namespace = one["spec"]["template"], one["metadata"]["namespace"]
            metadata = {"name": "p", "namespace": namespace, "uid": "u", "resourceVersion": "1", **template["metadata"]}
            pod = {"metadata": metadata, "spec": template["spec"], "status": {"phase": "Running"}}
            found[one["metadata"]["name"]] = pod
    return found


@pytest.mark.parametrize("style", [HELM, OPERATOR_STYLE], ids=lambda style: style.name)
def test_the_agent_takes_the_plugin_of_the_real_node_for_nvidias_and_nobody_else(style: Style):
    documents = [*device_plugin(style, Ways()), *feature_discovery(style, Ways(), ("127.0.0.1", 6443)), exporter()]
    pods = pods_of(documents)
    assert documents[0]["metadata"]["name"] == style.namespace
    plugins = {name for name, pod in pods.items() if is_plugin(PODS.parse(pod, Interner()))}
    assert plugins == {"nvidia-device-plugin-daemonset"}
    for pod in pods.values():
        assert not any(one.get("operator") == "Exists" and "key" not in one for one in pod["spec"]["tolerations"])


@pytest.mark.parametrize(("cdi", "given"), [(True, "DEVICE_LIST_STRATEGY"), (False, "PASS_DEVICE_SPECS")])
def test_devices_are_given_to_containers_in_one_way(cdi: bool, given: str):
    (container,) = device_plugin(HELM, Ways(cdi=cdi))[-1]["spec"]["template"]["spec"]["containers"]
    names = {one["name"] for one in container["env"]}
    assert names & {"DEVICE_LIST_STRATEGY", "PASS_DEVICE_SPECS"} == {given}


def test_time_slicing_is_configured_only_where_something_is_shared():
    assert configuration(Ways("single")) == {"version": "v1", "flags": {"migStrategy": "single"}}
    resources = [{"name": "nvidia.com/gpu", "replicas": 4}]
    assert configuration(Ways(shares={"nvidia.com/gpu": 4}))["sharing"] == {"timeSlicing": {"resources": resources}}


def test_a_deployment_asks_for_what_it_computes_on():
    document = deployment("train", 3, {"nvidia.com/mig-1g.10gb": 2})
    template = document["spec"]["template"]
    assert template["metadata"]["labels"] == document["spec"]["selector"]["matchLabels"] == {"app": "train"}
    assert template["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/mig-1g.10gb": "2"}}
