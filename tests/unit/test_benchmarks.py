"""The benchmarks run at tiny sizes, give figures of the promised shape, and compare only what did the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from boards import VARIANTS, board_of, rows
from c_built import library_or_skip

from benchmarks import __main__ as command
from benchmarks import evicting, faces, fleet, footprint, planning, quality, report, saving
from benchmarks.brute import Brute
from benchmarks.measuring import Times, percentile
from benchmarks.transactions import STORIES, Story, nominal, transactions
from migd.agent.store import encode
from migd.mig.table import table_of


def test_percentiles_are_values_that_were_measured() -> None:
    hundred = [float(n) for n in range(1, 101)]
    assert (percentile(hundred, 50), percentile(hundred, 99)) == (50.0, 99.0)
    assert Times.of([3.0, 1.0, 2.0]) == Times(3, 2.0, 3.0, 3.0)
    assert Times.of([7.0]) == Times(1, 7.0, 7.0, 7.0)


@pytest.mark.parametrize("variant", ["basic", "a30-media"])
def test_planning_is_timed_and_its_answers_are_those_of_brute_force(variant: str) -> None:
    results = list(planning.planning(variant, builds=2, cases=8, asked=5))
    assert [r.what for r in results] == [
        *("table", "fit", "transition", "refused, in use", "refused, in use, again"),
        *("refused, never fits", "refused, never fits, again"),
    ]
    for result in results:
        assert 0 < result.ours.p50_s <= result.ours.p99_s <= result.ours.max_s
        assert (result.twin is None) == (result.same == 0) == result.what.endswith("again")
        assert result.twin is None or result.ratio == result.twin.p50_s / result.ours.p50_s
    assert results[0].same == len(table_of(board_of(rows(*VARIANTS[variant]))).sets)
    assert [r.same for r in results[1:3]] == [5, 5]


def test_a_comparison_of_different_answers_fails() -> None:
    brute = Brute(rows(*VARIANTS["basic"]))
    seven = planning.Case(frozenset(), frozenset(), (("7g.40gb", 1),))
    with pytest.raises(AssertionError, match="the planner and brute force differ"):
        planning._compared("fit", "basic", brute, [seven], [frozenset], 1)


def test_evictions_are_timed_and_are_those_of_brute_force_and_hard_nodes_are_proven() -> None:
    random_nodes, *hard = list(evicting.evicting(12, 5))
    assert (random_nodes.ours.n, random_nodes.same) == (12, 5)
    assert random_nodes.twin is not None
    assert random_nodes.ratio == random_nodes.twin.p50_s / random_nodes.ours.p50_s
    assert [r.what for r in hard] == [f"evictions, {what}" for what in evicting.HARD]
    assert all(r.ours.n == 2 and r.twin is None for r in hard)


def test_every_case_of_a_seed_is_the_same_again() -> None:
    table = table_of(board_of(rows(*VARIANTS["double"])))
    again = [[planning.some_case(planning.random.Random("x"), table) for _ in range(3)] for _ in range(2)]
    assert again[0] == again[1]
    assert all(case.busy <= case.current for case in again[0])


def test_first_fit_fails_in_the_published_share_of_orders() -> None:
    basic, double = quality.orders("basic"), quality.orders("double")
    assert (basic.orders, basic.multisets, double.orders, double.multisets) == (114, 38, 425, 78)
    assert [round(100 * share, 1) for share in (basic.fails_first_fit, basic.fails_best)] == [23.7, 12.3]
    assert [round(100 * share, 1) for share in (double.fails_first_fit, double.fails_best)] == [32.2, 7.3]
    assert basic.fails_ours == double.fails_ours == 0


def test_first_fit_puts_the_wide_one_in_the_way() -> None:
    table = table_of(board_of(rows(*VARIANTS["basic"])))
    wish = ["3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb"]
    assert quality.first_fit(table, 0, wish) is None
    placed = quality.first_fit(table, 0, [*wish[1:], wish[0]])
    assert placed is not None
    assert table.find(placed) is not None


def test_a_recut_destroys_no_more_than_clearing_the_gpu() -> None:
    found = quality.recuts("basic", 30)
    assert 0 < found.destroyed_ours < found.destroyed_clear
    assert 0 <= found.fails_greedy <= 1
    assert found == quality.recuts("basic", 30)


@pytest.mark.parametrize("kept", ["memory", "file"])
def test_a_transaction_is_timed_whole_and_every_run_does_the_same(kept: str) -> None:
    found = transactions(STORIES[0], kept, runs=2, scale=0.001)  # type: ignore[arg-type]
    assert (found.n, found.steps) == (2, 14)  # 5 × 1g go, 3g and 2g come, two calls each
    assert found.looks == found.saves + 1 == found.steps + 3
    assert 1 < found.ratio_p50 <= found.ratio_max
    parts = found.looks_s + found.saves_s + found.operations_s + found.decide_s
    assert min(found.looks_s, found.saves_s, found.operations_s, found.decide_s) > 0
    assert parts == pytest.approx(found.nvml_s * (found.ratio_p50 - 1))


@pytest.mark.parametrize(
    ("story", "seconds", "steps"),
    [(STORIES[0], 5 * 0.2 + 0.2 + 0.17, 14), (STORIES[2], 3 + 7 * 0.16, 15), (STORIES[3], 1 + 7 * 0.16, 15)],
    ids=lambda value: value.name if isinstance(value, Story) else "",
)
def test_nvmls_own_time_is_the_sum_of_the_published_durations(story: Story, seconds: float, steps: int) -> None:
    assert nominal(story, 1.0) == (pytest.approx(seconds), steps)


def test_a_save_is_compared_with_the_disk_writing_the_same() -> None:
    found = saving.saving(2)
    assert found.ours.n == found.disk.n == 2
    assert found.ratio == found.ours.p50_s / found.disk.p50_s
    assert found.bytes == len(encode(saving.some_record(8)))


def test_a_larger_table_weighs_more() -> None:
    basic, double = footprint.memory("basic"), footprint.memory("double")
    assert (basic.sets, double.sets) == (298, 723)
    assert 50_000 < basic.bytes < double.bytes <= double.peak_bytes


def test_a_start_is_compared_with_pythons_own() -> None:
    found = footprint.start(1)
    assert found.command.n == found.python.n == 1
    assert found.ratio == found.command.p50_s / found.python.p50_s


def test_both_faces_did_the_same_work() -> None:
    library_or_skip("a comparison with the C face")
    results = faces.faces("file", 2)
    assert [(r.what.split()[0], r.kept, r.process.n, r.c.n) for r in results] == [
        *(("read", "file", 2, 2), ("create", "file", 2, 2), ("migd", "file", 2, 2)),
    ]
    assert [r.calls for r in results[:2]] == [1, 2]
    assert results[2].calls > 8 * 49
    assert all(r.ratio == r.c.p50_s / r.process.p50_s for r in results)


def test_the_command_prints_tables_and_writes_the_same_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    command.main(["--only", "quality", "--small", "--json", str(file)])
    printed, written = capsys.readouterr().out, json.loads(file.read_text())
    assert {"python", "cpus", "small", "orders", "recuts"} == set(written)
    assert [found["board"] for found in written["recuts"]] == list(planning.BOARDS.values())
    assert "23.7%" in printed
    assert written["orders"][0]["fails_first_fit"] == pytest.approx(27 / 114)


def test_every_row_of_a_table_has_a_cell_for_each_head() -> None:
    results = list(planning.planning("a30-media", builds=1, cases=3, asked=1))
    table = report.planning_rows(results)
    assert {len(row) for row in table} == {8}
    lines = report.text(table).splitlines()
    assert len(lines) == len(results) + 1
    assert all(line.index(row[1]) == lines[0].index("BOARD") for line, row in zip(lines[1:], table[1:], strict=True))


def test_deciding_for_a_fleet_is_timed_and_a_fleet_at_rest_has_nothing_written() -> None:
    results = list(fleet.fleets(3, 2))
    assert [(r.what, r.nodes, r.gpus) for r in results] == [
        ("first decision", 3, 24),
        ("in a rollout", 3, 24),
        ("at rest", 3, 24),
    ]
    assert results[0].writes > 24
    assert results[2].writes == 0
