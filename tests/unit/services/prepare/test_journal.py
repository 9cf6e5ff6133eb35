"""The journal: what it knew at the last checkpoint, and which images look alike."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from services.prepare.journal import Journal, State
from spec.shards import Shard


def test_after_the_last_checkpoint_nothing_is_known(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    state = State(file="a", number=3, dropped={"small": 2})
    state.train.shards.append(Shard(path="images/a.tar", samples=1, bytes=1, sha256="0" * 64))
    with closing(Journal(path)) as journal:
        assert journal.state() == State()
        assert journal.same_pixels(b"1" * 16, place="one") == ""
        journal.commit(state)
        assert journal.same_pixels(b"2" * 16, place="two") == ""
        assert journal.same_pixels(b"2" * 16, place="three") == "two"
    with closing(Journal(path)) as journal:
        assert journal.state() == state
        assert journal.same_pixels(b"1" * 16, place="four") == "one"
        assert journal.same_pixels(b"2" * 16, place="four") == ""


LOOK = st.integers(1, 2**64 - 1)


@given(
    look=LOOK, flips=st.sets(st.integers(0, 63), max_size=8), others=st.lists(LOOK, max_size=5), bits=st.integers(0, 7)
)
@settings(deadline=None, max_examples=80)
def test_looks_are_alike_exactly_if_few_bits_differ(look: int, flips: set[int], others: list[int], bits: int) -> None:
    """Against a comparison with every one: the bands find all, and only those."""
    other = look
    for bit in flips:
        other ^= 1 << bit
    with closing(Journal(Path(":memory:"))) as journal:
        kept: list[int] = []
        for number, one in enumerate([look, *others, other]):
            found = journal.same_look(one, place=f"{number}", bits=bits)
            alike = one and any((one ^ before).bit_count() <= bits for before in kept)
            assert bool(found) == bool(alike)
            if not found and one:
                kept.append(one)
