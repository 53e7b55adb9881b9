"""The tokens of a conversation that Megatron-Bridge trains on.

Bridge 0.6.2 takes the parts of a chat template between `{% generation %}` and `{% endgeneration %}`, as transformers
does. For templates of known families, which mostly lack these marks, it looks for the tokens around the assistant's
turns, and also trains on the token that ends a turn. Here is what `tokenize_chat_example` of its
data/conversation_processing.py does for text (`loss_mode="assistant"`), without torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# Bridge's own expression (GENERATION_REGEX of data/datasets/utils.py).
GENERATION = re.compile(r"\{%-?\s+generation\s+-?%\}")
# Never trained on, wherever they are (PAD_TOKENS of data/token_utils.py). Tokens that end a turn are not among them.
NEVER_TRAINED = frozenset(
    (
        "<|im_start|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<|AUDIO|>",
        "<|audio_bos|>",
        "<|audio_eos|>",
        "<image>",
        "<pad>",
        "<|begin_of_text|>",
        "<|finetune_right_pad_id|>",
        "<|step_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|python_tag|>",
        "<|image|>",
        "<image_soft_token>",
        "<start_of_audio>",
        "<start_of_image>",
        "<end_of_audio>",
        "<end_of_image>",
    )
)
_ROLES = ("system", "developer", "user", "tool")


@dataclass(frozen=True)
class _Family:
    """Texts around the turns of a family of templates; all of `marks` are in each of its templates."""

    marks: tuple[str, ...]
    start: str
    end: str
    other_ends: tuple[str, ...]
    other_starts: dict[str, str]


# In the order in which Bridge tries them (`infer_assistant_mask_boundary_config`).
_FAMILIES = (
    _Family(
        ("<|im_start|>assistant", "<|im_end|>"),
        "<|im_start|>assistant\n",
        "<|im_end|>\n",
        ("<|im_end|>",),
        {role: f"<|im_start|>{role}\n" for role in _ROLES},
    ),
    _Family(
        ("<|im_assistant|>", "<|im_user|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
        "<|im_assistant|>assistant<|im_middle|>",
        "<|im_end|>",
        (),
        {role: f"<|im_{role}|>{role}<|im_middle|>" for role in ("system", "user")},
    ),
    _Family(("<|turn>model", "<turn|>"), "<|turn>model\n", "<turn|>", (), {}),
    _Family(("<start_of_turn>model", "<end_of_turn>"), "<start_of_turn>model\n", "<end_of_turn>", (), {}),
    _Family(
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        (),
        {role: f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in _ROLES},
    ),
    _Family(
        ("<|start|>", "<|channel|>", "<|message|>"),
        "<|start|>assistant",
        "<|return|>",
        ("<|end|>", "<|call|>"),
        {role: f"<|start|>{role}" for role in _ROLES},
    ),
)


@dataclass(frozen=True)
class Boundaries:
    """Token ids around turns: before a turn by its role, and after a turn, the usual ones first."""

    starts: dict[str, list[int]]
    ends: list[list[int]]

    def sequences(self) -> Iterator[list[int]]:
        yield from self.starts.values()
        yield from self.ends


def boundaries_of(template: str, encode: Callable[[str], list[int]]) -> Boundaries | None:
    """Return the boundaries of the family that a template belongs to, or None if Bridge does not know it."""
    for family in _FAMILIES:
        if not all(mark in template for mark in family.marks):
            continue
        start, end = encode(family.start), encode(family.end)
        if start and end:
            starts = {"assistant": start}
            for role, text in family.other_starts.items():
                if ids := encode(text):
                    starts[role] = ids
            return Boundaries(starts, [end, *(ids for text in family.other_ends if (ids := encode(text)))])
    return None


@dataclass(frozen=True)
class Rendering:
    """A conversation as token ids. `generated` marks what its template has in `{% generation %}`, if it has any.

    `render` returns the ids of the first turns of the conversation, and `encode` returns the ids of a text.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[Any] | None
    ids: list[int]
    generated: list[int] | None
    render: Callable[[Sequence[dict[str, Any]]], list[int]]
    encode: Callable[[str], list[int]]


