"""Records as conversations, and packing by lengths: what needs no tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8launch.plugins.data.chat.conversations import Unusable, conversation_of
from fp8launch.plugins.data.chat.dataset import split_numbers
from fp8launch.plugins.data.chat.packing import Packing, pack, stored_length

USER = {"role": "user", "content": "1 + 1?"}
ANSWER = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, ANSWER], "id": 7},
        {"conversation": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]},
        {"conversations": [{"from": "User", "value": "1 + 1?"}, {"from": "Assistant", "value": "2"}]},
        {"instruction": "1 + 1?", "input": "", "output": "2"},
        {"prompt": "1 + 1?", "completion": "2"},
        {"input": "1 + 1?", "output": "2"},
    ],
)
def test_each_format_gives_the_same_messages(record: dict[str, Any]) -> None:
    assert conversation_of(record).as_json() == {"messages": [USER, ANSWER]}


def test_alpacas_input_follows_its_instruction_and_a_system_text_comes_first() -> None:
    found = conversation_of({"system": "Be brief.", "instruction": "Add.", "input": "1, 1", "output": "2"})
    assert [turn["content"] for turn in found.messages] == ["Be brief.", "Add.\n\n1, 1", "2"]
    assert found.messages[0]["role"] == "system"


def test_calls_of_tools_and_their_results_are_kept() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    record = {"messages": [USER, call, {"role": "tool", "content": "2"}, ANSWER], "tools": [{"name": "add"}]}
    assert conversation_of(record).as_json() == record


@pytest.mark.parametrize(
    ("record", "reason", "words"),
    [
        ([USER, ANSWER], "not-an-object", "a list"),
        ({"text": "1 + 1?"}, "no-conversation", "keys: text"),
        ({"messages": []}, "no-conversation", "not a list of turns"),
        ({"messages": "1 + 1?"}, "no-conversation", "`messages` is text"),
        ({"messages": [USER, "2"]}, "no-conversation", "messages[1] is text"),
        ({"messages": [USER, {"content": "2"}]}, "role", "messages[1] has none"),
        ({"messages": [USER, {"role": "critic", "content": "2"}]}, "role", "`critic`; known: system,"),
        ({"messages": [{"role": "user", "content": " \n"}, ANSWER]}, "turn", "messages[0], of the user"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "turn", "of the assistant"),
        ({"instruction": "1 + 1?", "output": ""}, "turn", "`output`, of the assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}, ANSWER]}, "not-text", "image"),
        ({"messages": [{"role": "user", "content": 2}, ANSWER]}, "not-text", "a number"),
        ({"messages": [ANSWER, USER]}, "order", "turn 1: assistant at the start"),
        ({"messages": [USER, USER, ANSWER]}, "order", "turn 2: user after user"),
        ({"messages": [USER, {"role": "system", "content": "x"}, ANSWER]}, "order", "system after user"),
        ({"messages": [USER]}, "no-answer", "user"),
        ({"messages": [USER, ANSWER], "tools": "add"}, "no-conversation", "`tools` is text"),
    ],
)
def test_a_record_that_cannot_be_trained_on_says_why(record: Any, reason: str, words: str) -> None:
    with pytest.raises(Unusable) as refused:
        conversation_of(record)
    assert refused.value.reason == reason
    assert words in refused.value.detail


@given(st.lists(st.integers(2, 70), min_size=1, max_size=80), st.sampled_from([1, 2, 8]))
def test_packed_sequences_hold_each_conversation_once_and_are_never_too_long(lengths: list[int], multiple: int) -> None:
    packing = Packing(48, multiple, seed=3)
    found = pack(lengths, packing)
    used = sorted(number for row in found.rows for number in row)
    assert len(used) + found.left_out == len(lengths)
    assert used == [number for number, length in enumerate(lengths) if multiple > 1 or length - 1 <= 48]
    for row in found.rows:
        sizes = [stored_length(lengths[number], packing) - 1 for number in row]
        assert sum(sizes) <= 48 and all(size % multiple == 0 for size in sizes)
    assert found == pack(lengths, packing)


@pytest.mark.parametrize(
    ("count", "shares", "sizes"),
    [
        (1000, (98, 1, 1), [980, 10, 10]),
        (10, (98, 1, 1), [8, 1, 1]),
        (2, (98, 1, 1), [2, 0, 0]),
        (9, (1, 0, 0), [9, 0, 0]),
    ],
)
def test_splits_take_their_shares_in_order(count: int, shares: tuple[float, ...], sizes: list[int]) -> None:
    found = split_numbers(count, shares, seed=5)
    assert list(map(len, found)) == sizes
    assert sorted(number for part in found for number in part) == list(range(count))
    assert all(part == sorted(part) for part in found)
    assert found == split_numbers(count, shares, seed=5)
