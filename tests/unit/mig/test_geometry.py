"""Geometries: what a GPU is cut into, counted, ordered and said in one line."""

from __future__ import annotations

import pytest
from boards import at, board

from migd.mig.geometry import EMPTY, GpuInstance, Layout, by_start, counts, counts_of, occupied, summary
from migd.mig.observed import Holder, MigMode, SeenComputeInstance, SeenGpu, SeenInstance
from migd.mig.profiles import Placement

A100 = board("a100-40gb")


def test_counts_are_sorted_and_hold_no_zero() -> None:
    assert counts({"3g.20gb": 1, "2g.10gb": 0, "1g.5gb": 2}) == (("1g.5gb", 2), ("3g.20gb", 1))
    assert counts({}) == ()
    with pytest.raises(ValueError, match="below zero"):
        counts({"1g.5gb": -1})


def test_a_geometry_is_counted_by_profile() -> None:
    assert counts_of(at(A100, "3g@4 1g@0 1g@2")) == (("1g.5gb", 2), ("3g.20gb", 1))
    assert counts_of(EMPTY) == ()


def test_instances_are_listed_by_start_and_wide_ones_first() -> None:
    one, other = GpuInstance("1g.5gb", Placement(0, 1)), GpuInstance("1g.5gb+me", Placement(0, 1))
    wide, late = GpuInstance("2g.10gb", Placement(0, 2)), GpuInstance("1g.5gb", Placement(3, 1))
    assert by_start({late, other, one, wide}) == (wide, one, other, late)


def test_a_geometry_is_said_in_one_line_widest_first() -> None:
    assert summary(at(A100, "1g@0 1g@1 1g@2 3g@4")) == "3g.20gb 3×1g.5gb"
    assert summary(at(A100, "1g@0 2g@2 1g.10gb@4")) == "1g.10gb 2g.10gb 1g.5gb"
    assert summary(EMPTY) == ""
    assert str(next(iter(at(A100, "3g@4")))) == "3g.20gb@4"


def test_occupied_slices_are_a_mask() -> None:
    assert occupied(at(A100, "1g@0 2g@2 1g@6")) == 0b1001101
    assert occupied(EMPTY) == 0


def test_a_layout_says_its_mode() -> None:
    assert str(Layout(mig=False)) == "MIG off"
    assert str(Layout(mig=True)) == "MIG on, empty"
    assert str(Layout(mig=True, instances=at(A100, "7g@0"))) == "7g.40gb"
    with pytest.raises(AssertionError, match="MIG on"):
        Layout(mig=False, instances=at(A100, "7g@0"))


def test_a_seen_gpu_tells_its_layout_and_what_is_busy() -> None:
    (first,), (second,) = at(A100, "3g@0"), at(A100, "3g@4")
    whole = SeenComputeInstance(0, whole=True, mig_uuid="MIG-1")
    seen = SeenGpu(
        "GPU-1",
        0,
        "some GPU",
        "0x20B010DE",
        40_960,
        MigMode(current=True, pending=True),
        board=A100,
        instances=(SeenInstance(first, 1, (whole,), in_use=True), SeenInstance(second, 2)),
    )
    assert seen.layout == Layout(mig=True, instances=at(A100, "3g@0 3g@4"))
    assert seen.busy == at(A100, "3g@0")
    assert [i.whole for i in seen.instances] == [True, False]
    assert seen.mode is not None
    assert seen.mode.settled
    assert not MigMode(current=True, pending=False).settled
    assert not SeenGpu("GPU-2", 1, "no MIG", "0x0", 1, None).mig_on


def test_holders_are_named_as_well_as_known() -> None:
    assert str(Holder(None)) == "an unknown client"
    assert str(Holder(17, "python", "0123456789abcdef")) == "pid 17 (python) in container 0123456789ab"
