# SPDX-License-Identifier: Apache-2.0
"""kopf: events of custom resources ring the manager's queue; nothing else knows kopf."""
