"""Values reach the container as they were written, whatever they hold."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from manifests import values
from manifests.render import render
from spec.units import parse_bytes, parse_cpu
from tests.builders.plans import NASTY_ENV, cpu_run, expand, pod_templates

variable_names = st.from_regex(r"[A-Z][A-Z0-9_]{0,8}", fullmatch=True).filter(lambda name: not name.startswith("GKR_"))
pieces = st.sampled_from([*"$()'\"`\n=ü大\\ ", "$$", "$(A)", "$(", "a: b", "%s"])
nasty = st.one_of(st.text(st.characters(codec="utf-8", exclude_characters="\x00")), st.lists(pieces).map("".join))


@given(nasty, st.dictionaries(variable_names, nasty))
@example("$$(A)", {"A": "expanded"})
@example("$", {})
@example("$(A", {"A": "expanded"})
@example("$(A)$$(A)$$$(A)", {"A": "expanded"})
def test_kubelets_expansion_gives_back_what_was_written(value: str, known: dict[str, str]) -> None:
    assert expand(values.literal(value), known) == value


def test_the_oracle_expands_as_kubelet_does() -> None:
    known = {"A": "1", "B": "$(A)"}
    cases = {
        "$(A)": "1", "$$(A)": "$(A)", "$$$(A)": "$1", "$(B)": "$(A)", "$(C)": "$(C)", "$A": "$A", "a$": "a$",
        "$(A": "$(A",
        "$$": "$", "$()": "$()", "$(A)$(A)": "11",
    }  # fmt: skip
    assert {text: expand(text, known) for text in cases} == cases


@given(st.dictionaries(variable_names, nasty, max_size=5))
@example(NASTY_ENV)
def test_every_container_of_the_run_gets_the_persons_variables_byte_for_byte(written: dict[str, str]) -> None:
    plan = cpu_run(written)
    for template in pod_templates(render(plan)["us-east5"]):
        env = template["spec"]["containers"][0]["env"]
        assert [one["name"] for one in env] == sorted({one["name"] for one in env})
        known: dict[str, str] = {}
        for one in env:  # kubelet goes through them in order; earlier ones can be expanded in later ones
            if "value" in one:
                known[one["name"]] = expand(one["value"], known)
        assert written.items() <= known.items()


@given(st.floats(min_value=0.001, max_value=500))
def test_cores_are_exact_to_a_thousandth(cores: float) -> None:
    assert math.isclose(parse_cpu(values.cpu(cores)), cores, abs_tol=0.0005)


def test_cores_are_never_nothing() -> None:
    assert values.cpu(0.0001) == "1m"


@given(st.integers(min_value=1, max_value=2**44))
def test_memory_is_exact(size: int) -> None:
    text = values.memory(size)
    assert (int(text) if text.isdigit() else parse_bytes(text)) == size


@given(st.floats(min_value=0, max_value=1e12))
def test_deadlines_are_whole_seconds_above_zero_and_fit_32_bits(duration: float) -> None:
    found = values.seconds(duration)
    assert 1 <= found <= 2**31 - 1
    assert found >= duration or found == 2**31 - 1


@given(st.integers(0, 2**62), st.booleans())
@example(51_539_607_552_000, False)
@example(1_000_000, True)
def test_a_canonical_amount_is_the_same_amount_without_zeros_that_a_suffix_says(amount: int, thousandths: bool) -> None:
    text = values.canonical(amount, thousandths=thousandths)
    number = text.rstrip("mkMGTPE")
    power = {"m": -1, "": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}[text.removeprefix(number)]
    assert int(number) * 1000 ** (power + thousandths) == amount
    assert amount == 0 or int(number) % 1000 or power == 6


def test_canonical_amounts_as_an_api_server_wrote_them() -> None:
    assert values.canonical(51_539_607_552_000) == "51539607552k"
    assert values.canonical(1_500, thousandths=True) == "1500m"
    assert values.canonical(2_000_000, thousandths=True) == "2k"
    assert values.canonical(0, thousandths=True) == "0"
