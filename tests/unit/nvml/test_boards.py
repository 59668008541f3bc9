"""What a board is read as: names, ids, sizes and places as the driver reports them, and drivers that report less."""

from __future__ import annotations

from dataclasses import replace

import pynvml
import pytest
from unit.nvml.scripted import A100, Gpu, Inline, Offer, Scripted

from migd.mig.operations import SetMode
from migd.mig.profiles import Placement
from migd.nvml import NoPermissionError, NvmlGpus

PROFILE_INFO = "nvmlDeviceGetGpuInstanceProfileInfo"
PLACEMENTS = "nvmlDeviceGetGpuInstancePossiblePlacements"


def look(library, **_):
    return NvmlGpus(library, Inline()).look()


def test_profiles_carry_numeric_ids_and_not_the_enum_that_asked_for_them():
    board = look(Scripted(Gpu("GPU-a")))[0].board
    assert {p.name: p.profile_id for p in board.profiles} == {
        "1g.5gb": 19,
        "1g.5gb+me": 20,
        "2g.10gb": 14,
        "3g.20gb": 9,
        "7g.40gb": 0,
    }
    assert board.profile("3g.20gb").memory_mib == 19968
    assert board.profile("3g.20gb").compute_slices == 3


def test_placements_are_sorted_whatever_the_driver_says_first():
    board = look(Scripted(Gpu("GPU-a")))[0].board
    assert board.profile("2g.10gb").placements == (Placement(0, 2), Placement(2, 2), Placement(4, 2))


@pytest.mark.parametrize("name", ["MIG 1g.5gb", "1g.5gb"])
def test_a_profile_name_is_the_same_with_and_without_its_prefix(name):
    board = look(Scripted(Gpu("GPU-a", offers=(replace(A100[0], name=name),))))[0].board
    assert [p.name for p in board.profiles] == ["1g.5gb"]


def test_names_and_sizes_are_read_and_never_computed():
    odd = Offer(3, 77, "MIG 5g.79gb+odd.me", 5, 3, (1,), memory_mib=12345)
    (profile,) = look(Scripted(Gpu("GPU-a", offers=(odd,))))[0].board.profiles
    assert (profile.name, profile.profile_id, profile.memory_mib) == ("5g.79gb+odd.me", 77, 12345)
    assert profile.placements == (Placement(1, 3),)


def test_the_enum_is_counted_to_the_end_that_this_driver_has():
    library = Scripted(Gpu("GPU-a"))
    look(library)
    assert library.calls(PROFILE_INFO) == 11  # 0 to 9, and the one that is past the end


def test_a_driver_that_never_ends_its_enum_is_not_asked_for_ever():
    library = Scripted(Gpu("GPU-a"))
    library.always[PROFILE_INFO] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert look(library)[0].board is None
    assert library.calls(PROFILE_INFO) == 64


def test_an_older_driver_lists_no_profiles_while_mig_is_off_and_lists_them_once_it_is_on():
    gpus = NvmlGpus(Scripted(Gpu("GPU-a", lists_while_off=False)), Inline())
    assert gpus.look()[0].board is None
    gpus.perform(SetMode("GPU-a", True))
    assert gpus.look()[0].board.offers("3g.20gb")


def test_placements_refused_while_mig_is_off_mean_that_the_board_is_not_known_yet():
    library = Scripted(Gpu("GPU-a"))
    library.always[PLACEMENTS] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert look(library)[0].board is None


def test_placements_refused_with_mig_on_make_the_gpu_unreadable_and_its_board_not_unknown():
    library = Scripted(Gpu("GPU-a", current=1, pending=1))
    library.always[PLACEMENTS] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert PLACEMENTS in look(library)[0].unreadable


@pytest.mark.parametrize(
    "code",
    [
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,  # of the very first value: a structure version it does not know
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    ],
)
def test_a_driver_too_old_to_name_its_profiles_is_said_to_be_that(code):
    library = Scripted(Gpu("GPU-a"))
    library.always[PROFILE_INFO] = code
    assert "too old to name its MIG profiles" in look(library)[0].unreadable


def test_a_profile_without_a_name_is_not_given_one():
    assert "too old to name" in look(Scripted(Gpu("GPU-a", offers=(replace(A100[0], name=""),))))[0].unreadable


def test_two_profiles_of_one_name_are_refused_in_words():
    twice = (A100[0], replace(A100[1], name=A100[0].name))
    assert "two profiles one name: 1g.5gb, 1g.5gb" in look(Scripted(Gpu("GPU-a", offers=twice)))[0].unreadable


def test_the_same_profile_under_two_enum_values_counts_once():
    again = (A100[0], replace(A100[0], enum=9))
    assert len(look(Scripted(Gpu("GPU-a", offers=again)))[0].board.profiles) == 1


def test_missing_privilege_for_placements_is_named():
    library = Scripted(Gpu("GPU-a"))
    library.always[PLACEMENTS] = pynvml.NVML_ERROR_NO_PERMISSION
    with pytest.raises(NoPermissionError, match="mig/config"):
        look(library)


def test_a_board_is_read_once_while_the_mode_lasts_and_again_after_a_change():
    library = Scripted(Gpu("GPU-a"))
    gpus = NvmlGpus(library, Inline())
    gpus.look()
    read = library.calls(PROFILE_INFO)
    gpus.look()
    assert library.calls(PROFILE_INFO) == read
    gpus.perform(SetMode("GPU-a", True))
    gpus.look()
    assert library.calls(PROFILE_INFO) == 2 * read


def test_a_mode_change_by_another_program_is_noticed_too():
    library = Scripted(Gpu("GPU-a", lists_while_off=False))
    gpus = NvmlGpus(library, Inline())
    assert gpus.look()[0].board is None
    library.gpus[0].current = library.gpus[0].pending = 1
    assert gpus.look()[0].board is not None


def test_a_mode_that_went_off_and_on_between_two_looks_is_not_taken_for_one_that_lasted():
    library = Scripted(Gpu("GPU-a", current=1, pending=1))
    gpus = NvmlGpus(library, Inline())
    gpus.look()
    gpus.perform(SetMode("GPU-a", False))
    library.gpus[0].offers = (replace(A100[0], name="MIG 1g.6gb"), *A100[1:])
    gpus.perform(SetMode("GPU-a", True))
    assert gpus.look()[0].board.offers("1g.6gb")


def test_a_new_driver_is_asked_for_its_own_names():
    library = Scripted(Gpu("GPU-a"))
    gpus = NvmlGpus(library, Inline())
    gpus.look()
    gpus.close()
    library.gpus[0].offers = (replace(A100[0], name="MIG 1g.6gb"),)
    assert [p.name for p in gpus.look()[0].board.profiles] == ["1g.6gb"]


def test_equal_boards_are_one_object():
    one, other = look(Scripted(Gpu("GPU-a"), Gpu("GPU-b")))
    assert one.board is other.board
