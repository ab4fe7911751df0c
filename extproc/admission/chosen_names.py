# SPDX-License-Identifier: Apache-2.0
"""Names that clients choose, such as the value of a header: hashed, and bounded in number.

Each name has an account of its own, but only so many of a tenant's at a time. Were there no bound, a client would have
a full allowance with every new name. Beyond the bound all new names share one account, until a name has not been used
for so long that its account would be full again: then a new one may take its place at no gain.

So a tenant with a limit L for each name is granted at most ``(MOST_NAMES + 1) * L``, and its names take the places of
nobody else's.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

# Of one tenant, for one limit or queue.
MOST_NAMES: Final = 1_000
# Tenants remembered, the least recently used forgotten first: about 100 KB each at most.
_MOST_OWNERS: Final = 10_000
_HASH_BYTES: Final = 16
# What all names beyond the bound are called. No hash is.
OTHERS: Final = "others"


class ChosenNames:
    """The names in use, by their owners."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, OrderedDict[str, float]] = OrderedDict()

    def account(self, owner: str, name: str, now: float, *, idle_s: float) -> str:
        """The account of ``name``: its hash, the same in every process, or OTHERS.

        ``owner``: whose bound holds. ``idle_s``: unused for so long, a name may give up its place.
        """
        names = self._owners.get(owner)
        if names is None:
            names = self._owners[owner] = OrderedDict()
            if len(self._owners) > _MOST_OWNERS:
                self._owners.popitem(last=False)
        self._owners.move_to_end(owner)
        # cryptographic: who can choose names must not be able to choose somebody else's account
        found = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=_HASH_BYTES).hexdigest()
        if found not in names and len(names) >= MOST_NAMES:
            oldest = next(iter(names))
            if now - names[oldest] < idle_s:
                return OTHERS
            del names[oldest]
        names[found] = now
        names.move_to_end(found)
        return found
