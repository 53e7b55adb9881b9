"""Commands on a cluster's login node, from a machine that reaches it by ssh."""
