# SPDX-License-Identifier: Apache-2.0
"""The leader's work: objects looked at one by one, what reconcilers plan is done, statuses and Events are written."""
