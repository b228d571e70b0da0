"""Layouts of DFlash drafts in other systems, translated into ours while a config is read.

One module a layout; each has `matches(config_dict)` and `convert_config(config_dict)`, and those that `export` writes
have `export_config(config, architectures)`. Weights need no module: all layouts share the inner names but for the few
in `modeling_dflash.WEIGHT_RENAMES`.
"""

from . import dspark, muse, speculators, zlab

# Asked in this order; a config that none of them knows is ours or no draft.
LAYOUTS = (dspark, speculators, muse, zlab)

__all__ = ["LAYOUTS"]
