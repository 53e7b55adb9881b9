"""Flag schemas of forks and source checkouts of Megatron-LM."""
