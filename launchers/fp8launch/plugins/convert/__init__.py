"""Conversions between Hugging Face models and Megatron checkpoints with Megatron-Bridge's AutoBridge."""
