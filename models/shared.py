"""Modules that all blocks of a model use together, such as one table of learned frequencies.

A module inside a block that needs one defines ``use_shared(shared: nn.ModuleDict) -> None``.  It is
called once, after the blocks of a part are built, with the part's ``shared``: the module puts its
partner there under a fixed name, if no block before it has, and keeps a reference that does not
register it a second time (in a tuple, for example).

So every pipeline rank with such a block holds the parameters, under the same logical names
(``shared.<name>.<key>``); the ranks start from the same values, and their gradients are summed over
the hosts before each update, as those of a tied embedding are.  A shared parameter lies outside the
regions and the fully sharded roots: plan kind ``partial`` where its users are sharded over ``tp``.
"""

from __future__ import annotations

from torch import nn


def shared_modules(part: nn.Module) -> nn.ModuleDict:
    """What the modules of ``part`` share, by name; empty for most models."""
    shared = nn.ModuleDict()
    for module in list(part.modules()):
        use_shared = getattr(module, "use_shared", None)
        if use_shared is not None:
            use_shared(shared)
    return shared
