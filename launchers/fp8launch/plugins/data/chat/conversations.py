"""Conversations from records of the usual formats, as OpenAI's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8launch.plugins.data.documents import kind_of

# Keys that hold a list of turns, in the order in which Bridge looks for them.
_TURNS = ("messages", "conversation", "conversations")
# Pairs of one question and its answer: Alpaca's, and those that Bridge itself knows.
_PAIRS = (("instruction", "output"), ("prompt", "completion"), ("input", "output"))
# ShareGPT's names of roles.
_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
}
# The roles that may precede each role; None is the start of the conversation.
_AFTER: Mapping[str, tuple[str | None, ...]] = {
    "system": (None,),
    "developer": (None, "system"),
    "user": (None, "system", "developer", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


class Unusable(ValueError):
    """A record that is no conversation; `reason` is a key of `bad_input.REASONS`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Conversation:
    """Turns with `role` and `content`, and the tools that the assistant may call."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the record that Bridge reads."""
        if self.tools:
            return {"messages": self.messages, "tools": self.tools}
        return {"messages": self.messages}


def conversation_of(record: Any) -> Conversation:
    """Return the conversation of a record: `messages`, ShareGPT's `conversations`, or a pair such as Alpaca's.

    Raises Unusable if there is none, or if a model cannot be trained on it.
    """
    if not isinstance(record, dict):
        raise Unusable("not-an-object", f"it is {kind_of(record)}")
    turns = _turns(record)
    system = record.get("system")
    if isinstance(system, str) and system and not any(turn["role"] == "system" for turn in turns):
        turns.insert(0, {"role": "system", "content": system})
    _require_order([turn["role"] for turn in turns])
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise Unusable("no-conversation", f"`tools` is {kind_of(tools)}, not a list")
    return Conversation(turns, tools or None)


def _turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    for key in _TURNS:
        if record.get(key) is not None:
            turns = record[key]
            if not isinstance(turns, list) or not turns:
                raise Unusable("no-conversation", f"`{key}` is {kind_of(turns)}, not a list of turns")
            return [_turn(turn, f"{key}[{at}]") for at, turn in enumerate(turns)]
    for question, answer in _PAIRS:
        if isinstance(record.get(question), str) and isinstance(record.get(answer), str):
            asked = record[question]
            if question == "instruction" and isinstance(record.get("input"), str) and record["input"].strip():
                asked = f"{asked}\n\n{record['input']}"
            pair = (("user", asked, question), ("assistant", record[answer], answer))
            return [_turn({"role": role, "content": text}, f"`{key}`") for role, text, key in pair]
    there = ", ".join(list(record)[:4]) or "none"
    raise Unusable("no-conversation", f"keys: {there[:100]}")


def _turn(turn: Any, where: str) -> dict[str, Any]:
    """Return a turn with `role` and `content`, and the other keys that OpenAI's format gives it."""
    if not isinstance(turn, dict):
        raise Unusable("no-conversation", f"{where} is {kind_of(turn)}, not an object")
    others = {key: value for key, value in turn.items() if key not in ("role", "content", "from", "value")}
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str):
        raise Unusable("role", f"{where} has none")
    name = _ALIASES.get(role.lower(), role.lower())
    if name not in _AFTER:
        raise Unusable("role", f"{where} has `{role[:40]}`; known: {', '.join([*_AFTER, *_ALIASES])}")
    if not _has_text(content, where) and not (name == "assistant" and others.get("tool_calls")):
        raise Unusable("turn", f"{where}, of the {name}")
    return {"role": name, "content": content, **others}


def _has_text(content: Any, where: str) -> bool:
    """Return whether the content of a turn has text. Raises Unusable if it has anything but text."""
    if content is None:
        return False
    if isinstance(content, str):
        return bool(content.strip())
    if not isinstance(content, list):
        raise Unusable("not-text", f"the content of {where} is {kind_of(content)}")
    found = False
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else kind_of(part)
            raise Unusable("not-text", f"the content of {where} has a part of type {kind}")
        found = found or bool(part["text"].strip())
    return found


def _require_order(roles: Sequence[str]) -> None:
    before: str | None = None
    for at, role in enumerate(roles):
        if before not in _AFTER[role]:
            place = "at the start" if before is None else f"after {before}"
            raise Unusable("order", f"turn {at + 1}: {role} {place}")
        before = role
    if "assistant" not in roles:
        raise Unusable("no-answer", f"roles: {', '.join(roles)}")
