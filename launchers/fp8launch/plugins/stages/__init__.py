"""Recipes with stages: separate runs of one recipe, each of which starts from the result of an earlier one."""
