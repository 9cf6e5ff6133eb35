"""What a person gets to see for each way of writing a file wrongly: the place and the remedy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.errors import EXIT_CONFIG
from spec.machines import gpu_tokens
from spec.problems import DocumentError, Problem
from tests.builders.experiments import LOCAL, load, resolved


def problems_of(text: str, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(DocumentError) as caught:
        load(text, overrides=overrides)
    assert caught.value.exit_code == EXIT_CONFIG
    return caught.value.problems


def only(text: str, *overrides: str) -> Problem:
    found = problems_of(text, *overrides)
    assert len(found) == 1, found
    return found[0]


def test_an_unknown_key_is_shown_with_its_line_a_caret_the_near_key_and_its_help() -> None:
    text = "version: 1\nname: a\ngroups:\n  - name: trainer\n    resources:\n      acelerators: H200:8\nrun: x\n"
    assert str(only(text)) == (
        't.yaml:6:7: error: unknown key "acelerators" in groups[0].resources\n'
        "   6 |       acelerators: H200:8\n"
        "     |       ^^^^^^^^^^^\n"
        '  hint: did you mean "gpu"?\n'
        "  help: gpu: GPU type and count per node, such as H200:8."
    )


def test_an_unknown_key_at_the_top_with_nothing_near_lists_the_keys() -> None:
    found = only(LOCAL + "zzzzqqq: 1\n")
    assert (found.line, found.column) == (18, 1)
    assert found.message == 'unknown key "zzzzqqq" at the top level'
    assert found.hint.startswith("keys here: cluster, code, data")


@pytest.mark.parametrize(
    ("written", "want_message", "want_help"),
    [
        ("memory: 64", "64 has no unit; write 64Gi (64 x 2^30 bytes) or 64G (64 x 10^9 bytes)", "memory"),
        ("memory: 64GB", "'64GB' reads two ways; write 64G (= 59.6Gi) or 64Gi", "memory"),
        ("memory: 10 Gi", "'10 Gi' is not a size; write for example 64Gi or 500M", "memory"),
        ("memory: 1e3Mi", "'1e3Mi' is not a size; write for example 64Gi or 500M", "memory"),
        ("memory: 5Zi", "unknown unit 'Zi' in '5Zi'; units are k, M, G, T, P and Ki, Mi, Gi, Ti, Pi", "memory"),
        ("cpu: two", "'two' is not a CPU quantity; write cores (2, 0.5) or millicores (500m)", "cpu"),
        ("shm: -1Gi", "'-1Gi' is not a size; write for example 64Gi or 500M", "shm"),
    ],
)
def test_a_wrong_unit_is_refused_at_its_place_with_what_to_write(
    written: str, want_message: str, want_help: str
) -> None:
    key = written.split(":")[0]
    text = f"version: 1\nname: a\nrun: x\ngroups:\n  - resources:\n      {written}\n"
    found = only(text)
    assert (found.line, found.column) == (6, 7 + len(key) + 2)
    assert found.message == f"groups[0].resources.{key}: {want_message}"
    assert found.help.startswith(f"{want_help}: ")


@pytest.mark.parametrize(
    ("written", "want_message", "want_hint"),
    [
        ("H2000:8", f'GPU type "H2000" is not in the machine catalogue ({", ".join(gpu_tokens())})', "H200"),
        ("h200:8", f'GPU type "h200" is not in the machine catalogue ({", ".join(gpu_tokens())})', "H200"),
        ("H200:0", '"H200:0" is not GPUTYPE:COUNT with a whole count above zero', "H200:8"),
        ("H200:0.5", '"H200:0.5" is not GPUTYPE:COUNT with a whole count above zero', "H200:8"),
        ("H200:-8", '"H200:-8" is not GPUTYPE:COUNT with a whole count above zero', "H200:8"),
        ("H200", '"H200" has no count', "H200:8"),
        ("GB200:4", 'GPU type "GB200" is not supported', "H100-MEGA, H200"),
    ],
)
def test_a_gpu_type_that_is_not_in_the_catalogue_is_refused(written: str, want_message: str, want_hint: str) -> None:
    found = only(f"version: 1\nname: a\nrun: x\ngroups:\n  - resources: {{gpu: {written}}}\n")
    assert (found.line, found.column) == (5, 22)
    assert want_message in found.message
    assert want_hint in found.hint


@pytest.mark.parametrize(
    ("written", "want_message", "want_hint"),
    [
        ("nodes: two", 'expected a whole number, got the text "two"', ""),
        ('nodes: "2"', 'expected a whole number, got the text "2"', "remove the quotes: 2"),
        ("nodes: 010", 'expected a whole number, got the text "010"', "write 10"),
        ("nodes: 1.5", "expected a whole number, got 1.5", ""),
        ("nodes: [1]", "expected a whole number, got a sequence", ""),
        ("nodes:", "is empty; expected a whole number", "give a value or remove the key"),
        ("nodes: 0", "must be at least 1, got 0", ""),
        ("name: 12", "expected a text, got 12", 'quote it: "12"'),
    ],
)
def test_a_wrong_type_names_what_was_expected_and_what_was_found(
    written: str, want_message: str, want_hint: str
) -> None:
    found = only(f"version: 1\nname: a\nrun: x\ngroups:\n  - {written}\n")
    assert found.line == 5
    assert found.message == f"groups[0].{written.split(':')[0]}: {want_message}"
    assert found.hint == want_hint


def test_a_duration_without_a_unit_shows_both_readings() -> None:
    found = only(LOCAL + "sync: {heartbeat: 3}\n")
    assert found.message == "sync.heartbeat: 3 has no unit; write 3s for seconds or 3m for minutes"
    assert (found.line, found.column) == (18, 19)


def test_a_choice_that_does_not_exist_names_the_near_one() -> None:
    found = only(LOCAL + "sync: {mode: barier}\n")
    assert found.message == 'sync.mode: expected one of barrier, decoupled, got the text "barier"'
    assert found.hint == 'did you mean "barrier"?'


def test_a_missing_key_says_where_it_belongs() -> None:
    found = only("version: 1\nrun: x\nlearners:\n  - groups: [{nodes: 1}]\nname: a\n")
    assert (found.line, found.message) == (4, 'missing key "name" in learners[0]')
    assert found.hint == "add name: ..."


def test_all_errors_are_reported_at_once_in_the_order_of_the_file() -> None:
    text = "version: 2\nname: Bad Name\nrunn: x\ngroups:\n  - nodes: two\n    resources: {memory: 64}\n"
    assert [one.line for one in problems_of(text)] == [1, 2, 3, 5, 6]


def test_a_union_of_short_and_long_form_gives_one_error_not_one_per_branch() -> None:
    found = only(LOCAL.replace("cluster: local-0", "cluster: 3"))
    assert found.message == "learners[0].cluster: expected a list, got 3"


def test_a_yaml_1_1_trap_stays_the_text_it_looks_like() -> None:
    document = load(LOCAL + "env: {A: no, B: 010, C: 22:22, D: 3.10, E: 2024-01-01, F: 1e3, G: off, H: }\n")
    want = {"A": "no", "B": "010", "C": "22:22", "D": "3.10", "E": "2024-01-01", "F": "1e3", "G": "off", "H": None}
    assert document.value.env == want


@pytest.mark.parametrize("word", ["true", "null", "~"])
def test_an_environment_value_without_a_text_form_must_be_quoted(word: str) -> None:
    found = only(LOCAL + f"env: {{A: {word}}}\n")
    assert found.message == f"env.A is the YAML value {word}, which has no text form of its own"
    assert found.hint == f'quote it: "{word}"'


def test_an_exponent_without_a_dot_is_a_number() -> None:
    assert load(LOCAL, overrides=["train.learning_rate=2e-4"]).value.train.learning_rate == 2e-4  # pyright: ignore[reportOptionalMemberAccess]


def test_every_value_knows_its_origin() -> None:
    plan = resolved(LOCAL, overrides=["train.batch=128"])
    origins = {one.path: one for one in plan.origins}
    want = {
        "name": ("file", "small", "t.yaml:2:7"),
        "learners[0].cluster[0]": ("file", "local-0", "t.yaml:5:14"),
        "train.batch": ("flag", "128", "--set train.batch=128"),
        "train.model.width": ("recipe", "64", "recipes/train/digits.yaml:6:10"),
        "train.gradient_clip": ("default", "1.0", ""),
        "learners[0].groups[0].machine": ("facts", "local-cpu", "facts of local-0"),
    }
    assert {path: (origins[path].origin, origins[path].value, origins[path].where) for path in want} == want
    assert len(origins) == len(plan.origins)


def test_an_error_in_a_recipe_points_into_the_recipe() -> None:
    found = only(LOCAL.replace("recipe: digits", "recipe: digts"))
    assert (found.line, found.hint) == (12, 'did you mean "digits"?')


def test_an_error_caused_by_a_flag_points_to_the_flag() -> None:
    found = only(LOCAL, "train.model.patch_size=3")
    assert found.message == "train.model: patch_size 3 does not divide image_size 8; choose a divisor"
    unknown = only(LOCAL, "train.bach=3")
    assert (unknown.file, unknown.line) == ("--set train.bach=3", 0)
    assert unknown.hint == 'did you mean "batch"?'
    assert str(unknown).startswith('--set train.bach=3: error: unknown key "bach" in train\n')


def test_each_kind_of_model_has_its_own_keys_and_an_unknown_kind_is_named() -> None:
    unknown = only(LOCAL, "train.model.kind=lmm")
    assert unknown.message == 'train.model.kind: expected one of dit, lm, got the text "lmm"'
    assert unknown.hint == 'did you mean "lm"?'
    foreign = only(LOCAL.replace("recipe: digits", "recipe: docstrings, model: {contxt: 3}"))
    assert (foreign.message, foreign.hint) == ('unknown key "contxt" in train.model', 'did you mean "context"?')
    assert "  help: context: Bytes that the model sees at once." in str(foreign)


def test_problems_are_data_for_json_output() -> None:
    data = only(LOCAL + "zz: 1\n").as_dict()
    assert set(data) == {"file", "line", "column", "path", "message", "hint", "help", "snippet"}


def problems_or_none(text: str) -> tuple[Problem, ...] | None:
    try:
        load(text)
    except DocumentError as error:
        return error.problems
    return None


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_with_problems_and_never_breaks(text: str) -> None:
    found = problems_or_none(text)
    assert found is None or (found and all(one.message for one in found))


@given(st.lists(st.sampled_from(LOCAL.splitlines(keepends=True)), max_size=20))
def test_any_shuffle_of_lines_is_read_or_refused_with_problems(lines: list[str]) -> None:
    found = problems_or_none("".join(lines))
    assert found is None or found
