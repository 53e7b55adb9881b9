"""Conversions between Hugging Face models and Megatron checkpoints, by Megatron-Bridge's AutoBridge."""
