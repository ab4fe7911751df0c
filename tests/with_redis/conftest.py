# SPDX-License-Identifier: Apache-2.0
"""A real Redis."""

from tests.redis_server import running_redis

__all__ = ["running_redis"]
