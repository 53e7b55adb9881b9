"""The plugins that come with fp8launch, a package each; `fp8launch.plugin_registry` lists and finds them.

Packages of a site make their own from `Plugin` and `Command`.
"""

from fp8launch.plugin_registry import Command, Plugin

__all__ = ["Command", "Plugin"]
