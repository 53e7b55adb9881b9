"""The search for the fastest settings of a recipe by short runs."""
