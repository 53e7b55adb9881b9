"""Find the fastest settings of a recipe by short runs on the user's own machine or cluster."""
