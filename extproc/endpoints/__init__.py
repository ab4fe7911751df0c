# SPDX-License-Identifier: Apache-2.0
"""The state of endpoints: load, reports and learned speeds, as columns of numbers."""
