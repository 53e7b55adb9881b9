"""One step of Megatron's own code for any rank of any recipe, without a GPU."""
