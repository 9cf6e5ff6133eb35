"""YAML defects are refused with place and remedy; anchors and merges work."""

from __future__ import annotations

import pytest

from spec.nodes import Source, overlay, read_tree, render_path
from spec.problems import DocumentError, Problem


def refused(text: str) -> Problem:
    with pytest.raises(DocumentError) as caught:
        read_tree(Source(text, "t.yaml"))
    assert len(caught.value.problems) == 1, caught.value
    return caught.value.problems[0]


def test_a_duplicate_key_is_refused_and_both_lines_are_named() -> None:
    found = refused("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n")
    assert (found.line, found.column, found.path) == (5, 3, "b.c")
    assert found.message == 'key "c" is given twice; it was first given at line 3'
    assert found.hint == "keep one of the two"


def test_all_duplicates_are_reported_together() -> None:
    with pytest.raises(DocumentError) as caught:
        read_tree(Source("a: 1\na: 2\nb: {c: 1, c: 2}\n", "t.yaml"))
    assert [one.line for one in caught.value.problems] == [2, 3]


@pytest.mark.parametrize("text", ["a:\n\tb: 1\n", "a:\n  b: 1\n\tc: 2\n", "\ta: 1\n", "a:\n  - 1\n\t- 2\n"])
def test_a_tab_for_indentation_is_refused_where_it_stands(text: str) -> None:
    found = refused(text)
    assert found.message == "a tab is used for indentation"
    assert found.line == next(index for index, line in enumerate(text.splitlines(), 1) if "\t" in line)
    assert found.hint == "indent with spaces"


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "~\n"])
def test_an_empty_file_is_refused(text: str) -> None:
    found = refused(text)
    assert found.message.startswith("the file is empty") or found.message.startswith("the file holds a scalar")
    assert "gkr init" in found.hint


@pytest.mark.parametrize(("text", "kind"), [("- a\n- b\n", "sequence"), ("hello\n", "scalar")])
def test_a_file_that_is_no_mapping_is_refused(text: str, kind: str) -> None:
    assert refused(text).message == f"the file holds a {kind}, not a mapping of keys"


def test_several_documents_are_refused() -> None:
    found = refused("a: 1\n---\nb: 2\n")
    assert found.message == "the file holds more than one document"
    assert found.line == 2


@pytest.mark.parametrize("text", ["a: !!python/object:os.system x\n", "a: !mine x\n", "a: !u!x y\n"])
def test_a_tag_is_refused(text: str) -> None:
    found = refused(text)
    assert "unknown tag" in found.message
    assert found.line == 1


@pytest.mark.parametrize("text", ["a: [1\n", "a: 'x\n", "a: b: c\n", "a: @x\n", "{a: 1\n", "a\nb: 1\n"])
def test_broken_syntax_is_refused_with_a_line(text: str) -> None:
    found = refused(text)
    assert found.line >= 1
    assert found.hint


def test_a_control_character_is_refused_at_its_place() -> None:
    found = refused("a: 1\nb: x\x00y\n")
    assert (found.line, found.column) == (2, 5)


def test_an_unknown_alias_is_refused() -> None:
    assert "undefined alias" in refused("a: *b\n").message


def test_an_alias_to_its_own_container_is_refused() -> None:
    assert "contains it" in refused("a: &a\n  b: *a\n").message


def test_nested_aliases_cannot_explode() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 8)]
    assert "values after aliases are expanded" in refused("\n".join(lines)).message


def test_anchors_and_merge_keys_work_and_an_own_key_wins() -> None:
    tree = read_tree(
        Source("x-base: &b {cpu: 1, memory: 2Gi}\nx-more: &m {cpu: 4, shm: 1Gi}\na: {<<: [*b, *m], memory: 3Gi}\n", "t")
    )
    assert tree.plain() == {"a": {"cpu": 1, "memory": "3Gi", "shm": "1Gi"}}


def test_scalars_follow_the_core_schema() -> None:
    text = "a: [no, off, yes, 22:22, 010, 0x1F, 1_000, 2024-01-01, true, null, ~, 7, -3, 1.5, 2e-4, .5, 1., <<, '7']\n"
    want = [
        "no",
        "off",
        "yes",
        "22:22",
        "010",
        "0x1F",
        "1_000",
        "2024-01-01",
        True,
        None,
        None,
        7,
        -3,
        1.5,
        2e-4,
        0.5,
        1.0,
    ]
    assert read_tree(Source(text.replace(" <<,", ""), "t")).plain() == {"a": [*want, "7"]}


def test_a_byte_order_mark_and_windows_line_ends_are_tolerated() -> None:
    tree = read_tree(Source("\ufeffa: 1\r\nb: {c: x}\r\n", "t.yaml"))
    assert tree.plain() == {"a": 1, "b": {"c": "x"}}
    assert tree.entries["b"].entries["c"].mark.where == "t.yaml:2:8"


def test_an_overlay_merges_mappings_and_replaces_lists() -> None:
    base = read_tree(Source("a: {x: 1, y: 2}\nb: [1, 2]\n", "base"))
    over = read_tree(Source("a: {y: 3}\nb: [9]\n", "over"))
    merged = overlay(base, over)
    assert merged.plain() == {"a": {"x": 1, "y": 3}, "b": [9]}
    assert merged.entries["a"].entries["x"].mark.source.file == "base"
    assert merged.entries["a"].entries["y"].mark.source.file == "over"


def test_a_path_reads_as_people_write_it() -> None:
    assert render_path(("learners", 0, "groups", 1, "nodes")) == "learners[0].groups[1].nodes"


@pytest.mark.parametrize("text", [
    "name: " + "[" * 5000 + "]" * 5000,
    "name: " + "{a: " * 5000 + "1" + "}" * 5000,
    "x-0: &a0 [1]\n" + "".join(f"x-{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 150)),
    "x-0: &a0 {k: 1}\n" + "".join(f"x-{n}: &a{n} {{<<: *a{n - 1}}}\n" for n in range(1, 150)),
])  # fmt: skip
def test_what_is_nested_too_deep_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(DocumentError) as raised:
        read_tree(Source(text, "deep.yaml"))
    (problem,) = raised.value.problems
    assert (problem.message, problem.line > 0) == ("nested deeper than 64 levels", True)


def test_an_endless_number_stays_a_text() -> None:
    digits = "9" * 5000
    assert read_tree(Source(f"batch: {digits}", "long.yaml")).entries["batch"].value == digits


@pytest.mark.parametrize(("written", "shown"), [("\\0", "0x0000"), ("\\ud800", "0xd800")])
def test_a_character_that_no_program_takes_is_refused(written: str, shown: str) -> None:
    with pytest.raises(DocumentError) as raised:
        read_tree(Source(f'env: {{A: "x{written}y"}}', "odd.yaml"))
    (problem,) = raised.value.problems
    assert (problem.message, problem.path) == (f"character {shown} is not allowed in a text", "env.A")


def test_of_an_endless_line_only_the_place_is_shown() -> None:
    text = "name: x\na: {" + ", ".join(f"k{n}: {n}" for n in range(3000)) + ", k7: again}"
    with pytest.raises(DocumentError) as raised:
        read_tree(Source(text, "wide.yaml"))
    shown, carets = raised.value.problems[0].snippet.splitlines()
    assert len(shown) < 140
    assert shown[carets.index("^") :].startswith("k7")
    assert shown[7:10] == "..."
