"""Texts become plain values within bounds, or problems with a line; never a traceback.

Left out: PyYAML's own scanning and parsing.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.plans.texts import refusal

from migd.plans.documents import BYTES_MAX, DEPTH_MAX, parse_documents
from migd.plans.problems import BadInput
from migd.plans.reading import read


def refused(text: str) -> str:
    with pytest.raises(BadInput) as caught:
        parse_documents(text, "file")
    return str(caught.value)


def test_a_key_given_twice_is_refused_with_both_lines():
    assert refused("a: 1\nb: 2\na: 3\n") == 'file: line 3: key "a" is already given in line 1 (keep one of them)'


def test_a_key_given_twice_in_json_is_refused_too():
    assert "already given in line 2" in refused('{\n"a": 1,\n"a": 2}')


def test_a_quoted_and_a_plain_spelling_are_one_key():
    assert "already given" in refused('a: 1\n"a": 2\n')


def test_an_alias_bomb_is_refused_by_the_number_of_values_it_stands_for():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert "holds more than 50000 values" in refused("\n".join(lines))


def test_an_alias_used_with_measure_is_taken():
    assert parse_documents("a: &x [1, 2]\nb: *x\n") == ({"a": [1, 2], "b": [1, 2]},)


def test_an_alias_to_itself_is_refused():
    assert "refers to itself" in refused("a: &a [*a]")


def test_an_alias_does_not_reach_into_another_document():
    assert "refers to nothing" in refused("a: &x 1\n---\nb: *x\n")


@pytest.mark.parametrize("text", ["[" * 500_000, "{" * 500_000, '{"a":' * 50_000 + "1" + "}" * 50_000, "- " * 100_000])
def test_deep_nesting_is_refused_at_once(text):
    assert "nests deeper than 32" in refused(text)


@pytest.mark.parametrize("wrap", [lambda inside: f"[{inside}]", lambda inside: f'{{"a": {inside}}}'])
def test_json_is_bounded_as_yaml_is(wrap):
    text = "1"
    for _ in range(DEPTH_MAX - 1):
        text = wrap(text)
    assert parse_documents(text)
    assert "nests deeper" in refused(wrap(text))


def test_a_text_over_one_mebibyte_is_refused():
    assert parse_documents("a: " + "x" * (BYTES_MAX - 3))
    assert "larger than 1 MiB" in refused("a: " + "x" * (BYTES_MAX - 2))


@pytest.mark.parametrize(
    "tag", ["!!python/object:os.system x", "!!set {x}", "!!binary aGk=", "!mine [1]", "!!timestamp 2020-01-01"]
)
def test_tags_are_refused(tag):
    assert "tags such as" in refused(f"a: {tag}")


@pytest.mark.parametrize("key", ["1", "true", "~", "[a]", "{a: b}", "1.5"])
def test_keys_that_are_no_text_are_refused(key):
    assert "a key must be text" in refused(f"? {key}\n: x\n")


def test_merge_keys_are_refused_and_not_taken_for_a_key():
    assert "merge keys" in refused("a: &a {x: 1}\nb:\n  <<: *a\n")


def test_scalars_are_read_as_kubernetes_reads_them_and_the_odd_ones_stay_text():
    text = "[1, -2, 0x10, 1.5, yes, Off, true, ~, null, '1', 010, 1:30, 1_000, 2020-01-01, .inf, 1e999]"
    assert parse_documents(text) == (
        [1, -2, 16, 1.5, True, False, True, None, None, "1", "010", "1:30", "1_000", "2020-01-01", ".inf", "1e999"],
    )


def test_json_with_tabs_is_read():
    assert parse_documents('{\n\t"a":\t[1]\n}') == ({"a": [1]},)


def test_empty_documents_are_passed_over():
    assert parse_documents("---\n---\na: 1\n---\n") == ({"a": 1},)


def test_a_syntax_error_names_its_line():
    assert refused("a: 1\n  b: 2\n").startswith("file: line 2: is neither YAML nor JSON")


FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "a",
            "spec",
            "kind",
            ":",
            ": ",
            "- ",
            "\n",
            "  ",
            "[",
            "]",
            "{",
            "}",
            ",",
            "&a ",
            "*a",
            "!!x ",
            "|\n",
            ">",
            "'",
            '"',
            "---\n",
            "...\n",
            "%YAML 1.1\n",
            "? ",
            "#",
            "\t",
            "\\",
            "0x",
            "1e9",
            "<<",
            "version: v1\n",
            "mig-configs:\n",
            "kind: ConfigMap\n",
            "data:\n",
            "  c: |\n    mig-configs",
            "GPUPartitionPlan",
            "rules:",
            "devices: ",
            "\ud800",
            "\x00",
        ]
    ),
    max_size=40,
).map("".join)


@settings(max_examples=400, deadline=None)
@given(st.one_of(FRAGMENTS, st.text(max_size=60)))
def test_whatever_the_text_is_the_answer_is_a_value_or_its_problems(text):
    bad = refusal(lambda: read(text, "fuzz"))
    assert bad is None or all(problem.message for problem in bad.problems)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(max_size=8),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=8), inside, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(JSON)
def test_json_means_the_same_as_in_the_json_module(value):
    found = parse_documents(json.dumps({"value": value}))
    assert found == ({"value": value},)


@settings(max_examples=300, deadline=None)
@given(JSON, st.sampled_from(["spec", "rules", "gpus", "metadata", "configs"]))
def test_any_value_in_any_place_is_answered_with_problems(value, place):
    selector = {"all": True}
    plan = {"apiVersion": "migd.dev/v1alpha1", "kind": "GPUPartitionPlan", "metadata": {"name": "a"}}
    plan["spec"] = {"nodeSelector": {}, "rules": [{"gpus": selector, "mig": "Disabled"}]}
    texts = {
        "spec": plan | {"spec": value},
        "rules": plan | {"spec": {"nodeSelector": {}, "rules": value}},
        "gpus": plan | {"spec": {"nodeSelector": {}, "rules": [{"gpus": value, "instances": value}]}},
        "metadata": plan | {"metadata": value},
        "configs": {"version": "v1", "mig-configs": value},
    }
    bad = refusal(lambda: read(json.dumps(texts[place]), "fuzz"))
    assert bad is None or all(problem.message for problem in bad.problems)
