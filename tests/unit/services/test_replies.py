"""Reply cache: duplicates are answered from it, and it stays small."""

from __future__ import annotations

from services.replies import ReplyCache


def test_a_reply_is_found_until_newer_ones_push_it_out() -> None:
    cache: ReplyCache[str] = ReplyCache(per_client=2, max_bytes=1000)
    for number in (1, 2, 3):
        cache.put("a", number, [b"x" * 10])

    assert [cache.get("a", number) is not None for number in (1, 2, 3)] == [False, True, True]
    assert cache.bytes == 20


def test_the_byte_limit_holds_over_all_clients() -> None:
    cache: ReplyCache[str] = ReplyCache(per_client=10, max_bytes=25)
    cache.put("a", 1, [b"x" * 10])
    cache.put("b", 1, [b"x" * 10])
    cache.put("a", 2, [b"x" * 10])

    assert cache.get("a", 1) is None
    assert cache.bytes == 20


def test_a_reply_larger_than_the_limit_is_not_kept() -> None:
    cache: ReplyCache[str] = ReplyCache(per_client=10, max_bytes=25)
    cache.put("a", 1, [b"x" * 30])

    assert cache.get("a", 1) is None
    assert cache.bytes == 0


def test_a_client_that_is_gone_leaves_nothing() -> None:
    cache: ReplyCache[str] = ReplyCache(per_client=10, max_bytes=1000)
    cache.put("a", 1, [b"x"])
    cache.put("b", 1, [b"y"])
    cache.forget("a")
    cache.forget("a")

    assert cache.get("a", 1) is None
    assert cache.get("b", 1) == [b"y"]
