"""The session with the driver: opened late, kept, ended for a reset, renewed after a reload, and bounded in time."""

from __future__ import annotations

import threading

import pynvml
import pytest
from unit.nvml.scripted import Gpu, Inline, Instance, Scripted

from migd.mig.geometry import GpuInstance
from migd.mig.operations import CreateGpuInstance, DestroyGpuInstance, SetMode
from migd.mig.profiles import Placement
from migd.nvml import Deadlines, DriverError, HungError, NvmlGpus, ThreadCaller

UUID = "GPU-a"
THREE = GpuInstance("3g.20gb", Placement(4, 4))
SOON = 30.0  # a bound for failing tests only


def node(caller=None, deadlines=None):
    library = Scripted(Gpu(UUID, current=1, pending=1))
    return library, NvmlGpus(library, caller or Inline(), deadlines or Deadlines())


def test_nothing_is_opened_before_it_is_needed_and_then_only_once():
    library, gpus = node()
    assert library.log == []
    for _ in range(3):
        gpus.look()
    gpus.perform(CreateGpuInstance(UUID, THREE))
    assert (library.calls("nvmlInit"), library.open) == (1, 1)


def test_closing_ends_the_session_and_the_next_look_opens_another():
    library, gpus = node()
    gpus.look()
    gpus.close()
    gpus.close()
    assert (library.open, library.calls("nvmlShutdown")) == (0, 1)
    assert gpus.look()[0].uuid == UUID
    assert library.open == 1


def test_closing_what_was_never_opened_calls_nothing():
    library, gpus = node()
    gpus.close()
    assert library.log == []


def test_the_driver_version_is_that_of_the_session():
    library, gpus = node()
    assert gpus.driver_version() == "580.65.06"
    library.driver = "590.10"
    assert gpus.driver_version() == "580.65.06"
    gpus.close()
    assert gpus.driver_version() == "590.10"


@pytest.mark.parametrize("code", [1, 9, 12, 18, 27])
def test_a_driver_that_is_away_is_told_and_retried_at_the_next_look(code):
    library, gpus = node()
    library.fail["nvmlInit"] = [code]
    with pytest.raises(DriverError) as caught:
        gpus.look()
    assert caught.value.retry is (code != 12), "waiting does not bring a library that is not there"
    assert gpus.look()[0].uuid == UUID


def test_a_driver_reloaded_under_the_session_is_left_so_that_it_can_unload():
    library, gpus = node()
    gpus.look()
    library.fail["nvmlDeviceGetMigMode"] = [pynvml.NVML_ERROR_UNINITIALIZED]
    with pytest.raises(DriverError):
        gpus.look()
    assert library.open == 0
    assert gpus.look()[0].uuid == UUID
    assert library.open == 1


def test_a_session_whose_driver_does_not_tell_its_version_is_not_left_open():
    library, gpus = node()
    library.fail["nvmlSystemGetDriverVersion"] = [pynvml.NVML_ERROR_UNKNOWN]
    with pytest.raises(Exception, match="nvmlSystemGetDriverVersion: unknown error"):
        gpus.look()
    assert library.open == 0


def test_a_shutdown_that_finds_no_driver_is_an_ended_session():
    library, gpus = node()
    gpus.look()
    library.fail["nvmlShutdown"] = [pynvml.NVML_ERROR_UNINITIALIZED]
    gpus.close()
    gpus.look()
    assert library.calls("nvmlInit") == 2


def test_an_operation_renews_the_session_as_well():
    library, gpus = node()
    gpus.look()
    library.fail["nvmlDeviceCreateGpuInstanceWithPlacement"] = [pynvml.NVML_ERROR_DRIVER_NOT_LOADED]
    with pytest.raises(DriverError):
        gpus.perform(CreateGpuInstance(UUID, THREE))
    gpus.perform(CreateGpuInstance(UUID, THREE))
    assert gpus.look()[0].geometry == {THREE}


