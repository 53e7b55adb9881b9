"""A tokenizer with a chat template, as transformers loads it for Megatron-Bridge.

transformers renders a template in Jinja's sandbox (ImmutableSandboxedEnvironment), so a template from others can reach
neither files nor Python, and it never loads code that a tokenizer's folder brings.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import error
from fp8launch.injob.regular_files import read_regular
from fp8launch.plugins.data.chat.conversations import Conversation, Unusable
from fp8launch.plugins.data.chat.loss_mask import (
    GENERATION,
    NEVER_TRAINED,
    Boundaries,
    Rendering,
    assistant_mask,
    boundaries_of,
)
from fp8launch.plugins.data.extras import load

INSTALL = "pip install 'fp8launch[chat]'"
_LARGEST_TEMPLATE = 1 << 20
_PURPOSE = "rendering conversations"


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer of transformers, with what Bridge needs to know about its chat template."""

    tokenizer: Any
    template: str
    boundaries: Boundaries | None
    never_trained: frozenset[int]

    @property
    def eos(self) -> int:
        """Return the id of the token that Bridge pads with."""
        return int(self.tokenizer.eos_token_id)

    def encode(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Return the ids of a conversation, and 1 for each that is trained on, else 0. Raises Unusable."""
        try:
            return self._encode(conversation)
        except Unusable:
            raise
        except Exception as exc:  # a template raises whatever its author wrote
            raise Unusable("template", " ".join(str(exc).split())[:200] or type(exc).__name__) from None

    def _encode(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        messages, tools = conversation.messages, conversation.tools
        marked = GENERATION.search(self.template) is not None
        render = functools.partial(self._rendered, tools=tools, marked=marked)
        found = render(messages)
        ids = list(map(int, found["input_ids"]))
        generated = list(map(int, found["assistant_masks"])) if marked else None
        self._render_without_answer(messages, tools)
        rendering = Rendering(
            messages, tools, ids, generated, lambda part: list(render(part)["input_ids"]), self.ids_of
        )
        mask = assistant_mask(rendering, self.boundaries)
        if mask is None:
            raise Unusable("template", "the turns of the assistant were not found in its text")
        mask = [
            int(bool(trained) and token not in self.never_trained) for token, trained in zip(ids, mask, strict=True)
        ]
        # The first token is never predicted.
        if not any(mask[1:]):
            raise Unusable("untrained", f"{len(ids):,} tokens")
        return ids, mask

    def _rendered(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None, marked: bool) -> Any:
        more: dict[str, Any] = {}
        if tools:
            more["tools"] = tools
        if marked:
            more["return_assistant_tokens_mask"] = True
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=False, return_dict=True, **more
        )

    def _render_without_answer(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> None:
        """Bridge also renders the conversation with an empty last answer, and ends if the template refuses that."""
        if messages[-1]["role"] == "assistant":
            empty = [*messages[:-1], {**messages[-1], "content": ""}]
            more = {"tools": tools} if tools else {}
            self.tokenizer.apply_chat_template(empty, tokenize=False, add_generation_prompt=False, **more)

    def ids_of(self, text: str) -> list[int]:
        """Return the ids of a text without the tokens that the tokenizer adds around it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def load_chat_tokenizer(folder: Path, template_file: Path | None = None) -> ChatTokenizer:
    """Return the tokenizer in a folder, with its own template or the one in a file.

    Raises UserError if it cannot be loaded, has no template, or Bridge could not tell what to train on.
    """
    transformers: Any = load("transformers", _PURPOSE, INSTALL)
    load("jinja2", _PURPOSE, INSTALL)
    transformers.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), use_fast=True, trust_remote_code=False, local_files_only=True
        )
    except Exception as exc:  # whatever the tokenizer's class raises for its files
        message = f"transformers cannot load the tokenizer {folder}: {' '.join(str(exc).split())[:300]}"
        raise error("data-tokenizer", message, "--tokenizer", "name a folder with a complete tokenizer") from None
    if template_file is not None:
        tokenizer.chat_template = _template_in(template_file)
    template = tokenizer.chat_template
    if not isinstance(template, str) or not template.strip():
        several = " but several named ones" if isinstance(template, dict) else ""
        message = f"the tokenizer {folder} has no chat template{several}"
        fix = "use the tokenizer of the model's instruct variant, or name a template with --chat-template FILE"
        raise error("data-template", message, "--tokenizer", fix)
    never = frozenset(id_ for id_, token in tokenizer.added_tokens_decoder.items() if str(token) in NEVER_TRAINED)
    found = ChatTokenizer(tokenizer, template, None, never)
    boundaries = boundaries_of(template, found.ids_of)
    if boundaries is None and GENERATION.search(template) is None:
        message = (
            "the chat template does not mark the assistant's answers, and Megatron-Bridge does not know its format"
        )
        fix = (
            "put {% generation %} and {% endgeneration %} around them in a copy, and name it with --chat-template FILE"
        )
        raise error("data-template", message, "--tokenizer", fix)
    if tokenizer.eos_token_id is None:
        message = f"the tokenizer {folder} has no end-of-sequence token, which Megatron-Bridge pads with"
        raise error("data-tokenizer", message, "--tokenizer", "set eos_token in its tokenizer_config.json")
    return ChatTokenizer(tokenizer, template, boundaries, never)


def _template_in(file: Path) -> str:
    try:
        return read_regular(file, _LARGEST_TEMPLATE).decode("utf-8")
    except (OSError, ValueError) as exc:
        message = f"the chat template {file} cannot be read: {exc}"
        raise error("data-template", message, "--chat-template", "name a file with a Jinja template") from None
