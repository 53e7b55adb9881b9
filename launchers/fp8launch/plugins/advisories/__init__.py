"""Known bugs of Megatron-Core, Transformer Engine and Megatron-Bridge, and the runs that have them."""
