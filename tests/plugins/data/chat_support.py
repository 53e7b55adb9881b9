"""Tokenizers with chat templates of known families, and generated conversations."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# The templates of published models, shortened to what they do with text and tools.
CHATML = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA3 = """{{- bos_token }}{%- for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>{% endfor %}{%- if add_generation_prompt %}\
<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
# Marks the answers, and belongs to no family that Bridge knows.
MARKED = """{% for message in messages %}[{{ message.role }}] {% if message.role == 'assistant' %}\
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}
{% endfor %}"""
# Marks the answers without the token that ends them, which Bridge adds.
MARKED_CHATML = """{% for message in messages %}{% if message.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ message.content }}{% endgeneration %}{% else %}<|im_start|>{{ message.role }}
{{ message.content }}{% endif %}<|im_end|>
{% endfor %}"""
# Drops the thoughts of earlier answers, as Qwen3's does: a prefix of the conversation is no prefix of its text.
THINKING = """{%- set last = messages | length - 1 %}{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}\
{% else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
GEMMA = """{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}<start_of_turn>\
{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
HARMONY = """{% for message in messages %}<|start|>{{ message.role }}{% if message.role == 'assistant' %}\
<|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>final{% endif %}<|message|>\
{{ message.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endfor %}"""
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "marked": MARKED,
    "marked-chatml": MARKED_CHATML,
    "thinking": THINKING,
    "gemma": GEMMA,
    "harmony": HARMONY,
}
_SPECIAL = """<|begin_of_text|> <|end_of_text|> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|>
<start_of_turn> <end_of_turn> <|start|> <|end|> <|channel|> <|message|> <|return|> <|call|> <|python_tag|>"""
_TEXT = """the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one Straße naïve 東京 42 3.14 don't x=f(y); system user assistant model"""

SPECIAL, WORDS = _SPECIAL.split(), _TEXT.split()


def write_chat_tokenizer(folder: Path, template: str | None = LLAMA3, vocab_size: int = 640) -> Path:
    """Train a small byte-level BPE with the special tokens of several families."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    words: Any = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator([" ".join(WORDS * 20)], trainer)
    words.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def text(choose: random.Random, longest: int = 30) -> str:
    return " ".join(choose.choices(WORDS, k=choose.randint(1, longest)))


def conversations(count: int, seed: int = 0, system: bool = True) -> list[dict[str, Any]]:
    """Records of the usual formats, in turn."""
    choose = random.Random(seed)
    found: list[dict[str, Any]] = []
    for number in range(count):
        if number % 4 == 3:
            found.append({"instruction": text(choose), "input": text(choose), "output": text(choose)})
            continue
        turns = []
        if system and choose.random() < 0.5:
            turns.append(("system", text(choose)))
        for _ in range(choose.randint(1, 4)):
            turns += [("user", text(choose)), ("assistant", text(choose))]
        if number % 4 == 2:
            names = {"user": "human", "assistant": "gpt"}
            found.append({"conversations": [{"from": names.get(role, role), "value": said} for role, said in turns]})
        else:
            found.append({"messages": [{"role": role, "content": said} for role, said in turns]})
    return found


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path
