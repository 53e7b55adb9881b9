"""Conversations for fine-tuning with Megatron-Bridge: read, render, mask and pack them.

sources (JSON lines) -> conversations -> token ids and loss mask -> training.jsonl ..., packed files, chat.manifest.json
"""
