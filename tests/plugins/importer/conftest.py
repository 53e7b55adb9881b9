"""Megatron's own parser, which needs the plugin validators next to the importer."""

from __future__ import annotations

from megatron_parser import real_parser as real_parser
from megatron_sites import minor as minor
from megatron_sites import site as site
