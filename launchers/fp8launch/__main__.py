"""`python -m fp8launch`."""

from fp8launch.cli import main

main()