def assistant_mask(rendering: Rendering, boundaries: Boundaries | None) -> list[int] | None:
    """Return 1 for each token that is trained on, else 0; None if Bridge cannot tell which these are."""
    generated = rendering.generated
    if boundaries is None:
        return generated
    # A user may write the tokens that begin a turn. Bridge then does not search the whole text for turns.
    texts = [{key: value for key, value in turn.items() if key != "role"} for turn in rendering.messages]
    is_safe = not _writes_boundaries([texts, rendering.tools], boundaries, rendering.encode)
    with_content = not generated or not any(generated)
    found = _by_turns(rendering, boundaries, with_content)
    if found is None and is_safe:
        found = _by_search(rendering, boundaries, with_content)
    if not with_content:
        assert generated is not None
        if found is None:
            return generated
        return [max(pair) for pair in zip(generated, found, strict=True)]
    if found is None or not any(found):
        # Without an answer in the template's marks either, nothing is trained on.
        return found or generated
    return found


def _by_turns(rendering: Rendering, boundaries: Boundaries, with_content: bool) -> list[int] | None:
    """Mark the assistant's turns, each between the lengths of the conversation before and after it."""
    ids, messages = rendering.ids, rendering.messages
    mask = [0] * len(ids)
    start = boundaries.starts["assistant"]
    for at, turn in enumerate(messages):
        if turn["role"] != "assistant":
            continue
        try:
            before = rendering.render(messages[:at]) if at else []
            through = ids if at + 1 == len(messages) else rendering.render(messages[: at + 1])
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
            return None
        begin, limit = _common_prefix(before, ids), _common_prefix(through, ids)
        role_start = find(ids, start, begin)
        content = role_start + len(start)
        if begin >= limit or role_start < 0 or content > limit:
            return None
        ends = []
        for priority, pattern in enumerate(boundaries.ends):
            for end in _all(ids, pattern, content, limit):
                ends.append((end, -priority, end + len(pattern)))
        if not ends:
            return None
        end, _, after = max(ends)
        if with_content:
            mask[content:end] = [1] * (end - content)
        mask[end:after] = [1] * (after - end)
    return mask


def _by_search(rendering: Rendering, boundaries: Boundaries, with_content: bool) -> list[int] | None:
    """Mark what lies between the tokens that begin and end the assistant's turns, anywhere in the text."""
    ids = rendering.ids
    marks: dict[int, tuple[int, str]] = {}
    for role, pattern in boundaries.starts.items():
        at = find(ids, pattern, 0)
        while at >= 0:
            # The longest of two that begin at the same token.
            if at not in marks or len(pattern) > marks[at][0]:
                marks[at] = len(pattern), role
            at = find(ids, pattern, at + len(pattern))
    starts = sorted(marks)
    seen = sum(marks[at][1] == "assistant" for at in starts)
    if not starts or seen != sum(turn["role"] == "assistant" for turn in rendering.messages):
        return None
    mask = [0] * len(ids)
    for at, after in zip(starts, [*starts[1:], len(ids)], strict=True):
        length, role = marks[at]
        content = at + length
        if role != "assistant":
            continue
        ends = []
        for priority, pattern in enumerate(boundaries.ends):
            for end in _all(ids, pattern, content, after):
                ends.append((end, priority, end + len(pattern)))
        if not ends:
            continue
        if len({end for end, _, _ in ends}) != 1:
            return None
        end, _, last = min(ends)
        if with_content:
            mask[content:end] = [1] * (end - content)
        mask[end:last] = [1] * (last - end)
    return mask if any(mask) else None


def _writes_boundaries(value: Any, boundaries: Boundaries, encode: Callable[[str], list[int]]) -> bool:
    """Return whether a text in a conversation has the tokens of a boundary."""
    if isinstance(value, str):
        ids = encode(value)
        return any(find(ids, pattern, 0) >= 0 for pattern in boundaries.sequences())
    if isinstance(value, dict):
        return any(_writes_boundaries(item, boundaries, encode) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_writes_boundaries(item, boundaries, encode) for item in value)
    return False


def find(ids: Sequence[int], pattern: Sequence[int], start: int) -> int:
    """Return where a pattern begins at `start` or later; -1 if nowhere."""
    size = len(pattern)
    at = start
    while True:
        try:
            at = ids.index(pattern[0], at, max(len(ids) - size + 1, 0))
        except ValueError:
            return -1
        if list(ids[at : at + size]) == list(pattern):
            return at
        at += 1


def _all(ids: Sequence[int], pattern: Sequence[int], start: int, limit: int) -> Iterator[int]:
    """Yield where a pattern begins in ids[start:limit], as long as it ends there too."""
    at = find(ids, pattern, start)
    while at >= 0 and at + len(pattern) <= limit:
        yield at
        at = find(ids, pattern, at + 1)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return min(len(left), len(right))