def test_each_kind_of_call_has_its_own_deadline():
    caller = Inline()
    _, gpus = node(caller, Deadlines(open_s=1, read_s=2, mutation_s=3, mode_s=4))
    gpus.look()
    gpus.perform(CreateGpuInstance(UUID, THREE))
    gpus.perform(DestroyGpuInstance(UUID, THREE))
    gpus.perform(SetMode(UUID, False))
    gpus.close()
    assert caller.deadlines == [
        ("open an NVML session", 1),
        ("count the GPUs", 2),
        ("read GPU 0", 2),
        (f"find what to change on {UUID}", 2),
        (f"nvmlDeviceCreateGpuInstanceWithPlacement on {UUID}", 3),
        (f"find what to change on {UUID}", 2),
        (f"nvmlGpuInstanceDestroy on {UUID}", 3),
        (f"find what to change on {UUID}", 2),
        (f"switch MIG off on {UUID}", 4),
        ("end the NVML session", 2),
    ]


def test_the_deadlines_are_those_that_the_documentation_gives():
    assert Deadlines() == Deadlines(open_s=120, read_s=30, mutation_s=60, mode_s=120)


@pytest.mark.parametrize(
    ("hang", "operation"),
    [
        ("find what", DestroyGpuInstance(UUID, THREE)),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", CreateGpuInstance(UUID, THREE)),
        ("switch MIG", SetMode(UUID, False)),
    ],
)
def test_a_deadline_that_passes_is_a_hang_of_unknown_effect(hang, operation):
    caller = Inline()
    _, gpus = node(caller)
    gpus.look()
    caller.hang = hang
    with pytest.raises(HungError, match="whether it took effect is not known") as caught:
        gpus.perform(operation)
    assert (caught.value.gpu_uuid, caught.value.code) == (UUID, None)


def test_a_hanging_read_names_the_gpu_that_had_the_index():
    caller = Inline()
    _, gpus = node(caller)
    gpus.look()
    caller.hang = "read GPU 0"
    with pytest.raises(HungError) as caught:
        gpus.look()
    assert caught.value.gpu_uuid == UUID


def test_after_a_hang_nothing_that_was_remembered_of_the_mode_is_trusted():
    caller = Inline()
    library, gpus = node(caller)
    gpus.look()
    read = library.calls("nvmlDeviceGetGpuInstanceProfileInfo")
    caller.hang = "nvmlDeviceCreateGpuInstanceWithPlacement"
    with pytest.raises(HungError):
        gpus.perform(CreateGpuInstance(UUID, THREE))
    gpus.look()
    assert library.calls("nvmlDeviceGetGpuInstanceProfileInfo") == 2 * read


def test_whatever_calls_nvml_has_its_turn_to_itself():
    taken = []

    class Watching(Inline):
        def run(self, fn, deadline_s):
            taken.append(gpus._turn.locked())
            return super().run(fn, deadline_s)

    _, gpus = node(Watching())
    for use in (gpus.look, gpus.driver_version, lambda: gpus.perform(CreateGpuInstance(UUID, THREE)), gpus.close):
        taken.clear()
        use()
        assert taken
        assert all(taken)


def test_a_call_that_truly_hangs_is_named_and_all_waits_for_it_to_return():
    library, gpus = node(ThreadCaller(), Deadlines(open_s=SOON, read_s=SOON, mutation_s=0, mode_s=0))
    gpus.look()
    entered, release, returned = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        release.wait(SOON)
        returned.set()

    library.before["nvmlDeviceCreateGpuInstanceWithPlacement"] = hang
    with pytest.raises(HungError):
        gpus.perform(CreateGpuInstance(UUID, THREE))
    assert entered.wait(SOON)
    for attempt in (gpus.look, gpus.close, gpus.driver_version):
        with pytest.raises(HungError, match=f"still not returned: nvmlDeviceCreateGpuInstanceWithPlacement on {UUID}"):
            attempt()
    release.set()
    assert returned.wait(SOON)
    assert gpus._session._caller._hanging.done.wait(SOON)
    assert gpus.look()[0].geometry == {THREE}  # it took effect after all: only a look can say


def test_looks_and_operations_from_several_threads_take_turns():
    library, gpus = node(ThreadCaller())
    library.gpus[0].instances = [Instance(2, 9, 4, 4)]
    problems: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                gpus.look()
                gpus.perform(DestroyGpuInstance(UUID, THREE))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert library.calls("nvmlGpuInstanceDestroy") == 1
