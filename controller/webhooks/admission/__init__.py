# SPDX-License-Identifier: Apache-2.0
"""Pure: whether the API server should take an object, and what to warn of; no network, no clock."""
