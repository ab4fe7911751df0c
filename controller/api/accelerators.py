# SPDX-License-Identifier: Apache-2.0
"""Names of accelerators: which spellings mean the same kind, as far as the names tell."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

# A name says the same with and without its vendor.
_VENDORS: Final = frozenset({"amd", "google", "habana", "huawei", "intel", "nvidia"})
_BETWEEN_WORDS: Final = re.compile(r"[-_ ]+")


def is_of_kind(name: str, kind: str) -> bool:
    """Whether ``name`` says all that ``kind`` does: NVIDIA-H100-80GB-HBM3 is of the kinds H100, nvidia-h100 and
    h100-80gb.

    Neither case nor the vendor matters. What says less is of unknown kind: an H100 need not be an H100-80GB.
    """
    return _asked(kind) <= _words(name)


@lru_cache(maxsize=1024)
def _words(name: str) -> frozenset[str]:
    """Of a name. A resource, such as ``nvidia.com/gpu``, is one word."""
    return frozenset(one for one in _BETWEEN_WORDS.split(name.lower()) if one) or frozenset({name})


@lru_cache(maxsize=1024)
def _asked(kind: str) -> frozenset[str]:
    """The words that matter: the vendor only if there is nothing else."""
    return _words(kind) - _VENDORS or _words(kind)
