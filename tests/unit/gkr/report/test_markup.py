"""Nothing that a run says becomes markup."""

from __future__ import annotations

from gkr.report.markup import Html, el, escape, join, table


def test_text_is_escaped_wherever_it_enters() -> None:
    want = '<p title="&quot;&gt;&lt;b&gt;">&lt;script&gt;</p>'
    assert el("p", "<script>", title='"><b>') == want


def test_markup_passes_as_it_is() -> None:
    assert join(Html("<br>"), ["<", 1, None, ("a", 2.5)]) == "<br>&lt;1a2.5"


def test_attributes_are_left_out_written_bare_or_renamed() -> None:
    assert (
        el("input", class_="a", data_label="b", checked=True, hidden=False, id=None)
        == '<input class="a" data-label="b" checked>'
    )


def test_control_characters_and_marks_that_turn_text_around_are_replaced() -> None:
    hostile = "a\x00b\x1bc\u202ed\ud800e\nf\tg"
    assert escape(hostile) == "a\ufffdb\ufffdc\ufffdd\ufffde\nf\tg"
    assert escape("51\u202f200") == "51\u202f200"


def test_every_cell_of_a_table_carries_its_heading_for_the_phone() -> None:
    drawn = table(("a<b", "c"), [["1", 2]], numeric=(1,))
    assert '<td data-label="a&lt;b"><span>1</span></td><td data-label="c" class="num"><span>2</span></td>' in drawn
